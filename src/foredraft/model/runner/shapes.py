"""Exact shapes: the shapes of a pass at which this model's own operators give every row the same bits.

Contract: found, never assumed. A product's kernel is chosen by its row count and an attention's by its query
count and length, so the same position can come out different in its last bits from a pass of another shape
(DESIGN, section 6). The self-check runs the decoder's own weights at many shapes, compares with one reference
shape bit for bit, and keeps those that agree. Passes are then padded, and products cut, to kept shapes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foredraft.model.cache import KVCache
from foredraft.model.decoder import Decoder, Plan
from foredraft.model.layers import Product, RowSpan, rope_table
from foredraft.model.runner.passes import build_pass

logger = logging.getLogger(__name__)

QUERIES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 64)
SPOT_QUERIES = (1, 2, 4, 8, 16, 64)  # those that are also tried in further batches and lengths
ROWS = (*range(1, 17), 20, 24, 32, 48, 64)
QUANTA = (256, 512, 1024)
REFERENCE = 8  # queries and rows of the reference shape


@dataclass(frozen=True, slots=True)
class ExactShapes:
    """Shapes that agree; empty buckets and no rows mean that any shape will do."""

    query_buckets: tuple[int, ...]
    row_low: int
    row_high: int
    length_quantum: int
    row_step: int = 1
    apart: bool = False  # attention's bits depend on the batch: attend row by row
    found: bool = True  # False: the self-check found no agreement, and one fixed shape is used

    @property
    def span(self) -> RowSpan | None:
        return RowSpan(self.row_low, self.row_high, self.row_step) if self.row_high else None

    def queries(self, width: int, batch: int) -> int:
        """The query count for `width` columns: the smallest bucket that also feeds the products enough
        rows."""
        if not self.query_buckets:
            return width
        fitting = [bucket for bucket in self.query_buckets if bucket >= width]
        if not fitting:
            raise ValueError(
                f"{width} columns are more than the longest exact pass takes ({self.query_buckets[-1]})"
            )
        return next((bucket for bucket in fitting if bucket * batch >= self.row_low), fitting[0])

    def length(self, positions: int) -> int:
        """The attended length that covers `positions`."""
        return math.ceil(positions / self.length_quantum) * self.length_quantum

    def for_prefill(self, buckets: tuple[int, ...]) -> ExactShapes:
        """The same lengths, other query counts, products uncut: a prompt's passes agree with themselves
        only."""
        return replace(self, query_buckets=buckets, row_low=0, row_high=0, row_step=1)


LOOSE = ExactShapes(query_buckets=(), row_low=0, row_high=0, length_quantum=64)
# one shape for everything: whatever the kernels do, they do it alike for every pass
FALLBACK = ExactShapes(
    query_buckets=(REFERENCE,),
    row_low=REFERENCE,
    row_high=REFERENCE,
    length_quantum=1024,
    row_step=REFERENCE,
    apart=True,
    found=False,
)


@torch.inference_mode()
def find_shapes(decoder: Decoder) -> ExactShapes:
    """The exact shapes of a decoder, on its device, in its dtype, on its first two layers."""
    generator = torch.Generator().manual_seed(0)
    span = _agreeing_rows(decoder, generator)
    if span is None:
        logger.warning("no two row counts of this model's products agree bit for bit; using one fixed shape")
        return FALLBACK
    best = FALLBACK
    for apart in (False, True):
        trial = _Trial(decoder, generator, span, apart)
        for quantum in QUANTA:
            kept = trial.agreeing_queries(quantum)
            if len(kept) > len(best.query_buckets):
                best = ExactShapes(kept, span.low, span.high, quantum, span.step, apart)
            if 2 * len(kept) > len(QUERIES):
                return best  # a longer quantum costs more than the few buckets that it may add
        if len(best.query_buckets) > 1:
            return best
    logger.warning("no two query counts of this model's attention agree bit for bit; using one fixed shape")
    return FALLBACK


def _agreeing_rows(decoder: Decoder, generator: torch.Generator) -> RowSpan | None:
    """The longest run of row counts around the reference at which every product agrees with it."""
    layer = decoder.layers[0]
    products: list[tuple[Product, int]] = [
        (layer.attention.qkv, decoder.spec.hidden_size),
        (layer.attention.output, decoder.spec.heads * decoder.spec.head_dim),
        (layer.mlp.gate_up, decoder.spec.hidden_size),
        (layer.mlp.down, decoder.spec.intermediate_size),
        (decoder.output, decoder.spec.hidden_size),
    ]
    agreeing = set(ROWS)
    for weights, columns in products:
        x = torch.randn(max(ROWS), columns, generator=generator).to(decoder.device, decoder.dtype)
        agreeing &= _agreeing(weights, x, sorted(agreeing))
    for step in (1, 2, 4, 8):
        counts = [rows for rows in ROWS if rows % step == 0]
        low = high = REFERENCE
        for rows in reversed([rows for rows in counts if rows < REFERENCE]):
            if rows not in agreeing:
                break
            low = rows
        for rows in (rows for rows in counts if rows > REFERENCE):
            if rows not in agreeing:
                break
            high = rows
        if high >= 2 * REFERENCE:
            return RowSpan(low, high, step)
    return None


def _agreeing(weights: Product, x: Tensor, counts: Sequence[int]) -> set[int]:
    """Row counts whose rows match the reference, wherever in the product the row stands."""
    reference = weights(x[:REFERENCE])
    kept = set()
    for rows in counts:
        shared = min(rows, REFERENCE)
        # the reference's rows at the other end, among other neighbours
        moved = weights(x.roll(rows - shared, 0)[:rows])[rows - shared :]
        if torch.equal(moved, reference[:shared]):
            kept.add(rows)
    return kept


class _Trial:
    """Passes of the first two layers at many shapes, over a scratch cache of ordinary and of garbage
    values."""

    def __init__(self, decoder: Decoder, generator: torch.Generator, span: RowSpan, apart: bool) -> None:
        spec = decoder.spec
        depth = min(2, spec.layers)
        # one layer of each kind of attention, where the first two differ
        self.spec = replace(spec, layers=depth, windows=spec.windows[:depth])
        self.decoder, self.span, self.apart = decoder, span, apart
        self.cache = KVCache(self.spec, 8, 3584, device=decoder.device, dtype=decoder.dtype)
        self.start = QUANTA[0] - max(QUERIES) - 5

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(decoder.device, decoder.dtype)

        self.rows = random(2, 1, spec.kv_heads, self.start, spec.head_dim)
        self.noise = random(2, 1, spec.kv_heads, self.cache.stored, spec.head_dim)
        self.states = random(1, max(QUERIES), spec.hidden_size)
        self.table = rope_table(spec, QUANTA[0] + max(QUERIES), decoder.device, decoder.dtype)
        self.plan = Plan.full(spec.layers)

    def agreeing_queries(self, quantum: int) -> tuple[int, ...]:
        """The query counts that agree with the reference at this quantum, alone and in batches."""
        reference = self._run(1, REFERENCE, quantum, place=0, scale=1.0)  # [1, T, D]

        def agrees(batch: int, queries: int, length: int, place: int, scale: float) -> bool:
            shared = min(queries, REFERENCE)
            got = self._run(batch, queries, length, place, scale)
            return torch.equal(got[:, :shared], reference[:, :shared])

        if not agrees(1, REFERENCE, 4 * quantum, 0, 7.0):
            return ()  # the bits depend on the padded length, so no query count can agree
        kept = [
            queries
            for queries in QUERIES
            if agrees(1, queries, 4 * quantum, 0, 3.0) and agrees(3, queries, quantum, 2, 0.0)
        ]
        for queries in SPOT_QUERIES:
            if queries in kept and not (
                agrees(1, queries, quantum, 0, 5.0) and agrees(8, queries, 2 * quantum, 5, 2.0)
            ):
                kept.remove(queries)
        return tuple(kept)

    def _run(self, batch: int, queries: int, length: int, place: int, scale: float) -> Tensor:
        """The states of the tried row, at `place` in a batch of other rows, garbage of `scale` past its
        length."""
        data = self.cache.data
        data[:, :, :batch, :, :length] = self.noise[:, :, :, :length] * scale
        data[:, :, place, :, : self.start] = self.rows[:, 0]
        states = self.states[:, :queries].flip(1).repeat(batch, 1, 1)
        states[place] = self.states[0, :queries]
        pass_ = build_pass(
            self.spec,
            self.table,
            self.cache,
            [self.start - 7 * abs(row - place) for row in range(batch)],
            queries,
            length,
            first_row=0,
            span=self.span,
            apart=self.apart,
        )
        return self.decoder.run(states, pass_, self.plan, 0, self.spec.layers)[place : place + 1]
