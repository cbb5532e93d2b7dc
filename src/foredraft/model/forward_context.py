"""The context of a forward pass: what all layers share, as the operators of PyTorch read it.

Contract: a `PassShape` holds everything that decides which operators run, on which shapes; `PassInputs` hold
everything that differs between two passes of one shape. So a pass can be captured once per shape and replayed
on other inputs. A `ForwardContext` is what follows from both: rotations, masks and write indices, computed
once per pass, not once per layer. The host reads no device value. The mask of a row depends on the row's
start, never on the batch.

A *column* is one position of one row. The caller asks for T columns of each of B rows; T' *queries* of each
row are attended, which are the columns and their padding. A ragged pass computes the N real ones of the
B * T' queries; any other pass computes all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.model.cache import CacheLayers
from foredraft.model.layers import RowSpan
from foredraft.model.plan import Plan
from foredraft.model.rope import Rope, rope_table
from foredraft.model.spec import ModelSpec

__all__ = [
    "ForwardContext",
    "PassInputs",
    "PassShape",
    "additive_mask",
    "at_columns",
    "build_context",
    "causal_masks",
    "rope_tables",
]

Rotation = tuple[Tensor, ...]  # cosines and signed sines of every column, [N, 1, R] each


@dataclass(frozen=True, slots=True)
class PassShape:
    """The key of all passes that run the same operators on the same shapes.

    Attributes:
        first_row: The cache row of row 0.
        batch: B.
        columns: T, the columns of a row that the caller asks for.
        queries: T', the columns of a row with their padding.
        length: L, the positions that are attended.
        span: The row counts at which products are batch-invariant; None allows any.
        apart: Attend row by row, because the attention kernel's bits depend on the batch size.
        plan: The sub-layers that run.
        start: The first layer.
        stop: The layer after the last.
        taps: The depths whose entering states are returned.
        head: Compute logits.
    """

    first_row: int
    batch: int
    columns: int
    queries: int
    length: int
    span: RowSpan | None
    apart: bool
    plan: Plan
    start: int
    stop: int
    taps: tuple[int, ...] = ()
    head: bool = False


@dataclass(frozen=True, slots=True)
class PassInputs:
    """The values in which passes of one shape differ.

    Attributes:
        starts: The position of each row's first column, [B]; a number for a single row, because slices cost
            the host less than indices.
        tokens: Token ids, [B, T]; None where `hidden` is given.
        hidden: States that enter the first layer of the pass, [B, T, D]; None where `tokens` are given.
        real: The columns b * T' + t that a ragged pass computes, [N]; None computes all.
        at: The column of each row whose logits are wanted, [B]; None wants all.
    """

    starts: Tensor | int
    tokens: Tensor | None
    hidden: Tensor | None = None
    real: Tensor | None = None
    at: Tensor | None = None


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """What all layers of a pass share.

    Attributes:
        shape: The shape of the pass.
        cache: The keys and values.
        rotary: The rotation of every column, by the window of the layer.
        query_rotary: That of queries; None: they are rotated as keys are.
        masks: The additive mask [B, 1, T' * G, L] of 0 and -inf, by the window of the layer.
        write: Where a layer stores keys and values, by its window: flat indices, or the slice of positions of
            a single row.
        real: The columns b * T' + t that a ragged pass computes, [N]; None computes all.
        layer_inputs: What each layer takes of the tokens themselves, [N, layers, I]; None in models without.
    """

    shape: PassShape
    cache: CacheLayers
    rotary: Mapping[int | None, Rotation]
    masks: Mapping[int | None, Tensor]
    write: Mapping[int | None, Tensor | slice]
    real: Tensor | None
    query_rotary: Rotation | None = None
    layer_inputs: Tensor | None = None


def build_context(
    spec: ModelSpec,
    tables: Mapping[Rope, Tensor],
    cache: CacheLayers,
    shape: PassShape,
    starts: Tensor | int,
    real: Tensor | None = None,
) -> ForwardContext:
    """Return the context of a pass over the columns at positions starts[b] + t.

    Args:
        spec: The model.
        tables: The rotary tables, [P, 2, R] each.
        cache: The KV cache.
        shape: The shape of the pass.
        starts: The position of each row's first column, [B], or the number of a single row.
        real: The columns b * T' + t that a ragged pass computes, [N]; None computes all.
    """
    columns, windows = torch.arange(shape.queries, device=cache.device), dict.fromkeys(spec.windows)
    write: dict[int | None, Tensor | slice] = {}
    if isinstance(starts, int):
        positions = (columns + starts)[None]  # [1, T']
        rows: Tensor | slice = slice(starts, starts + shape.queries)  # of the rotary tables
        write = dict.fromkeys(windows, rows)
    else:
        positions = starts[:, None] + columns  # [B, T']
        rows = positions.view(-1)
        lanes = {
            heads: _lanes(cache, heads, positions, shape.first_row)
            for heads in dict.fromkeys(spec.kv_heads_of(window) for window in windows)
        }
        if real is not None:
            rows, lanes = rows[real], {heads: own[real] for heads, own in lanes.items()}
        write = {window: lanes[spec.kv_heads_of(window)].view(-1) for window in windows}
    rotations = {rope: table[rows].chunk(2, 1) for rope, table in tables.items()}
    rotary = {window: rotations[spec.rope_of(window)] for window in windows}
    masks = causal_masks(spec, positions, shape.length, cache.dtype)
    query_rotary = None if spec.query_rope is None else rotations[spec.query_rope]
    return ForwardContext(shape, cache, rotary, masks, write, real, query_rotary)


def at_columns(computed: Tensor, real: Tensor | None, count: int) -> Tensor:
    """Return computed columns [N, ...] at their places `real` [N] among `count` columns; the others are zero.

    None for `real`: all columns were computed, and are in their places.
    """
    if real is None:
        return computed
    return computed.new_zeros(count, *computed.shape[1:]).index_copy_(0, real, computed)


def causal_masks(
    spec: ModelSpec, positions: Tensor, length: int, dtype: torch.dtype
) -> dict[int | None, Tensor]:
    """Return the additive attention masks of a pass, one per distinct window.

    A query past the attended length (padding, an idle row) is treated as the last position. So every query
    sees at least one key: the softmax of a row of -inf would be NaN, and NaN in the cache outlives the pass.

    Args:
        spec: The model.
        positions: The position of every query, [B, T].
        length: L, the positions that are attended.
        dtype: The dtype of the masks.

    Returns:
        Masks [B, 1, T * G, L] of 0 and -inf, by window; None is the window of full attention.
    """
    keys = torch.arange(length, device=positions.device)
    last = positions.clamp(max=length - 1)[:, :, None]  # [B, T, 1]
    causal = keys <= last  # [B, T, L]
    built: dict[tuple[int | None, int], Tensor] = {}
    masks: dict[int | None, Tensor] = {}
    for window in dict.fromkeys(spec.windows):
        reach = None if window is None or window >= length else window  # a window that hides no key is none
        kind = reach, spec.groups_of(window)
        if kind not in built:
            visible = causal if reach is None else causal & (keys > last - reach)
            built[kind] = additive_mask(visible, spec.groups_of(window), dtype)
        masks[window] = built[kind]
    return masks


def additive_mask(visible: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """Turn visibility [B, T, L] into an additive mask for folded query heads."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(
        ~visible, float("-inf")
    )
    batch, queries, length = mask.shape
    folded = mask[:, :, None].expand(batch, queries, groups, length)
    return folded.reshape(batch, 1, queries * groups, length)  # [B, 1, T * G, L]


def rope_tables(
    spec: ModelSpec, positions: int, device: torch.device, dtype: torch.dtype
) -> dict[Rope, Tensor]:
    """Return the rotary table [P, 2, R] of every rope that a layer of the model uses."""
    ahead = spec.rotated_ahead
    return {
        rope: rope_table(rope, dim, positions + ahead, device, dtype)[ahead:]
        for rope, dim in spec.ropes.items()
    }


def _lanes(cache: CacheLayers, kv_heads: int, positions: Tensor, first_row: int) -> Tensor:
    """Return where the keys and values of every column go in a layer [2 * R * Hk * P, D]: [B * T, 2 * Hk]."""
    batch = positions.shape[0]
    heads = torch.arange(kv_heads, device=positions.device)
    rows = torch.arange(first_row, first_row + batch, device=positions.device)
    lanes = (rows[:, None] * kv_heads + heads) * cache.stored  # [B, Hk]
    pair = torch.stack([lanes, lanes + cache.rows * kv_heads * cache.stored], 1)  # [B, 2, Hk]
    return (positions[:, :, None, None] + pair[:, None]).flatten(0, 1).flatten(1)
