"""EAGLE: a head over the target's states drafts (Li et al., arXiv:2401.15077, 2406.16858, 2503.01840).

The first step of a draft reads all pairs of committed tokens that the head has not read; each further step
reads the drafted token and the state that the step before gave. What drafted tokens wrote to the head's cache
is dropped at the commit: the next draft reads the accepted ones with the target's own states. Heads of
EAGLE-1 and 2, whose papers draft a tree, draft a chain, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from foredraft.decode.round_draft import pad_rows
from foredraft.decode.sequence import Sequence
from foredraft.drafters.heads.configs import read_eagle
from foredraft.drafters.heads.eagle3_head import Eagle3Head, load_eagle3
from foredraft.drafters.heads.gguf_files import read_head
from foredraft.drafters.heads.layers import HeadDrafter, TimedPass
from foredraft.drafters.heads.record import HeadRecord
from foredraft.drafters.states import MAX_WAITING, WaitingStates, keep, kept, states_spec
from foredraft.model.cache import CacheLayers, KVCache
from foredraft.model.memory import upload
from foredraft.model.runner import DraftInputs, Forward, FusedDraft, Runner
from foredraft.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class HeadPass(TimedPass):
    """The forward of a draft step over states that mean nothing."""

    head: Eagle3Head = field(kw_only=True)

    @property
    def described(self) -> str:
        return repr(self.head.record)

    def __call__(self, cache: CacheLayers, tokens: Tensor, starts: list[int], **more: Any) -> Forward:
        batch, spec = len(starts), self.head.record.spec
        own, tables = self.scratch_of(cache, spec, blocked=self.head.kernels is not None)
        with torch.inference_mode():
            states = torch.zeros(batch, 1, spec.hidden_size, dtype=own.dtype, device=own.device)
            left = self.head.run(own, tables, tokens, states, [max(1, s) for s in starts], [1] * batch)
            return Forward(self.head.logits(left[:, 0])[:, None], left, {})

    def fused(self, cache: CacheLayers, inputs: DraftInputs) -> FusedDraft | None:
        kernels = self.head.kernels
        if kernels is None:
            return None
        own, tables = self.scratch_of(cache, self.head.record.spec, blocked=True)
        read = sum(len(inputs.tokens[row]) for row in inputs.active)
        states = torch.zeros(read, self.head.record.spec.hidden_size, dtype=own.dtype)
        inputs = replace(inputs, starts=[max(1, start) for start in inputs.starts])
        return kernels.draft(own, tables, inputs, states)[0]


class Eagle3(HeadDrafter):
    """An autoregressive drafter over an EAGLE-3 head and the target's states."""

    name = "eagle3"
    head: Eagle3Head
    read_files, load = staticmethod(read_head), staticmethod(load_eagle3)

    def __init__(self, target: Runner, cache: KVCache, head: Eagle3Head, planned: int | None = None) -> None:
        super().__init__(target, cache, head, planned, blocked=head.kernels is not None)
        self.states = self.own[1]
        self.draft_pass = HeadPass(target, head=head)
        self._joined: dict[int, Sequence] = {}  # by sequence id
        self._stepped: dict[int, int] = {}  # sequence id -> positions in its row after the first step
        self._recurring: Tensor | None = None  # the states of the next pairs, [B, d]; None before a draft

    @classmethod
    def specs(cls, record: HeadRecord) -> tuple[ModelSpec, ...]:
        return record.spec, states_spec(record.spec, record.spec.hidden_size)

    def join(self, sequence: Sequence) -> None:
        self._joined[sequence.id] = sequence

    @torch.inference_mode()
    def step(
        self, tokens: Tensor, starts: list[int], counts: list[int], idle: list[bool], at: Tensor | None
    ) -> Tensor:
        if self._recurring is None:
            left, drafts = self._first_step(starts, idle)
        else:
            # a text that began with one token has no state before it: its draft goes on from zeros
            drafts = [not is_idle and start > 0 for start, is_idle in zip(starts, idle, strict=True)]
            left = self._run(tokens, self._recurring[:, None], starts, [int(draws) for draws in drafts])[:, 0]
        self._recurring = self.head.recurring(left)
        logits = self.head.logits(left)
        if self.vocabulary is not None:
            logits = self.vocabulary.columns(logits)
        if not all(drafts):  # without a pair, q is uniform
            logits = logits.masked_fill(~upload(drafts, logits.device)[:, None], 0.0)
        return logits

    @torch.inference_mode()
    def fused_draft(self, inputs: DraftInputs) -> FusedDraft | None:
        kernels, active = self.head.kernels, inputs.active
        if kernels is None or not all(inputs.starts[row] for row in active):
            return None  # a text of one token has no pair
        if self._recurring is None:
            tokens, first = self._unread(list(inputs.starts), [not length for length in inputs.lengths])
            states = [kept(self.states, row, slice(first[row] - 1, inputs.starts[row])) for row in active]
            inputs = replace(inputs, tokens=tokens, starts=first)
            pairs = torch.cat(states)
        else:
            pairs = self._recurring[active]
        draft, self._recurring = kernels.draft(self.cache, self._tables, inputs, pairs)
        return draft

    def _first_step(self, starts: list[int], idle: list[bool]) -> tuple[Tensor, list[bool]]:
        """Read all pairs up to the pending tokens; return what the last ones left, and which rows draft."""
        unread, first = self._unread(starts, idle)
        counts = [len(tokens) for tokens in unread]
        width = max(1, *counts)
        hidden = self.head.record.spec.hidden_size
        states = torch.zeros(len(starts), width, hidden, dtype=self.cache.dtype, device=self.cache.device)
        for row, count in enumerate(counts):
            if count:
                states[row, :count] = kept(self.states, row, slice(first[row] - 1, first[row] + count - 1))
        tokens = upload(pad_rows(unread), self.cache.device, torch.int64)
        drafts = [count > 0 for count in counts]
        left = self._run(tokens, states, first, counts)
        last = upload([max(0, count - 1) for count in counts], left.device)
        return left[torch.arange(len(counts), device=left.device), last], drafts

    def _unread(self, starts: list[int], idle: list[bool]) -> tuple[list[list[int]], list[int]]:
        """Return each row's tokens up to the pending one whose pairs are unread, and the first's position."""
        rows = {s.row: s for s in self._joined.values() if 0 <= s.row < len(idle) and not idle[s.row]}
        self.read_states(self._waiting.where(lambda sequence: sequence.row in rows))
        tokens, first = [list[int]() for _ in starts], [1] * len(starts)
        for row, sequence in rows.items():
            if starts[row] - self.cache.lengths[row] >= MAX_WAITING:
                self._read(sequence, starts[row])
            first[row] = max(1, self.cache.lengths[row])
            tokens[row] = sequence.tokens[first[row] : starts[row] + 1]
            if tokens[row]:
                self._stepped[sequence.id] = starts[row] + 1
        return tokens, first

    def _run(self, tokens: Tensor, states: Tensor, starts: list[int], counts: list[int]) -> Tensor:
        if not any(counts):
            return torch.zeros_like(states)
        return self.head.run(self.cache, self._tables, tokens, states, starts, counts)

    def end_draft(self) -> None:
        self._recurring = None

    @torch.inference_mode()
    def observe(self, sequence: Sequence, start: int, states: Mapping[int, Tensor]) -> None:
        lengths, row = self.cache.lengths, sequence.row
        lengths[row] = max(lengths[row], self._stepped.pop(sequence.id, 0))
        super().observe(sequence, start, states)
        if not self._waiting.of(sequence):
            self._read(sequence, self.states.lengths[row])

    def rewind(self, sequence: Sequence) -> None:
        super().rewind(sequence)
        self._stepped.pop(sequence.id, None)

    def leave(self, sequence: Sequence) -> None:
        super().leave(sequence)
        self._joined.pop(sequence.id, None)
        self._stepped.pop(sequence.id, None)

    def read_states(self, waiting: list[WaitingStates]) -> None:
        """Join waiting states, those of all rows in one product, and write the states to their rows."""
        if not waiting:
            return
        joined = self.head.joined(torch.cat([each.states for each in waiting]))
        counts = [len(each.states) for each in waiting]
        for each, states in zip(waiting, torch.split(joined, counts), strict=True):
            keep(self.states, each.sequence.row, each.start, states)
            self._waiting.drop(each.sequence)

    def _read(self, sequence: Sequence, stop: int) -> None:
        """Read the pairs of tokens before `stop` that are not read yet, for their keys and values."""
        row, start = sequence.row, max(1, self.cache.lengths[sequence.row])
        while start < stop:
            end = min(stop, start + MAX_WAITING)
            tokens = upload([sequence.tokens[start:end]], self.cache.device)
            states = kept(self.states, row, slice(start - 1, end - 1))[None]
            self.head.run(self.cache, self._tables, tokens, states, [start], [end - start], first_row=row)
            start = end
        self.cache.lengths[row] = max(self.cache.lengths[row], stop)


class Eagle(Eagle3):
    """An autoregressive drafter over an EAGLE-1 or EAGLE-2 head and the target's last states."""

    name = "eagle"
    read_files = staticmethod(read_eagle)
