"""Batch-invariant shapes: the shapes of a pass at which a model's operators give every row the same bits.

Libraries choose kernels by row count, query count and length. The self-check runs the model's operators at
many shapes on cancelling probes (`probes`), and keeps those that agree bit for bit with a reference shape;
two layers of the loaded decoder confirm them. `probe_shapes` needs no weight of the model, so it runs before
they are loaded.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from foredraft.model.attention import PassShape, build_context, rope_tables
from foredraft.model.cache import KVCache
from foredraft.model.decoder import Decoder, RunLayers
from foredraft.model.layers import RowSpan
from foredraft.model.recurrent import Run
from foredraft.model.runner.compiled import pack
from foredraft.model.runner.probes import AttentionProbe, ProductProbe
from foredraft.model.spec import Plan

logger = logging.getLogger(__name__)

QUERY_COUNTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 64)  # candidates for query buckets
SPOT_QUERY_COUNTS = (1, 2, 4, 8, 16, 64)  # candidates that a CPU also tries in further batches and lengths
ROW_COUNTS = (*range(1, 17), 20, 24, 32, 48, 64)  # candidates for row counts of products
ROW_STEPS = (1, 2, 4, 8)  # candidates for the step between row counts
LENGTH_QUANTA = (256, 512, 1024)  # candidates for the quantum of attended lengths, in positions
WHOLE = 2**40  # a quantum of attended lengths that is longer than any cache
LONG_CONTEXT = 700  # positions; libraries cut sums over so many into blocks, by the padded length
FAR_CONTEXT = 5000  # positions; a GPU's kernels may cut sums over thousands otherwise
POSITIONS = 4096  # that are attended over shorter contexts, at most
FAR_LENGTHS = 5120, 7168  # attended lengths that cover such a context: multiples of all quanta
REFERENCE = 8  # queries and rows of the reference shape: a common verifying pass
TRIAL_START = 150  # first position of the confirmed row, whose context lies within one quantum


@dataclass(frozen=True, slots=True)
class Reach:
    """What the passes of a device reach, and attention is probed at."""

    batches: tuple[int, ...]  # the rows of further batches, the most last
    counts: tuple[int, ...]  # the query counts that are tried in these
    far: bool  # contexts may have thousands of positions


# A CPU's batches are small, and its kernels need no probes: more of them would make loading longer.
REACH = {"cpu": Reach((8,), SPOT_QUERY_COUNTS, far=False), "cuda": Reach((8, 16, 32), QUERY_COUNTS, far=True)}


@dataclass(frozen=True, slots=True)
class InvariantShapes:
    """Shapes that passes may have: at all of them, a row has the same bits."""

    query_buckets: tuple[int, ...]  # the columns per row that a pass is padded to; empty allows any number
    span: RowSpan | None  # the rows of a product; None allows any number
    length_quantum: int  # attended lengths are multiples of it, in positions; WHOLE attends the whole cache
    apart: bool = False  # attend row by row, because the bits of attention depend on the batch size
    found: bool = True  # False: no two shapes agree, and one fixed shape serves all passes

    def __str__(self) -> str:
        if not self.query_buckets:
            return "any shape, not deterministic"
        kind = "batch-invariant shapes" if self.found else "one shape for all passes, because no two agree"
        columns = ", ".join(map(str, self.query_buckets))
        span = self.span or RowSpan(0, 0)
        step = "" if span.step == 1 else f" by {span.step}"
        apart = ", attention row by row" if self.apart else ""
        rows = f"{span.low} to {span.high} rows{step}"
        lengths = "the whole cache" if self.length_quantum == WHOLE else f"lengths by {self.length_quantum}"
        return f"{kind}: {columns} columns, {rows}, {lengths}{apart}"

    def queries(self, width: int, batch: int) -> int:
        """Return the query count for `width` columns: the smallest bucket that gives products enough rows."""
        if not self.query_buckets:
            return width
        fitting = [bucket for bucket in self.query_buckets if bucket >= width]
        if not fitting:
            most = self.query_buckets[-1]
            raise ValueError(f"{width} columns exceed the widest batch-invariant pass ({most})")
        low = 0 if self.span is None else self.span.low
        return next((bucket for bucket in fitting if bucket * batch >= low), fitting[0])

    def length(self, positions: int) -> int:
        """Return the attended length that covers `positions`; a pass cuts it to what its cache stores."""
        return math.ceil(positions / self.length_quantum) * self.length_quantum


ONE_SHAPE = "every pass uses one fixed shape"  # what FALLBACK means, for the log

# any shape, without a promise about bits
ANY_SHAPE = InvariantShapes(query_buckets=(), span=None, length_quantum=64)
# one shape for every pass: libraries then choose the same kernels for all
FALLBACK = InvariantShapes(
    query_buckets=(REFERENCE,),
    span=RowSpan(REFERENCE, REFERENCE, REFERENCE),
    length_quantum=max(LENGTH_QUANTA),
    apart=True,
    found=False,
)


def fallback(device: torch.device) -> InvariantShapes:
    """Return FALLBACK for a device. A GPU attends the whole cache: its kernels may cut sums by length."""
    return replace(FALLBACK, length_quantum=WHOLE) if device.type == "cuda" else FALLBACK


@torch.inference_mode()
def probe_shapes(outline: Decoder, device: torch.device) -> InvariantShapes:
    """Return the shapes at which probes of a decoder's operators agree, for `find_shapes` to confirm."""
    random = torch.Generator().manual_seed(0)
    like = torch.empty(0, device=device, dtype=outline.dtype)
    span = _agreeing_rows(outline, like, random)
    if span is None:
        logger.warning("no two row counts of the model's products agree bit for bit; %s", ONE_SHAPE)
        return fallback(device)
    queries = max(QUERY_COUNTS)
    context = LENGTH_QUANTA[0] - queries - 5  # the columns end within the shortest quantum
    reach = REACH[device.type]
    probe = partial(AttentionProbe, outline.spec, queries=queries, like=like, random=random)
    probes = [
        (
            probe(context, most=(reach.batches[-1], POSITIONS), window=window),
            probe(LONG_CONTEXT, most=(1, POSITIONS), window=window),
            probe(FAR_CONTEXT, most=(8, FAR_LENGTHS[-1]), window=window) if reach.far else None,
        )
        for window in outline.spec.windows_by_heads
    ]
    for apart in (False, True):
        best: tuple[int, ...] = ()
        for quantum in LENGTH_QUANTA:
            agreeing = [_agreeing_queries(*each, reach, quantum, apart) for each in probes]
            kept = tuple(count for count in agreeing[0] if all(count in others for others in agreeing))
            if len(kept) > len(best):
                best, shapes = kept, InvariantShapes(kept, span, quantum, apart)
            if 2 * len(kept) > len(QUERY_COUNTS):
                break  # a longer quantum costs more than the few buckets that it may add
        if len(best) > 1:
            return shapes
    logger.warning("no two query counts of the model's attention agree bit for bit; %s", ONE_SHAPE)
    return fallback(device)


