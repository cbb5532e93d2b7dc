"""A foreign or broken `--work` folder: it runs no code, and each of its faults is one clear line."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from foredraft import ConfigError
from foredraft.train.adapter import train_adapter
from foredraft.train.preparation import RunKey
from foredraft.train.training_checkpoints import TrainingCheckpoints
from foredraft.train.training_options import AdapterOptions
from tests.support.checkpoints import TEXT, save_checkpoint
from tests.support.limits import no_more_bytes

FILE = "checkpoints/step-4.safetensors"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("model"), "llama", tokenizer=True, vocab_size=97)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "data.jsonl"
    words, random = TEXT.split(), np.random.default_rng(0)
    texts = [" ".join(words[at] for at in random.integers(len(words), size=60)) for _ in range(30)]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file


def options(data: Path, folder: Path, **more: Any) -> AdapterOptions:
    given: dict[str, Any] = {
        "data": (data,), "length": 64, "steps": 8, "step_tokens": 512, "group_tokens": 256, "warm_up": 2,
        "validate_every": 4, "work": folder / "work", "out": folder / "adapter", "depth": 1, "patience": 0,
        "self_generate": 8,
    }  # fmt: skip
    return AdapterOptions(**{**given, **more})


def train(model: Path, given: AdapterOptions) -> Any:
    return train_adapter(given, str(model), device="cpu")


@pytest.fixture(scope="module")
def stopped(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that stopped after step 4 of 8."""
    folder = tmp_path_factory.mktemp("stopped")
    save = TrainingCheckpoints.save

    def save_and_stop(self: TrainingCheckpoints, *state: Any) -> None:
        save(self, *state)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingCheckpoints, "save", save_and_stop)
        with pytest.raises(KeyboardInterrupt):
            train(model, options(data, folder))
    return folder


@pytest.fixture
def folder(stopped: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stopped, tmp_path / "run"))


class Planted:
    """Unpickled, it makes a folder."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.place),)


def test_a_checkpoint_that_pickles_hold_runs_nothing(
    model: Path, data: Path, folder: Path, tmp_path: Path
) -> None:
    """As earlier versions wrote it: a folder whose `.metadata` was unpickled."""
    place = folder / "work" / "checkpoints" / "step-6"
    place.mkdir()
    (place / "progress.json").write_text("{}")
    for name in (".metadata", "__0_0.distcp"):
        (place / name).write_bytes(pickle.dumps(Planted(tmp_path / "code-ran")))
    with pytest.raises(ConfigError, match=r"work is .*whose checkpoint step-6 is a folder.*start anew"):
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
    torch.save({"x": torch.zeros(1)}, folder / "work" / FILE)
    with pytest.raises(ConfigError, match=r"whose checkpoint step-4.safetensors cannot be read"):
        train(model, options(data, folder))
    assert not (tmp_path / "code-ran").exists()


Spoiler = Callable[[dict[str, torch.Tensor], dict[str, Any]], None]


def header_of(file: Path) -> dict[str, str]:
    with safe_open(file, "pt") as opened:
        return dict(opened.metadata())


def lacks(tensors: dict[str, torch.Tensor], _: dict[str, Any]) -> None:
    del tensors[sorted(tensors)[0]]


def more(tensors: dict[str, torch.Tensor], _: dict[str, Any]) -> None:
    tensors["student/other"] = torch.zeros(2)


def other_shape(tensors: dict[str, torch.Tensor], _: dict[str, Any]) -> None:
    name = sorted(tensors)[0]
    tensors[name] = tensors[name][..., :-1].contiguous()


def other_dtype(tensors: dict[str, torch.Tensor], _: dict[str, Any]) -> None:
    name = sorted(tensors)[-1]
    tensors[name] = tensors[name].to(torch.int32)


def not_finite(tensors: dict[str, torch.Tensor], _: dict[str, Any]) -> None:
    tensors[sorted(tensors)[-1]].view(-1)[0] = float("nan")


def progress(**changes: Any) -> Spoiler:
    def spoil(_: dict[str, torch.Tensor], found: dict[str, Any]) -> None:
        found.update(changes)
        for name in [name for name, value in found.items() if value is None]:
            del found[name]

    return spoil


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lacks, "lacks tensor .*that of another run"),
        (more, "has tensor 'student/other', so it is that of another run"),
        (other_shape, "of shape .*that of another run"),
        (other_dtype, "dtype I32.*that of another run"),
        (not_finite, "values that are not finite"),
        (progress(step=None), "has no field 'step'"),
        (progress(other=1), "has the unknown field 'other'"),
        (progress(step="4"), "has the step '4'"),
        (progress(step=8), "is that of step 8"),
        (progress(tokens=-1), "has the tokens -1"),
        (progress(best=float("inf")), "has the best inf"),
        (progress(seconds=float("nan")), "has the seconds nan"),
        (progress(finished=1), "has the finished 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_broken_checkpoint_is_one_line(
    spoil: Spoiler, message: str, model: Path, data: Path, folder: Path
) -> None:
    file = folder / "work" / FILE
    header = header_of(file)
    metadata = json.loads(header["progress"])
    tensors = load_file(file)
    spoil(tensors, metadata)
    save_file(tensors, file, header | {"progress": json.dumps(metadata)})
    with pytest.raises(ConfigError, match=f"whose checkpoint step-4.safetensors .*{message}.*fresh"):
        train(model, options(data, folder))


@pytest.mark.parametrize("change", ["seed", "data", "target", "a header of none", "no header"])
def test_a_checkpoint_of_another_run_with_equal_shapes_is_one_line(
    change: str, model: Path, data: Path, folder: Path, tmp_path: Path
) -> None:
    """The checkpoint of another run, whole and of equal shapes, lies in the place of the run's own."""
    file = folder / "work" / FILE
    if change in ("no header", "a header of none"):
        header = header_of(file) | {"run": "0" * 64}
        save_file(load_file(file), file, None if change == "no header" else header)
        again = options(data, folder)
    else:
        if change == "data":
            data = Path(shutil.copy(data, tmp_path / "data.jsonl"))
            data.write_text(data.read_text() + '{"text": "one more line"}\n')
        if change == "target":
            model = save_checkpoint(tmp_path / "m", "llama", tokenizer=True, vocab_size=97, seed=1)
        again = options(data, tmp_path, steps=4, seed=int(change == "seed"))
        train(model, again)
        shutil.copy(file, tmp_path / "work" / FILE)
    with pytest.raises(ConfigError, match=r"whose checkpoint step-4.safetensors is that of a run of another"):
        train(model, again)


