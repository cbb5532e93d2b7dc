"""A LoRA from a hub on 127.0.0.1: its two files are downloaded, of a revision, and are found again offline."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.checkpoints import save_checkpoint
from tests.support.hub_client import INSPECT, Client
from tests.support.hub_server import Repository, serving
from tests.support.loras import save_lora

LOAD = """
import json, sys
import foredraft
from foredraft.errors import ForedraftError
try:
    llm = foredraft.load("owner/big", lora=sys.argv[1:], device="cpu", max_length=64, policy="fixed")
except ForedraftError as error:
    print(json.dumps([type(error).__name__, str(error)]))
else:
    [output] = llm.generate("x", foredraft.SamplingParams(temperature=0, max_new_tokens=8))
    print(json.dumps([*llm.lora, output.token_ids]))
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    big = save_checkpoint(folder / "big", tokenizer=True, seed=1, eos_token_id=None)
    save_lora(big, folder / "lora", lora_alpha=24)
    save_lora(big, folder / "second", lora_alpha=24, seed=9)
    (folder / "empty").mkdir()
    (folder / "empty" / "README.md").write_text("none")
    return folder


@pytest.fixture
def client(folders: Path, tmp_path: Path) -> Iterator[Client]:
    with serving() as hub:
        hub.repositories["owner/big"] = Repository({"main": folders / "big"})
        hub.repositories["owner/lora"] = Repository({"main": folders / "lora", "v2": folders / "second"})
        hub.repositories["owner/empty"] = Repository({"main": folders / "empty"})
        yield Client(hub, tmp_path / "home")


def test_a_lora_is_downloaded_once_and_found_offline(client: Client, folders: Path) -> None:
    first = client.run(LOAD, "owner/lora")
    assert first.returncode == 0, first.stderr
    fetched = client.hub.fetched()
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {*fetched} and "README.md" not in fetched
    again = client.run(LOAD, "owner/lora", HF_HUB_OFFLINE="1")
    assert client.hub.log == [] and again.stdout == first.stdout
    assert json.loads(client.run(LOAD, str(folders / "lora")).stdout)[1] == json.loads(first.stdout)[1]


def test_a_revision_is_another_lora(client: Client) -> None:
    texts = [
        json.loads(client.run(LOAD, *loras).stdout)
        for loras in (["owner/lora@main"], ["owner/lora@v2"], ["owner/lora", "owner/lora@v2"])
    ]
    assert [text[:-1] for text in texts] == [
        ["owner/lora@main"],
        ["owner/lora@v2"],
        ["owner/lora", "owner/lora@v2"],
    ]
    assert texts[0][-1] != texts[1][-1] != texts[2][-1] != texts[0][-1]


def test_what_the_hub_does_not_have_is_named(client: Client) -> None:
    for name, message in (
        ("owner/empty", "owner/empty has no adapter_config.json on the hub"),
        ("owner/nowhere", "owner/nowhere is neither a local folder nor a model on the hub"),
        ("owner/lora@v9", "owner/lora has no revision 'v9' on the hub"),
        (
            "owner/lora:Q4_K_M",
            "LoRA 'owner/lora:Q4_K_M' is neither a folder nor a hub name of the form owner/name",
        ),
    ):
        kind, said = json.loads(client.run(LOAD, name).stdout)
        assert kind == "CheckpointError" and message in said and "\n" not in said
    kind, said = json.loads(client.run(LOAD, "owner/other", HF_HUB_OFFLINE="1").stdout)
    assert "is not in the local hub cache" in said


def test_info_needs_no_weights_of_the_model(client: Client) -> None:
    done = client.run(INSPECT, "owner/big", "--lora", "owner/lora")
    assert done.returncode == 0, done.stderr
    assert "LoRA: owner/lora, rank 4, alpha 24, 3 k_proj" in done.stdout
    assert "model.safetensors" not in client.hub.fetched()
    assert "The weights of the target are not downloaded" in done.stdout
