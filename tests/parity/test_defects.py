"""Planted defects of the model's arithmetic: parity with transformers must notice each."""

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


def anew(name: str) -> Pair:
    """The same weights and expectations, with a runner made under the defect."""
    made, again = pair(name), object.__new__(Pair)
    again.__dict__.update(made.__dict__, runner=Runner(made.runner.decoder))
    return again


def several_columns(name: str) -> None:
    test_logits.test_every_position_of_a_prompt(pair(name))


def one_column(name: str) -> None:
    test_logits.test_token_by_token_after_prefill(anew(name))


def loaded_anew(name: str) -> None:
    """The same expectations, with everything read and loaded under the defect."""
    made, again = pair(name), object.__new__(Pair)
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(load_decoder(save_variant(Path(folder), name)))
    again.__dict__.update(made.__dict__, runner=runner)
    test_logits.test_token_by_token_after_prefill(again)


def check(kind: object, name: str) -> functools.partial[None]:
    return functools.partial(kind, name)  # type: ignore[call-overload,no-any-return]


MASKS = attention.causal_masks
# every column rotates by the base of the pass's longest position
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
        "window one too wide", ((MASKS, "last - reach", "last - reach - 1"),), check(one_column, "gemma2")
    ),
    Mutant(
        "window one too narrow", ((MASKS, "last - reach", "last - reach + 1"),), check(one_column, "gemma2")
    ),
    Mutant(
        "window of a verifying pass measured from its first column",
        ((MASKS, "keys > last - reach", "keys > last[:, :1] - reach"),),
        check(several_columns, "gemma2"),
    ),
    Mutant(
        "window edge off by one where a pass has several columns",
        ((MASKS, "last - reach", "last - reach - int(last.shape[1] > 8)"),),
        check(several_columns, "gemma2"),
    ),
    Mutant(
        "every layer windowed",
        ((MASKS, "None if window is None or window >= length", "24 if window is None"),),
        check(one_column, "gemma2"),
    ),
    Mutant(
        "a column sees the next one",
        ((MASKS, "keys <= last", "keys <= last + 1"),),
        check(several_columns, "llama"),
    ),
    Mutant(
        "a column does not see itself",
        ((MASKS, "keys <= last", "keys < last.clamp(min=1)"),),
        check(one_column, "llama"),
    ),
    Mutant("rotary sign", ((rope.rope_table, "[-sin, sin]", "[sin, -sin]"),), check(one_column, "llama")),
    Mutant(
        "rotary one position late",
        (
            (
                passes.build_pass,
                "rows: Tensor | slice = slice(starts, starts + shape.queries)",
                "late = starts + (starts > 0)\n        rows: Tensor | slice = slice(late, late + shape.queries)",
            ),
        ),
        check(one_column, "llama"),
    ),
    Mutant(
        "long waves not stretched",
        ((rope._llama3, "inverse / rope.factor, inverse)", "inverse, inverse)"),),
        check(one_column, "llama-llama3"),
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
        check(one_column, "gemma2"),
    ),
    Mutant(
        "logits without their soft-cap",
        ((decoder.Decoder.head, "self.spec.logit_softcap is not None", "False"),),
        check(one_column, "gemma2"),
    ),
    Mutant(
        "embedding without its scale",
        ((decoder.Decoder.embed, "self._scale is None", "True"),),
        check(one_column, "gemma2"),
    ),
    Mutant(
        "post-norm left out",
        ((decoder.finish, "layer.mlp.post_norm is None", "True"),),
        check(one_column, "gemma2"),
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
        check(one_column, "llama-gqa-tied"),
    ),
    Mutant(
        "window left out",
        ((MASKS, "if window is None or window >= length", "if True"),),
        check(one_column, "mistral"),
    ),
    Mutant(
        "window of every layer one too wide",
        ((MASKS, "last - reach", "last - reach - 1"),),
        check(one_column, "mistral"),
    ),
    Mutant(
        "window of every layer one too narrow",
        ((MASKS, "last - reach", "last - reach + 1"),),
        check(several_columns, "mistral"),
    ),
    Mutant(
        "windows before the layer they count from",
        (
            (
                families._qwen_windows,
                "SLIDING if layer >= first else FULL",
                "FULL if layer >= first else SLIDING",
            ),
        ),
        check(loaded_anew, "qwen2-windows"),
    ),
    Mutant(
        "windows from a layer too late",
        ((families._qwen_windows, "layer >= first", "layer > first"),),
        check(loaded_anew, "qwen3-windows"),
    ),
    Mutant(
        "windows though they are switched off",
        (
            (
                families._qwen_windows,
                'not read.flag("use_sliding_window") or window is None',
                "window is None",
            ),
        ),
        check(loaded_anew, "qwen2-windows-off"),
    ),
    Mutant(
        "biases of queries, keys and values left out",
        ((packed.pack, "_packed(weight.contiguous()), bias", "_packed(weight.contiguous()), None"),),
        check(loaded_anew, "qwen2"),
    ),
    Mutant(
        "norms of queries and keys left out",
        ((decoder.project, "weights.q_norm is not None and", "False and"),),
        check(one_column, "qwen3"),
    ),
    Mutant(
        "norm of keys left out",
        ((decoder.project, "k.copy_(weights.k_norm(k))", "pass"),),
        check(one_column, "gemma3"),
    ),
    Mutant(
        "norm of queries in place of that of keys",
        ((decoder.project, "weights.k_norm(k)", "weights.q_norm(k)"),),
        check(one_column, "qwen3"),
    ),
    Mutant(
        "values normed like keys",
        ((decoder.project, "spec.heads : spec.heads + spec.kv_heads", "spec.heads :"),),
        check(one_column, "qwen3"),
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
        check(loaded_anew, "gemma3"),
    ),
    Mutant(
        "local base in layers that see everything",
        ((spec.ModelSpec.rope_of, "self.rope if window is None or", "self.rope if"),),
        check(one_column, "gemma3"),
    ),
    Mutant(
        "global base in layers with a window",
        ((spec.ModelSpec.rope_of, "self.rope if window is None or", "self.rope if True or"),),
        check(one_column, "gemma3"),
    ),
    Mutant(
        "every fifth layer sees everything",
        ((families._gemma3_windows, '"sliding_window_pattern", 6', '"sliding_window_pattern", 5'),),
        check(loaded_anew, "gemma3-default-pattern"),
    ),
    Mutant(
        "the layer after every fifth sees everything",
        ((families._gemma3_windows, "(layer + 1) % pattern", "layer % pattern"),),
        check(loaded_anew, "gemma3-default-pattern"),
    ),
    Mutant(
        "scores scaled by the head's size",
        (
            (
                families._gemma_common,
                'read.number("query_pre_attn_scalar", 256)',
                '(0 * read.number("query_pre_attn_scalar", 256) + 24)',
            ),
        ),
        check(loaded_anew, "gemma3-head-dim-scalar"),
    ),
    Mutant(
        "positions not divided",
        ((rope.frequencies, "inverse / rope.factor", "inverse"),),
        check(one_column, "gemma3-linear"),
    ),
    Mutant(
        "yarn's attention factor left out",
        ((rope.rope_table, "angles.cos() * rope.attention_factor", "angles.cos()"),),
        check(one_column, "llama-yarn"),
    ),
    Mutant(
        "yarn's attention factor from the factor alone",
        ((rope_config._attention_factor, "scaled(mscale) / scaled(mscale_all_dim)", "scaled(1.0)"),),
        check(loaded_anew, "llama-yarn-mscale"),
    ),
    Mutant(
        "yarn's bounds on whole channels",
        ((rope._yarn, "if rope.truncate", "if True"),),
        check(one_column, "llama-yarn-untruncated"),
    ),
    Mutant(
        "yarn's fast waves stretched and its slow ones kept",
        (
            (
                rope._yarn,
                "inverse / rope.factor * stretched + inverse *",
                "inverse * stretched + inverse / rope.factor *",
            ),
        ),
        check(one_column, "qwen3-yarn"),
    ),
    Mutant(
        "dynamic base of the position before",
        ((rope._dynamic_theta, "torch.arange(1, positions + 1)", "torch.arange(0, positions)"),),
        check(one_column, "llama-dynamic"),
    ),
    Mutant(
        "dynamic base not grown",
        ((rope._dynamic_theta, "stretch **", "1.0 **"),),
        check(one_column, "mistral-dynamic"),
    ),
    Mutant(
        "dynamic base by pass, of several columns",
        DYNAMIC_BY_PASS,
        check(several_columns, "llama-dynamic"),
    ),
    Mutant(
        "dynamic base by pass, after a prefill",
        DYNAMIC_BY_PASS,
        check(one_column, "qwen2-dynamic"),
    ),
]
CHECKS = {mutant.check.func.__name__ + " " + mutant.check.args[0]: mutant.check for mutant in MUTANTS}  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_passes(name: str) -> None:
    CHECKS[name]()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_defect_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(mutant, monkeypatch)
