"""A foreign or broken `--work` folder: it runs no code, and each of its faults is one clear line."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from foredraft import ConfigError
from foredraft.train import trainers
from foredraft.train.preparation import RunKey
from foredraft.train.training_checkpoints import TrainingCheckpoints
from foredraft.train.training_options import AdapterOptions
from tests.support.limits import no_more_bytes
from tests.support.training import QUICK, curve, random_words, save_target, stopped_at_its_first_checkpoint

FILE = "checkpoints/step-4.pt"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "data.jsonl"
    file.write_text("".join(json.dumps({"text": random_words(60, seed)}) + "\n" for seed in range(30)))
    return file


def options(data: Path, folder: Path, **more: Any) -> AdapterOptions:
    given = {**QUICK, "steps": 8, "work": folder / "work", "out": folder / "adapter", "depth": 1, **more}
    return AdapterOptions(data=(data,), **{"self_generate": 8, **given})


@pytest.fixture(scope="module")
def stopped(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stopped")
    with stopped_at_its_first_checkpoint():
        train(model, options(data, folder))
    return folder


def train(model: Path, given: AdapterOptions) -> Any:
    return trainers.train(given, str(model), device="cpu")


@pytest.fixture
def folder(stopped: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stopped, tmp_path / "run"))


class Planted:
    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.place),)


@pytest.mark.heavy
def test_a_checkpoint_of_pickles_runs_nothing(model: Path, data: Path, folder: Path, tmp_path: Path) -> None:
    """As an earlier version wrote it: a folder whose `.metadata` was unpickled."""
    place = folder / "work" / "checkpoints" / "step-6"
    place.mkdir()
    (place / "progress.json").write_text("{}")
    for name in (".metadata", "__0_0.distcp"):
        (place / name).write_bytes(pickle.dumps(Planted(tmp_path / "code-ran")))
    said = r"work is .*whose checkpoint step-6 is that of an earlier.*start anew"
    with pytest.raises(ConfigError, match=said):
        train(model, options(data, folder))
    assert not (tmp_path / "code-ran").exists()
    assert train(model, options(data, folder, fresh=True)).steps == 8


def test_pickles_in_place_of_files_run_nothing(model: Path, data: Path, folder: Path, tmp_path: Path) -> None:
    code = pickle.dumps(Planted(tmp_path / "code-ran"))
    for name in (FILE, "metrics.jsonl", "self_generated.jsonl", "key.json"):
        sound = (folder / "work" / name).read_bytes()
        (folder / "work" / name).write_bytes(code)
        with pytest.raises(ConfigError, match="work is "):
            train(model, options(data, folder))
        (folder / "work" / name).write_bytes(sound)
    for content in ({"x": torch.zeros(1)}, {"run": Planted(tmp_path / "code-ran")}):
        torch.save(content, folder / "work" / FILE)
        with pytest.raises(ConfigError, match=r"whose checkpoint step-4.pt cannot be read"):
            train(model, options(data, folder))
    assert not (tmp_path / "code-ran").exists()


Change = Callable[[Path], object]  # of a work folder


def spoilt(change: Callable[[dict[str, Any]], object]) -> Change:
    def spoil(work: Path) -> None:
        content = torch.load(work / FILE, weights_only=True)
        change(content)
        torch.save(content, work / FILE)

    return spoil


def written(name: str, content: str | bytes) -> Change:
    return lambda work: (work / name).write_bytes(content.encode() if isinstance(content, str) else content)


def lacks(content: dict[str, Any]) -> None:
    del content["student"][sorted(content["student"])[0]]


def other_shape(content: dict[str, Any]) -> None:
    name = sorted(content["student"])[0]
    content["student"][name] = content["student"][name][..., :-1]


def flipped_bit(work: Path) -> None:
    """Somewhere in the numbers, where PyTorch reads it without an error."""
    content = bytearray((work / FILE).read_bytes())
    content[len(content) // 2] ^= 1
    (work / FILE).write_bytes(content)
    torch.load(work / FILE, weights_only=True)


def of_an_earlier_version(work: Path) -> None:
    save_file({"x": torch.zeros(1)}, work / "checkpoints" / "step-4.safetensors")


OURS, ANEW = "whose checkpoint step-4.pt ", ".*fresh"
BROKEN: list[tuple[Change, str]] = [
    (spoilt(lacks), f"{OURS}differs in tensor .*that of another run{ANEW}"),
    (spoilt(lambda own: own["student"].update(x=torch.zeros(2))), f"{OURS}differs in tensor 'x', so{ANEW}"),
    (spoilt(other_shape), f"{OURS}differs in tensor .*that of another run{ANEW}"),
    (spoilt(lambda own: own.pop("progress")), f"{OURS}cannot be read .*progress{ANEW}"),
    (spoilt(lambda own: own["progress"].update(other=1)), f"{OURS}cannot be read .*other{ANEW}"),
    (spoilt(lambda own: own["progress"].update(step=8)), f"{OURS}is that of step 8{ANEW}"),
    (spoilt(lambda own: own.update(run=None)), f"{OURS}is that of a run of another"),
    (spoilt(lambda own: own.update(run="0" * 64)), f"{OURS}is that of a run of another"),
    (flipped_bit, f"{OURS}is damaged in {ANEW}"),
    (of_an_earlier_version, f"step-4.safetensors is that of an earlier version, {ANEW}"),
    (written("metrics.jsonl", "{}\n"), 'line 1 is no JSON object with a "step"'),
    (written("metrics.jsonl", '{"step": "1"}\n'), 'line 1 is no JSON object with a "step"'),
    (written("metrics.jsonl", "[1]\n"), 'line 1 is no JSON object with a "step"'),
    (written("metrics.jsonl", '{"step": 1}\n{"step\n'), "line 2 is not JSON"),
    (written("metrics.jsonl", "[" * 5000 + "\n"), "line 1 is not JSON"),
    (written("metrics.jsonl", b"\xff\n"), "is not UTF-8"),
    (written("self_generated.jsonl", '{"a": 1}\n'), "line 1 is no list of the model's token ids"),
    (written("self_generated.jsonl", '["a"]\n'), "line 1 is no list of the model's token ids"),
    (written("self_generated.jsonl", "[true]\n"), "line 1 is no list of the model's token ids"),
    (written("self_generated.jsonl", "[1000000]\n"), "line 1 is no list of the model's token ids"),
    (written("self_generated.jsonl", "[1]\n" * 5000), "follows the texts of all"),
    (written("self_generated.jsonl", "[1\n"), "line 1 is not JSON"),
    (written("self_generated.jsonl", b"\xff\n"), "is not UTF-8"),
    (written("key.json", b"\xff"), "a run of another target"),
]


@pytest.mark.parametrize(("change", "message"), BROKEN, ids=[message for _, message in BROKEN])
def test_broken_files_are_named(change: Change, message: str, model: Path, data: Path, folder: Path) -> None:
    change(folder / "work")
    with pytest.raises(ConfigError, match=message) as caught:
        train(model, options(data, folder))
    assert "\n" not in str(caught.value)


@pytest.mark.heavy
@pytest.mark.parametrize("change", ["seed", "data", "target"])
def test_a_checkpoint_of_another_run_with_equal_shapes_is_one_line(
    change: str, model: Path, data: Path, folder: Path, tmp_path: Path
) -> None:
    if change == "data":
        data = Path(shutil.copy(data, tmp_path / "data.jsonl"))
        data.write_text(data.read_text() + '{"text": "one more line"}\n')
    if change == "target":
        model = save_target(tmp_path / "m", seed=1)
    again = options(data, tmp_path, steps=4, seed=int(change == "seed"))
    train(model, again)
    shutil.copy(folder / "work" / FILE, tmp_path / "work" / FILE)
    with pytest.raises(ConfigError, match=r"whose checkpoint step-4.pt is that of a run of another"):
        train(model, again)


def test_a_checkpoint_of_fewer_steps_is_of_the_same_run(model: Path, data: Path) -> None:
    keys = [RunKey.of(options(data, data.parent, steps=steps), "target") for steps in (4, 8)]
    assert keys[0].digest == keys[1].digest and keys[0].text != keys[1].text


@pytest.mark.heavy
def test_any_cut_or_flipped_file_is_one_line_or_harmless(model: Path, data: Path, folder: Path) -> None:
    """Bytes at random places: the run goes on where the values of tensors differ, or the folder is refused."""
    random = np.random.default_rng(0)
    refused, untouched = 0, Path(shutil.copytree(folder / "work", folder / "untouched"))
    for name in ("key.json", "metrics.jsonl", "self_generated.jsonl", FILE):
        for trial in range(6):
            content = bytearray((folder / "work" / name).read_bytes())
            at = int(random.integers(min(len(content), 2000)))
            if trial % 3 == 0:
                del content[at:]
            else:
                content[at] = int(random.integers(256))
            (folder / "work" / name).write_bytes(content)
            with suppress(ConfigError):  # any other error fails this test
                refused += 1
                train(model, options(data, folder))
                refused -= 1
            shutil.rmtree(folder / "work")
            shutil.copytree(untouched, folder / "work")
    assert refused > 7


@pytest.fixture(scope="module")
def with_states(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("states") / "run"
    train(model, options(data, folder, kept_states=0.1, self_generate=0))
    return folder


@pytest.mark.heavy
@pytest.mark.parametrize("spoil", ["hidden size", "dtype", "not finite", "a name"])
def test_states_of_another_run_are_computed_again(
    spoil: str, model: Path, data: Path, with_states: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrainingCheckpoints, "restore", lambda *_: None)
    shutil.copytree(with_states, tmp_path, dirs_exist_ok=True)
    given = options(data, tmp_path, kept_states=0.1, self_generate=0)
    sound = [each.get("loss") for each in curve(tmp_path / "work")]
    for file in (tmp_path / "work" / "states").glob("*.safetensors"):
        tensors = load_file(file)
        last = tensors["last"]
        if spoil == "not finite":
            last[0, 0] = float("inf")
        tensors["last"] = {"hidden size": last[:, :-2].contiguous(), "dtype": last.double()}.get(spoil, last)
        if spoil == "a name":
            tensors["lost"] = tensors.pop("last")
        save_file(tensors, file)
    train(model, given)
    assert [each.get("loss") for each in curve(tmp_path / "work")] == sound


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("checkpoint", "a checkpoint.*before it is whole"),
        ("journal", "metrics.jsonl"),
        ("texts", "self_generated.jsonl"),
    ],
)
def test_a_full_disk_is_one_line(what: str, named: str, model: Path, data: Path, folder: Path) -> None:
    """Files may not grow beyond so many bytes: each kind of file meets the bound at its own size."""
    work = folder / "work"
    if what == "texts":
        shutil.rmtree(work / "checkpoints")
        (work / "self_generated.jsonl").unlink()
    before = {file: file.read_bytes() for file in (work / "checkpoints").glob("*")}
    size = (work / FILE).stat().st_size if what == "checkpoint" else 0
    bound = {"checkpoint": size // 2, "journal": 1_300, "texts": 100}[what]
    with (
        no_more_bytes(bound),
        pytest.raises(ConfigError, match=r"cannot be written \(File too large\)") as told,
    ):
        train(model, options(data, folder))
    assert re.search(f"work is .*{named}", str(told.value))
    assert {file: file.read_bytes() for file in (work / "checkpoints").glob("*")} == before
    assert train(model, options(data, folder)).steps == 8
