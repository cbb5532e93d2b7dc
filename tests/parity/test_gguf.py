"""Logits of GGUF files equal those of the checkpoints that they were made of (float32), by operators and by kernels.

Where transformers reads an architecture and all of its keys, its own logits of the file are compared, too."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import is_gguf_available

from foredraft import CheckpointError
from foredraft.kernels.compilation import library
from foredraft.model.families import IN_GGUF
from foredraft.model.gguf import source, tensors
from foredraft.model.gguf.source import MetadataReader
from foredraft.model.locate import resolve
from foredraft.model.runner import Runner
from foredraft.model.weights import load_decoder
from tests.parity.test_logits import TOTAL, close, prompt_logits
from tests.support.checkpoints import save_checkpoint, save_variant
from tests.support.mutation import Mutant, Mutation, assert_caught, defect

pytest.importorskip("gguf")
import gguf

from tests.support.gguf_files import ARCHITECTURES, KINDS, NORMS, write_gguf
from tests.support.mutations import Function, around, instead

WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_key_value_heads": 2}  # rows of whole blocks
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 128},
    "gemma2": {
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3": {"head_dim": 256, "query_pre_attn_scalar": 256},
}
TOKENS = torch.randint(3, 97, (1, 100), generator=torch.Generator().manual_seed(7))  # [1, T]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library()  # from the cache of all tests, where it is compiled
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))


@pytest.mark.skipif(not is_gguf_available(), reason="transformers needs a newer gguf")
@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("kind", ["F32", *KINDS])
def test_logits_of_a_file_equal_those_of_transformers(family: str, kind: str, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "model", family, **WIDE, **MODELS[family])
    file = write_gguf(folder, tmp_path / "model.gguf", kind)
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=file.name, attn_implementation="eager", dtype=torch.float32
    ).eval()
    with torch.inference_mode():
        expected = reference(TOKENS).logits[0]
    assert close(logits_of(file), expected)


def logits_of(file: Path, *, native: bool = False) -> torch.Tensor:
    decoder = load_decoder(resolve(file), dtype=torch.float32, native=native, length=TOTAL)
    return prompt_logits(Runner(decoder), TOKENS)


def add_own(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
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
    rope = config["rope_parameters"]
    own = {
        f"rope_factors_{kind}.weight": np.array(rope[f"{kind}_factor"], dtype=np.float32)
        for kind in ("long", "short")
        if f"{kind}_factor" in rope
    }
    return tensors | own


def write_with_own(folder: Path, file: Path) -> Path:
    config = json.loads((folder / "config.json").read_text())
    add, change = lambda writer: add_own(writer, config), functools.partial(factors, config)
    return write_gguf(folder, file, edit=add, tensors=change)


OWN = """gemma granite granite-tied granite-biases ministral3 ministral3-yarn-mscale phi3 phi3-partial
    phi3-tied-window phi3-longrope-long phi3-longrope-short phi3-longrope-partial seed-oss seed-oss-output-bias smollm3
    smollm3-untied-biases""".split()
OF_NORMS = """cohere2 exaone4 exaone4-no-window glm4 glm4-no-biases-tied gpt2 gpt_neox gpt_neox-sequential-tied olmo2
    olmo3 olmo3-one-base phi stablelm stablelm-parallel starcoder2-no-window""".split()
OF_HYBRIDS = ["qwen3_5", *(f"qwen3_5-{rope}" for rope in ("linear", "yarn"))]
WRITERS: dict[str, Callable[[Path, Path], Path]] = {
    **dict.fromkeys(OWN, write_with_own),
    **dict.fromkeys(OF_HYBRIDS, write_gguf),
    **dict.fromkeys(OF_NORMS, write_gguf),
}


def check(variant: str, folder: Path) -> None:
    model = save_variant(folder / "model", variant)
    file = WRITERS[variant](model, folder / "model.gguf")
    want = prompt_logits(Runner(load_decoder(model, length=TOTAL)), TOKENS)
    for native in (False, True):
        assert close(logits_of(file, native=native), want)


@pytest.mark.parametrize("variant", WRITERS)
def test_logits_of_a_file_equal_those_of_its_checkpoint(variant: str, tmp_path: Path) -> None:
    check(variant, tmp_path)


def test_every_family_of_the_table_has_a_file() -> None:
    assert {variant.split("-")[0] for variant in OF_NORMS} == {*NORMS}
    assert {ARCHITECTURES.get(name, name) for name in NORMS} <= IN_GGUF.keys()


@pytest.mark.parametrize("family", ["cohere2", "glm4", "gpt_neox"])
def test_coded_weights_of_a_file_are_those_that_it_stands_for(family: str, tmp_path: Path) -> None:
    """Rows in another order, and a tied head, in codes of 8 bits."""
    model = save_variant(tmp_path / "model", family)
    file = write_gguf(model, tmp_path / "model.gguf", "Q8_0")
    assert close(logits_of(file, native=True), logits_of(file))


def test_a_file_of_internlm2_is_a_llama() -> None:
    """The converter takes its weights apart, and reorders them as those of a Llama."""
    assert tensors.row_order("internlm2", "blk.0.attn_q.weight", 8, 2, 2) is not None
    assert tensors.model_name("internlm2", "blk.0.attn_q.weight") == "model.layers.0.self_attn.q_proj.weight"


def test_another_length_of_growth_is_refused(tmp_path: Path) -> None:
    folder = save_variant(tmp_path / "model", "ministral3")

    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_orig_ctx_len(32)
        writer.add_attn_temperature_scale(0.5)
        writer.add_attn_temperature_length(64)

    with pytest.raises(CheckpointError, match="temperature_length"):
        resolve(write_gguf(folder, tmp_path / "model.gguf", edit=edit))


# --- planted defects ------------------------------------------------------------------------------------


rows_left = instead(lambda architecture, *rest: None)


def factors_exchanged(factors: Function) -> Function:
    other = {tensors.LONG_FACTORS: tensors.SHORT_FACTORS, tensors.SHORT_FACTORS: tensors.LONG_FACTORS}
    return lambda read, name, count: factors(read, other[name], count)


@around
def windows_shifted(config_of: Function, *given: Any) -> dict[str, Any]:
    config = config_of(*given)
    return config | {"layer_types": [*config["layer_types"][1:], config["layer_types"][0]]}


whole_head_rotated = around(lambda share, *given: share(*given) and {"partial_rotary_factor": 1.0})

MUTANTS: list[tuple[str, Any, Mutation]] = [
    ("phi3-longrope-long", MetadataReader.factors, factors_exchanged),
    ("granite", tensors.row_order, rows_left),
    ("smollm3", tensors.row_order, rows_left),
    ("gpt_neox", tensors.row_order, rows_left),
    ("cohere2", source.config_of, windows_shifted),
    ("stablelm", MetadataReader.share, whole_head_rotated),
]


@pytest.mark.parametrize(
    ("variant", "point", "mutation"), MUTANTS, ids=lambda each: getattr(each, "__name__", each)
)
def test_a_defect_is_caught(
    variant: str, point: Any, mutation: Mutation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant: Mutant = defect(variant, point, mutation, lambda: check(variant, tmp_path))
    assert_caught(mutant, monkeypatch)
