"""Penalty context: the tokens that penalties and min_new_tokens depend on, rolled along a draft.

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
from foredraft.model.transfers import HOST, upload

__all__ = ["PenaltyContext"]


@dataclass(frozen=True, slots=True)
class PenaltyContext:
    """Tokens of B rows before the first column of a pass.

    Attributes:
        ids: [B, S] int64, the distinct tokens of prompt and output; shorter rows repeat their first one.
        counts: [B, S] float32, how often each is in the output.
        prompted: [B, S] bool, it is in the prompt. All three are None where no row has a penalty.
        new: [B] int64, tokens of the output.
        drafted: [B, K] int64, tokens along the pass; column t follows the first `ahead + t` of them.
        ahead: Drafted tokens before the first column, of all rows or of each, [B] int64.
    """

    ids: Tensor | None
    counts: Tensor | None
    prompted: Tensor | None
    new: Tensor
    drafted: Tensor | None = None
    ahead: int | Tensor = 0

    @classmethod
    def of(cls, sequences: Seq[Sequence], device: torch.device) -> PenaltyContext | None:
        """Return the context of a batch; None where no row's distribution depends on it."""
        if not any(s.params.penalised or s.params.min_new_tokens for s in sequences):
            return None
        new = upload([len(s.tokens) - len(s.prompt) for s in sequences], device)
        if not any(s.params.penalised for s in sequences):
            return cls(None, None, None, new)
        width = max(1, *(len(s.token_counts) for s in sequences if s.token_counts is not None))
        if device.type not in HOST:  # few widths, each of which a graph may be captured for
            width = 1 << (width - 1).bit_length()
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
        """Return the context of one prompt: column t follows it and the first t of the tokens ahead [K]."""
        return replace(cls.after(prompt, [], ahead.device), drafted=ahead[None])

    @classmethod
    def after(cls, prompt: list[int], output: list[int], device: torch.device) -> PenaltyContext:
        """Return the context of the token after one prompt and what is committed of its output."""
        token_counts = TokenCounts(prompt)
        for token in output:
            token_counts.count(token, 1)
        ids, counts, prompted = (
            upload(x[None], device) for x in (token_counts.ids, token_counts.counts, token_counts.prompted)
        )
        return cls(ids, counts, prompted, upload([len(output)], device))

    def along(self, drafted: Tensor, ahead: int | Tensor = 0) -> PenaltyContext:
        """Return the context of a pass whose column t follows the first `ahead + t` of drafted [B, K]."""
        return replace(self, drafted=drafted, ahead=ahead)

    def said(self, columns: int) -> Tensor:
        """Return the tokens of the output before each column, [B, T] int64."""
        return self.new[:, None] + self._drafted_before(columns)

    def _drafted_before(self, columns: int) -> Tensor:
        """Return how many drafted tokens each column follows, [1 or B, T] int64."""
        ahead = self.ahead[:, None] if isinstance(self.ahead, Tensor) else self.ahead
        return (ahead + torch.arange(columns, device=self.new.device)).view(-1, columns)

    def token_counts(self, columns: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return ids [B, N], how often each is in the output before a column [B, T, N], and whether it is in
        prompt or output there [B, T, N]. An id may stand in several places, with the same figures."""
        assert self.ids is not None and self.counts is not None and self.prompted is not None
        drafted = self.ids[:, :0] if self.drafted is None else self.drafted
        ids = torch.cat([self.ids, drafted], 1)  # [B, N]
        known = self.ids[:, None] == drafted[:, :, None]  # [B, K, S]: what was said of a drafted token before
        counts = torch.cat([self.counts, (known * self.counts[:, None]).amax(-1)], 1)
        prompted = torch.cat([self.prompted, (known & self.prompted[:, None]).any(-1)], 1)
        steps = (ids[:, None] == drafted[:, :, None]).cumsum(1)  # [B, K, N]
        steps = torch.nn.functional.pad(steps, (0, 0, 1, 0))  # [B, K + 1, N]
        if isinstance(self.ahead, Tensor):
            along = steps.gather(1, self._drafted_before(columns)[..., None].expand(-1, -1, ids.shape[1]))
        else:
            along = steps[:, self.ahead : self.ahead + columns]
        counts = counts[:, None] + along  # [B, T, N]
        return ids, counts, prompted[:, None] | (counts > 0)
