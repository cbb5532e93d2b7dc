"""P-EAGLE (arXiv:2602.01469): an EAGLE-3 head that drafts all tokens in one pass.

Behind the pairs that EAGLE-3 reads lie masked ones: the embedding of one token, and one learned state. The
first pair that is not of the text gives the logits of the draft's first token, each masked one those of the
next. All attend to what is before them, and none sees a drafted token, so q of a slot is fixed before
anything is drawn, and ordinary rejection is exact. What masked pairs wrote to the cache lies behind the
committed positions, and the next draft overwrites it.

Source: https://github.com/vllm-project/vllm, vllm/v1/spec_decode/utils.py (the inputs of parallel drafting).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self, cast

import torch
from torch import Tensor

from foredraft.drafters.eagle3 import Eagle3, Eagle3Head, MaskedPairs
from foredraft.drafters.heads.configs import read_p_eagle
from foredraft.drafters.heads.layers import HeadBuilder, HeadCache, load_head
from foredraft.drafters.heads.record import PEagleRecord
from foredraft.drafters.heads.tensors import MASK_HIDDEN, HeadFiles
from foredraft.model.cache import KVCache
from foredraft.model.checkpoint import Checkpoint
from foredraft.model.runner import DraftInputs, FusedDraft, Runner

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PEagleHead(Eagle3Head):
    mask_hidden: Tensor | None = None  # the joined auxiliary states of a masked pair, before `fc`

    @classmethod
    def of(cls, builder: HeadBuilder) -> Self:
        return replace(super().of(builder), mask_hidden=builder.load([MASK_HIDDEN]).view(1, -1))

    def masked(self, count: int) -> MaskedPairs:
        mask = cast(PEagleRecord, self.record).mask_token
        assert mask is not None and self.mask_hidden is not None
        return MaskedPairs(count, mask, self.joined(self.mask_hidden))

    def timed_step(self, own: HeadCache, tokens: Tensor, starts: list[int]) -> Tensor:
        raise NotImplementedError  # all tokens of a draft come of one pass

    def timed_draft(self, own: HeadCache, inputs: DraftInputs) -> FusedDraft:
        batch, count = len(inputs.starts), max(inputs.lengths)
        states = own.kv.planes[0].new_zeros(batch, count, self.record.spec.hidden_size)
        tokens = torch.zeros(batch, count, dtype=torch.int64, device=own.kv.device)
        starts = [max(1, start) for start in inputs.starts]
        left = self.run(own, tokens, states, starts, [count] * batch)
        drafted = self.logits(left.flatten(0, 1)).argmax(-1).view(batch, count)
        return FusedDraft(drafted, torch.ones_like(drafted, dtype=torch.bool), None)


def load_p_eagle(files: HeadFiles[PEagleRecord], target: Runner) -> PEagleHead:
    """Read the weights of a head, in the target's dtype."""
    head = load_head(files, target, PEagleHead.of)
    return cast(PEagleHead, head.by_kernels()) if target.by_kernels else head


class PEagle(Eagle3):
    """An autoregressive drafter whose first step gives the logits of all tokens."""

    name = "p-eagle"
    head: PEagleHead
    read_folder, load = staticmethod(read_p_eagle), staticmethod(load_p_eagle)

    def __init__(self, target: Runner, cache: KVCache, head: PEagleHead, planned: int | None = None) -> None:
        super().__init__(target, cache, head, planned)
        self._expected = 1  # tokens of the longest draft of the round
        # the logits of the steps to come, [B, draft_vocab] each, and the rows that draft; None before a draft
        self._slots: tuple[list[Tensor], list[bool]] | None = None

    @classmethod
    def files_for(cls, place: Path, target: Checkpoint) -> HeadFiles[PEagleRecord]:
        files = read_p_eagle(place)
        if files.record.mask_token is not None:
            return files
        mask = usual_mask(target)
        logger.warning(
            "%s names no token for masked slots; token %d is taken, as SpecForge does", place, mask
        )
        return replace(files, record=replace(files.record, mask_token=mask))

    def expect(self, budgets: list[int]) -> None:
        self._expected = max(1, *budgets)

    @torch.inference_mode()
    def step(
        self, tokens: Tensor, starts: list[int], counts: list[int], idle: list[bool], at: Tensor | None
    ) -> Tensor:
        if self._slots is None:
            left, drafts = self.first_step(starts, idle, self.head.masked(self._expected - 1))
            logits = self.head.logits(left.flatten(0, 1)).view(*left.shape[:2], -1)
            self._slots = list(logits.unbind(1)), drafts
        slots, drafts = self._slots
        return self.over_target(slots.pop(0), drafts)

    def fused_draft(self, inputs: DraftInputs) -> FusedDraft | None:
        return None

    def end_draft(self) -> None:
        self._slots = None


def usual_mask(target: Checkpoint) -> int:
    """Return the token that SpecForge puts into masked slots where a head names none.

    SpecForge takes the first id that the tokenizer does not use, or else an end token.
    """
    vocabulary, tokenizer = target.spec.vocab_size, target.tokenizer
    unused = vocabulary if tokenizer is None else tokenizer.inner.get_vocab_size()
    return unused if unused < vocabulary else next(iter(target.spec.eos_token_ids), 0)
