"""EAGLE-3: a head over the target's states at several depths drafts (Li et al. 2025, arXiv:2503.01840).

The target hands over its states of committed positions at the depths that the head reads. Joined by `fc`,
they stand in a cache of states, whose rows follow the batch's: so a text can be cut, copied or parked
anywhere. The first step of a draft reads all pairs of committed tokens that the head has not read, those of
all rows in one pass; each further step reads the token that was drafted and the state that the step before
gave. What drafted tokens wrote to the head's cache is dropped at the commit: the next draft reads the
accepted ones with the target's own states.

A reduced head has logits for some tokens alone. Scattered over the target's vocabulary, they are -inf
elsewhere before every transform: q is 0 there, and the residual is over the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.decode.drafter import DraftPass, Stepper
from foredraft.decode.round_draft import pad_rows
from foredraft.decode.sequence import Sequence
from foredraft.drafters import waiting_states
from foredraft.drafters.asset import Found, Missing, Parts
from foredraft.drafters.heads.eagle3_files import Eagle3Files, is_eagle3
from foredraft.drafters.heads.eagle3_gguf import is_eagle3_gguf, read_head
from foredraft.drafters.heads.eagle3_head import Eagle3Head, cache_spec, load_eagle3
from foredraft.drafters.heads.head_asset import HeadAsset
from foredraft.drafters.heads.settings import described_head, with_settings
from foredraft.drafters.heads.timed_pass import TimedPass
from foredraft.drafters.heads.words import map_of
from foredraft.drafters.kept_states import keep, kept, states_spec
from foredraft.drafters.waiting_states import Waiting, WaitingStates
from foredraft.errors import Option
from foredraft.model.cache import CacheLayers, KVCache
from foredraft.model.forward_context import rope_tables
from foredraft.model.runner import DraftInputs, Forward, FusedDraft, Resume, Runner
from foredraft.model.transfers import upload
from foredraft.model.unread import Checkpoint

__all__ = ["ASSET", "Eagle3", "HeadPass"]


@dataclass(frozen=True, slots=True)
class HeadPass(TimedPass):
    """The forward of a draft step over states that mean nothing."""

    head: Eagle3Head = field(kw_only=True)

    @property
    def described(self) -> str:
        return repr(self.head.record)

    def __call__(self, cache: CacheLayers, tokens: Tensor, starts: list[int], **more: Any) -> Forward:
        batch, spec = len(starts), cache_spec(self.head.record)
        own, tables = self.scratch_of(cache, spec, blocked=self.head.kernels is not None)
        with torch.inference_mode():
            states = torch.zeros(batch, 1, spec.hidden_size, dtype=own.dtype, device=own.device)
            left = self.head.run(own, tables, tokens, states, [max(1, s) for s in starts], [1] * batch)
            return Forward(self.head.logits(left[:, 0])[:, None], left, {})

    def fused(self, cache: CacheLayers, inputs: DraftInputs) -> FusedDraft | None:
        kernels = self.head.kernels
        if kernels is None:
            return None
        own, tables = self.scratch_of(cache, cache_spec(self.head.record), blocked=True)
        read = sum(len(inputs.tokens[row]) for row in inputs.active)
        states = torch.zeros(read, self.head.record.spec.hidden_size, dtype=own.dtype)
        inputs = replace(inputs, starts=[max(1, start) for start in inputs.starts])
        return kernels.draft(own, tables, inputs, states)[0]


class Eagle3(Stepper):
    """A stepper over an EAGLE-3 head and the target's states.

    Args:
        target: The target's runner.
        cache: The target's KV cache.
        head: The head.
        planned: Draft length that the head's config proposes.
    """

    name = "eagle3"
    read_files = staticmethod(read_head)
    draft_pass: DraftPass

    def __init__(self, target: Runner, cache: KVCache, head: Eagle3Head, planned: int | None = None) -> None:
        record = head.record
        assert record.taps is not None, "a record that was checked for a target has its taps"
        self.head, self.planned = head, planned
        self.taps = tuple(dict.fromkeys(record.taps))

        self.cache = cache.beside(cache_spec(record), blocked=head.kernels is not None)
        self.states = cache.beside(states_spec(record.spec, record.spec.hidden_size))
        self.caches = (self.cache, self.states)
        self.draft_pass = HeadPass(target, head=head)
        self.vocabulary = map_of(head.words, target.decoder)
        self._tables = rope_tables(record.spec, self.cache.stored, cache.device, cache.dtype)
        self._joined: dict[int, Sequence] = {}  # by sequence id
        self._waiting = Waiting()
        self._stepped: dict[int, int] = {}  # sequence id -> positions in its row after the first step
        self._recurring: Tensor | None = None  # the states of the next pairs, [B, d]; None before a draft

    def join(self, sequence: Sequence) -> None:
        self._joined[sequence.id] = sequence

    def length(self, sequence: Sequence) -> int:
        return len(sequence.tokens) - 1  # what the head lacks, its first step reads

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
        """Keep all waiting states; return each row's tokens up to the pending one whose pairs are not read,
        and the position of the first. A text of one token has none."""
        rows = {s.row: s for s in self._joined.values() if 0 <= s.row < len(idle) and not idle[s.row]}
        self._keep(self._waiting.where(lambda sequence: sequence.row in rows))
        tokens, first = [list[int]() for _ in starts], [1] * len(starts)
        for row, sequence in rows.items():
            if starts[row] - self.cache.lengths[row] >= waiting_states.MAX_WAITING:
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

    def resume(self) -> Resume | None:
        self._recurring = None  # the draft ends
        return None

    @torch.inference_mode()
    def observe(self, sequence: Sequence, start: int, states: Mapping[int, Tensor]) -> None:
        """Keep the target's states of newly committed positions; those of a prompt are read at once."""
        assert self.head.record.taps is not None
        new = torch.cat([states[tap] for tap in self.head.record.taps], -1)
        lengths, row = self.cache.lengths, sequence.row
        lengths[row] = max(lengths[row], self._stepped.pop(sequence.id, 0))
        waiting = self._waiting.add(sequence, start, new)
        if waiting.due:
            self._keep([waiting])
            self._read(sequence, waiting.stop)

    @torch.inference_mode()
    def settle(self, sequence: Sequence) -> None:
        self._keep(self._waiting.of(sequence))

    def rewind(self, sequence: Sequence) -> None:
        most, row = len(sequence.tokens) - 1, sequence.row
        self._recurring = None
        self._stepped.pop(sequence.id, None)
        for cache in self.caches:
            cache.lengths[row] = min(cache.lengths[row], most)
        self._waiting.rewind(sequence, most)

    def leave(self, sequence: Sequence) -> None:
        self._recurring = None
        self._joined.pop(sequence.id, None)
        self._waiting.drop(sequence)
        self._stepped.pop(sequence.id, None)

    def _keep(self, waiting: list[WaitingStates]) -> None:
        """Join waiting taps, those of all rows in one product, and write the states to their rows."""
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
            end = min(stop, start + waiting_states.MAX_WAITING)
            tokens = upload([sequence.tokens[start:end]], self.cache.device)
            states = kept(self.states, row, slice(start - 1, end - 1))[None]
            self.head.run(self.cache, self._tables, tokens, states, [start], [end - start], first_row=row)
            start = end
        self.cache.lengths[row] = max(self.cache.lengths[row], stop)


