"""What the drafters of whole blocks share: one pass over all slots, then one slot a step.

The target hands over its states of committed positions. Their keys and values stand in the head's cache, at
their positions, and depend on nothing that comes later: so a rollback sets a length. The first step of a
draft writes those of all rows that wait, and runs the block; each step gives the logits of the next slot.
What the block wrote to the cache lies behind the committed positions, and the next block overwrites it.

A reduced head has logits for some tokens alone. Scattered over the target's vocabulary, they are -inf
elsewhere before every transform: q is 0 there, and the residual is over the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from foredraft.decode.drafter import DraftPass, Stepper
from foredraft.decode.sequence import Sequence
from foredraft.drafters.asset import Found, Parts
from foredraft.drafters.heads.block_files import BlockFiles
from foredraft.drafters.heads.block_gguf import read_block_head
from foredraft.drafters.heads.block_head import BlockHead, load_block
from foredraft.drafters.heads.head_asset import HeadAsset
from foredraft.drafters.heads.settings import described_head, with_settings
from foredraft.drafters.heads.timed_pass import TimedPass
from foredraft.drafters.heads.words import map_of
from foredraft.drafters.waiting_states import Waiting, WaitingStates
from foredraft.model.cache import CacheLayers, KVCache
from foredraft.model.forward_context import rope_tables
from foredraft.model.runner import DraftInputs, FusedDraft, Runner
from foredraft.model.unread import Checkpoint

__all__ = ["BlockAsset", "BlockDrafter", "BlockPass"]


@dataclass(frozen=True, slots=True)
class Block:
    """A block that ran.

    Attributes:
        hidden: The normed states of all slots, [B, block, d].
        logits: Of the first slots that draft, [B, n, words] float32, without a bias.
    """

    hidden: Tensor
    logits: Tensor

    @staticmethod
    def of(head: BlockHead, hidden: Tensor, count: int) -> Block:
        """Return a block with the logits of its first `count` slots that draft, in one product."""
        first = head.record.first_slot
        slots = hidden[:, first : first + count]
        return Block(hidden, head.logits(slots.flatten(0, 1)).view(*slots.shape[:2], -1))


class Chain:
    """The logits of one slot after the other, given the tokens before them."""

    def __init__(self, head: BlockHead, block: Block, anchors: Tensor) -> None:
        self.head, self.block, self.taken = head, block, 0
        self.state: Tensor | None = None
        if head.markov is not None and head.record.first_slot:
            self.state = head.markov.after(anchors, block.hidden[:, 0])

    def next(self, before: Tensor) -> Tensor:
        """Return the logits [B, words] of the next slot, after the tokens before it, [B]."""
        logits = self.block.logits[:, self.taken]
        if self.head.markov is not None:
            hidden = self.block.hidden[:, self.head.record.first_slot + self.taken]
            bias, self.state = self.head.markov(before, hidden, self.state)
            logits = logits + bias
        self.taken += 1
        return logits


@dataclass(frozen=True, slots=True)
class BlockPass(TimedPass):
    """A draft over contexts that mean nothing: its first step runs the block."""

    head: BlockHead = field(kw_only=True)

    @property
    def described(self) -> str:
        return repr(self.head.record)

    def fused(self, cache: CacheLayers, inputs: DraftInputs) -> FusedDraft:
        batch, record = len(inputs.starts), self.head.record
        own, tables = self.scratch_of(cache, record.spec)
        with torch.inference_mode():
            before = torch.tensor([tokens[-1] for tokens in inputs.tokens], device=own.device)
            hidden = self.head.run(own, tables, before, inputs.starts, [True] * batch)
            count = min(record.drafts, max(inputs.lengths))
            chain, tokens = Chain(self.head, Block.of(self.head, hidden, count), before), list[Tensor]()
            for _ in range(count):
                before = chain.next(before).argmax(-1)
                tokens.append(before)
            drafted = torch.stack(tokens, 1)
            return FusedDraft(drafted, torch.ones_like(drafted, dtype=torch.bool), None)


class BlockDrafter(Stepper):
    """A stepper over a block drafter's head and the target's states.

    Args:
        target: The target's runner.
        cache: The target's KV cache.
        head: The head.
        planned: Draft length that the head's config proposes.
    """

    draft_pass: DraftPass

    def __init__(self, target: Runner, cache: KVCache, head: BlockHead, planned: int | None = None) -> None:
        record = head.record
        assert record.taps is not None, "a record that was checked for a target has its taps"
        self.head, self.planned = head, planned
        self.max_draft = self.longest_draft = record.drafts
        self.taps = tuple(dict.fromkeys(record.taps))
        self.cache = cache.beside(record.spec)
        self.caches = (self.cache,)
        self.draft_pass = BlockPass(target, head=head)
        self.vocabulary = map_of(head.words, target.decoder)
        self._tables = rope_tables(record.spec, self.cache.stored, cache.device, cache.dtype)
        self._waiting = Waiting()
        self._chain: Chain | None = None  # of the draft that is being made
        self._expected = record.drafts  # tokens of the longest draft of the round

    @staticmethod
    def read_files(head: Path) -> BlockFiles:
        """Return the head in a folder or a GGUF file, or raise CheckpointError."""
        return read_block_head(head)

    def length(self, sequence: Sequence) -> int:
        return len(sequence.tokens) - 1  # what the head lacks, its first step reads from taps

    def expect(self, budgets: list[int]) -> None:
        self._expected = min(max(budgets), self.head.record.drafts)

    @torch.inference_mode()
    def step(
        self, tokens: Tensor, starts: list[int], counts: list[int], idle: list[bool], at: Tensor | None
    ) -> Tensor:
        before = tokens[:, 0]
        if self._chain is None:
            self._keep(self._waiting.where(lambda sequence: not idle[sequence.row]))
            drafts = [not is_idle for is_idle in idle]
            hidden = self.head.run(self.cache, self._tables, before, starts, drafts)
            self._chain = Chain(self.head, Block.of(self.head, hidden, self._expected), before)
        logits = self._chain.next(before)
        return logits if self.vocabulary is None else self.vocabulary.columns(logits)

    def resume(self) -> None:
        self._chain = None  # the draft ends

    @torch.inference_mode()
    def observe(self, sequence: Sequence, start: int, states: Mapping[int, Tensor]) -> None:
        """Note the target's states of newly committed positions; those of a prompt are read at once."""
        assert self.head.record.taps is not None
        new = torch.cat([states[tap] for tap in self.head.record.taps], -1)
        waiting = self._waiting.add(sequence, start, new)
        if waiting.due:
            self._keep([waiting])

    @torch.inference_mode()
    def settle(self, sequence: Sequence) -> None:
        self._keep(self._waiting.of(sequence))

    def rewind(self, sequence: Sequence) -> None:
        most, row = len(sequence.tokens) - 1, sequence.row
        self._chain = None
        self.cache.lengths[row] = min(self.cache.lengths[row], most)
        self._waiting.rewind(sequence, most)

    def leave(self, sequence: Sequence) -> None:
        self._chain = None
        self._waiting.drop(sequence)

    def _keep(self, waiting: list[WaitingStates]) -> None:
        """Write the keys and values of waiting taps to their rows, those of all rows in one pass."""
        by_row = {each.sequence.row: each for each in waiting}
        if not by_row:
            return
        rows = range(min(by_row), max(by_row) + 1)
        joined = self.head.contexts(torch.cat([by_row[row].states for row in rows if row in by_row]))
        contexts, starts, done = [joined[:0]] * len(rows), [0] * len(rows), 0
        for row in filter(by_row.__contains__, rows):
            each, at = by_row[row], row - rows.start
            contexts[at], starts[at] = joined[done : done + len(each.states)], each.start
            done += len(each.states)
        self.head.inject(self.cache, self._tables, contexts, starts, rows.start)
        for row, each in by_row.items():
            self.cache.lengths[row] = each.stop
            self._waiting.drop(each.sequence)


@dataclass(frozen=True, kw_only=True)
class FoundBlock(Found):
    """A head that fits the target.

    Attributes:
        drafter: The drafter's class.
        files: The head.
        target: The target.
    """

    drafter: type[BlockDrafter]
    files: BlockFiles
    target: Checkpoint

    def row_bytes(self, positions: int) -> int:
        return KVCache.bytes_per_row(self.files.record.spec, positions, self.target.dtype)

    def make(self, parts: Parts) -> BlockDrafter:
        return self.drafter(parts.target, parts.cache, load_block(self.files, parts.target), self.planned)


class BlockAsset(HeadAsset):
    """A head of a block drafter.

    Attributes:
        drafter: Drafts with it, and reads its files.
    """

    drafter: ClassVar[type[BlockDrafter]]

    def found(self, place: Path, target: Checkpoint) -> Found:
        files, settings = with_settings(self.drafter.read_files(place), target.spec)
        record = files.record
        return FoundBlock(
            bytes=files.parameters * target.dtype.itemsize, planned=record.planned,
            longest_draft=record.drafts, drafter=self.drafter, files=files, target=target,
            about=described_head(files, settings, f", blocks of {record.drafts}"),
        )  # fmt: skip
