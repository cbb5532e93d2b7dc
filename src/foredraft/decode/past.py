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

import torch
from torch import Tensor

from foredraft.decode.sequence import Sequence
from foredraft.model.device import upload

__all__ = ["Past"]


@dataclass(frozen=True, slots=True)
class Past:
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
    def of(cls, sequences: Seq[Sequence], device: torch.device) -> Past | None:
        """None where no row's law depends on its past."""
        if not any(s.params.penalised or s.params.min_new_tokens for s in sequences):
            return None
        new = upload([len(s.tokens) - len(s.prompt) for s in sequences], device)
        if not any(s.params.penalised for s in sequences):
            return cls(None, None, None, new)
        tallies = [s.tally for s in sequences]
        width = max(len(tally) for tally in tallies)
        rows = [list(tally.items()) or [(0, (0, False))] for tally in tallies]
        padded = [row + row[:1] * (max(width, 1) - len(row)) for row in rows]
        ids = [[token for token, _ in row] for row in padded]
        counts = [[count for _, (count, _) in row] for row in padded]
        prompted = [[prompt for _, (_, prompt) in row] for row in padded]
        return cls(upload(ids, device), upload(counts, device, torch.float32), upload(prompted, device), new)

    @classmethod
    def of_prompt(cls, tokens: Tensor, ahead: Tensor) -> Past:
        """Of one row: column t follows tokens [n] and the first t of ahead [K], all of them its prompt's."""
        ids = torch.unique(tokens)[None]  # on the device: no host needs to know them
        counts = torch.zeros(ids.shape, device=ids.device)
        new = torch.zeros(1, dtype=torch.int64, device=ids.device)
        return cls(ids, counts, torch.ones_like(ids, dtype=torch.bool), new, ahead[None])

    def along(self, drafted: Tensor, ahead: int = 0) -> Past:
        """For a pass whose column t follows the first `ahead + t` of drafted [B, K]."""
        return replace(self, drafted=drafted, ahead=ahead)

    def said(self, columns: int) -> Tensor:
        """Tokens said before each column -> [B, T] int64."""
        return self.new[:, None] + torch.arange(self.ahead, self.ahead + columns, device=self.new.device)

    def tally(self, columns: int) -> tuple[Tensor, Tensor, Tensor]:
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