@torch.inference_mode()
def find_shapes(
    decoder: Decoder, probed: InvariantShapes | None = None, run: RunLayers | None = None
) -> InvariantShapes:
    shapes = probe_shapes(decoder, decoder.device) if probed is None else probed
    if not shapes.found:
        return shapes
    for apart in sorted({shapes.apart, True}):  # shapes that agree in batches agree row by row, too
        tried = replace(shapes, apart=apart)
        buckets = _confirmed_buckets(decoder, tried, run or decoder.run)
        if len(buckets) > 1:
            return replace(tried, query_buckets=buckets)
    logger.warning("no two query counts of the model's layers agree bit for bit; %s", ONE_SHAPE)
    return fallback(decoder.device)


def _agreeing_rows(outline: Decoder, like: Tensor, random: torch.Generator) -> RowSpan | None:
    agreeing = set(ROW_COUNTS)
    first = [product.shape for product in (*outline.layers[0].products, outline.output)]
    others = dict.fromkeys(product.shape for product in outline.products if product.shape not in first)
    for shape in (*first, *others):
        probe = ProductProbe(pack, shape, max(ROW_COUNTS), like, random)
        agreeing = {rows for rows in agreeing if probe.agrees(rows, REFERENCE)}
        del probe  # two at a time may be too large
    for step in ROW_STEPS:
        counts = [rows for rows in ROW_COUNTS if rows % step == 0]
        low = _last_agreeing(agreeing, [rows for rows in reversed(counts) if rows <= REFERENCE])
        high = _last_agreeing(agreeing, [rows for rows in counts if rows >= REFERENCE])
        if high >= 2 * REFERENCE:
            return RowSpan(low, high, step)
    return None


def _last_agreeing(agreeing: set[int], counts: list[int]) -> int:
    last = REFERENCE
    for rows in counts:
        if rows not in agreeing:
            break
        last = rows
    return last


def _agreeing_queries(
    probe: AttentionProbe,
    long_probe: AttentionProbe,
    far_probe: AttentionProbe | None,
    reach: Reach,
    quantum: int,
    apart: bool,
) -> tuple[int, ...]:
    """Return the query counts at which attention agrees at a quantum, alone and in batches."""
    shortest = quantum * math.ceil((LONG_CONTEXT + REFERENCE) / quantum)
    long_reference = long_probe.output(1, REFERENCE, shortest, 0, 1.0, apart)
    for length in range(shortest + quantum, 3 * max(LENGTH_QUANTA) + 1, quantum):
        if not torch.equal(long_probe.output(1, REFERENCE, length, 0, 7.0, apart), long_reference):
            return ()  # the bits depend on the padded length, so no query count can agree
    agrees = _agreement(probe, quantum, apart)
    if not (agrees(1, REFERENCE, 2 * quantum, 0, 7.0) and agrees(1, REFERENCE, 4 * quantum, 0, 7.0)):
        return ()  # the bits depend on the padded length, so no query count can agree
    kept = [n for n in QUERY_COUNTS if agrees(1, n, 4 * quantum, 0, 3.0) and agrees(3, n, quantum, 2, 0.0)]
    for queries in reach.counts:
        further = queries in kept and (
            agrees(1, queries, quantum, 0, 5.0),
            *(agrees(rows, queries, 2 * quantum, rows - 3, 2.0) for rows in reach.batches),
        )
        if further and not all(further):
            kept.remove(queries)
    return tuple(kept) if far_probe is None else _agreeing_far(far_probe, kept, apart)


