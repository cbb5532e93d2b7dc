"""Verdict: the decision of an acceptance rule."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Verdict"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision about a draft.

    Attributes:
        accepted: [B] int64, drafted tokens to keep.
        next_token: [B] int64, correction or bonus.
        sibling: [B] int64, the sibling that `next_token` is, -1 where it is none; None without siblings.
        after_sibling: [B] int64, the token after it. It means nothing where `sibling` is -1.
    """

    accepted: Tensor
    next_token: Tensor
    sibling: Tensor | None = None
    after_sibling: Tensor | None = None

    def last_column(self, k: int) -> Tensor:
        """Return the column of the verifying pass that gave the last token, [B]."""
        if self.sibling is None:
            return self.accepted
        return torch.where(self.sibling >= 0, k + 1 + self.sibling, self.accepted)

    @property
    def last_token(self) -> Tensor:
        """Return the last token that was decided, [B]."""
        if self.sibling is None or self.after_sibling is None:
            return self.next_token
        return torch.where(self.sibling >= 0, self.after_sibling, self.next_token)
