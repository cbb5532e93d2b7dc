"""Known states: those of the target that a draft's steps computed, for the verifying pass to resume from."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from foredraft.model.runner import FusedDraft, Resume
from foredraft.model.transfers import on_host

__all__ = ["KnownStates"]


class KnownStates:
    """The states of one draft that enter layer `depth`: those of the pending token and of drafted ones.

    The last drafted token has none, because no step reads it.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._states: list[Tensor] = []  # [B, steps, D] each
        self._known: list[int] = []  # [B]

    def add(self, states: Tensor, idle: Seq[bool]) -> None:
        """Add one step's states [B, 1, D]."""
        self._add(states, [not is_idle for is_idle in idle])

    def add_fused(self, draft: FusedDraft, lengths: Seq[int]) -> None:
        """Add the states of a fused draft of at most `lengths` [B] tokens."""
        assert draft.states is not None
        known = list(lengths)
        if on_host(draft.tokens):  # elsewhere every row draws all of its tokens
            drawn = (draft.tokens >= 0).cumprod(1).sum(1).tolist()  # a row ends at one that it cannot draw
            known = [min(n, count + 1) for n, count in zip(lengths, drawn, strict=True)]
        self._add(draft.states, known)

    def _add(self, states: Tensor, counts: Seq[int]) -> None:
        self._states.append(states)
        known = self._known or [0] * len(counts)
        self._known = [n + count for n, count in zip(known, counts, strict=True)]

    def take(self) -> Resume | None:
        """Return the states of the draft, and forget them; None without any."""
        if not self._states:
            return None
        resume = Resume(self.depth, torch.cat(self._states, 1), self._known)
        self.forget()
        return resume

    def forget(self) -> None:
        """Forget the states of a draft that an exception may have ended halfway."""
        self._states, self._known = [], []
