"""Hostile numbers and nesting in the files of a checkpoint are refused before anything of that size is made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import foredraft
from foredraft import CheckpointError, ConfigError
from foredraft.drafters.plan_files import read_plan
from foredraft.model.config import MOST
from tests.support.checkpoints import save_checkpoint

NESTED = '{"a":' + "[" * 100_000 + "]" * 100_000 + "}"


@pytest.mark.parametrize("key", MOST)
def test_a_size_beyond_any_machine_is_refused_by_arithmetic(tmp_path: Path, key: str) -> None:
    folder = save_checkpoint(tmp_path, "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: 2**31 - 1}))
    with pytest.raises(CheckpointError, match=f"{key} is 2147483647; it must be a whole number, at most"):
        foredraft.load(folder)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_deep_nesting_is_no_readable_json(tmp_path: Path, name: str) -> None:
    folder = save_checkpoint(tmp_path, "llama")
    (folder / name).write_text(NESTED)
    with pytest.raises(CheckpointError, match=f"{name} is not readable JSON"):
        foredraft.load(folder)


@pytest.mark.parametrize("field", ["alpha", "c", "tau", "speedup"])
def test_a_number_beyond_floats_in_a_plan_is_refused(tmp_path: Path, field: str) -> None:
    plan = {
        "format": 1, "model": "m", "model_hash": "h", "attention": [1], "mlp": [], "exit": None, "layers": 4,
        "max_draft": 5, "alpha": 0.5, "c": 0.1, "tau": 2.0, "speedup": 1.5, "predicted": 1.5,
        "date": "2026-01-01", "temperature": None,
    }  # fmt: skip
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(plan | {field: 10**400}))
    with pytest.raises(ConfigError, match="plan is "):
        read_plan(file)
