"""Past: what a sequence has said, as far as it bears on what it may say next, rolled along a draft.

A penalty at a column of a pass depends on every token before that column, the drafted ones included:
q of the third drafted token and p of the third column both count the first two. Nothing is kept on the
device between rounds, so nothing has to be rolled back.

Repetition penalty: Keskar et al. 2019 (arXiv 1909.05858), with the sign rule of `transformers`; presence
and frequency penalties as the OpenAI API defines them.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from foredraft.decode.sequence import Sequence
from foredraft.decode.token_counts import TokenCounts
from foredraft.model.device import upload

__all__ = ["PenaltyContext"]


@dataclass(frozen=True, slots=True)
class PenaltyContext:
    """Of B rows, before the first column of a pass.

    ids [B, S] int64: the distinct tokens of prompt and output; rows of fewer repeat their first.
    counts [B, S] float32: how often each was said, the prompt aside; prompted [B, S] bool: it is in the
    prompt. None where no row has a penalty. new [B] int64: tokens said.
    drafted [B, K] int64: what is said along the pass; column t follows the first `ahead + t` of them.
    """

    ids: Tensor | None
    counts: Tensor | None
    prompted: Tensor | None
    new: Tensor
    drafted: Tensor | None = None
    ahead: int = 0

    @classmethod
    def of(cls, sequences: Seq[Sequence], device: torch.device) -> PenaltyContext | None:
        """None where no row's law depends on its past."""
        if not any(s.params.penalised or s.params.min_new_tokens for s in sequences):
            return None
        new = upload([len(s.tokens) - len(s.prompt) for s in sequences], device)
        if not any(s.params.penalised for s in sequences):
            return cls(None, None, None, new)
        width = max(1, *(len(s.token_counts) for s in sequences if s.token_counts is not None))
        ids = np.zeros((len(sequences), width), dtype=np.int64)
        counts, prompted = np.zeros(ids.shape, dtype=np.float32), np.zeros(ids.shape, dtype=np.bool_)
        for row, sequence in enumerate(sequences):
            if (token_counts := sequence.token_counts) is not None:
                for array, values in (
                    (ids, token_counts.ids),
                    (counts, token_counts.counts),
                    (prompted, token_counts.prompted),
                ):
                    array[row, : len(values)], array[row, len(values) :] = values, values[0]
        return cls(upload(ids, device), upload(counts, device), upload(prompted, device), new)

    @classmethod
    def of_prompt(cls, prompt: list[int], ahead: Tensor) -> PenaltyContext:
        """Of one row: column t follows a prompt's first tokens and then the first t of ahead [K], which are
        its next."""
        token_counts = TokenCounts(prompt)
        ids, counts, prompted = (
            upload(x[None], ahead.device)
            for x in (token_counts.ids, token_counts.counts, token_counts.prompted)
        )
        return cls(ids, counts, prompted, torch.zeros_like(ids[:, 0]), ahead[None])

    def along(self, drafted: Tensor, ahead: int = 0) -> PenaltyContext:
        """For a pass whose column t follows the first `ahead + t` of drafted [B, K]."""
        return replace(self, drafted=drafted, ahead=ahead)

    def said(self, columns: int) -> Tensor:
        """Tokens said before each column -> [B, T] int64."""
        return self.new[:, None] + torch.arange(self.ahead, self.ahead + columns, device=self.new.device)

    def token_counts(self, columns: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of each column: ids [B, N] that may have been said, how often [B, T, N], and whether they are in
        prompt or output [B, T, N]. An id may stand in several places, with the same figures in all."""
        assert self.ids is not None and self.counts is not None and self.prompted is not None
        drafted = self.ids[:, :0] if self.drafted is None else self.drafted
        ids = torch.cat([self.ids, drafted], 1)  # [B, N]
        known = self.ids[:, None] == drafted[:, :, None]  # [B, K, S]: what was said of a drafted token before
        counts = torch.cat([self.counts, (known * self.counts[:, None]).amax(-1)], 1)
        prompted = torch.cat([self.prompted, (known & self.prompted[:, None]).any(-1)], 1)
        steps = (ids[:, None] == drafted[:, :, None]).cumsum(1)  # [B, K, N]
        along = torch.nn.functional.pad(steps, (0, 0, 1, 0))[:, self.ahead : self.ahead + columns]
        counts = counts[:, None] + along  # [B, T, N]
        return ids, counts, prompted[:, None] | (counts > 0)
