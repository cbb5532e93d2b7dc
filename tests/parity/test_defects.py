"""Planted defects of the model's arithmetic; the comparison with transformers must catch each of them."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import pytest

from foredraft.model import attention, decoder, families, rope, rope_config, spec, weights
from foredraft.model.runner import packed, passes
from foredraft.model.runner.runner import Runner
from foredraft.model.weights import load_decoder
from tests.parity import test_logits
from tests.parity.test_logits import Pair
from tests.support.checkpoints import save_variant
from tests.support.planting import Mutant, assert_caught


@functools.cache
def pair(name: str) -> Pair:
    with tempfile.TemporaryDirectory() as folder:
        return Pair(save_variant(Path(folder), name))


def with_new_runner(name: str) -> Pair:
    """Return the same weights and expected logits, with a runner that is made under the defect."""
    original, copy = pair(name), object.__new__(Pair)
    copy.__dict__.update(original.__dict__, runner=Runner(original.runner.decoder))
    return copy


def prompt_logits(name: str) -> None:
    test_logits.test_prompt_logits_equal_those_of_transformers(pair(name))


def decoding_logits(name: str) -> None:
    test_logits.test_decoding_logits_equal_those_of_transformers(with_new_runner(name))


def reloaded_logits(name: str) -> None:
    """Compare with the same expected logits, after loading the checkpoint under the defect."""
    original, copy = pair(name), object.__new__(Pair)
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(load_decoder(save_variant(Path(folder), name)))
    copy.__dict__.update(original.__dict__, runner=runner)
    test_logits.test_decoding_logits_equal_those_of_transformers(copy)


def check(kind: object, name: str) -> functools.partial[None]:
    return functools.partial(kind, name)  # type: ignore[call-overload,no-any-return]


MASKS = attention.causal_masks
# every column rotates by the base of the last position of the pass
DYNAMIC_BY_PASS = (
    (
        passes.build_pass,
        "table[rows].chunk(2, 1)",
        "(rope_table(Rope('default', rope.theta * (rope.factor * max(int(positions[0, -1]) + 1, rope.original_positions)"
        " / rope.original_positions - (rope.factor - 1)) ** (spec.head_dim / (spec.head_dim - 2))), spec.head_dim,"
        " len(table), table.device, table.dtype) if rope.kind == 'dynamic' else table)[rows].chunk(2, 1)",
    ),
)
MUTANTS = [
    Mutant(
        "window one too wide",
        ((MASKS, "last - reach", "last - reach - 1"),),
        check(decoding_logits, "gemma2"),
    ),
    Mutant(
        "window one too narrow",
        ((MASKS, "last - reach", "last - reach + 1"),),
        check(decoding_logits, "gemma2"),
    ),
    Mutant(
        "window of a verification pass measured from its first column",
        ((MASKS, "keys > last - reach", "keys > last[:, :1] - reach"),),
        check(prompt_logits, "gemma2"),
    ),
    Mutant(
        "window edge off by one where a pass has several columns",
        ((MASKS, "last - reach", "last - reach - int(last.shape[1] > 8)"),),
        check(prompt_logits, "gemma2"),
    ),
    Mutant(
        "every layer has a window",
        ((MASKS, "None if window is None or window >= length", "24 if window is None"),),
        check(decoding_logits, "gemma2"),
    ),
    Mutant(
        "a column sees the next one",
        ((MASKS, "keys <= last", "keys <= last + 1"),),
        check(prompt_logits, "llama"),
    ),
    Mutant(
        "a column does not see itself",
        ((MASKS, "keys <= last", "keys < last.clamp(min=1)"),),
        check(decoding_logits, "llama"),
    ),
    Mutant(
        "rotation in the wrong direction",
        ((rope.rope_table, "[-sin, sin]", "[sin, -sin]"),),
        check(decoding_logits, "llama"),
    ),
    Mutant(
        "rotation one position late",
        (
            (
                passes.build_pass,
                "rows: Tensor | slice = slice(starts, starts + shape.queries)",
                "late = starts + (starts > 0)\n        rows: Tensor | slice = slice(late, late + shape.queries)",
            ),
        ),
        check(decoding_logits, "llama"),
    ),
    Mutant(
        "low frequencies not divided",
        ((rope._llama3, "inverse / rope.factor, inverse)", "inverse, inverse)"),),
        check(decoding_logits, "llama-llama3"),
    ),
    Mutant(
        "attention without its soft-cap",
        (
            (
                attention._batch_attention,
                "soft_cap(scores, spec.attention_softcap, spec.attention_scale)",
                "scores.mul_(spec.attention_scale)",
            ),
        ),
        check(decoding_logits, "gemma2"),
    ),
    Mutant(
        "logits without their soft-cap",
        ((decoder.Decoder.head, "self.spec.logit_softcap is not None", "False"),),
        check(decoding_logits, "gemma2"),
    ),
    Mutant(
        "embedding without its scale",
        ((decoder.Decoder.embed, "self._scale is None", "True"),),
        check(decoding_logits, "gemma2"),
    ),
    Mutant(
        "post-norm left out",
        ((decoder.finish, "layer.mlp.post_norm is None", "True"),),
        check(decoding_logits, "gemma2"),
    ),
    Mutant(
        "query heads grouped the other way",
        (
            (
                attention.attend,
                ".view(batch, queries, kv_heads, groups, dim).permute(0, 2, 1, 3, 4)\n    q =",
                ".view(batch, queries, groups, kv_heads, dim).permute(0, 3, 1, 2, 4)\n    q =",
            ),
        ),
        check(decoding_logits, "llama-gqa-tied"),
    ),
    Mutant(
        "windows left out",
        ((MASKS, "if window is None or window >= length", "if True"),),
        check(decoding_logits, "mistral"),
    ),
    Mutant(
        "window of every layer one too wide",
        ((MASKS, "last - reach", "last - reach - 1"),),
        check(decoding_logits, "mistral"),
    ),
    Mutant(
        "window of every layer one too narrow",
        ((MASKS, "last - reach", "last - reach + 1"),),
        check(prompt_logits, "mistral"),
    ),
    Mutant(
        "windows in the layers before max_window_layers",
        (
            (
                families._qwen_windows,
                "SLIDING if layer >= first else FULL",
                "FULL if layer >= first else SLIDING",
            ),
        ),
        check(reloaded_logits, "qwen2-windows"),
    ),
    Mutant(
        "windows start one layer late",
        ((families._qwen_windows, "layer >= first", "layer > first"),),
        check(reloaded_logits, "qwen3-windows"),
    ),
    Mutant(
        "windows although use_sliding_window is false",
        (
            (
                families._qwen_windows,
                'not read.flag("use_sliding_window") or window is None',
                "window is None",
            ),
        ),
        check(reloaded_logits, "qwen2-windows-off"),
    ),
    Mutant(
        "biases of queries, keys and values left out",
        ((packed.pack, "_packed(weight.contiguous()), bias", "_packed(weight.contiguous()), None"),),
        check(reloaded_logits, "qwen2"),
    ),
    Mutant(
        "norms of queries and keys left out",
        ((decoder.project, "weights.q_norm is not None and", "False and"),),
        check(decoding_logits, "qwen3"),
    ),
    Mutant(
        "norm of keys left out",
        ((decoder.project, "k.copy_(weights.k_norm(k))", "pass"),),
        check(decoding_logits, "gemma3"),
    ),
    Mutant(
        "keys normed with the weight of queries",
        ((decoder.project, "weights.k_norm(k)", "weights.q_norm(k)"),),
        check(decoding_logits, "qwen3"),
    ),
    Mutant(
        "values normed like keys",
        ((decoder.project, "spec.heads : spec.heads + spec.kv_heads", "spec.heads :"),),
        check(decoding_logits, "qwen3"),
    ),
    Mutant(
        "norms of queries and keys without their offset",
        (
            (
                weights._Builder.norm,
                "weight.float() + 1.0 if offset",
                "weight.float() + float(size is None) if offset",
            ),
        ),
        check(reloaded_logits, "gemma3"),
    ),
    Mutant(
        "local base in layers with full attention",
        ((spec.ModelSpec.rope_of, "self.rope if window is None or", "self.rope if"),),
        check(decoding_logits, "gemma3"),
    ),
    Mutant(
        "global base in windowed layers",
        ((spec.ModelSpec.rope_of, "self.rope if window is None or", "self.rope if True or"),),
        check(decoding_logits, "gemma3"),
    ),
    Mutant(
        "full attention in every fifth layer",
        ((families._gemma3_windows, '"sliding_window_pattern", 6', '"sliding_window_pattern", 5'),),
        check(reloaded_logits, "gemma3-default-pattern"),
    ),
    Mutant(
        "full attention one layer late",
        ((families._gemma3_windows, "(layer + 1) % pattern", "layer % pattern"),),
        check(reloaded_logits, "gemma3-default-pattern"),
    ),
    Mutant(
        "scores scaled by head_dim",
        (
            (
                families._gemma_common,
                'read.number("query_pre_attn_scalar", 256)',
                '(0 * read.number("query_pre_attn_scalar", 256) + 24)',
            ),
        ),
        check(reloaded_logits, "gemma3-head-dim-scalar"),
    ),
    Mutant(
        "positions not divided by the linear factor",
        ((rope.frequencies, "inverse / rope.factor", "inverse"),),
        check(decoding_logits, "gemma3-linear"),
    ),
    Mutant(
        "yarn's attention factor left out",
        ((rope.rope_table, "angles.cos() * rope.attention_factor", "angles.cos()"),),
        check(decoding_logits, "llama-yarn"),
    ),
    Mutant(
        "yarn's attention factor ignores mscale",
        ((rope_config._attention_factor, "scaled(mscale) / scaled(mscale_all_dim)", "scaled(1.0)"),),
        check(reloaded_logits, "llama-yarn-mscale"),
    ),
    Mutant(
        "yarn's bounds always truncated",
        ((rope._yarn, "if rope.truncate", "if True"),),
        check(decoding_logits, "llama-yarn-untruncated"),
    ),
    Mutant(
        "yarn divides high frequencies and keeps low ones",
        (
            (
                rope._yarn,
                "inverse / rope.factor * stretched + inverse *",
                "inverse * stretched + inverse / rope.factor *",
            ),
        ),
        check(decoding_logits, "qwen3-yarn"),
    ),
    Mutant(
        "dynamic base of the position before",
        ((rope._dynamic_theta, "torch.arange(1, positions + 1)", "torch.arange(0, positions)"),),
        check(decoding_logits, "llama-dynamic"),
    ),
    Mutant(
        "dynamic base does not grow",
        ((rope._dynamic_theta, "stretch **", "1.0 **"),),
        check(decoding_logits, "mistral-dynamic"),
    ),
    Mutant(
        "dynamic base of the pass, with several columns",
        DYNAMIC_BY_PASS,
        check(prompt_logits, "llama-dynamic"),
    ),
    Mutant(
        "dynamic base of the pass, after a prefill",
        DYNAMIC_BY_PASS,
        check(decoding_logits, "qwen2-dynamic"),
    ),
]
CHECKS = {mutant.check.func.__name__ + " " + mutant.check.args[0]: mutant.check for mutant in MUTANTS}  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_passes_without_a_defect(name: str) -> None:
    CHECKS[name]()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_defect_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(mutant, monkeypatch)
