"""Planted defects of the model's arithmetic: parity with transformers must notice each."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import pytest
import test_logits
from test_logits import Pair

from checkpoints import save_variant
from foredraft.model import attention, decoder, layers
from foredraft.model.runner import passes
from foredraft.model.runner.runner import Runner
from planting import Mutant, assert_caught


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


def check(kind: object, name: str) -> functools.partial[None]:
    return functools.partial(kind, name)  # type: ignore[call-overload,no-any-return]


MASKS = attention.causal_masks
MUTANTS = [
    Mutant(
        "window one too wide", ((MASKS, "last - hides", "last - hides - 1"),), check(one_column, "gemma2")
    ),
    Mutant(
        "window one too narrow", ((MASKS, "last - hides", "last - hides + 1"),), check(one_column, "gemma2")
    ),
    Mutant(
        "window of a verifying pass measured from its first column",
        ((MASKS, "keys > last - hides", "keys > last[:, :1] - hides"),),
        check(several_columns, "gemma2"),
    ),
    Mutant(
        "window edge off by one where a pass has several columns",
        ((MASKS, "last - hides", "last - hides - int(last.shape[1] > 8)"),),
        check(several_columns, "gemma2"),
    ),
    Mutant(
        "every layer windowed",
        ((MASKS, "None if window is None or window > reach", "24 if window is None"),),
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
    Mutant("rotary sign", ((layers.rope_table, "[-sin, sin]", "[sin, -sin]"),), check(one_column, "llama")),
    Mutant(
        "rotary one position late",
        (
            (
                passes.build_pass,
                "table[starts[0] : starts[0] + queries]",
                "table[starts[0] + 1 : starts[0] + 1 + queries] * (starts[0] > 0) + table[: queries] * (starts[0] == 0)",
            ),
        ),
        check(one_column, "llama"),
    ),
    Mutant(
        "long waves not stretched",
        ((layers.frequencies, "inverse / rope.factor, inverse)", "inverse, inverse)"),),
        check(one_column, "llama-llama3-rope"),
    ),
    Mutant(
        "attention without its soft-cap",
        (
            (
                attention._mixed,
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
        ((decoder.Decoder._mlp, "weights.post_norm is None", "True"),),
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
]
CHECKS = {mutant.check.func.__name__ + " " + mutant.check.args[0]: mutant.check for mutant in MUTANTS}  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_passes(name: str) -> None:
    CHECKS[name]()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_defect_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(mutant, monkeypatch)
