"""The runner: the one `forward` that every pass of a decoder goes through.

Contract: `forward` computes the same bits for a column whatever its neighbours in the batch and in the pass,
as long as `exact` is left on, `deterministic` too, and the self-check at loading found agreeing shapes
(docs/losslessness.md). It writes keys and values at absolute positions and leaves `cache.lengths` alone.
Callers see no padding: not of the queries, not of the rows, not of the attended length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.model.cache import KVCache
from foredraft.model.decoder import Decoder, Plan
from foredraft.model.device import upload
from foredraft.model.rope import Rope
from foredraft.model.runner.body import Body, Bucket, Forward, Inputs
from foredraft.model.runner.compiled import compiled_steps
from foredraft.model.runner.graphs import CudaRecorder, Graphs, coarse_length
from foredraft.model.runner.job import FusedDraft, Job, Resume, SamplingInputs, StopThresholds
from foredraft.model.runner.native import NativePasses, stretch
from foredraft.model.runner.packed import unpacked_because
from foredraft.model.runner.passes import PassShape, rope_tables
from foredraft.model.runner.ragged import Gathering
from foredraft.model.runner.shapes import ANY, LOOSE, ExactShapes, find_shapes

CHUNK = 256  # positions of a prefill pass; prompts are cut at its multiples
TAILS = (8, 16, 32, 64, 128, CHUNK)  # query buckets of a prompt's last chunk


def next_chunk(position: int, stop: int, chunk: int) -> int:
    """Where the prefill pass that starts at `position` ends: at multiples of `chunk`, never by load."""
    return min((position // chunk + 1) * chunk, stop)


class Runner:
    """Forwards of one decoder over caches of its making.

    gathers: whether passes leave the padding of their batch out (`gather`); None: where it pays.
    graphs: the recordings of its passes (`graphs`); None: they run as they are.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        deterministic: bool = True,
        probed: ExactShapes | None = None,
        compile: bool = False,
    ) -> None:
        """probed: what `probe_shapes` gave for this decoder before it was loaded; None probes now."""
        self.decoder = decoder
        self.compiled = compile
        self._run = partial(decoder.run, steps=compiled_steps()) if compile else decoder.run
        self.chunk = CHUNK
        self.forwarded = 0
        self.gathers: bool | None = None
        self.graphs = Graphs(CudaRecorder(decoder.device)) if decoder.device.type == "cuda" else None
        self._gathering = Gathering.of(decoder.spec, decoder.device)
        self._full = Plan.full(decoder.spec.layers)
        self._tables: dict[Rope, Tensor] = {}
        self._positions = 0  # that the rotary tables hold
        self._native = NativePasses.of(decoder)
        self._reserve(2 * CHUNK)
        self.shapes = self._shapes(deterministic, probed)
        self.max_queries = max(self.shapes.query_buckets, default=64)

    def _shapes(self, deterministic: bool, probed: ExactShapes | None) -> ExactShapes:
        if self._native is not None:
            return ANY
        return find_shapes(self.decoder, probed, self._run) if deterministic else LOOSE

    @property
    def by_kernels(self) -> bool:
        """Whether kernels of our own run its passes."""
        return self._native is not None

    @property
    def choices(self) -> str:
        """What was chosen for this decoder, on this machine, in words."""
        device, dtype = self.decoder.device, self.decoder.dtype
        if self._native is not None:
            how = ["kernels of our own, which are exact at any shape"]
        else:
            why_not = unpacked_because(device, dtype)
            how = [
                "products packed" if why_not is None else f"products not packed ({why_not})",
                str(self.shapes),
                f"steps {'' if self.compiled else 'not '}compiled",
                f"passes {'not ' if self.graphs is None else ''}recorded",
                str(self._gathering),
            ]
        return "; ".join([f"{str(dtype).removeprefix('torch.')} on {device}", *how])

    def new_cache(self, rows: int, positions: int) -> KVCache:
        """A zeroed cache for `rows` sequences of at most `positions` tokens."""
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

        `counts` says how many columns of each row are real (all, where it is left out): of the others, what
        comes out means nothing. Rows marked `idle` are dummies that touch no sequence. `exact=False` is for
        draft passes: any shape.
        """
        shapes = self.shapes if exact or self._native else LOOSE
        idle = idle or [False] * len(starts)
        active = [b for b, dummy in enumerate(idle) if not dummy]
        if not active:
            raise ValueError("every row of the batch is idle; forward needs an active one")
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
            recorded=True,
        )
        return self._forward(job, resume, at)

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
        job = Job(
            cache=cache,
            shapes=self.shapes if self._native else self.shapes.for_prefill(TAILS),
            tokens=upload([tokens], self.decoder.device),
            starts=[start],
            first_row=row,
            active=[0],
            real=[range(len(tokens))],
            plan=plan or self._full,
            stop=self.decoder.spec.layers if stop is None else stop,
            taps=tuple(taps),
            head=False,
            recorded=False,  # many columns: their kernels take longer than their launches
        )
        return self._forward(job)

    def draft(
        self,
        cache: KVCache,
        tokens: list[list[int]],
        starts: list[int],
        most: list[int],
        sampling_inputs: SamplingInputs | None = None,
        stops: StopThresholds | None = None,
        *,
        plan: Plan | None = None,
    ) -> FusedDraft | None:
        """Row b reads tokens[b] from position starts[b] on, and then most[b] tokens of its own, one after the
        other, all in one call; rows with most[b] = 0 do nothing. drawing: None for the likeliest. stops:
        where a row ends before that.

        None where no kernels serve: the caller takes the steps by itself.
        """
        if self._native is None:
            return None
        active = [row for row, count in enumerate(most) if count]
        last = max(starts[row] + len(tokens[row]) + most[row] - 1 for row in active)
        if last > cache.scratch:
            raise ValueError(
                f"a draft up to position {last} overruns a cache row of {cache.positions} positions"
            )
        flat = [token for row in active for token in tokens[row]]
        drafted = self._native.draft(
            flat,
            cache,
            [(row, starts[row], len(tokens[row])) for row in active],
            plan or self._full,
            self.decoder.spec.layers,
            [most[row] for row in active],
            sampling_inputs,
            stops,
            len(most),
        )
        self.forwarded += len(flat) + sum(steps - 1 for steps in drafted.steps if steps)
        return drafted

    @torch.inference_mode()
    def head(self, hidden: Tensor) -> Tensor:
        """Logits [B, T, V] of states after the last layer [B, T, D], at any shape: for those of a prompt."""
        if self._native is None:
            return self.decoder.head(hidden)
        return self._native.head(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)

    def _forward(self, job: Job, resume: Resume | None = None, at: Tensor | None = None) -> Forward:
        if resume is None:
            return self._stretch(job, at=at)
        if any(tap < resume.depth for tap in job.taps):
            raise ValueError(f"taps {job.taps} below the resumed depth {resume.depth} are not computed")
        return self._stretch(job, self._join(job, resume), resume.depth, at)

    def _join(self, job: Job, resume: Resume) -> Tensor:
        """States entering layer `depth` of all columns: the known ones, and the rest computed now."""
        rest = job.unknown(resume)
        if rest is None:
            return resume.hidden
        width, computed = job.tokens.shape[1], rest.tokens.shape[1]
        below = F.pad(self._stretch(rest).hidden, (0, 0, width - computed, 0))  # [B, T, D]
        columns = torch.arange(width, device=below.device)
        known = columns < upload(resume.known, below.device)[:, None]  # [B, T]
        return torch.where(known[:, :, None], resume.hidden, below)

    def _stretch(
        self, job: Job, hidden: Tensor | None = None, start: int = 0, at: Tensor | None = None
    ) -> Forward:
        """The job's pass from layer `start` on, which `hidden` enters; without it, the tokens enter."""
        cache, device = job.cache, self.decoder.device
        if self._native is not None:
            return stretch(self._native, job, hidden, start, at)
        shape = job.shape()
        starts = [min(start, cache.scratch) for start in job.starts]
        real = self._gathered(job, shape)
        graphs = self.graphs if job.recorded and real is None else None
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
        """The columns b * T' + t that a gathered pass computes; None: all, in place."""
        if shape.batch == 1 or self.gathers is False:
            return None
        padded, count = shape.batch * shape.queries, sum(map(len, job.real))
        if self.gathers is None and not self._gathering.pays(padded, count):
            return None
        return [b * shape.queries + t for b, columns in enumerate(job.real) for t in columns]

    def _reserve(self, positions: int) -> None:
        """Have rotary tables of at least that many positions."""
        if self._positions < positions:
            decoder = self.decoder
            self._tables = rope_tables(decoder.spec, positions, decoder.device, decoder.dtype)
            self._positions = positions
            if self._native is not None:
                self._native.rotate_by(self._tables)
