"""Folders of EAGLE-1 and EAGLE-2 heads: what is read in them, and what is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import foredraft
from foredraft.drafters.heads.eagle_files import is_eagle, read_eagle
from tests.parity.test_heads import KEYS, V
from tests.support.checkpoints import reference_model
from tests.support.eagle import save_eagle
from tests.support.heads import save_head
from tests.support.refused_heads import check_pickle, check_refused

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "hidden size": ({"size": 32}, "is for a target of hidden size 32, but the target's is 64"),
    "a shape": ({"tensors": {"fc.weight": torch.ones(64, 64)}},
                "tensor fc.weight has shape [64, 64], but config.json implies [64, 128]"),
    "a bias": ({"config": {"bias": False}}, "config.json has bias = false, but fc.bias is there"),
    "no bias": ({"tensors": {"fc.bias": None}, "config": {"bias": True}}, "bias = true, but fc.bias is missing"),
    "a lying count of layers": ({"config": {"num_hidden_layers": 2}}, "lacks tensor layers.1."),
    "an unknown tensor": ({"tensors": {"extra.weight": torch.ones(2)}}, "tensor extra.weight is not part of"),
    "codes": ({"tensors": {"fc.weight": torch.ones(64, 128, dtype=torch.int8)}}, "fc.weight is stored as I8"),
}  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    reference_model(**KEYS).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", BAD)
def test_a_bad_head_is_refused_in_one_line(target: Path, tmp_path: Path, name: str) -> None:
    given, message = BAD[name]
    folder = save_eagle(tmp_path / "head", "eagle-1", V, **given)
    check_refused(target, folder, message, "eagle")


def test_a_head_for_another_vocabulary_is_refused(target: Path, tmp_path: Path) -> None:
    folder = save_eagle(tmp_path / "head", "eagle-2", V + 2)
    with pytest.raises(foredraft.CheckpointError, match="of vocabulary 13, but the target's is 11"):
        foredraft.load(target, draft=folder, device="cpu")


def test_a_pickle_is_refused_and_never_read(target: Path, tmp_path: Path) -> None:
    folder = save_eagle(tmp_path / "head", "eagle-1", V)
    (folder / "model.safetensors").unlink()
    check_pickle(target, folder / "pytorch_model.bin", "convert it to")


def test_a_head_is_told_from_other_folders(target: Path, tmp_path: Path) -> None:
    folder = save_eagle(tmp_path / "head", "eagle-1", V)
    assert is_eagle(folder) and read_eagle(folder).record.pair_fc
    assert not is_eagle(save_head(tmp_path / "eagle3", "safeailab", V)) and not is_eagle(target)
    whole = tmp_path / "whole"
    reference_model(**{**KEYS, "num_hidden_layers": 1}).save_pretrained(whole)
    assert json.loads((whole / "config.json").read_text())["num_hidden_layers"] == 1 and not is_eagle(whole)
    llm = foredraft.load(target, draft=folder, policy="fixed", device="cpu", max_batch=1, max_length=64)
    assert llm.default_drafter == "eagle"
