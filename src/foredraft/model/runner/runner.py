"""The runner: the one `forward` that every pass of a decoder goes through.

Contract: `forward` computes the same bits for a column whatever its neighbours in the batch and in the pass,
as long as `exact` is left on, `deterministic` too, and the self-check at loading found agreeing shapes
(docs/losslessness.md). It writes keys and values at absolute positions and leaves `cache.lengths` alone.
Callers see no padding: not of the queries, not of the rows, not of the attended length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.model.attention import Pass
from foredraft.model.cache import KVCache
from foredraft.model.decoder import Decoder, Plan
from foredraft.model.device import upload
from foredraft.model.rope import Rope
from foredraft.model.runner.passes import build_pass, rope_tables
from foredraft.model.runner.shapes import LOOSE, ExactShapes, find_shapes

CHUNK = 256  # positions of a prefill pass; prompts are cut at its multiples
TAILS = (8, 16, 32, 64, 128, CHUNK)  # query buckets of a prompt's last chunk


def next_chunk(position: int, stop: int, chunk: int) -> int:
    """Where the prefill pass that starts at `position` ends: at multiples of `chunk`, never by load."""
    return min((position // chunk + 1) * chunk, stop)


@dataclass(frozen=True, slots=True)
class Resume:
    """What a drafter already computed of a verifying pass: states entering layer `depth`."""

    depth: int
    hidden: Tensor  # [B, T, D]
    known: list[int]  # [B] leading columns whose state is known, 0 to T


@dataclass(frozen=True, slots=True)
class Forward:
    """What came out of a forward, for the real columns."""

    logits: Tensor | None  # [B, T, V] float32, or [B, 1, V] where `at` chose a column
    hidden: Tensor  # [B, T, D] states at `stop`
    taps: dict[int, Tensor]  # depth -> [B, T, D] states entering that layer


class Runner:
    """Forwards of one decoder over caches of its making."""

    def __init__(
        self, decoder: Decoder, *, deterministic: bool = True, probed: ExactShapes | None = None
    ) -> None:
        """probed: what `probe_shapes` gave for this decoder before it was loaded; None probes now."""
        self.decoder = decoder
        self.chunk = CHUNK
        self.forwarded = 0
        self._full = Plan.full(decoder.spec.layers)
        self._tables: dict[Rope, Tensor] = {}
        self._positions = 0  # that the rotary tables hold
        self._reserve(2 * CHUNK)
        self.shapes: ExactShapes = find_shapes(decoder, probed) if deterministic else LOOSE
        self.max_queries = max(self.shapes.query_buckets, default=64)

    def new_cache(self, rows: int, positions: int) -> KVCache:
        """A zeroed cache for `rows` sequences of at most `positions` tokens."""
        decoder = self.decoder
        cache = KVCache(
            decoder.spec, rows, positions, device=decoder.device, dtype=decoder.dtype, slack=CHUNK
        )
        self._reserve(cache.stored)
        return cache

    @torch.inference_mode()
    def forward(
        self,
        cache: KVCache,
        tokens: Tensor,
        starts: list[int],
        *,
        first_row: int = 0,
        idle: Sequence[bool] | None = None,
        counts: Sequence[int] | None = None,
        plan: Plan | None = None,
        stop: int | None = None,
        resume: Resume | None = None,
        taps: Sequence[int] = (),
        at: Tensor | None = None,
        want_logits: bool = True,
        exact: bool = True,
    ) -> Forward:
        """One pass over tokens [B, T]: row b is the cache's row first_row + b, column t its position
        starts[b] + t.

        `counts` says how many columns of each row are real (all, where it is left out), for `forwarded`
        alone; rows marked `idle` are computed as dummies that touch no sequence. `exact=False` is for draft
        passes: any shape.
        """
        shapes = self.shapes if exact else LOOSE
        idle = idle or [False] * len(starts)
        active = [b for b, dummy in enumerate(idle) if not dummy]
        if not active:
            raise ValueError("every row of the batch is idle; forward needs an active one")
        width = tokens.shape[1]
        real = [width] * len(starts) if counts is None else counts
        self.forwarded += sum(real[b] for b in active)
        job = _Job(
            cache=cache,
            tokens=tokens.to(self.decoder.device),
            starts=[cache.scratch if dummy else start for start, dummy in zip(starts, idle, strict=True)],
            first_row=first_row,
            active=active,
            plan=plan or self._full,
            stop=self.decoder.spec.layers if stop is None else stop,
            taps=tuple(taps),
        )
        return self._forward(job, shapes, resume, at, want_logits)

    @torch.inference_mode()
    def prefill(
        self,
        cache: KVCache,
        row: int,
        tokens: list[int],
        start: int,
        *,
        taps: Sequence[int] = (),
        plan: Plan | None = None,
        stop: int | None = None,
    ) -> Forward:
        """One chunk of a prompt, without logits.

        Its shape depends on the chunk's place in the prompt only, never on load: a chunk may not cross a
        multiple of `chunk`, and is padded to a bucket of its own that no other kind of pass has to agree
        with.
        """
        if not tokens or start // CHUNK != (start + len(tokens) - 1) // CHUNK:
            raise ValueError(
                f"a prefill chunk of {len(tokens)} tokens at {start} must lie within a multiple of {CHUNK}"
            )
        self.forwarded += len(tokens)
        job = _Job(
            cache=cache,
            tokens=upload([tokens], self.decoder.device),
            starts=[start],
            first_row=row,
            active=[0],
            plan=plan or self._full,
            stop=self.decoder.spec.layers if stop is None else stop,
            taps=tuple(taps),
        )
        return self._forward(job, self.shapes.for_prefill(TAILS), None, None, want_logits=False)

    @torch.inference_mode()
    def head(self, hidden: Tensor) -> Tensor:
        """Logits [B, T, V] of states after the last layer [B, T, D], at any shape: for those of a prompt."""
        return self.decoder.head(hidden)

    def _forward(
        self, job: _Job, shapes: ExactShapes, resume: Resume | None, at: Tensor | None, want_logits: bool
    ) -> Forward:
        start, hidden = 0, None
        if resume is not None:
            if any(tap < resume.depth for tap in job.taps):
                raise ValueError(f"taps {job.taps} below the resumed depth {resume.depth} are not computed")
            start, hidden = resume.depth, self._join(job, shapes, resume)
        width = job.tokens.shape[1]
        pass_ = self._pass(job, shapes, width, first_column=0)
        if hidden is None:
            hidden = self.decoder.embed(_padded(job.tokens, pass_.queries))
        else:
            hidden = F.pad(hidden, (0, 0, 0, pass_.queries - width))
        kept: dict[int, Tensor] = {}
        for depth in sorted({*job.taps, job.stop}):
            hidden = self.decoder.run(hidden, pass_, job.plan, start, depth)
            start = depth
            if depth in job.taps:
                kept[depth] = hidden[:, :width]
        hidden = hidden[:, :width]
        logits = None
        if want_logits and job.stop == self.decoder.spec.layers:
            chosen = (
                hidden
                if at is None
                else hidden[torch.arange(len(at), device=hidden.device), at.to(hidden.device)]
            )
            logits = self.decoder.head(chosen if at is None else chosen[:, None], pass_.span)
        return Forward(logits, hidden, kept)

    def _join(self, job: _Job, shapes: ExactShapes, resume: Resume) -> Tensor:
        """States entering layer `depth` of all columns: the known ones, and the rest computed now."""
        width = job.tokens.shape[1]
        first = min(resume.known[b] for b in job.active)
        if first >= width:
            return resume.hidden
        tokens = job.tokens[:, first:]
        pass_ = self._pass(job, shapes, width - first, first_column=first)
        below = self.decoder.embed(_padded(tokens, pass_.queries))
        below = self.decoder.run(below, pass_, job.plan, 0, resume.depth)[:, : width - first]
        below = F.pad(below, (0, 0, first, 0))  # [B, T, D], zero where known
        columns = torch.arange(width, device=below.device)
        known = columns < upload(resume.known, below.device)[:, None]  # [B, T]
        return torch.where(known[:, :, None], resume.hidden, below)

    def _pass(self, job: _Job, shapes: ExactShapes, width: int, first_column: int) -> Pass:
        """The pass over `width` columns from `first_column` on."""
        cache = job.cache
        starts = [start + first_column for start in job.starts]
        queries = shapes.queries(width, len(starts))
        last = max(starts[b] for b in job.active)
        if last + queries > cache.scratch:
            raise ValueError(
                f"{queries} columns at position {last} overrun a cache row of {cache.positions} positions"
            )
        if queries > cache.slack:
            raise ValueError(f"{queries} columns are more than the slack of {cache.slack} positions holds")
        return build_pass(
            self.decoder.spec,
            self._tables,
            cache,
            [min(start, cache.scratch) for start in starts],
            queries,
            min(shapes.length(last + width), cache.stored),
            first_row=job.first_row,
            span=shapes.span,
            apart=shapes.apart,
        )

    def _reserve(self, positions: int) -> None:
        """Have rotary tables of at least that many positions."""
        if self._positions < positions:
            decoder = self.decoder
            self._tables = rope_tables(decoder.spec, positions, decoder.device, decoder.dtype)
            self._positions = positions


@dataclass(frozen=True, slots=True)
class _Job:
    """The arguments of one forward, resolved."""

    cache: KVCache
    tokens: Tensor  # [B, T]
    starts: list[int]
    first_row: int
    active: list[int]
    plan: Plan
    stop: int
    taps: tuple[int, ...]


def _padded(tokens: Tensor, queries: int) -> Tensor:
    return tokens if tokens.shape[1] == queries else F.pad(tokens, (0, queries - tokens.shape[1]))
