"""The runner: the one `forward` that every pass of a decoder goes through, to one of two back ends.

`forward` gives a column the same bits whatever else is in the batch and in the pass, unless `invariant` or
`deterministic` is off (docs/losslessness.md). It writes keys and values at absolute positions and leaves
`cache.lengths` alone. Callers see no padding: neither of queries, nor of rows, nor of the attended length.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.model.attention import rope_tables
from foredraft.model.cache import CacheLayers, KVCache
from foredraft.model.decoder import Decoder
from foredraft.model.memory import dtype_name, upload
from foredraft.model.recurrent import COLUMNS
from foredraft.model.runner.native.check import unserved_because
from foredraft.model.runner.native.native_backend import NativeBackend
from foredraft.model.runner.passes import (
    CHUNK,
    DraftInputs,
    DraftVocab,
    Forward,
    FusedDraft,
    Leaves,
    Pass,
    Resume,
    SamplingInputs,
)
from foredraft.model.spec import Plan

if TYPE_CHECKING:
    from foredraft.model.runner.invariant_shapes import InvariantShapes
    from foredraft.model.runner.torch_backend import TorchBackend

__all__ = [
    "DraftInputs", "DraftVocab", "Forward", "FusedDraft", "Leaves", "PassOptions", "Resume", "Runner",
    "SamplingInputs", "next_chunk", "unserved_because",
]  # fmt: skip


def next_chunk(position: int, stop: int, chunk: int) -> int:
    """Return where the prefill pass from `position` ends, at any load: a multiple of `chunk`, or `stop`."""
    return min((position // chunk + 1) * chunk, stop)


class PassOptions(TypedDict, total=False):
    """What a pass computes beside the logits of all layers at all columns."""

    plan: Plan | None  # the sub-layers that run; None: all
    stop: int | None  # the layer before which the pass ends; None: it ends after the last one
    resume: Resume | None  # states that are known, from which the pass goes on
    aux_layers: Sequence[int]  # the depths whose entering states are returned
    at: Tensor | None  # [B] the column of each row whose logits are wanted; None: all
    want_logits: bool  # True where it is left out
    invariant: bool  # keep to batch-invariant shapes; True where it is left out
    leaves: Leaves | None  # of the rows' token trees


class Runner:
    def __init__(
        self,
        decoder: Decoder,  # the weights
        *,
        deterministic: bool = True,  # keep passes to batch-invariant shapes
        probed: InvariantShapes | None = None,  # of `probe_shapes`; None probes now
        shapes: InvariantShapes | None = None,  # of a decoder with layers of the same sizes
        compile: bool = False,  # run the parts of each layer through torch.compile
    ) -> None:
        self.decoder, self.compiled = decoder, compile
        backend: NativeBackend | TorchBackend | None = NativeBackend.of(decoder)
        if backend is None:
            from foredraft.model.runner.torch_backend import TorchBackend  # which the kernels do without

            backend = TorchBackend(decoder, deterministic, probed, shapes, compile)
        self.backend, self.by_kernels, self.takes_leaves = backend, backend.native, backend.takes_leaves
        self.shapes, self.max_queries = backend.shapes, backend.max_queries
        if decoder.spec.recurrent is not None:
            self.max_queries = min(self.max_queries, COLUMNS)
        self.chunk = CHUNK  # positions of a prefill pass
        self.forwarded = 0  # real columns that were computed so far, of all passes
        self._full = Plan.full(decoder.spec.layers)
        self._positions = 0  # of the rotary tables
        self.reserve_positions(2 * CHUNK)

    @property
    def choices(self) -> str:
        decoder = self.decoder
        return "; ".join([f"{dtype_name(decoder.dtype)} on {decoder.device}", *self.backend.choices])

    def uncaptured(self) -> AbstractContextManager[None]:
        """Capture no CUDA graph within the block: its passes have shapes that no later pass has."""
        return self.backend.uncaptured()

    def new_cache(self, rows: int, positions: int) -> KVCache:
        decoder = self.decoder
        cache = KVCache(
            decoder.spec, rows, positions,
            device=decoder.device, dtype=decoder.dtype, slack=CHUNK, blocked=self.by_kernels,
        )  # fmt: skip
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
        **options: Unpack[PassOptions],
    ) -> Forward:
        """Run one pass: column t of row b is position starts[b] + t of the cache row first_row + b."""
        if not options.keys() <= PassOptions.__annotations__.keys():
            raise TypeError(f"a pass has no options {sorted(options.keys() - PassOptions.__annotations__)}")
        leaves, stop, resume = options.get("leaves"), options.get("stop"), options.get("resume")
        if leaves is not None and not self.takes_leaves:
            raise ValueError("passes of PyTorch's operators take no leaves of token trees")
        idle = idle or [False] * len(starts)
        active = [b for b, dummy in enumerate(idle) if not dummy]
        if not active:
            raise ValueError("every row of the batch is idle; forward needs an active row")
        width = tokens.shape[1]
        real = [width] * len(starts) if counts is None else counts
        real = [0 if dummy else count for count, dummy in zip(real, idle, strict=True)]
        self.forwarded += sum(real) + sum(map(len, leaves or ()))
        depth = self.decoder.spec.layers if stop is None else stop
        starts = [cache.scratch if dummy else start for start, dummy in zip(starts, idle, strict=True)]
        pass_ = Pass(
            cache, tokens.to(self.decoder.device), starts, first_row, active, real=[*map(range, real)],
            plan=options.get("plan") or self._full, start=0, stop=depth,
            aux_layers=tuple(options.get("aux_layers", ())),
            head=options.get("want_logits", True) and depth == self.decoder.spec.layers,
            at=options.get("at"), invariant=options.get("invariant", True), leaves=leaves,
        )  # fmt: skip
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
        aux_layers: Sequence[int] = (),
    ) -> Forward:
        """Run one chunk of a prompt, without logits; only its place in the prompt decides its shape."""
        if not tokens or start // CHUNK != (start + len(tokens) - 1) // CHUNK:
            chunk = f"a prefill chunk of {len(tokens)} tokens at {start}"
            raise ValueError(f"{chunk} must lie between multiples of {CHUNK}")
        self.forwarded += len(tokens)
        pass_ = Pass(
            cache, upload([tokens], self.decoder.device), [start], row, active=[0],
            real=[range(len(tokens))], prefill=True, plan=self._full, start=0, stop=self.decoder.spec.layers,
            aux_layers=tuple(aux_layers), head=False,
        )  # fmt: skip
        return self.backend.run(pass_)

    @torch.inference_mode()
    def draft(
        self, cache: CacheLayers, inputs: DraftInputs, *, plan: Plan | None = None, exit: int | None = None
    ) -> FusedDraft | None:
        """Run a fused draft: all draft steps of the batch in one call of the C kernels, or one CUDA graph."""
        if not self.backend.fuses:
            return None
        tokens, starts, lengths, active = inputs.tokens, inputs.starts, inputs.lengths, inputs.active
        last = max(starts[row] + len(tokens[row]) + lengths[row] - 1 for row in active)
        if last > cache.scratch:
            row = f"a cache row of {cache.positions} positions"
            raise ValueError(f"a draft up to position {last} overruns {row}")
        draft = self.backend.draft(cache, inputs, plan or self._full, exit)
        if draft is not None:
            self.forwarded += sum(len(tokens[row]) + lengths[row] - 1 for row in active)
        return draft

    @torch.inference_mode()
    def head(self, hidden: Tensor) -> Tensor:
        """Return the logits [B, T, V] of states [B, T, D] after the last layer, at any shape."""
        return self.backend.head(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)

    def _resume(self, pass_: Pass, resume: Resume) -> None:
        """Let a pass begin at layer `resume.depth`, from states that are known or computed here."""
        if any(layer < resume.depth for layer in pass_.aux_layers):
            raise ValueError(f"layers {pass_.aux_layers} below the resumed depth {resume.depth} do not run")
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
        if self._positions < positions:
            decoder = self.decoder
            tables = rope_tables(decoder.spec, positions, decoder.device, decoder.dtype)
            self.backend.use_rotary_tables(tables)
            self._positions = positions
