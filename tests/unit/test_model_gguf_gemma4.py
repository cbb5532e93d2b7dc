"""A GGUF file of Gemma 4 gives the model of the checkpoint that it was written from, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from foredraft.errors import CheckpointError
from foredraft.model.gguf import gemma4_config, names
from foredraft.model.hub import resolve
from foredraft.model.spec import ModelSpec
from tests.support.checkpoints import save_checkpoint
from tests.support.planting import Mutant, assert_caught, defect
from tests.support.variants_gemma4 import BY_LAYER, FULL, SHARED, SLIDING

pytest.importorskip("gguf")

from tests.support.gguf_gemma4 import write_gguf
from tests.unit.test_model_gguf import check_same

JOINED = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "final_logit_softcapping": 8.0}
MODELS: dict[str, dict[str, Any]] = {
    "keys are values": JOINED,
    "shared keys": {**SHARED, **BY_LAYER, "use_double_wide_mlp": True},
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))


def check(name: str, folder: Path, kind: str = "F32") -> None:
    save_checkpoint(folder / "model", "gemma4", **MODELS[name])
    file = write_gguf(folder / "model", folder / "model.gguf", kind)
    if kind == "F32":
        spec, found = ModelSpec.from_folder(folder / "model"), ModelSpec.from_folder(resolve(file))
        ends = {"eos_token_ids": spec.eos_token_ids, "bos_token_id": spec.bos_token_id}  # of the vocabulary
        assert replace(found, **ends) == spec
    check_same(folder / "model", file, torch.float32)


@pytest.mark.parametrize("name", MODELS)
def test_a_file_is_its_checkpoint(name: str, tmp_path: Path) -> None:
    check(name, tmp_path)


def test_keys_that_no_layer_reads_stay_unread(tmp_path: Path) -> None:
    """Published checkpoints hold keys and values of layers that read those of others, and so do their files."""
    folder = save_checkpoint(tmp_path / "model", "gemma4", **MODELS["shared keys"])
    weights = load_file(folder / "model.safetensors")
    more = {f"model.layers.5.self_attn.{part}_proj.weight": torch.randn(32, 64) for part in "kv"}
    save_file(weights | more, folder / "model.safetensors", {"format": "pt"})
    check_same(folder, write_gguf(folder, tmp_path / "model.gguf"), torch.float32)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"layer_types": [FULL, *[SLIDING] * 6]}, "sliding_window_pattern"),
        ({"global_head_dim": 64}, "rope_freqs.weight"),
        ({"num_key_value_heads": 4}, "blk.0.attn_k.weight"),
    ],
    ids=str,
)
def test_a_file_that_contradicts_itself_is_refused(keys: dict[str, Any], named: str, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "model", "gemma4", **JOINED)
    with pytest.raises(CheckpointError, match=named):
        resolve(write_gguf(folder, tmp_path / "model.gguf", **keys))


DEFECTS = [
    ("norms lose one", "keys are values", names.adds_one, lambda sound: lambda kind, name: "norm." in name),
    ("all frequencies turn", "shared keys", gemma4_config._turning, lambda sound: lambda *_: 1.0),
    (
        "values are no keys", "keys are values", gemma4_config._joined, lambda sound: lambda *_: False,
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", DEFECTS, ids=lambda case: case[0])
def test_a_defect_is_caught(case: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, model, seam, spoiler = case
    expected = CheckpointError if name == "values are no keys" else AssertionError
    mutant: Mutant = defect(name, seam, spoiler, lambda: check(model, tmp_path), expected)
    assert_caught(mutant, monkeypatch)
