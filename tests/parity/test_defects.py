"""Planted defects of the model's arithmetic; the comparison with transformers must catch each of them.

A table entry reads: name, seam, spoiler, check. A spoiler takes the sound function and returns the defective one.
The tables of further families are `*_mutants.py`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft.model import attention, forward_context, rope, rope_config, weights
from foredraft.model.decoder import Decoder, Layer
from foredraft.model.families import gemma, qwen, shared
from foredraft.model.forward_context import ForwardContext
from foredraft.model.layers import RMSNorm
from foredraft.model.rope import Rope
from foredraft.model.runner import packed
from foredraft.model.spec import ModelSpec
from tests.parity import gemma4_mutants, llama_like_mutants, norm_mutants
from tests.parity.mutant_checks import (
    MASKS,
    NARROWER,
    RUN,
    WIDER,
    Function,
    check,
    configured,
    decoding_logits,
    pair,
    projected_with,
    prompt_logits,
    reloaded_logits,
    windows,
    with_parts,
    with_rope,
)
from tests.support.planting import Mutant, assert_caught, defect, replaced

# --- masks and rotations --------------------------------------------------------------------------------


def next_column_seen(masks: Function) -> Function:
    return lambda spec, positions, *rest: masks(spec, positions + 1, *rest)


def own_column_hidden(masks: Function) -> Function:
    return lambda spec, positions, *rest: masks(spec, (positions - 1).clamp(min=0), *rest)


def rotated_backwards(rope_table: Function) -> Function:
    return lambda *args: rope_table(*args) * torch.tensor([[1], [-1]])


def rotated_late(build: Function) -> Function:
    """Rotate the columns of every pass but the first of a text by the angles of the next position."""

    def spoilt(
        spec: ModelSpec, tables: dict[Rope, Tensor], cache: Any, shape: Any, starts: Any, *rest: Any
    ) -> ForwardContext:
        late = int(isinstance(starts, int) and starts > 0)
        later = {rope: table.roll(-late, 0) for rope, table in tables.items()}
        made: ForwardContext = build(spec, later, cache, shape, starts, *rest)
        return made

    return spoilt


def base_of_the_pass(build: Function) -> Function:
    """Rotate every column by the dynamic base of the last position of the pass."""

    def spoilt(
        spec: ModelSpec, tables: dict[Rope, Tensor], cache: Any, shape: Any, starts: Any, *rest: Any
    ) -> ForwardContext:
        end = (starts if isinstance(starts, int) else int(starts[0])) + shape.queries

        def of_the_end(own: Rope, table: Tensor) -> Tensor:
            if own.kind != "dynamic":
                return table
            base = float(rope._dynamic_theta(own, spec.head_dim, end)[-1])
            return rope.rope_table(
                Rope("default", base), spec.head_dim, len(table), table.device, table.dtype
            )

        tables = {own: of_the_end(own, table) for own, table in tables.items()}
        made: ForwardContext = build(spec, tables, cache, shape, starts, *rest)
        return made

    return spoilt


def low_frequencies_kept(llama3: Function) -> Function:
    def spoilt(own: Rope, inverse: Tensor) -> Tensor:
        is_low = 2 * math.pi / inverse > own.original_positions / own.low_frequency
        return torch.where(is_low, inverse, llama3(own, inverse))

    return spoilt


def other_frequencies_divided(yarn: Function) -> Function:
    """Divide the frequencies that are kept, and keep those that are divided."""
    return lambda own, inverse: inverse + inverse / own.factor - yarn(own, inverse)


def base_of_the_position_before(dynamic_theta: Function) -> Function:
    def spoilt(*args: Any) -> Tensor:
        theta = dynamic_theta(*args)
        return torch.cat([theta[:1], theta[:-1]])

    return spoilt


def base_that_does_not_grow(dynamic_theta: Function) -> Function:
    return lambda own, *rest: torch.full_like(dynamic_theta(own, *rest), own.theta)


# --- layers ---------------------------------------------------------------------------------------------


def without_post_norm(finish: Function) -> Function:
    def spoilt(spec: ModelSpec, layer: Layer, *rest: Any) -> Tensor:
        out: Tensor = finish(spec, replace(layer, mlp=replace(layer.mlp, post_norm=None)), *rest)
        return out

    return spoilt


def values_normed(project: Function) -> Function:
    def spoilt(spec: ModelSpec, own: Any, *rest: Any) -> Tensor:
        qkv: Tensor = project(spec, own, *rest)
        qkv[:, -spec.kv_heads :] = own.k_norm(qkv[:, -spec.kv_heads :])
        return qkv

    return spoilt


def grouped_the_other_way(attend: Function) -> Function:
    """Attend with query head g * Hk + k in the place of head k * G + g."""

    def spoilt(spec: ModelSpec, layer: int, qkv: Tensor, context: ForwardContext) -> Tensor:
        order = torch.arange(spec.heads).view(spec.groups, spec.kv_heads).T.flatten()
        out: Tensor = attend(spec, layer, torch.cat([qkv[:, order], qkv[:, spec.heads :]], 1), context)
        return out

    return spoilt


def attention_uncapped(masked_attention: Function) -> Function:
    return lambda spec, *rest: masked_attention(replace(spec, attention_softcap=None), *rest)


def logits_uncapped(head: Function) -> Function:
    def spoilt(own: Decoder, *rest: Any) -> Tensor:
        with replaced(own, "spec", replace(own.spec, logit_softcap=None)):
            logits: Tensor = head(own, *rest)
        return logits

    return spoilt


def embedded_without_scale(embed: Function) -> Function:
    return lambda own, *args: embed(own, *args) / own.embedding_scale


# --- loading --------------------------------------------------------------------------------------------


def swapped_kinds(windows: Function) -> Function:
    """Take layers with full attention for windowed ones, and the reverse."""
    swap = {shared.FULL: shared.SLIDING, shared.SLIDING: shared.FULL}
    return lambda read, known, kinds: windows(read, known, [swap[kind] for kind in kinds])


def one_layer_late(windows: Function) -> Function:
    return lambda read, known, kinds: windows(read, known, [shared.FULL, *kinds[:-1]])


def head_norms_without_offset(norm: Function) -> Function:
    def spoilt(builder: Any, name: str, size: int | None = None, heads: int = 0) -> RMSNorm:
        made: RMSNorm = norm(builder, name, size, heads)
        return made if size is None else replace(made, weight=made.weight - 1.0)

    return spoilt


TABLE, BUILD = rope.rope_table, forward_context.build_context
ROPE_OF, WINDOWS = ModelSpec.rope_of, shared.read_windows
MUTANTS = [
    defect("window one too wide", MASKS, WIDER, check(decoding_logits, "gemma2")),
    defect("window one too narrow", MASKS, NARROWER, check(decoding_logits, "gemma2")),
    defect(
        "window of a verification pass measured from its first column",
        MASKS,
        windows(lambda window, at, columns: window and window + at),
        check(prompt_logits, "gemma2"),
    ),
    defect(
        "window edge off by one where a pass has several columns",
        MASKS,
        windows(lambda window, at, columns: window and window + (columns > 8)),
        check(prompt_logits, "gemma2"),
    ),
    defect(
        "every layer has a window",
        MASKS,
        windows(lambda window, at, columns: window or 24),
        check(decoding_logits, "gemma2"),
    ),
    defect("a column sees the next one", MASKS, next_column_seen, check(prompt_logits, "llama")),
    defect("a column does not see itself", MASKS, own_column_hidden, check(decoding_logits, "llama")),
    defect("rotation in the wrong direction", TABLE, rotated_backwards, check(decoding_logits, "llama")),
    defect("rotation one position late", BUILD, rotated_late, check(decoding_logits, "llama")),
    defect(
        "low frequencies not divided",
        rope._llama3,
        low_frequencies_kept,
        check(decoding_logits, "llama-llama3"),
    ),
    defect(
        "attention without its soft-cap",
        attention.masked_attention,
        attention_uncapped,
        check(decoding_logits, "gemma2"),
    ),
    defect("logits without their soft-cap", Decoder.head, logits_uncapped, check(decoding_logits, "gemma2")),
    defect(
        "embedding without its scale", Decoder.embed, embedded_without_scale, check(decoding_logits, "gemma2")
    ),
    defect("post-norm left out", RUN, with_parts(finish=without_post_norm), check(decoding_logits, "gemma2")),
    defect(
        "query heads grouped the other way",
        attention.attend,
        grouped_the_other_way,
        check(decoding_logits, "llama-gqa-tied"),
    ),
    defect(
        "windows left out",
        MASKS,
        windows(lambda window, at, columns: None),
        check(decoding_logits, "mistral"),
    ),
    defect("window of every layer one too wide", MASKS, WIDER, check(decoding_logits, "mistral")),
    defect("window of every layer one too narrow", MASKS, NARROWER, check(prompt_logits, "mistral")),
    defect(
        "windows in the layers before max_window_layers",
        WINDOWS,
        swapped_kinds,
        check(reloaded_logits, "qwen2-windows"),
    ),
    defect("windows start one layer late", WINDOWS, one_layer_late, check(reloaded_logits, "qwen3-windows")),
    defect(
        "windows although use_sliding_window is false",
        qwen.qwen_windows,
        configured(use_sliding_window=True),
        check(reloaded_logits, "qwen2-windows-off"),
    ),
    defect(
        "biases of queries, keys and values left out",
        packed.pack,
        lambda pack: lambda weight, bias=None: pack(weight),
        check(reloaded_logits, "qwen2"),
    ),
    defect(
        "norms of queries and keys left out",
        RUN,
        projected_with(lambda own: replace(own, q_norm=None, k_norm=None)),
        check(decoding_logits, "qwen3"),
    ),
    defect(
        "norm of keys left out",
        RUN,
        projected_with(lambda own: replace(own, k_norm=torch.clone)),
        check(decoding_logits, "gemma3"),
    ),
    defect(
        "keys normed with the weight of queries",
        RUN,
        projected_with(lambda own: replace(own, k_norm=own.q_norm)),
        check(decoding_logits, "qwen3"),
    ),
    defect(
        "values normed like keys", RUN, with_parts(project=values_normed), check(decoding_logits, "qwen3")
    ),
    defect(
        "norms of queries and keys without their offset",
        weights._Builder.norm,
        head_norms_without_offset,
        check(reloaded_logits, "gemma3"),
    ),
    defect(
        "local base in layers with full attention",
        ROPE_OF,
        lambda rope_of: lambda spec, window: rope_of(spec, 1),
        check(decoding_logits, "gemma3"),
    ),
    defect(
        "global base in windowed layers",
        ROPE_OF,
        lambda rope_of: lambda spec, window: rope_of(spec, None),
        check(decoding_logits, "gemma3"),
    ),
    defect(
        "full attention in every fifth layer",
        gemma.gemma3_windows,
        configured(sliding_window_pattern=5),
        check(reloaded_logits, "gemma3-default-pattern"),
    ),
    defect(
        "full attention one layer late",
        WINDOWS,
        one_layer_late,
        check(reloaded_logits, "gemma3-default-pattern"),
    ),
    defect(
        "scores scaled by head_dim",
        gemma.gemma_common,
        configured(query_pre_attn_scalar=24),
        check(reloaded_logits, "gemma3-head-dim-scalar"),
    ),
    defect(
        "positions not divided by the linear factor",
        rope.frequencies,
        with_rope(factor=1.0),
        check(decoding_logits, "gemma3-linear"),
    ),
    defect(
        "yarn's attention factor left out",
        TABLE,
        with_rope(attention_factor=1.0),
        check(decoding_logits, "llama-yarn"),
    ),
    defect(
        "yarn's attention factor ignores mscale",
        rope_config._attention_factor,
        lambda sound: lambda factor, *mscale: sound(factor, None, None),
        check(reloaded_logits, "llama-yarn-mscale"),
    ),
    defect(
        "yarn's bounds always truncated",
        rope._yarn,
        with_rope(truncate=True),
        check(decoding_logits, "llama-yarn-untruncated"),
    ),
    defect(
        "yarn divides high frequencies and keeps low ones",
        rope._yarn,
        other_frequencies_divided,
        check(decoding_logits, "qwen3-yarn"),
    ),
    defect(
        "dynamic base of the position before",
        rope._dynamic_theta,
        base_of_the_position_before,
        check(decoding_logits, "llama-dynamic"),
    ),
    defect(
        "dynamic base does not grow",
        rope._dynamic_theta,
        base_that_does_not_grow,
        check(decoding_logits, "mistral-dynamic"),
    ),
    defect(
        "dynamic base of the pass, with several columns",
        BUILD,
        base_of_the_pass,
        check(prompt_logits, "llama-dynamic"),
    ),
    defect(
        "dynamic base of the pass, after a prefill",
        BUILD,
        base_of_the_pass,
        check(decoding_logits, "qwen2-dynamic"),
    ),
]
ALL = [*MUTANTS, *gemma4_mutants.MUTANTS, *llama_like_mutants.MUTANTS, *norm_mutants.MUTANTS]
CHECKS = {mutant.check.func.__name__ + " " + mutant.check.args[0]: mutant.check for mutant in ALL}  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_passes_without_a_defect(name: str) -> None:
    CHECKS[name]()


@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.name)
def test_a_defect_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    pair(mutant.check.args[0])  # type: ignore[attr-defined]  # made without the defect, and kept for all tests
    assert_caught(mutant, monkeypatch)
