"""Logits of GGUF files of families after Llama equal those of the checkpoint that was written (float32).

The files hold what convert_hf_to_gguf.py writes (https://github.com/ggml-org/llama.cpp): transformers reads
none of these architectures, or leaves out their keys.
"""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from foredraft import CheckpointError
from foredraft.model.gguf import llama_like, names
from foredraft.model.hub import resolve
from foredraft.model.runner import Runner
from foredraft.model.spec import ModelSpec
from foredraft.model.weights import load_decoder
from tests.parity.test_logits import TOTAL, Pair, close, prompt_logits
from tests.support.checkpoints import VARIANTS, save_variant
from tests.support.planting import Mutant, assert_caught, defect

pytest.importorskip("gguf")
import gguf

from tests.support.gguf_files import write_gguf

NAMES = [
    "gemma", "granite", "granite-tied", "granite-biases", "ministral3", "ministral3-yarn-mscale", "phi3",
    "phi3-partial", "phi3-tied-window", "phi3-longrope-long", "phi3-longrope-short", "phi3-longrope-partial",
    "seed-oss", "seed-oss-output-bias", "smollm3", "smollm3-untied-biases",
]  # fmt: skip


def add_own(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Add the keys of an architecture that the converter adds."""
    kind, rope = config["model_type"], config["rope_parameters"]
    if kind == "granite":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if kind == "ministral3":
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
        writer.add_attn_temperature_length(rope["original_max_position_embeddings"])
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
            writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
            writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        else:
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if kind == "phi3":
        head_dim = config["hidden_size"] // config["num_attention_heads"]
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
        writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
        writer.add_sliding_window(config["sliding_window"] or 0)
        if rope["rope_type"] == "longrope":
            original = config["original_max_position_embeddings"]
            scale = config["max_position_embeddings"] / original
            writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))


def factors(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Add LongRoPE's factors, as the converter does."""
    rope = config["rope_parameters"]
    own = {
        f"rope_factors_{kind}.weight": np.array(rope[f"{kind}_factor"], dtype=np.float32)
        for kind in ("long", "short")
        if f"{kind}_factor" in rope
    }
    return tensors | own


def save_file(folder: Path, name: str) -> Path:
    """Save a variant and its GGUF file, and return the file."""
    save_variant(folder / "model", name)
    config = json.loads((folder / "model" / "config.json").read_text())
    return write_gguf(
        folder / "model",
        folder / "model.gguf",
        edit=lambda writer: add_own(writer, config),
        tensors=functools.partial(factors, config),
    )


def check(name: str, folder: Path) -> None:
    file = save_file(folder, name)
    found = Pair(folder / "model")
    runner = Runner(load_decoder(resolve(file), dtype=torch.float32, length=TOTAL))
    assert close(prompt_logits(runner, found.tokens), found.expected)


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_a_file_equal_those_of_its_checkpoint(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    assert name in VARIANTS
    check(name, tmp_path)


def test_a_file_of_internlm2_is_a_llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The converter takes its weights apart, and reorders them as those of a Llama."""
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    assert names.row_order("internlm2", "blk.0.attn_q.weight", 8, 2, 2) is not None
    assert names.model_name("internlm2", "blk.0.attn_q.weight") == "model.layers.0.self_attn.q_proj.weight"


MUTANTS = [
    ("phi3-longrope-long", defect("long and short factors exchanged", llama_like._factors,
        lambda sound: lambda read, name, count: sound(
            read, names.SHORT_FACTORS if name == names.LONG_FACTORS else names.LONG_FACTORS, count
        ), lambda: None)),
    ("granite", defect("rows left as the file has them", names.row_order,
        lambda sound: lambda *given: None, lambda: None)),
    ("smollm3", defect("rows left in files of SmolLM 3", names.row_order,
        lambda sound: lambda *given: None, lambda: None)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "mutant"), MUTANTS, ids=lambda case: getattr(case, "name", None))
def test_a_defect_is_caught(
    name: str, mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    planted = Mutant(mutant.name, mutant.edits, lambda: check(name, tmp_path), mutant.raises)
    assert_caught(planted, monkeypatch)


def test_another_length_of_growth_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    folder = save_variant(tmp_path / "model", "ministral3")

    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_orig_ctx_len(32)
        writer.add_attn_temperature_scale(0.5)
        writer.add_attn_temperature_length(64)

    with pytest.raises(CheckpointError, match="temperature_length"):
        ModelSpec.from_folder(resolve(write_gguf(folder, tmp_path / "model.gguf", edit=edit)))
