"""Hybrids: their logits equal those of transformers, by the kernels and by PyTorch's operators.

Its two forms, by chunks and by steps, differ from each other: in float32 by up to 1e-4 of these logits of gated
delta nets, and 1e-5 of Mamba-2. In bfloat16 both are about as far as we are from what float32 gives of the same
weights, so that is the bound there.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Lfm2VlConfig

import foredraft
from foredraft import CheckpointError
from foredraft.model import checkpoint, delta, short_conv
from foredraft.model.delta import Delta
from foredraft.model.mamba import Mamba
from foredraft.model.recurrent import Recurrence
from foredraft.model.runner import Runner
from foredraft.model.short_conv import ShortConv
from foredraft.model.spec import ModelSpec
from foredraft.model.weights import load_decoder
from tests.parity.test_logits import Pair, close, prompt_logits
from tests.support.checkpoints import save_variant
from tests.support.hybrids import OTHERS, VARIANTS, config_of, rewrite, save_hybrid
from tests.support.mutation import Mutant, assert_caught, caught_by
from tests.support.mutations import around, instead
from tests.support.variants_hybrids import fill

LENGTH = 300
PREFIX = "model.language_model."


def logits_of(runner: Runner, tokens: list[int]) -> Tensor:
    """Return the logits [T, V] by a chunk of prompt and passes of several widths."""
    cache, widths = runner.new_cache(2, len(tokens)), [1, 2, 5, 16]
    states = runner.prefill(cache, 1, tokens[:256], 0).hidden
    found, at = [runner.head(states)[0, :256]], 256
    while at < len(tokens):
        cache.lengths[1] = at
        part = tokens[at : at + widths[at % 4]]
        logits = runner.forward(cache, torch.tensor([part]), [at], first_row=1).logits
        assert logits is not None
        found.append(logits[0])
        at += len(part)
    return torch.cat(found)


@functools.cache
def saved(variant: str) -> tuple[Path, Tensor, list[int]]:
    folder = save_hybrid(Path(tempfile.mkdtemp()), variant)
    tokens = torch.randint(3, 320, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = AutoModelForCausalLM.from_pretrained(folder)(tokens).logits[0]
    return folder, expected, tokens[0].tolist()


def check(variant: str = "two values a key", native: bool = True) -> None:
    folder, expected, tokens = saved(variant)
    runner = Runner(load_decoder(folder, native=native))
    assert runner.by_kernels == native
    bound = 2e-3 if variant in VARIANTS else 1e-4
    torch.testing.assert_close(logits_of(runner, tokens), expected, rtol=0, atol=bound)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("variant", [*VARIANTS, *OTHERS])
def test_logits_equal_those_of_transformers(variant: str, native: bool) -> None:
    check(variant, native)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("variant", OTHERS)
def test_in_bfloat16_they_are_as_near_to_those_of_float32(variant: str, native: bool, tmp_path: Path) -> None:
    save_hybrid(tmp_path, variant, dtype="bfloat16")
    tokens = torch.randint(3, 320, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        wide, theirs = (
            AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)(tokens).logits[0].float()
            for dtype in (torch.float32, torch.bfloat16)
        )
    ours = logits_of(Runner(load_decoder(tmp_path, native=native)), tokens[0].tolist()).float()
    assert (ours - wide).square().mean() < 1.2 * (theirs - wide).square().mean()


@pytest.mark.parametrize("native", [True, False])
def test_no_time_step_is_clamped(native: bool, tmp_path: Path) -> None:
    """Of a Nemotron-H, transformers clamps time steps from below where it reads a prompt."""
    save_hybrid(tmp_path, "blocks")
    rewrite(
        tmp_path, lambda all: {name: t - 7.0 if name.endswith("dt_bias") else t for name, t in all.items()}
    )
    model, tokens = AutoModelForCausalLM.from_pretrained(tmp_path), [*range(3, 90)] * 4
    ours = logits_of(Runner(load_decoder(tmp_path, native=native)), tokens)
    with torch.inference_mode():
        clamped = model(torch.tensor([tokens])).logits[0]
        for module in model.modules():
            if hasattr(module, "time_step_limit"):
                module.time_step_limit = 0.0, float("inf")
        assert (model(torch.tensor([tokens])).logits[0] - ours).abs().max() < 1e-4
    assert (clamped - ours).abs().max() > 1e-2


def test_files_spell_a_model_in_several_ways() -> None:
    """As makers wrote them before transformers had their classes, or had other names."""

    def spec(variant: str, *without: str, **keys: object) -> ModelSpec:
        config = json.loads((saved(variant)[0] / "config.json").read_text())
        return ModelSpec.from_hf({key: config[key] for key in config if key not in without} | keys)

    assert spec("convolutions") == spec(
        "convolutions", "layer_types", "intermediate_size", "tie_word_embeddings",
        full_attn_idxs=[2, 5], block_ff_dim=96, tie_embedding=True, num_heads=4, rope_theta=1e6, rope_parameters=None,
    )  # fmt: skip
    kinds = ["mamba", "mamba", "attention"] * 2
    assert spec("mamba") == spec(
        "mamba", layer_types=kinds, time_step_limit=[0.0, float("inf")], mamba_d_head="auto"
    )
    assert spec("mamba") == spec("mamba", "layer_types", layers_block_type=kinds)
    assert spec("blocks") == spec(
        "blocks", "layers_block_type", "n_groups", hybrid_override_pattern="M-MM*-M-M*-", mamba_n_groups=2,
        num_hidden_layers=11,
    )  # fmt: skip


def test_a_granite_that_attends_throughout_has_no_recurrent_layers() -> None:
    config = json.loads((saved("rotated mamba")[0] / "config.json").read_text())
    spec = ModelSpec.from_hf(config | {"layer_types": ["attention"] * 4})
    assert spec.recurrent is None and not spec.recurrent_layers and spec.stores(0)


def test_the_text_half_of_a_multimodal_checkpoint(tmp_path: Path) -> None:
    """Decays and norms in float32 beside weights of 16 bits, heads for further tokens, and a vision tower."""
    save_hybrid(tmp_path, dtype="bfloat16")
    plain = logits_of(Runner(load_decoder(tmp_path, native=True)), [*range(3, 90)] * 4)

    def wrapped(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        wide = {
            name: t.float()
            for name, t in tensors.items()
            if name.endswith(("A_log", "linear_attn.norm.weight"))
        }
        found = {name.replace("model.", PREFIX, 1): t for name, t in (tensors | wide).items()}
        return found | {"mtp.fc.weight": torch.ones(4, 4), "model.visual.patch.weight": torch.ones(4)}

    rewrite(tmp_path, wrapped)
    text = json.loads((tmp_path / "config.json").read_text())
    names = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5"}
    tokens = {"image_token_id": 90, "vision_start_token_id": 91, "vision_config": {"depth": 2}}
    said = {"attn_output_gate": True, "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1}
    rope = text["rope_parameters"] | {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    whole = names | tokens | {"text_config": text | said | {"rope_parameters": rope}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    assert torch.equal(logits_of(Runner(load_decoder(tmp_path, native=True)), [*range(3, 90)] * 4), plain)


def test_the_text_half_of_an_lfm2_that_sees(tmp_path: Path) -> None:
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Lfm2VlConfig(
        text_config=config_of("convolutions").to_dict(), projector_hidden_size=16, image_token_id=90,
        vision_config=vision | {"model_type": "siglip2_vision_model", "num_patches": 16, "patch_size": 14},
    )  # fmt: skip
    model = AutoModelForImageTextToText.from_config(config)
    fill(model)
    model.save_pretrained(tmp_path)
    tokens = torch.randint(3, 90, (1, LENGTH))
    with torch.inference_mode():
        expected = model(tokens).logits[0]
    found = logits_of(Runner(load_decoder(tmp_path, native=True)), tokens[0].tolist())
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


MIXTURE = "is not supported: it is a mixture of experts with recurrent layers"


@pytest.mark.parametrize(
    ("variant", "keys", "problem"),
    [
        ("convolutions", {"conv_bias": True}, "conv_bias is True; supported are false"),
        ("convolutions", {"layer_types": ["conv"] * 6}, "without any layer that attends"),
        ("convolutions", {"layer_types": ["conv", "full_attention"]}, "each of the 6 layers"),
        ("mamba", {"num_local_experts": 4}, MIXTURE),
        ("mamba", {"mamba_d_head": 48}, "mamba_n_heads is 4; heads must have 128 numbers"),
        ("mamba", {"time_step_limit": [0.001, 0.1]}, "only 0 to infinity"),
        ("mamba", {"mamba_n_groups": 3}, "mamba_n_heads is 4; it must be a multiple of mamba_n_groups, 3"),
        ("mamba", {"layer_types": ["mamba", "sliding"] * 3}, "a list of full_attention, linear_attention"),
        ("blocks", {"layers_block_type": ["mamba", "moe", "attention"]}, MIXTURE),
        ("blocks", {"layers_block_type": ["mlp", "mamba", "attention"]}, "an MLP must follow"),
        ("blocks", {"layers_block_type": ["mamba", "attention", "mlp", "mlp"]}, "an MLP must follow"),
        ("blocks", {"layers_block_type": None, "hybrid_override_pattern": "M*X"}, "hybrid_override_pattern"),
        ("blocks", {"layers_block_type": None}, "hybrid_override_pattern is missing"),
        ("blocks", {"use_bias": True}, "use_bias is True"),
    ],
)
def test_what_is_no_hybrid_of_a_kind_is_refused(variant: str, keys: dict[str, object], problem: str) -> None:
    config = json.loads((saved(variant)[0] / "config.json").read_text())
    with pytest.raises(CheckpointError, match=problem):
        ModelSpec.from_hf(config | keys)


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"attn_output_gate": False}, "attn_output_gate is False; only True"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads is 3; it must be a multiple of"),
        ({"layer_types": ["linear_attention"] * 8}, "without any layer that attends"),
        ({"rope_parameters": {"rope_type": "default", "alpha": 2.0}}, "alpha"),
    ],
)
def test_what_is_no_such_model_is_refused(keys: dict[str, object], problem: str) -> None:
    config = json.loads((saved("two values a key")[0] / "config.json").read_text())
    with pytest.raises(CheckpointError, match=problem):
        ModelSpec.from_hf(config | keys)


@pytest.mark.parametrize("variant", ["two values a key", "mamba", "convolutions"])
def test_memory_is_told_before_loading(variant: str) -> None:
    """Of each row: states in float32, and the log of the latest positions, beside keys and values."""
    folder, _, _ = saved(variant)
    llm = foredraft.load(folder, device="cpu", max_batch=1, max_length=64)
    cache = llm.loaded.engine.cache
    rows = cache.recurrent
    assert rows is not None
    held = cache.planes[0].nbytes + rows.bases.nbytes + rows.logs.nbytes
    assert cache.bytes_per_row(llm.loaded.spec, 64, torch.float32) == held
    llm.close()


def check_operators() -> None:
    check(native=False)


def check_mamba() -> None:
    check("mamba", native=False)


def check_convolutions() -> None:
    check("convolutions", native=False)


def check_next() -> None:
    """The rows of Qwen3-Next's weights lie key head by key head."""
    pair = Pair(save_variant(Path(tempfile.mkdtemp()), "qwen3_next-three-a-key"))
    assert close(prompt_logits(pair.runner, pair.tokens), pair.expected)


