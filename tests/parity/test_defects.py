"""Planted defects of the model's arithmetic, which the comparison with transformers must catch."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft.model import attention, rope
from foredraft.model.attention import ForwardContext
from foredraft.model.decoder import Decoder
from foredraft.model.families import gemma, shared
from foredraft.model.layer_weights import LayerBuilder
from foredraft.model.rope import Rope
from foredraft.model.runner import compiled
from foredraft.model.spec import ModelSpec
from tests.parity import family_mutants
from tests.parity.family_mutants import FAMILY, in_family
from tests.parity.mutant_checks import (
    MASKS,
    NARROWER,
    RUN,
    WIDER,
    Function,
    configured,
    decoding,
    given,
    norms_with,
    pair,
    projected_with,
    prompt,
    reloaded,
    windows,
    with_parts,
    with_spec,
    without_scale,
)
from tests.support.mutation import Mutant, assert_caught, defect
from tests.support.mutations import argument, around

# --- masks and rotations --------------------------------------------------------------------------------

next_column_seen = argument(1, lambda positions: positions + 1)
own_column_hidden = argument(1, lambda positions: (positions - 1).clamp(min=0))
rotated_backwards = around(lambda rope_table, *args: rope_table(*args) * torch.tensor([[1], [-1]]))


@around
def rotated_late(
    build: Function, spec: ModelSpec, tables: Any, cache: Any, shape: Any, starts: Any, *rest: Any
) -> Any:
    """Rotate the columns of every pass but the first of a text by the angles of the next position."""
    late = int(isinstance(starts, int) and starts > 0)
    later = {rope: table.roll(-late, 0) for rope, table in tables.items()}
    return build(spec, later, cache, shape, starts, *rest)


@around
def base_of_the_pass(
    build: Function, spec: ModelSpec, tables: Any, cache: Any, shape: Any, starts: Any, *rest: Any
) -> Any:
    """Rotate every column by the dynamic base of the last position of the pass."""
    end = (starts if isinstance(starts, int) else int(starts[0])) + shape.queries

    def of_the_end(own: Rope, table: Tensor) -> Tensor:
        if own.kind != "dynamic":
            return table
        base = Rope("default", float(rope._dynamic_theta(own, spec.head_dim, end)[-1]))
        return rope.rope_table(base, spec.head_dim, len(table), table.device, table.dtype)

    tables = {own: of_the_end(own, table) for own, table in tables.items()}
    return build(spec, tables, cache, shape, starts, *rest)


@around
def low_frequencies_kept(llama3: Function, own: Rope, inverse: Tensor) -> Tensor:
    is_low = 2 * math.pi / inverse > own.original_positions / own.low_frequency
    return torch.where(is_low, inverse, llama3(own, inverse))


# divide the frequencies that are kept, and keep those that are divided
other_frequencies_divided = around(
    lambda yarn, own, inverse: inverse + inverse / own.factor - yarn(own, inverse)
)
without_mscale = around(lambda attention_factor, factor, *mscale: attention_factor(factor, None, None))
base_of_the_position_before = around(
    lambda dynamic_theta, *args: (lambda theta: torch.cat([theta[:1], theta[:-1]]))(dynamic_theta(*args))
)
base_that_does_not_grow = around(
    lambda dynamic_theta, own, *rest: torch.full_like(dynamic_theta(own, *rest), own.theta)
)


def one_base(window: int | None) -> Function:
    """Rotate every layer as those with this window."""
    return lambda rope_of: lambda spec, _: rope_of(spec, window)


# --- layers ---------------------------------------------------------------------------------------------


without_post_norm = around(
    lambda finish, spec, layer, *rest: finish(
        spec, replace(layer, mlp=replace(layer.mlp, post_norm=None)), *rest
    )
)


@around
def values_normed(project: Function, spec: ModelSpec, own: Any, *rest: Any) -> Tensor:
    qkv: Tensor = project(spec, own, *rest)
    qkv[:, -spec.kv_heads :] = own.k_norm(qkv[:, -spec.kv_heads :])
    return qkv


@around
def grouped_the_other_way(
    attend: Function, spec: ModelSpec, layer: int, qkv: Tensor, context: ForwardContext
) -> Any:
    """Attend with query head g * Hk + k in the place of head k * G + g."""
    order = torch.arange(spec.heads).view(spec.groups, spec.kv_heads).T.flatten()
    return attend(spec, layer, torch.cat([qkv[:, order], qkv[:, spec.heads :]], 1), context)


NO_HEAD_NORMS = projected_with(lambda own: replace(own, q_norm=None, k_norm=None))
KEYS_NOT_NORMED = projected_with(lambda own: replace(own, k_norm=torch.clone))
KEYS_NORMED_AS_QUERIES = projected_with(lambda own: replace(own, k_norm=own.q_norm))

# --- loading --------------------------------------------------------------------------------------------

without_biases = around(lambda pack, weight, bias=None: pack(weight))


SWAP = {shared.FULL: shared.SLIDING, shared.SLIDING: shared.FULL}
swapped_kinds = argument(2, lambda kinds: [SWAP[kind] for kind in kinds])
one_layer_late = argument(2, lambda kinds: [shared.FULL, *kinds[:-1]])


TABLE, BUILD, SCORES = rope.rope_table, attention.build_context, attention.masked_attention
ROPE_OF, WINDOWS, NORM = ModelSpec.rope_of, shared.read_windows, LayerBuilder.norm
YARN, THETA, ATTEND = rope._by_channel, rope._dynamic_theta, attention.attend
EVERYWHERE = windows(lambda window, at, columns: window or 24)
FROM_THE_FIRST = windows(lambda window, at, columns: window and window + at)
WIDER_WITH_COLUMNS = windows(lambda window, at, columns: window and window + (columns > 8))
WINDOWED, EVERY_FIFTH = configured(use_sliding_window=True), configured(sliding_window_pattern=5)
BY_HEAD_DIM, DEFAULT_PATTERN = configured(query_pre_attn_scalar=24), "gemma3-default-pattern"
MUTANTS = [
    defect("window one too wide", MASKS, WIDER, decoding("gemma2")),
    defect("window one too narrow", MASKS, NARROWER, decoding("gemma2")),
    defect("window measured from the first column", MASKS, FROM_THE_FIRST, prompt("gemma2")),
    defect("window one too wide in a pass of several columns", MASKS, WIDER_WITH_COLUMNS, prompt("gemma2")),
    defect("every layer has a window", MASKS, EVERYWHERE, decoding("gemma2")),
    defect("a column sees the next one", MASKS, next_column_seen, prompt("llama")),
    defect("a column does not see itself", MASKS, own_column_hidden, decoding("llama")),
    defect("rotation in the wrong direction", TABLE, rotated_backwards, decoding("llama")),
    defect("rotation one position late", BUILD, rotated_late, decoding("llama")),
    defect(
        "low frequencies not divided", rope._by_wavelength, low_frequencies_kept, decoding("llama-llama3")
    ),
    defect("attention without its soft-cap", SCORES, given(attention_softcap=None), decoding("gemma2")),
    defect("logits without their soft-cap", Decoder.head, with_spec(logit_softcap=None), decoding("gemma2")),
    defect("embedding without its scale", Decoder.embed, without_scale, decoding("gemma2")),
    defect("post-norm left out", RUN, with_parts(finish=without_post_norm), decoding("gemma2")),
    defect("query heads in other groups", ATTEND, grouped_the_other_way, decoding("llama-gqa-tied")),
    defect("windows left out", MASKS, windows(lambda window, at, columns: None), decoding("mistral")),
    defect("window of every layer one too wide", MASKS, WIDER, decoding("mistral")),
    defect("window of every layer one too narrow", MASKS, NARROWER, prompt("mistral")),
    defect("windows in the first layers", WINDOWS, swapped_kinds, reloaded("qwen2-windows")),
    defect("windows start one layer late", WINDOWS, one_layer_late, reloaded("qwen3-windows")),
    defect("windows although switched off", FAMILY, in_family(WINDOWED), reloaded("qwen2-windows-off")),
    defect("biases of queries, keys and values left out", compiled.pack, without_biases, reloaded("qwen2")),
    defect("norms of queries and keys left out", RUN, NO_HEAD_NORMS, decoding("qwen3")),
    defect("norm of keys left out", RUN, KEYS_NOT_NORMED, decoding("gemma3")),
    defect("keys normed with the weight of queries", RUN, KEYS_NORMED_AS_QUERIES, decoding("qwen3")),
    defect("values normed like keys", RUN, with_parts(project=values_normed), decoding("qwen3")),
    defect("norms of heads without their offset", NORM, norms_with(-1.0, of_heads=True), reloaded("gemma3")),
    defect("local base in layers with full attention", ROPE_OF, one_base(1), decoding("gemma3")),
    defect("global base in windowed layers", ROPE_OF, one_base(None), decoding("gemma3")),
    defect(
        "full attention in every fifth layer", gemma.gemma3_windows, EVERY_FIFTH, reloaded(DEFAULT_PATTERN)
    ),
    defect("full attention one layer late", WINDOWS, one_layer_late, reloaded(DEFAULT_PATTERN)),
    defect("scores scaled by head_dim", gemma.gemma_common, BY_HEAD_DIM, reloaded("gemma3-head-dim-scalar")),
    defect("positions not divided", rope.frequencies, given(factor=1.0), decoding("gemma3-linear")),
    defect("yarn's attention factor left out", TABLE, given(attention_factor=1.0), decoding("llama-yarn")),
    defect("mscale ignored", rope._attention_factor, without_mscale, reloaded("llama-yarn-mscale")),
    defect("yarn's bounds always truncated", YARN, given(truncate=True), decoding("llama-yarn-untruncated")),
    defect("yarn keeps low frequencies", YARN, other_frequencies_divided, decoding("qwen3-yarn")),
    defect("dynamic base a position late", THETA, base_of_the_position_before, decoding("llama-dynamic")),
    defect("dynamic base does not grow", THETA, base_that_does_not_grow, decoding("mistral-dynamic")),
    defect("dynamic base of a pass of columns", BUILD, base_of_the_pass, prompt("llama-dynamic")),
    defect("dynamic base of the pass, after a prefill", BUILD, base_of_the_pass, decoding("qwen2-dynamic")),
]
ALL = [*MUTANTS, *family_mutants.MUTANTS]


@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.name)
def test_a_defect_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    pair(mutant.check.args[0])  # type: ignore[attr-defined]  # made without the defect, and kept for all tests
    assert_caught(mutant, monkeypatch)