@dataclass(frozen=True, kw_only=True)
class FoundEagle3(Found):
    """A head that fits the target.

    Attributes:
        files: The head.
        target: The target.
        drafter: Drafts with it.
    """

    files: Eagle3Files
    target: Checkpoint
    drafter: type[Eagle3]

    def row_bytes(self, positions: int) -> int:
        own = self.files.record.spec
        specs = cache_spec(self.files.record), states_spec(own, own.hidden_size)
        return sum(KVCache.bytes_per_row(spec, positions, self.target.dtype) for spec in specs)

    def make(self, parts: Parts) -> Eagle3:
        head = load_eagle3(self.files, parts.target)
        return self.drafter(parts.target, parts.cache, head, self.planned)


class Eagle3Asset(HeadAsset):
    """An EAGLE-3 head.

    Attributes:
        drafter: Drafts with it, and reads its files.
    """

    drafter: type[Eagle3] = Eagle3
    called = "EAGLE-3 head"
    missing = Missing(
        "needs an EAGLE-3 head of this model", ("give ", Option("draft"), ", its folder or GGUF file")
    )
    required = Missing("which needs an EAGLE-3 head of the model", missing.remedy)

    def knows(self, place: Path) -> bool:
        return is_eagle3(place) or is_eagle3_gguf(place)

    def found(self, place: Path, target: Checkpoint) -> Found:
        files, settings = with_settings(self.drafter.read_files(place), target.spec)
        return FoundEagle3(
            bytes=files.parameters * target.dtype.itemsize, planned=files.record.planned,
            about=described_head(files, settings), files=files, target=target, drafter=self.drafter,
        )  # fmt: skip


ASSET = Eagle3Asset()