def test_rows_that_lie_by_key_heads() -> None:
    check_next()


def without_the_oldest(step: Any, weights: Any, window: Tensor, state: Tensor) -> Any:
    return step(weights, torch.cat([window[:1] * 0, window[1:]]), state)


DEFECTS: dict[Callable[[], object], list[tuple[Any, ...]]] = {
    check_operators: [
        ("a window that is too short", Delta.step, around(without_the_oldest)),
        ("keys of any length", delta._unit, lambda _: lambda x: x),
        ("no gate", Delta.gated, around(lambda gated, weights, read, z: gated(weights, read, torch.ones_like(z)))),
        ("gates beside other heads", checkpoint.qkv_order, lambda _: lambda spec: None),
    ],
    check_mamba: [
        ("Mamba: a window that is too short", Mamba.step, around(without_the_oldest)),
        ("Mamba: a convolution without its bias", Recurrence.convolved, around(lambda convolved, own, window: convolved(replace(own, shift=None), window))),
        ("Mamba: values do not skip the state", Mamba.step, around(lambda step, own, *given: step(replace(own, skip=own.skip * 0), *given))),
        ("Mamba: groups are normed together", Mamba.gated, around(lambda gated, own, *given: gated(replace(own, sizes=replace(own.sizes, key_heads=1)), *given))),
        ("Mamba: the norm comes before the gate", Mamba.gated, around(lambda gated, own, read, gates: gated(own, read, torch.ones_like(gates)) * F.silu(gates) / F.silu(torch.ones(1)))),
    ],
    check_convolutions: [
        ("a convolution is activated", ShortConv.step, around(lambda step, own, *given: (F.silu(step(own, *given)[0]), given[1]))),
        ("gates and values change places", short_conv.stored_order, lambda _: lambda sizes: torch.arange(3 * sizes.values)),
        ("a convolution's window is too short", ShortConv.step, around(without_the_oldest)),
    ],
    check_next: [
        ("rows as they lie", checkpoint.delta_order, instead(lambda *given: None)),
        ("heads of values in turn", checkpoint.delta_order, around(lambda order, sizes, *of_key: torch.cat([part.view(sizes.key_heads, -1, len(part) // sizes.value_heads).transpose(0, 1).flatten() if at >= len(of_key) - 2 else part for at, part in enumerate(order(sizes, *of_key).split([sizes.key_heads * rows for rows in of_key]))]))),
    ],
}  # fmt: skip


@pytest.mark.parametrize("mutant", caught_by(DEFECTS), ids=lambda mutant: str(mutant.name))
def test_defects_are_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(mutant, monkeypatch)
