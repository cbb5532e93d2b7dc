"""Exact shapes: the shapes of a pass at which this model's own operators give every row the same bits.

Contract: found, never assumed. A product's kernel is chosen by its row count and an attention's by its query
count and length, so the same position can come out different in its last bits from a pass of another shape
(docs/losslessness.md). The self-check runs the model's operators at many shapes, on probes that cancel
(`probes`), compares with one reference shape bit for bit, and keeps the shapes that agree; two layers of the
real decoder confirm them. Passes are then padded, and products cut, to kept shapes.

Memory: a probe is as large as what it stands for, twice where it is packed, but needs no weight of the model.
So `probe_shapes` comes before the weights, with one probe at a time, and only the small confirmation after.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foredraft.model.cache import KVCache
from foredraft.model.decoder import Decoder, Plan
from foredraft.model.layers import RowSpan
from foredraft.model.runner.packed import pack
from foredraft.model.runner.passes import PassShape, build_pass, rope_tables
from foredraft.model.runner.probes import AttentionProbe, ProductProbe

logger = logging.getLogger(__name__)

QUERIES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 64)
SPOT_QUERIES = (1, 2, 4, 8, 16, 64)  # those that are also tried in further batches and lengths
ROWS = (*range(1, 17), 20, 24, 32, 48, 64)
STEPS = (1, 2, 4, 8)
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
            most = self.query_buckets[-1]
            raise ValueError(f"{width} columns are more than the longest exact pass takes ({most})")
        return next((bucket for bucket in fitting if bucket * batch >= self.row_low), fitting[0])

    def length(self, positions: int) -> int:
        """The attended length that covers `positions`."""
        return math.ceil(positions / self.length_quantum) * self.length_quantum

    def for_prefill(self, buckets: tuple[int, ...]) -> ExactShapes:
        """The same lengths, other query counts, products uncut: a prompt's passes agree with themselves
        only."""
        return replace(self, query_buckets=buckets, row_low=0, row_high=0, row_step=1)


LOOSE = ExactShapes(query_buckets=(), row_low=0, row_high=0, length_quantum=64)
# what the kernels compute does not depend on the shape at all
ANY = ExactShapes(query_buckets=(), row_low=0, row_high=0, length_quantum=1)
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
def probe_shapes(outline: Decoder, device: torch.device) -> ExactShapes:
    """The shapes at which probes of a decoder's operators agree on `device`, for `find_shapes` to confirm.

    The values of the decoder do not matter: it may be its outline, on torch's meta device.
    """
    random = torch.Generator().manual_seed(0)
    like = torch.empty(0, device=device, dtype=outline.dtype)
    span = _agreeing_rows(outline, like, random)
    if span is None:
        logger.warning("no two row counts of this model's products agree bit for bit; using one fixed shape")
        return FALLBACK
    probe = AttentionProbe(outline.spec, QUANTA[0] - max(QUERIES) - 5, max(QUERIES), like, random)
    for apart in (False, True):
        best: tuple[int, ...] = ()
        for quantum in QUANTA:
            kept = _agreeing_queries(probe, quantum, apart)
            if len(kept) > len(best):
                best, shapes = kept, ExactShapes(kept, span.low, span.high, quantum, span.step, apart)
            if 2 * len(kept) > len(QUERIES):
                break  # a longer quantum costs more than the few buckets that it may add
        if len(best) > 1:
            return shapes
    logger.warning("no two query counts of this model's attention agree bit for bit; using one fixed shape")
    return FALLBACK


@torch.inference_mode()
def find_shapes(decoder: Decoder, probed: ExactShapes | None = None) -> ExactShapes:
    """The exact shapes of a decoder, on its device, in its dtype: those that were probed for it (None: that
    are probed now) and that its layers confirm."""
    shapes = probe_shapes(decoder, decoder.device) if probed is None else probed
    if not shapes.found:
        return shapes
    for apart in sorted({shapes.apart, True}):  # what agrees in batches agrees row by row: probed already
        tried = replace(shapes, apart=apart)
        buckets = _confirmed(decoder, tried)
        if len(buckets) > 1:
            return replace(tried, query_buckets=buckets)
    logger.warning("no two query counts of this model's layers agree bit for bit; using one fixed shape")
    return FALLBACK


def _agreeing_rows(outline: Decoder, like: Tensor, random: torch.Generator) -> RowSpan | None:
    """The longest run of row counts around the reference at which every product agrees with it."""
    layer = outline.layers[0]
    agreeing = set(ROWS)
    for product in (
        layer.attention.qkv,
        layer.attention.output,
        layer.mlp.gate_up,
        layer.mlp.down,
        outline.output,
    ):
        agreeing = _agreeing(agreeing, product.shape, like, random)
    for step in STEPS:
        low = _run(agreeing, [rows for rows in reversed(ROWS) if rows <= REFERENCE and rows % step == 0])
        high = _run(agreeing, [rows for rows in ROWS if rows >= REFERENCE and rows % step == 0])
        if high >= 2 * REFERENCE:
            return RowSpan(low, high, step)
    return None


def _agreeing(counts: set[int], shape: tuple[int, int], like: Tensor, random: torch.Generator) -> set[int]:
    """Those of the row counts at which a product of this shape agrees; its probe is gone before the next."""
    probe = ProductProbe(pack, shape, max(ROWS), like, random)
    return {rows for rows in counts if probe.agrees(rows, REFERENCE)}


def _run(agreeing: set[int], counts: list[int]) -> int:
    """The last of the leading counts that agree."""
    last = REFERENCE
    for rows in counts:
        if rows not in agreeing:
            break
        last = rows
    return last


def _agreeing_queries(probe: AttentionProbe, quantum: int, apart: bool) -> tuple[int, ...]:
    """The query counts whose attention agrees with the reference at this quantum, alone and in batches."""
    reference = probe.output(1, REFERENCE, quantum, 0, 1.0, apart)

    def agrees(batch: int, queries: int, length: int, place: int, scale: float) -> bool:
        shared = min(queries, REFERENCE)
        got = probe.output(batch, queries, length, place, scale, apart)
        return torch.equal(got[:shared], reference[:shared])

    if not (agrees(1, REFERENCE, 2 * quantum, 0, 7.0) and agrees(1, REFERENCE, 4 * quantum, 0, 7.0)):
        return ()  # the bits depend on the padded length, so no query count can agree
    kept = [
        queries
        for queries in QUERIES
        if agrees(1, queries, 4 * quantum, 0, 3.0) and agrees(3, queries, quantum, 2, 0.0)
    ]
    for queries in SPOT_QUERIES:
        further = queries in kept and (
            agrees(1, queries, quantum, 0, 5.0),
            agrees(8, queries, 2 * quantum, 5, 2.0),
        )
        if further and not all(further):
            kept.remove(queries)
    return tuple(kept)


def _confirmed(decoder: Decoder, shapes: ExactShapes) -> tuple[int, ...]:
    """The query buckets at which two layers of the real decoder agree too, norms and activations included."""
    trial = _Trial(decoder, shapes)
    alone = trial.states(1, REFERENCE, 0)
    kept = []
    for queries in shapes.query_buckets:
        shared = min(queries, REFERENCE)
        if torch.equal(trial.states(2, queries, 1)[:shared], alone[:shared]):
            kept.append(queries)
    return tuple(kept)


class _Trial:
    """Passes of the first two layers over a scratch cache of random values."""

    def __init__(self, decoder: Decoder, shapes: ExactShapes) -> None:
        depth = min(2, decoder.spec.layers)
        self.spec = replace(decoder.spec, layers=depth, windows=decoder.spec.windows[:depth])
        self.decoder, self.shapes = decoder, shapes
        random = torch.Generator().manual_seed(1)
        self.cache = KVCache(self.spec, 2, 256, device=decoder.device, dtype=decoder.dtype)
        context = torch.randn(self.cache.data[:, :, :1].shape, generator=random)
        self.context = context.to(decoder.device, decoder.dtype)  # of either row
        hidden = torch.randn(max(QUERIES), self.spec.hidden_size, generator=random)
        self.hidden = hidden.to(decoder.device, decoder.dtype)  # [T, D]
        self.tables = rope_tables(self.spec, 512, decoder.device, decoder.dtype)

    def states(self, batch: int, queries: int, place: int) -> Tensor:
        """[T, D] of the tried row, at `place` among other rows."""
        self.cache.data.copy_(self.context)
        hidden = self.hidden[:queries].flip(0).repeat(batch, 1, 1)
        hidden[place] = self.hidden[:queries]
        shape = PassShape(
            0, batch, queries, self.shapes.length(150 + queries), self.shapes.span, self.shapes.apart
        )
        starts = torch.tensor([150 - 7 * abs(row - place) for row in range(batch)], device=hidden.device)
        pass_ = build_pass(self.spec, self.tables, self.cache, shape, starts)
        return self.decoder.run(hidden, pass_, Plan.full(self.spec.layers), 0, self.spec.layers)[place]
