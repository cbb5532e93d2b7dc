"""Heads of a hub on 127.0.0.1: the files that are fetched, and the drafter that they find."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.parity.test_heads import KEYS, V
from tests.support.checkpoints import reference_model
from tests.support.hub_client import Client
from tests.support.hub_server import Repository, serving
from tests.support.spelled_heads import SPELLED

LOAD = """
import json, sys
import foredraft
for name in sys.argv[2:]:
    llm = foredraft.load(sys.argv[1], draft=name, policy="fixed", device="cpu", max_batch=1, max_length=64)
    [output] = llm.generate([[1, 2, 3]], foredraft.SamplingParams(max_new_tokens=8, temperature=0))
    print(json.dumps([llm.default_drafter, output.stats.drafted > 0]))
"""
LOOK = """
import sys
from foredraft.loading.inspection import inspect_models
for name in sys.argv[2:]:
    print([str(each.note) for each in inspect_models(sys.argv[1], draft=name, device="cpu").drafters])
"""
# repository -> spelling, its file where it is no folder, and the files that are fetched
REPOSITORIES = {
    "owner/eagle3": ("safeailab", "", ["config.json", "model.safetensors"]),
    "owner/eagle": ("eagle-1", "", ["config.json", "model.safetensors"]),
    "owner/medusa": ("fasterdecoding", "", ["config.json", "medusa_lm_head.safetensors"]),
    "owner/gguf": ("gguf", "eagle3-head-F32.gguf", ["eagle3-head-F32.gguf"]),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    reference_model(**KEYS).save_pretrained(folder / "target")
    for name, (spelling, file, _) in REPOSITORIES.items():
        place = folder / name
        if file:
            place.mkdir(parents=True)
        SPELLED[spelling].save(place / file, spelling, V)
        (place / ".gitattributes").write_text("")
    return folder


@pytest.fixture
def client(folder: Path, tmp_path: Path) -> Iterator[Client]:
    with serving() as hub:
        for name in REPOSITORIES:
            hub.repositories[name] = Repository({"main": folder / name})
        yield Client(hub, tmp_path / "home")


def test_heads_are_recognised_by_their_hub_ids(client: Client, folder: Path) -> None:
    for environment in ({}, {"HF_HUB_OFFLINE": "1"}):
        done = client.run(LOAD, str(folder / "target"), *REPOSITORIES, **environment)
        assert done.returncode == 0, done.stderr
        found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
        assert found == [[SPELLED[spelling].drafter, True] for spelling, _, _ in REPOSITORIES.values()]
        fetched = sorted(file for file in client.hub.fetched() if not file.startswith("."))
        assert fetched == (
            [] if environment else sorted(file for _, _, own in REPOSITORIES.values() for file in own)
        )


def test_no_weights_are_fetched_to_look_at_a_head(client: Client, folder: Path) -> None:
    done = client.run(LOOK, str(folder / "target"), "owner/eagle3", "owner/eagle", "owner/medusa")
    assert done.returncode == 0, done.stderr
    assert not any("safetensors" in file for file in client.hub.fetched())
    for line, called in zip(
        done.stdout.splitlines(), ("an EAGLE-3 head", "an EAGLE-1 or", "Medusa"), strict=True
    ):
        assert f"needs {called}" in line
