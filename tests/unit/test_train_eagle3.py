"""Training runs of EAGLE-3 heads: continued to the same figures, and what they predict against decoding."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import foredraft
from foredraft.drafters.heads import settings as head_settings
from foredraft.drafters.heads.eagle3_files import FIRST_LAYERS, read_eagle3
from foredraft.drafters.heads.settings import HeadSettings, write_settings
from foredraft.errors import ConfigError, ForedraftError
from foredraft.train.eagle3 import train_eagle3
from foredraft.train.target import FrozenTarget
from foredraft.train.training_options import Eagle3Options
from foredraft.train.validation import drafts_of
from tests.support.checkpoints import TEXT, save_checkpoint
from tests.support.heads import BODY, LAYERS, save_head, student_of
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
        "taps": (2, 3), "draft_vocabulary": 60, "draft_length": GAMMA, "patience": 0,
    }  # fmt: skip
    return train_eagle3(
        Eagle3Options(**{**given, **more}), str(model), report=report, device="cpu", dtype="float32"
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


def test_a_training_starts_from_a_head(model: Path, data: Path, trained: Path, tmp_path: Path) -> None:
    """Of which taps and words stay, and that has learned already."""
    more = {"taps": (), "draft_vocabulary": None, "from_head": trained / "head", "steps": 1}
    train(model, data, tmp_path / "same", learning_rate=1e-30, **more)
    one, other = (load_file(folder / "head" / "model.safetensors") for folder in (trained, tmp_path / "same"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    train(model, data, tmp_path / "new", steps=1)
    assert curve(tmp_path / "same")[0]["loss"] < 0.9 * curve(tmp_path / "new")[0]["loss"]
    assert read_eagle3(tmp_path / "same" / "head").record == read_eagle3(trained / "head").record


@pytest.mark.parametrize("spelling", ["residual", "whole", "speculators", "qwen3"])
def test_a_published_head_goes_on_with_its_flags(spelling: str, data: Path, tmp_path: Path) -> None:
    """Its drafts are those of before but for the embedding, which is the model's from now on."""
    big = save_checkpoint(tmp_path / "big", tokenizer=True, num_hidden_layers=LAYERS)
    vocabulary = json.loads((big / "config.json").read_text())["vocab_size"]
    head = save_head(tmp_path / "published", spelling, vocabulary)
    given = {"taps": (), "draft_vocabulary": None, "from_head": head, "steps": 1, "learning_rate": 1e-30}
    train(big, data, tmp_path, **given)
    before, after = (read_eagle3(folder).record for folder in (head, tmp_path / "head"))
    # SpecForge's files hold no tap after layer 1, and no norms of queries and keys
    written = "speculators" if spelling in ("speculators", "qwen3") else "SafeAILab or SpecForge"
    assert (after.spelling, after.layer) == (written, FIRST_LAYERS[written])
    own = {"own_embedding": False, "own_head": True, "spelling": after.spelling, "layer": after.layer}
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


@pytest.mark.parametrize(
    ("spelling", "more", "message"),
    [
        ("deep", 0, "from_head is '.*', which has 2 layers; give another head"),
        ("window", 0, "which has a window in its attention; give another head"),
        ("residual", 5, r"is for a target of vocabulary \d+, but the target's is \d+"),
    ],
)
def test_a_head_that_cannot_go_on_is_refused(
    spelling: str, more: int, message: str, data: Path, tmp_path: Path
) -> None:
    big = save_checkpoint(tmp_path / "big", tokenizer=True, num_hidden_layers=LAYERS)
    vocabulary = json.loads((big / "config.json").read_text())["vocab_size"]
    windows = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
    body = {**BODY, **windows, "model_type": "qwen3", "head_dim": 24, "vocab_size": vocabulary}
    form, config = (spelling, None) if spelling != "window" else ("qwen3", {"transformer_layer_config": body})
    head = save_head(tmp_path / "published", form, vocabulary + more, config=config)
    with pytest.raises(ForedraftError, match=message):
        train(big, data, tmp_path, taps=(), draft_vocabulary=None, from_head=head)
    assert not (tmp_path / "work").exists() and not (tmp_path / "head").exists()


def test_a_head_is_not_replaced_while_it_is_the_start(
    model: Path, data: Path, trained: Path, tmp_path: Path
) -> None:
    copytree(trained / "head", tmp_path / "head")
    with pytest.raises(ConfigError, match="out is '.*head', which holds the head to start from"):
        train(model, data, tmp_path, taps=(), draft_vocabulary=None, from_head=tmp_path / "head")


def test_settings_of_the_doctor_go_on(
    model: Path, data: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They become the head's own, and other ones are another run, wherever they lie."""
    monkeypatch.setattr(head_settings, "settings_file", lambda head: tmp_path / "settings.json")
    copytree(trained / "head", tmp_path / "start")
    write_settings(tmp_path / "start", HeadSettings(norm_output=True))
    more = {"taps": (), "draft_vocabulary": None, "from_head": tmp_path / "start", "steps": 1}
    train(model, data, tmp_path, **more)
    assert read_eagle3(tmp_path / "head").record.norm_output
    write_settings(tmp_path / "start", HeadSettings())
    with pytest.raises(ConfigError, match="which holds a run of another target"):
        train(model, data, tmp_path, **more)


def test_another_head_to_start_from_is_another_run(
    model: Path, data: Path, trained: Path, tmp_path: Path
) -> None:
    more = {"taps": (), "draft_vocabulary": None, "from_head": tmp_path / "start", "steps": 1}
    copytree(trained / "head", tmp_path / "start")
    train(model, data, tmp_path, **more)
    file = tmp_path / "start" / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "fc.weight": tensors["fc.weight"] * 2}, file)
    with pytest.raises(ConfigError, match="which holds a run of another target, other data or other options"):
        train(model, data, tmp_path, **more)


def test_the_validations_acceptance_is_that_of_decoding(model: Path, trained: Path) -> None:
    """On texts that the target wrote: within the interval of a bootstrap over whole texts."""
    target, count, new = FrozenTarget(model, CPU, torch.float32), 32, 40
    student = student_of(trained / "head", target, GAMMA, 0.8)
    llm = foredraft.load(
        model, draft=trained / "head", drafter="eagle3", policy="fixed", max_draft=GAMMA, dtype="float32",
        device="cpu", max_batch=8, max_length=128,
    )  # fmt: skip
    check_prediction(
        llm, student, target, temperature=1.0, gamma=GAMMA, count=count, new=new, windows_of=drafts_of
    )
