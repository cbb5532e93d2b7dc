"""The runner: the one `forward` that every pass of a decoder goes through.

Contract: `forward` gives a column the same bits whatever else is in the batch and in the pass, unless `exact`
or `deterministic` is off; the self-check at loading finds the shapes for that (docs/losslessness.md). It
writes keys and values at absolute positions and leaves `cache.lengths` alone. Callers see no padding: neither
of queries, nor of rows, nor of the attended length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.model.cache import CacheLayers, KVCache
from foredraft.model.decoder import Decoder, Plan
from foredraft.model.device import dtype_name, upload
from foredraft.model.rope import Rope
from foredraft.model.runner.body import Body, Bucket, Forward, Inputs
from foredraft.model.runner.compiled import compiled_steps
from foredraft.model.runner.graphs import CudaGraphCapturer, Graphs, coarse_length
from foredraft.model.runner.job import FusedDraft, Job, Resume, SamplingInputs
from foredraft.model.runner.native import NativeCodes, NativePasses, run_layers
from foredraft.model.runner.packed import unpacked_because
from foredraft.model.runner.passes import PassShape, rope_tables
from foredraft.model.runner.ragged import RaggedRule
from foredraft.model.runner.shapes import INEXACT, KERNEL_SHAPES, ExactShapes, find_shapes

CHUNK = 256  # positions of a prefill pass; prompts are cut at its multiples
PREFILL_BUCKETS = (8, 16, 32, 64, 128, CHUNK)  # columns that a prefill pass is padded to
MAX_QUERIES = 64  # columns per row of a verifying pass where any shape is allowed


def next_chunk(position: int, stop: int, chunk: int) -> int:
    """Return where the prefill pass from `position` ends: at the next multiple of `chunk`, or at `stop`.

    The load of the batch never changes it: the bits of a prompt's keys depend on how the prompt is cut.
    """
    return min((position // chunk + 1) * chunk, stop)


class Runner:
    """Runs the passes of one decoder, over caches that it makes.

    Args:
        decoder: The weights.
        deterministic: Keep passes to exact shapes.
        probed: The result of `probe_shapes` for this decoder; None probes now.
        shapes: The exact shapes of another decoder with layers of the same sizes; None finds them.
        compile: Run the steps of each layer through torch.compile.

    Attributes:
        shapes: The shapes of its passes.
        max_queries: The columns per row that one verifying pass takes, at most.
        chunk: Positions of a prefill pass.
        forwarded: Real columns that were computed so far, of all passes.
        gathers: Whether passes gather the real columns of a ragged batch; None: where it pays (`ragged`).
        graphs: The captured CUDA graphs; None: passes are not captured.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        deterministic: bool = True,
        probed: ExactShapes | None = None,
        shapes: ExactShapes | None = None,
        compile: bool = False,
    ) -> None:
        self.decoder = decoder
        self.compiled = compile
        self._run = partial(decoder.run, steps=compiled_steps()) if compile else decoder.run
        self.chunk = CHUNK
        self.forwarded = 0
        self.gathers: bool | None = None
        self.graphs = Graphs(CudaGraphCapturer(decoder.device)) if decoder.device.type == "cuda" else None
        self._ragged_rule = RaggedRule.of(decoder.spec, decoder.device)
        self._full = Plan.full(decoder.spec.layers)
        self._tables: dict[Rope, Tensor] = {}
        self._positions = 0  # of the rotary tables
        self._native = NativePasses.of(decoder)
        self.reserve_positions(2 * CHUNK)
        self.shapes = shapes or self._shapes(deterministic, probed)
        self.max_queries = max(self.shapes.query_buckets, default=MAX_QUERIES)

    def _shapes(self, deterministic: bool, probed: ExactShapes | None) -> ExactShapes:
        if self._native is not None:
            return KERNEL_SHAPES
        return find_shapes(self.decoder, probed, self._run) if deterministic else INEXACT

    @property
    def by_kernels(self) -> bool:
        """Whether the C kernels run its passes."""
        return self._native is not None

    @property
    def choices(self) -> str:
        """The ways in which this decoder runs on this machine, for the log."""
        device, dtype = self.decoder.device, self.decoder.dtype
        if self._native is not None:
            parts = ["C kernels, exact at any shape"]
            if isinstance(self.decoder.output, NativeCodes):
                parts.append(f"a head of {self.decoder.output.coding.bits} bits")
        else:
            reason = unpacked_because(device, dtype)
            parts = [
                "packed weights" if reason is None else f"weights not packed ({reason})",
                str(self.shapes),
                "compiled steps" if self.compiled else "steps not compiled",
                "CUDA graphs" if self.graphs is not None else "no CUDA graphs",
                str(self._ragged_rule),
            ]
        return "; ".join([f"{dtype_name(dtype)} on {device}", *parts])

    def new_cache(self, rows: int, positions: int) -> KVCache:
        """Return a zeroed cache for `rows` sequences of at most `positions` tokens."""
        decoder = self.decoder
        cache = KVCache(
            decoder.spec,
            rows,
            positions,
            device=decoder.device,
            dtype=decoder.dtype,
            slack=CHUNK,
            blocked=self._native is not None,
        )
        self.reserve_positions(cache.stored)
        return cache

    @torch.inference_mode()
    def forward(
        self,
        cache: CacheLayers,
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
        """Run one pass: column t of row b is position starts[b] + t of the cache row first_row + b.

        Args:
            cache: A cache of `new_cache`.
            tokens: Token ids, [B, T].
            starts: The position of each row's first column, [B].
            first_row: The cache row of row 0.
            idle: Rows that touch no sequence, [B]; None: no row is idle.
            counts: The leading columns of each row that are real, [B]; the others are padding, and their
                results mean nothing. None: all are real.
            plan: The sub-layers that run; None runs all.
            stop: The layer after the last; None runs all.
            resume: States that a drafter has already computed.
            taps: The depths whose entering states are returned.
            at: The column of each row whose logits are wanted, [B]; None wants all.
            want_logits: Compute logits, where the pass runs to the last layer.
            exact: Keep to exact shapes. False allows any shape; draft passes use it.

        Raises:
            ValueError: Every row is idle, or the pass is too wide, or the columns do not fit into the cache.
        """
        shapes = self.shapes if exact or self._native else INEXACT
        idle = idle or [False] * len(starts)
        active = [b for b, dummy in enumerate(idle) if not dummy]
        if not active:
            raise ValueError("every row of the batch is idle; forward needs an active row")
        width = tokens.shape[1]
        real = [width] * len(starts) if counts is None else counts
        real = [0 if dummy else count for count, dummy in zip(real, idle, strict=True)]
        self.forwarded += sum(real)
        depth = self.decoder.spec.layers if stop is None else stop
        job = Job(
            cache=cache,
            shapes=shapes,
            tokens=tokens if tokens.device == self.decoder.device else tokens.to(self.decoder.device),
            starts=[cache.scratch if dummy else start for start, dummy in zip(starts, idle, strict=True)],
            first_row=first_row,
            active=active,
            real=[range(count) for count in real],
            plan=plan or self._full,
            stop=depth,
            taps=tuple(taps),
            head=want_logits and depth == self.decoder.spec.layers,
            capturable=True,
        )
        return self._forward(job, resume, at)

    @torch.inference_mode()
    def prefill(
        self,
        cache: CacheLayers,
        row: int,
        tokens: list[int],
        start: int,
        *,
        taps: Sequence[int] = (),
        plan: Plan | None = None,
        stop: int | None = None,
    ) -> Forward:
        """Run one chunk of a prompt, without logits.

        The shape of the pass depends on the chunk's place in the prompt, never on the load: a chunk lies
        between two multiples of `chunk`, and is padded to a bucket that only prefill uses.

        Args:
            cache: A cache of `new_cache`.
            row: The cache row.
            tokens: Token ids of the chunk.
            start: The position of the first.
            taps: The depths whose entering states are returned.
            plan: The sub-layers that run; None runs all.
            stop: The layer after the last; None runs all.

        Raises:
            ValueError: The chunk is empty or crosses a multiple of `chunk`.
        """
        if not tokens or start // CHUNK != (start + len(tokens) - 1) // CHUNK:
            raise ValueError(
                f"a prefill chunk of {len(tokens)} tokens at {start} must lie between multiples of {CHUNK}"
            )
        self.forwarded += len(tokens)
        job = Job(
            cache=cache,
            shapes=self.shapes if self._native else self.shapes.for_prefill(PREFILL_BUCKETS),
            tokens=upload([tokens], self.decoder.device),
            starts=[start],
            first_row=row,
            active=[0],
            real=[range(len(tokens))],
            plan=plan or self._full,
            stop=self.decoder.spec.layers if stop is None else stop,
            taps=tuple(taps),
            head=False,
            capturable=False,  # the kernels of many columns take longer than their launches
        )
        return self._forward(job)

    def draft(
        self,
        cache: CacheLayers,
        tokens: list[list[int]],
        starts: list[int],
        lengths: list[int],
        sampling_inputs: SamplingInputs | None = None,
        *,
        allowed: Sequence[Tensor | None] | None = None,
        plan: Plan | None = None,
        tap: int | None = None,
    ) -> FusedDraft | None:
        """Run a fused draft: all draft steps of the batch in one call of the C kernels.

        Row b reads tokens[b] from position starts[b] on, then drafts lengths[b] tokens one by one.

        Args:
            cache: A cache of `new_cache`; row b of the draft is its row b.
            tokens: The tokens that each row reads first, [B] lists.
            starts: The position of the first of them, [B].
            lengths: The tokens that each row drafts, [B]; 0: the row does nothing.
            sampling_inputs: Sampling parameters and noise; None drafts greedily.
            allowed: The tokens that each row's first step may draw, [B] of [V] bool; None allows all.
            plan: The sub-layers that run; None runs all.
            tap: The depth whose entering states are returned, 1 or more.

        Returns:
            The draft; None where the kernels do not run this decoder, and the caller takes the steps one by
            one.

        Raises:
            ValueError: The draft does not fit into the cache.
        """
        if self._native is None:
            return None
        active = [row for row, count in enumerate(lengths) if count]
        last = max(starts[row] + len(tokens[row]) + lengths[row] - 1 for row in active)
        if last > cache.scratch:
            raise ValueError(
                f"a draft up to position {last} overruns a cache row of {cache.positions} positions"
            )
        self.forwarded += sum(len(tokens[row]) + lengths[row] - 1 for row in active)
        return self._native.draft(
            cache, tokens, starts, lengths, plan or self._full, sampling_inputs, allowed, tap
        )

    @torch.inference_mode()
    def head(self, hidden: Tensor) -> Tensor:
        """Return the logits [B, T, V] of states [B, T, D] after the last layer, at any shape."""
        if self._native is None:
            return self.decoder.head(hidden)
        return self._native.head(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)

    def _forward(self, job: Job, resume: Resume | None = None, at: Tensor | None = None) -> Forward:
        """Run a job, from the states of `resume` on where they are given."""
        if resume is None:
            return self._run_layers(job, at=at)
        if any(tap < resume.depth for tap in job.taps):
            raise ValueError(f"taps {job.taps} below the resumed depth {resume.depth} are not computed")
        return self._run_layers(job, self._join(job, resume), resume.depth, at)

    def _join(self, job: Job, resume: Resume) -> Tensor:
        """Return the states of all columns that enter layer `resume.depth`: known, or computed here."""
        rest = job.unknown(resume)
        if rest is None:
            return resume.hidden
        width, computed = job.tokens.shape[1], rest.tokens.shape[1]
        below = F.pad(self._run_layers(rest).hidden, (0, 0, width - computed, 0))  # [B, T, D]
        columns = torch.arange(width, device=below.device)
        known = columns < upload(resume.known, below.device)[:, None]  # [B, T]
        return torch.where(known[:, :, None], resume.hidden, below)

    def _run_layers(
        self, job: Job, hidden: Tensor | None = None, start: int = 0, at: Tensor | None = None
    ) -> Forward:
        """Run layers [start, job.stop) of a job on `hidden`, or on the embedded tokens where that is None."""
        cache, device = job.cache, self.decoder.device
        if self._native is not None:
            return run_layers(self._native, job, hidden, start, at)
        shape = job.shape()
        starts = [min(start, cache.scratch) for start in job.starts]
        real = self._gathered(job, shape)
        graphs = self.graphs if job.capturable and real is None else None
        if graphs is not None:
            shape = replace(shape, length=min(coarse_length(shape.length), cache.stored))
        bucket = Bucket(shape, job.tokens.shape[1], job.plan, start, job.stop, job.taps, job.head)
        inputs = Inputs(
            starts[0] if len(starts) == 1 and graphs is None else upload(starts, device),
            job.tokens if hidden is None else None,
            hidden,
            None if real is None else upload(real, device),
            None if at is None else at.to(device),
        )
        body = Body(self.decoder, self._run, self._tables, cache)
        return body(bucket, inputs) if graphs is None else graphs.run(body, bucket, inputs)

    def _gathered(self, job: Job, shape: PassShape) -> list[int] | None:
        """Return the columns b * T' + t that a ragged pass computes; None: the pass computes all columns."""
        if shape.batch == 1 or self.gathers is False:
            return None
        padded, count = shape.batch * shape.queries, sum(map(len, job.real))
        if self.gathers is None and not self._ragged_rule.pays(padded, count):
            return None
        return job.real_columns(shape.queries)

    def reserve_positions(self, positions: int) -> None:
        """Extend the rotary tables to at least so many positions."""
        if self._positions < positions:
            decoder = self.decoder
            self._tables = rope_tables(decoder.spec, positions, decoder.device, decoder.dtype)
            self._positions = positions
            if self._native is not None:
                self._native.use_rotary_tables(self._tables)
