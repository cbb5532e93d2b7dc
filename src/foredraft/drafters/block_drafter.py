"""DFlash (arXiv:2602.06036) and DSpark (arXiv:2607.05147): one pass over a block, then one slot a step.

The first step of a draft runs the block, which gives the states of all slots; each step gives the logits of
the next slot. Those of DFlash depend on the text before the draft alone; those of DSpark also on the tokens
drawn before the slot. Either way q is known before the token is drawn, so ordinary rejection is exact. What
the block wrote to the cache lies behind the committed positions, and the next block overwrites it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from foredraft.drafters.heads.block_head import BlockHead, load_block
from foredraft.drafters.heads.gguf_files import read_block_head
from foredraft.drafters.heads.layers import HeadDrafter, TimedPass
from foredraft.drafters.states import WaitingStates
from foredraft.model.cache import CacheLayers, KVCache
from foredraft.model.runner import DraftInputs, FusedDraft, Runner


class Chain:
    """The logits of one slot after the other, given the tokens before them."""

    def __init__(
        self,
        head: BlockHead,
        hidden: Tensor,  # the normed states of all slots of a block, [B, block, d]
        count: int,  # the first slots that draft; their logits without a bias come in one product
        anchors: Tensor,  # [B]
    ) -> None:
        self.head, self.hidden, self.first = head, hidden, head.record.first_slot
        slots = hidden[:, self.first : self.first + count]
        self.logits = head.logits(slots.flatten(0, 1)).view(*slots.shape[:2], -1)  # [B, n, draft V] float32
        self.taken = 0
        self.state: Tensor | None = None
        if head.markov is not None and self.first:
            self.state = head.markov.after(anchors, hidden[:, 0])

    def next(self, before: Tensor) -> Tensor:
        """Return the logits [B, draft_vocab] of the next slot, after the tokens before it, [B]."""
        logits = self.logits[:, self.taken]
        if self.head.markov is not None:
            hidden = self.hidden[:, self.first + self.taken]
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
            chain, tokens = Chain(self.head, hidden, count, before), list[Tensor]()
            for _ in range(count):
                before = chain.next(before).argmax(-1)
                tokens.append(before)
            drafted = torch.stack(tokens, 1)
            return FusedDraft(drafted, torch.ones_like(drafted, dtype=torch.bool), None)


class BlockDrafter(HeadDrafter):
    """An autoregressive drafter over a block drafter's head and the target's states."""

    head: BlockHead
    read_files, load = staticmethod(read_block_head), staticmethod(load_block)

    def __init__(self, target: Runner, cache: KVCache, head: BlockHead, planned: int | None = None) -> None:
        super().__init__(target, cache, head, planned)
        self.max_draft = self.longest_draft = head.record.drafts
        self.draft_pass = BlockPass(target, head=head)
        self._chain: Chain | None = None  # of the draft that is being made
        self._expected = head.record.drafts  # tokens of the longest draft of the round

    def expect(self, budgets: list[int]) -> None:
        self._expected = min(max(budgets), self.head.record.drafts)

    @torch.inference_mode()
    def step(
        self, tokens: Tensor, starts: list[int], counts: list[int], idle: list[bool], at: Tensor | None
    ) -> Tensor:
        before = tokens[:, 0]
        if self._chain is None:
            self.read_states(self._waiting.where(lambda sequence: not idle[sequence.row]))
            drafts = [not is_idle for is_idle in idle]
            hidden = self.head.run(self.cache, self._tables, before, starts, drafts)
            self._chain = Chain(self.head, hidden, self._expected, before)
        logits = self._chain.next(before)
        return logits if self.vocabulary is None else self.vocabulary.columns(logits)

    def end_draft(self) -> None:
        self._chain = None

    def read_states(self, waiting: list[WaitingStates]) -> None:
        """Write the keys and values of waiting states to their rows, those of all rows in one pass."""
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


class DFlash(BlockDrafter):
    """An autoregressive drafter whose slots are independent."""

    name = "dflash"


class DSpark(BlockDrafter):
    """An autoregressive drafter whose slots follow each other."""

    name = "dspark"
