"""Training runs of EAGLE-3 and DFlash heads: continued to the same figures, and what they predict of decoding."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import foredraft
from foredraft.drafters.heads import settings as head_settings
from foredraft.drafters.heads.configs import FIRST_LAYERS, read_eagle3
from foredraft.drafters.heads.settings import HeadSettings, write_settings
from foredraft.drafters.kangaroo import read_adapter
from foredraft.errors import ConfigError, ForedraftError
from foredraft.train import trainers
from foredraft.train.loop import drafts_of
from foredraft.train.students import AdapterStudent
from foredraft.train.target import FrozenTarget
from foredraft.train.training_options import AdapterOptions, DFlashOptions, Eagle3Options
from tests.parity.test_head_training import block_student
from tests.support.checkpoints import save_checkpoint
from tests.support.heads import BODY, LAYERS, save_head
from tests.support.training import CPU, QUICK, check_prediction, curve
from tests.support.training import student_of as eagle3_student

GAMMA = 3


@dataclass(frozen=True)
class Kind:
    options: type
    given: dict[str, Any]
    student: Callable[[Path, FrozenTarget], Any]
    option: str = "draft"  # that names the folder


def adapter_student(folder: Path, target: FrozenTarget) -> AdapterStudent:
    start, depth = load_file(folder / "model.safetensors"), read_adapter(folder).depth
    vocabulary = start.pop("draft_vocabulary").tolist()
    return AdapterStudent(target.spec, target.head_weight, start, depth, mlp=True, vocabulary=vocabulary)


KINDS = {
    "kangaroo": Kind(AdapterOptions, {"depth": 1}, adapter_student, option="adapter"),
    "eagle3": Kind(
        Eagle3Options,
        {"taps": (2, 3), "draft_length": GAMMA},
        lambda head, target: eagle3_student(head, target, GAMMA, 0.8),
    ),
    "dflash": Kind(DFlashOptions, {"layers": 1, "taps": (1, 2), "block": 4}, block_student),
}


def train(
    model: Path, data: Path, folder: Path, kind: str = "eagle3", report: Any = lambda *_: None, **more: Any
) -> None:
    given = {**QUICK, "steps": 8, "draft_vocabulary": 60, **KINDS[kind].given, **more}
    options = KINDS[kind].options(data=(data,), work=folder / "work", out=folder / "head", **given)
    trainers.train(options, str(model), report=report, device="cpu", dtype="float32")


def same(one: Path, other: Path) -> bool:
    first, second = (load_file(folder / "head" / "model.safetensors") for folder in (one, other))
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture(scope="module")
def trained(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("trained")
    for kind in KINDS:
        train(model, data, folder / kind, kind, steps=20, validate_every=10, self_generate=24)
    return {kind: folder / kind for kind in KINDS}


@pytest.mark.heavy
@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_the_loss_falls_and_the_acceptance_rises(trained: dict[str, Path], kind: str) -> None:
    figures = curve(trained[kind] / "work")
    losses = [each["loss"] for each in figures if "loss" in each]
    alphas = [each["alpha_by_position"] for each in figures if "alpha" in each]
    assert losses[-1] < 0.9 * losses[0] and alphas[-1][0] > alphas[0][0]


@pytest.mark.heavy
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_to_the_same_figures(model: Path, data: Path, tmp_path: Path, kind: str) -> None:
    train(model, data, tmp_path / "whole", kind)

    def stop(stage: str, done: int, total: int, note: str) -> None:
        if stage == "train" and done == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(model, data, tmp_path / "cut", kind, stop)
    train(model, data, tmp_path / "cut", kind)
    assert curve(tmp_path / "cut" / "work") == curve(tmp_path / "whole" / "work")
    assert same(tmp_path / "cut", tmp_path / "whole")


@pytest.mark.heavy
@pytest.mark.parametrize(("kind", "temperature"), [("kangaroo", 0.0), *((kind, 1.0) for kind in KINDS)])
def test_the_validations_acceptance_is_decodings(
    model: Path, trained: dict[str, Path], kind: str, temperature: float
) -> None:
    target, head = FrozenTarget(model, CPU, torch.float32), trained[kind] / "head"
    llm = foredraft.load(
        model, **{KINDS[kind].option: head}, drafter=kind, policy="fixed", max_draft=GAMMA, dtype="float32", device="cpu",
        max_batch=8, max_length=128,
    )  # fmt: skip
    student = KINDS[kind].student(head, target)
    sizes = {"gamma": GAMMA, "count": 32, "new": 40}
    check_prediction(llm, student, target, temperature=temperature, windows_of=drafts_of, **sizes)


# --- from a head ------------------------------------------------------------------------------------------

FROM_HEAD: dict[str, Any] = {"taps": (), "draft_vocabulary": None, "steps": 1}


@pytest.fixture
def start(trained: dict[str, Path], tmp_path: Path) -> Path:
    return Path(copytree(trained["eagle3"] / "head", tmp_path / "start"))


def test_a_training_starts_from_a_head(model: Path, data: Path, start: Path, tmp_path: Path) -> None:
    train(model, data, tmp_path / "same", learning_rate=1e-30, from_head=start, **FROM_HEAD)
    before, after = (load_file(each / "model.safetensors") for each in (start, tmp_path / "same" / "head"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert read_eagle3(tmp_path / "same" / "head").record == read_eagle3(start).record


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("big")
    return save_checkpoint(folder, tokenizer=True, num_hidden_layers=LAYERS)


def vocab_size_of(big: Path) -> int:
    size: int = json.loads((big / "config.json").read_text())["vocab_size"]
    return size


@pytest.mark.parametrize("format", ["residual", "whole", "speculators", "qwen3"])
def test_a_published_head_goes_on_as_it_is(format: str, big: Path, data: Path, tmp_path: Path) -> None:
    """Its drafts are those of before but for the embedding, which is the model's from now on."""
    head = save_head(tmp_path / "published", format, vocab_size_of(big))
    train(big, data, tmp_path, from_head=head, learning_rate=1e-30, **FROM_HEAD)
    before, after = (read_eagle3(folder).record for folder in (head, tmp_path / "head"))
    # SpecForge's files hold no auxiliary layer 1, and no norms of queries and keys
    written = "speculators" if format in ("speculators", "qwen3") else "SafeAILab or SpecForge"
    assert (after.format, after.layer) == (written, FIRST_LAYERS[written])
    own = {"own_embedding": False, "own_head": True, "format": after.format, "layer": after.layer}
    own |= {"verifier": after.verifier, "planned": after.planned}
    before = before.for_target(FrozenTarget(big, CPU, torch.float32).spec, "")
    assert after == replace(before, **own)
    one, other = (
        {name.replace("layers.0.", "midlayer."): tensor for name, tensor in load_file(file).items()}
        for file in (head / "model.safetensors", tmp_path / "head" / "model.safetensors")
    )
    shared = one.keys() & other.keys()
    assert one.keys() - shared <= {"embed_tokens.weight"}
    assert other.keys() - shared <= {"lm_head.weight", "t2d"}
    assert all(torch.equal(one[name], other[name]) for name in shared)


WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}


@pytest.mark.parametrize(
    ("format", "more", "message"),
    [
        ("deep", 0, "from_head is '.*', which has 2 layers; give another head"),
        ("window", 0, "which has a window in its attention; give another head"),
        ("residual", 5, r"is for a target of vocabulary \d+, but the target's is \d+"),
    ],
)
def test_a_head_that_cannot_go_on_is_refused(
    format: str, more: int, message: str, big: Path, data: Path, tmp_path: Path
) -> None:
    config = None
    if format == "window":
        body = {**BODY, **WINDOW, "model_type": "qwen3", "head_dim": 24, "vocab_size": vocab_size_of(big)}
        format, config = "qwen3", {"transformer_layer_config": body}
    head = save_head(tmp_path / "published", format, vocab_size_of(big) + more, config=config)
    with pytest.raises(ForedraftError, match=message):
        train(big, data, tmp_path, from_head=head, **FROM_HEAD)
    assert not (tmp_path / "work").exists() and not (tmp_path / "head").exists()


def test_a_head_that_is_the_start_is_kept(model: Path, data: Path, start: Path, tmp_path: Path) -> None:
    start.rename(tmp_path / "head")
    with pytest.raises(ConfigError, match="out is '.*head', which holds the head to start from"):
        train(model, data, tmp_path, from_head=tmp_path / "head", **FROM_HEAD)


def test_settings_of_the_doctor_go_on_and_another_start_is_another_run(
    model: Path, data: Path, start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The settings become the head's own; other ones are another run, wherever they lie, as are other weights."""
    monkeypatch.setattr(head_settings, "settings_file", lambda head: tmp_path / "settings.json")
    write_settings(start, HeadSettings(norm_output=True))
    train(model, data, tmp_path, from_head=start, **FROM_HEAD)
    assert read_eagle3(tmp_path / "head").record.norm_output
    another = "which holds a run of another target, other data or other options"
    write_settings(start, HeadSettings())
    with pytest.raises(ConfigError, match=another):
        train(model, data, tmp_path, from_head=start, **FROM_HEAD)
    write_settings(start, HeadSettings(norm_output=True))
    tensors = load_file(start / "model.safetensors")
    save_file({**tensors, "fc.weight": tensors["fc.weight"] * 2}, start / "model.safetensors")
    with pytest.raises(ConfigError, match=another):
        train(model, data, tmp_path, from_head=start, **FROM_HEAD)
