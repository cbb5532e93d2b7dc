"""The commands on a real model, run to their end: verify with and without a defect, tune, train, quantise, bench."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foredraft.cli import main
from tests.support import real_models

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def written(file: Path, key: str) -> str:
    """Write prompts under a key of JSON Lines, and return the file's name."""
    file.write_text("\n".join(json.dumps({key: prompt}) for prompt in real_models.prompts(64)))
    return str(file)


def test_verify_finds_nothing_and_its_self_test_finds_the_defect(smollm2: Path, made: Path) -> None:
    draft = real_models.requantised(smollm2, "Q2_K", made)
    models = ["--model", str(smollm2), "--draft", str(draft)]
    assert main(["verify", *models]) in (0, 3)  # 3: nothing found, by weak evidence
    assert main(["verify", *models, "--self-test"]) == 1


def test_tune_runs_to_its_end(smollm2: Path, tmp_path: Path) -> None:
    """It keeps a plan only if one wins."""
    prompts = written(tmp_path / "prompts.jsonl", "prompt")
    options = ["--prompts", prompts, "--tokens", "1024", "--trials", "8"]
    assert main(["tune", "--model", str(smollm2), *options]) == 0


def test_train_makes_an_adapter(smollm2: Path, tmp_path: Path) -> None:
    adapter, data = tmp_path / "adapter", written(tmp_path / "texts.jsonl", "text")
    size = ["--length", "256", "--step-tokens", "1024", "--steps", "8", "--warm-up", "1"]
    options = ["--data", data, *size, "--validate-every", "4", "--out", str(adapter)]
    assert main(["train", "adapter", "--model", str(smollm2), *options]) == 0
    command = ["generate", "--model", str(smollm2), "--adapter", str(adapter), "--drafter", "kangaroo"]
    assert main([*command, "--temperature", "0", "def f(x):"]) == 0


def test_quantise_writes_a_checkpoint_that_runs(smollm2: Path, made: Path, tmp_path: Path) -> None:
    source, folder = real_models.requantised(smollm2, "BF16", made), tmp_path / "int4"
    assert main(["quantise", "--model", str(source), "--weights", "int4", "--out", str(folder)]) == 0
    assert main(["generate", "--model", str(folder), "--temperature", "0", "def f(x):"]) == 0