def test_a_checkpoint_of_fewer_steps_is_of_the_same_run(model: Path, data: Path) -> None:
    keys = [RunKey.of(options(data, data.parent, steps=steps), "target") for steps in (4, 8)]
    assert keys[0].digest == keys[1].digest and keys[0].text != keys[1].text


def test_a_checkpoint_without_progress_is_one_line(model: Path, data: Path, folder: Path) -> None:
    file = folder / "work" / FILE
    header = header_of(file)
    del header["progress"]
    for metadata in ({}, {"progress": "[]"}, {"progress": "{"}, {"progress": "[" * 5000}):
        save_file(load_file(file), file, header | metadata)
        with pytest.raises(ConfigError, match="whose checkpoint step-4.safetensors .*fresh"):
            train(model, options(data, folder))


def test_any_cut_or_flipped_file_is_one_line_or_harmless(model: Path, data: Path, folder: Path) -> None:
    """Bytes at random places: the run goes on where the values of tensors differ, or the folder is refused."""
    random = np.random.default_rng(0)
    refused, untouched = 0, Path(shutil.copytree(folder / "work", folder / "untouched"))
    for name in ("key.json", "metrics.jsonl", "self_generated.jsonl", FILE):
        sound = (folder / "work" / name).read_bytes()
        for trial in range(12):
            content = bytearray(sound)
            at = int(random.integers(min(len(sound), 2000)))
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
    assert refused > 15


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("metrics.jsonl", "{}\n", 'line 1 is no JSON object with a "step"'),
        ("metrics.jsonl", '{"step": "1"}\n', 'line 1 is no JSON object with a "step"'),
        ("metrics.jsonl", "[1]\n", 'line 1 is no JSON object with a "step"'),
        ("metrics.jsonl", '{"step": 1}\n{"step\n', "line 2 is not JSON"),
        ("metrics.jsonl", "[" * 5000 + "\n", "line 1 is not JSON"),
        ("metrics.jsonl", b"\xff\n", "is not UTF-8"),
        ("self_generated.jsonl", '{"a": 1}\n', "line 1 is no list of the model's token ids"),
        ("self_generated.jsonl", '["a"]\n', "line 1 is no list of the model's token ids"),
        ("self_generated.jsonl", "[true]\n", "line 1 is no list of the model's token ids"),
        ("self_generated.jsonl", "[1000000]\n", "line 1 is no list of the model's token ids"),
        ("self_generated.jsonl", "[1]\n" * 5000, "follows the texts of all"),
        ("self_generated.jsonl", "[1\n", "line 1 is not JSON"),
        ("self_generated.jsonl", b"\xff\n", "is not UTF-8"),
        ("key.json", b"\xff", "a run of another target"),
    ],
)
def test_a_broken_record_is_one_line(
    name: str, content: str | bytes, message: str, model: Path, data: Path, folder: Path
) -> None:
    (folder / "work" / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ConfigError, match=message):
        train(model, options(data, folder))


@pytest.mark.parametrize("spoil", ["hidden size", "dtype", "not finite", "a name"])
def test_states_of_another_run_are_computed_again(
    spoil: str, model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrainingCheckpoints, "restore", lambda *_: None)
    given = options(data, tmp_path, kept_states=0.1, self_generate=0)
    train(model, given)
    sound = (tmp_path / "work" / "metrics.jsonl").read_text().splitlines()
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
    again = (tmp_path / "work" / "metrics.jsonl").read_text().splitlines()
    losses = [[json.loads(line).get("loss") for line in lines] for lines in (sound, again)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("what", ["checkpoint", "journal", "texts"])
def test_a_full_disk_is_one_line(what: str, model: Path, data: Path, folder: Path) -> None:
    """Files may not grow beyond so many bytes: each kind of file meets the bound at its own size."""
    work = folder / "work"
    if what == "texts":
        shutil.rmtree(work / "checkpoints")
        (work / "self_generated.jsonl").unlink()
    before = {file: file.read_bytes() for file in (work / "checkpoints").glob("*")}
    size = (work / FILE).stat().st_size if what == "checkpoint" else 0
    bound = {"checkpoint": size - 1000, "journal": 1_300, "texts": 100}[what]
    words = {"checkpoint": "a checkpoint", "journal": "metrics.jsonl", "texts": "self_generated.jsonl"}[what]
    with no_more_bytes(bound), pytest.raises(ConfigError, match=f"work is .*{words}.*cannot be written"):
        train(model, options(data, folder))
    assert {file: file.read_bytes() for file in (work / "checkpoints").glob("*")} == before
    assert train(model, options(data, folder)).steps == 8
