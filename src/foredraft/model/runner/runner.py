"""The runner: the one `forward` that every pass of a decoder goes through.

    the engine, a drafter, a measurement
        -> Runner: forward, prefill, draft        arguments, checked -> a Pass, or DraftInputs
        -> Backend: run, draft, head              C kernels, or PyTorch's operators: one for each decoder
              PyTorch: PassShape + PassInputs     -> ForwardContext -> Decoder.run; or a CUDA graph of it

Contract: `forward` gives a column the same bits whatever else is in the batch and in the pass, unless
`invariant` or `deterministic` is off; the self-check at loading finds the shapes for that
(docs/losslessness.md). It writes keys and values at absolute positions and leaves `cache.lengths` alone.
Callers see no padding: neither of queries, nor of rows, nor of the attended length.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.model.cache import CacheLayers, KVCache
from foredraft.model.decoder import Decoder
from foredraft.model.forward_context import rope_tables
from foredraft.model.plan import Plan
from foredraft.model.runner.backend import Backend
from foredraft.model.runner.fused import DraftInputs, FusedDraft
from foredraft.model.runner.invariant_shapes import InvariantShapes
from foredraft.model.runner.native import NativeBackend
from foredraft.model.runner.passes import Forward, Leaves, Pass, Resume
from foredraft.model.runner.torch_backend import CHUNK, TorchBackend
from foredraft.model.transfers import dtype_name, upload

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
        deterministic: Keep passes to batch-invariant shapes.
        probed: The result of `probe_shapes` for this decoder; None probes now.
        shapes: The batch-invariant shapes of another decoder with layers of the same sizes; None finds them.
        compile: Run the parts of each layer through torch.compile.

    Attributes:
        backend: Runs the passes.
        compiled: Whether the parts of each layer run through torch.compile.
        max_queries: The columns per row that one verifying pass takes, at most.
        chunk: Positions of a prefill pass.
        forwarded: Real columns that were computed so far, of all passes.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        deterministic: bool = True,
        probed: InvariantShapes | None = None,
        shapes: InvariantShapes | None = None,
        compile: bool = False,
    ) -> None:
        self.decoder, self.compiled = decoder, compile
        self.backend: Backend = NativeBackend.of(decoder) or TorchBackend(
            decoder, deterministic, probed, shapes, compile
        )
        self.max_queries = max(self.shapes.query_buckets, default=MAX_QUERIES)
        self.chunk = CHUNK
        self.forwarded = 0
        self._full = Plan.full(decoder.spec.layers)
        self._positions = 0  # of the rotary tables
        self.reserve_positions(2 * CHUNK)

    @property
    def shapes(self) -> InvariantShapes:
        """The shapes of its passes."""
        return self.backend.shapes

    @property
    def by_kernels(self) -> bool:
        """Whether the C kernels run its passes."""
        return self.backend.native

    @property
    def choices(self) -> str:
        """The ways in which this decoder runs on this machine, for the log."""
        decoder = self.decoder
        return "; ".join([f"{dtype_name(decoder.dtype)} on {decoder.device}", *self.backend.choices])

    @property
    def takes_leaves(self) -> bool:
        """Whether a pass may have leaves: further tokens in the place of one of its columns."""
        return self.backend.takes_leaves

    def uncaptured(self) -> AbstractContextManager[None]:
        """Capture no CUDA graph within the block: its passes have shapes that no later pass has."""
        return self.backend.uncaptured()

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
            blocked=self.by_kernels,
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
        invariant: bool = True,
        leaves: Leaves | None = None,
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
            invariant: Keep to batch-invariant shapes. False allows any shape; draft passes use it.
            leaves: Columns behind the `counts` of each row that share the place of another one; only where
                `takes_leaves`.

        Raises:
            ValueError: Every row is idle, or the pass is too wide, or the columns do not fit into the cache,
                or this back end takes no leaves.
        """
        if leaves is not None and not self.takes_leaves:
            raise ValueError("passes of PyTorch's operators take no leaves")
        idle = idle or [False] * len(starts)
        active = [b for b, dummy in enumerate(idle) if not dummy]
        if not active:
            raise ValueError("every row of the batch is idle; forward needs an active row")
        width = tokens.shape[1]
        real = [width] * len(starts) if counts is None else counts
        real = [0 if dummy else count for count, dummy in zip(real, idle, strict=True)]
        self.forwarded += sum(real) + sum(map(len, leaves or ()))
        depth = self.decoder.spec.layers if stop is None else stop
        pass_ = Pass(
            cache=cache,
            tokens=tokens if tokens.device == self.decoder.device else tokens.to(self.decoder.device),
            starts=[cache.scratch if dummy else start for start, dummy in zip(starts, idle, strict=True)],
            first_row=first_row,
            active=active,
            real=[range(count) for count in real],
            plan=plan or self._full,
            start=0,
            stop=depth,
            taps=tuple(taps),
            head=want_logits and depth == self.decoder.spec.layers,
            at=at,
            invariant=invariant,
            leaves=leaves,
        )
        if resume is not None:
            self._resume(pass_, resume)
        return self.backend.run(pass_)

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
        pass_ = Pass(
            cache=cache,
            tokens=upload([tokens], self.decoder.device),
            starts=[start],
            first_row=row,
            active=[0],
            real=[range(len(tokens))],
            plan=plan or self._full,
            start=0,
            stop=self.decoder.spec.layers if stop is None else stop,
            taps=tuple(taps),
            head=False,
            prefill=True,
        )
        return self.backend.run(pass_)

    @torch.inference_mode()
    def draft(
        self, cache: CacheLayers, inputs: DraftInputs, *, plan: Plan | None = None, tap: int | None = None
    ) -> FusedDraft | None:
        """Run a fused draft: all draft steps of the batch in one call of the C kernels, or one CUDA graph.

        Args:
            cache: A cache of `new_cache`; row b of the draft is its row b.
            inputs: What each row reads and drafts.
            plan: The sub-layers that run; None runs all.
            tap: The depth whose entering states are returned, 1 or more.

        Returns:
            The draft; None where the back end cannot fuse it, and the caller takes the steps one by one.

        Raises:
            ValueError: The draft does not fit into the cache, or a row drafts that reads no token.
        """
        if not self.backend.fuses:
            return None
        tokens, starts, lengths, active = inputs.tokens, inputs.starts, inputs.lengths, inputs.active
        if not all(tokens[row] for row in active):
            raise ValueError("a row that drafts has to read a token first")
        last = max(starts[row] + len(tokens[row]) + lengths[row] - 1 for row in active)
        if last > cache.scratch:
            raise ValueError(
                f"a draft up to position {last} overruns a cache row of {cache.positions} positions"
            )
        draft = self.backend.draft(cache, inputs, plan or self._full, tap)
        if draft is not None:
            self.forwarded += sum(len(tokens[row]) + lengths[row] - 1 for row in active)
        return draft

    @torch.inference_mode()
    def head(self, hidden: Tensor) -> Tensor:
        """Return the logits [B, T, V] of states [B, T, D] after the last layer, at any shape."""
        return self.backend.head(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)

    def _resume(self, pass_: Pass, resume: Resume) -> None:
        """Let a pass begin at layer `resume.depth`, from states that are known or computed here."""
        if any(tap < resume.depth for tap in pass_.taps):
            raise ValueError(f"taps {pass_.taps} below the resumed depth {resume.depth} are not computed")
        below = pass_.below(resume)
        pass_.start, pass_.hidden = resume.depth, resume.hidden
        if below is None:
            return
        width, computed = pass_.tokens.shape[1], below.tokens.shape[1]
        states = F.pad(self.backend.run(below).hidden, (0, 0, width - computed, 0))  # [B, T, D]
        columns = torch.arange(width, device=states.device)
        known = columns < upload(resume.known, states.device)[:, None]  # [B, T]
        pass_.hidden = torch.where(known[:, :, None], resume.hidden, states)

    def reserve_positions(self, positions: int) -> None:
        """Extend the rotary tables to at least so many positions."""
        if self._positions < positions:
            decoder = self.decoder
            tables = rope_tables(decoder.spec, positions, decoder.device, decoder.dtype)
            self.backend.use_rotary_tables(tables)
            self._positions = positions
