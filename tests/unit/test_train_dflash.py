"""Training runs of DFlash heads: continued to the same figures, and what they predict against decoding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import foredraft
from foredraft.train.dflash import train_dflash
from foredraft.train.target import FrozenTarget
from foredraft.train.training_options import DFlashOptions
from foredraft.train.validation import drafts_of
from tests.parity.test_block_training import student_of
from tests.support.checkpoints import TEXT, save_checkpoint
from tests.support.trained_texts import check_prediction

CPU = torch.device("cpu")
GAMMA = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return save_checkpoint(folder, "llama", tokenizer=True, vocab_size=97)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "data.txt"
    words = TEXT.split()
    random = np.random.default_rng(0)
    file.write_text(" ".join(words[at] for at in random.integers(len(words), size=3000)))
    return file


def train(model: Path, data: Path, folder: Path, report: Any = lambda *_: None, **more: Any) -> Any:
    given: dict[str, Any] = {
        "data": (data,), "length": 64, "steps": 8, "step_tokens": 512, "group_tokens": 256, "warm_up": 2,
        "validate_every": 4, "learning_rate": 3e-3, "work": folder / "work", "out": folder / "head",
        "layers": 1, "taps": (1, 2), "draft_vocabulary": 60, "block": GAMMA + 1, "patience": 0,
    }  # fmt: skip
    return train_dflash(
        DFlashOptions(**{**given, **more}), str(model), report=report, device="cpu", dtype="float32"
    )


def curve(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "work" / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "tokens_per_second"} for line in lines]


@pytest.fixture(scope="module")
def trained(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    train(model, data, folder, steps=30, validate_every=15, self_generate=40)
    return folder


def test_the_loss_falls_and_the_acceptance_rises(trained: Path) -> None:
    figures = curve(trained)
    losses = [each["loss"] for each in figures if "loss" in each]
    alphas = [each["alpha_by_position"] for each in figures if "alpha" in each]
    assert losses[-1] < 0.9 * losses[0] and alphas[-1][0] > alphas[0][0]


def test_a_run_goes_on_to_the_figures_of_an_undisturbed_one(model: Path, data: Path, tmp_path: Path) -> None:
    train(model, data, tmp_path / "whole")

    def stop(stage: str, done: int, total: int, note: str) -> None:
        if stage == "train" and done == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(model, data, tmp_path / "cut", stop)
    train(model, data, tmp_path / "cut")
    assert curve(tmp_path / "cut") == curve(tmp_path / "whole")
    one, other = (load_file(tmp_path / name / "head" / "model.safetensors") for name in ("cut", "whole"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_the_validations_acceptance_is_that_of_decoding(model: Path, trained: Path) -> None:
    """On texts that the target wrote: within the interval of a bootstrap over whole texts."""
    target, count, new = FrozenTarget(model, CPU, torch.float32), 32, 40
    student = student_of(trained / "head", target)
    llm = foredraft.load(
        model, draft=trained / "head", drafter="dflash", policy="fixed", max_draft=GAMMA, dtype="float32",
        device="cpu", max_batch=8, max_length=128,
    )  # fmt: skip
    check_prediction(
        llm, student, target, temperature=1.0, gamma=GAMMA, count=count, new=new, windows_of=drafts_of
    )