def _agreement(probe: AttentionProbe, length: int, apart: bool) -> Callable[..., bool]:
    """Return whether attention at a batch, queries, length, place and scale has the bits of the reference."""
    reference = probe.output(1, REFERENCE, length, 0, 1.0, apart)

    def agrees(batch: int, queries: int, length: int, place: int, scale: float) -> bool:
        shared = min(queries, REFERENCE)
        got = probe.output(batch, queries, length, place, scale, apart)
        return torch.equal(got[:shared], reference[:shared])

    return agrees


def _agreeing_far(probe: AttentionProbe, counts: list[int], apart: bool) -> tuple[int, ...]:
    """Return those of the query counts at which attention agrees over a context of thousands, too."""
    shortest, longest = FAR_LENGTHS
    agrees = _agreement(probe, shortest, apart)
    if not agrees(1, REFERENCE, longest, 0, 7.0):
        return ()
    rows = probe.cache.rows
    return tuple(n for n in counts if agrees(1, n, longest, 0, 3.0) and agrees(rows, n, shortest, 2, 0.0))


def _confirmed_buckets(decoder: Decoder, shapes: InvariantShapes, run: RunLayers) -> tuple[int, ...]:
    trial = _Trial(decoder, shapes, run)
    alone = trial.states(1, REFERENCE, 0)
    kept = []
    for queries in shapes.query_buckets:
        shared = min(queries, REFERENCE)
        if torch.equal(trial.states(2, queries, 1)[:shared], alone[:shared]):
            kept.append(queries)
    return tuple(kept)


class _Trial:
    """Passes of a decoder's first layers, two and one of each shape of heads, over a small random cache."""

    def __init__(self, decoder: Decoder, shapes: InvariantShapes, run: RunLayers) -> None:
        spec = decoder.spec
        attending = {
            window: layer for layer, window in reversed([*enumerate(spec.windows)]) if spec.attends(layer)
        }
        firsts = (attending[window] + 1 for window in spec.windows_by_heads)
        self.spec = spec.first(max(min(2, spec.layers), *firsts))
        self.run, self.shapes = run, shapes
        random = torch.Generator().manual_seed(1)
        self.cache = KVCache(self.spec, 2, 256, device=decoder.device, dtype=decoder.dtype)
        contexts = [torch.randn(plane[:, :, :1].shape, generator=random) for plane in self.cache.planes]
        self.contexts = [context.to(decoder.device, decoder.dtype) for context in contexts]  # of both rows
        hidden = torch.randn(max(QUERY_COUNTS), self.spec.hidden_size, generator=random)
        self.hidden = hidden.to(decoder.device, decoder.dtype)  # [T, D]
        self.inputs: Tensor | None = None  # of the layers, [T, layers, I]
        if decoder.inputs is not None:
            shape = len(hidden), decoder.inputs.layers, decoder.inputs.size
            self.inputs = torch.randn(shape, generator=random).to(decoder.device, decoder.dtype)
        self.tables = rope_tables(self.spec, 512, decoder.device, decoder.dtype)

    def states(self, batch: int, queries: int, place: int) -> Tensor:
        """Return the states that leave the layers [T, D], of a row at `place` in a batch."""
        for plane, held in zip(self.cache.planes, self.contexts, strict=True):
            plane.copy_(held)
        hidden = self.hidden[:queries].flip(0).repeat(batch, 1, 1)
        hidden[place] = self.hidden[:queries]
        length = self.shapes.length(TRIAL_START + queries)
        span, apart, layers = self.shapes.span, self.shapes.apart, self.spec.layers
        shape = PassShape(0, batch, queries, queries, length, span, apart, Plan.full(layers), 0, layers)
        firsts = [TRIAL_START - 7 * abs(row - place) for row in range(batch)]
        starts = torch.tensor(firsts, device=hidden.device)
        context = build_context(self.spec, self.tables, self.cache, shape, starts)
        if self.cache.recurrent is not None:
            self.cache.recurrent.at[:] = torch.tensor(firsts)
            runs = [Run(row, row * queries, queries, start, start) for row, start in enumerate(firsts)]
            context = replace(context, runs=runs)
        if self.inputs is not None:
            inputs = self.inputs[:queries].repeat(batch, 1, 1)
            context = replace(context, layer_inputs=inputs)
        return self.run(hidden, context, 0, layers)[place]
