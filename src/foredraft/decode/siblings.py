"""Siblings: further choices of a drafter at places of its draft, of which nothing is drafted further.

A draft with siblings is a *comb*. One pass of the target verifies both: a sibling is a leaf of the pass, in
the place of a drafted token (`model.runner.Leaves`). The acceptance rule writes a token where the draft ends
or is rejected. Where this token is a sibling, the target's row of the leaf gives the token after it as well.
That is the plain step that would follow, a round earlier: the text keeps its law, whatever the siblings are.
Rule `speculative` tests them by turns after a rejection (`accept`); the other rules do not know of them.

Siblings are the tokens that come next in the draw of the drafted one: at temperature 0 the next likeliest; of
a sampled draft those that the same noise draws without the tokens before them, so under `coupled` those that
the target most likely writes.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foredraft.decode.verdict import Verdict
from foredraft.model.runner import Leaves
from foredraft.model.transfers import upload

__all__ = ["Siblings", "choices_of"]


def choices_of(budgets: Seq[int], siblings: Seq[int]) -> list[int]:
    """Return how many further choices a batch needs of each draft step, from the first one on.

    The siblings of a row lie one to a place, from the first place on; those beyond the draft's length are
    third choices, and so on.

    Args:
        budgets: [B] tokens that each row drafts at most.
        siblings: [B] how many it has; empty where no row has any.

    Examples:
        >>> choices_of([4, 2], [3, 0]), choices_of([2], [3])
        ([1, 1, 1], [2, 1])
    """
    if not any(siblings):
        return []
    rows = [(budget, count) for budget, count in zip(budgets, siblings, strict=True) if budget]
    reached = max((min(pair) for pair in rows), default=0)
    return [max(-(-(count - place) // budget) for budget, count in rows) for place in range(reached)]


@dataclass(frozen=True, slots=True)
class Siblings:
    """The siblings of every row's draft.

    Attributes:
        tokens: [B, S] int64; -1 where there is none. Those of one place lie in the order of the draw.
        places: [B, S] int64, drafted tokens before each; 0 where there is none.
        most: Siblings of one place, at most.
        masks: Of the constraints after each, [B, S, V] bool; None without any constraint.
        last: [B, S] bool, a constraint does not let the text go on after it; None without any constraint.
    """

    tokens: Tensor
    places: Tensor
    most: int
    masks: Tensor | None = None
    last: Tensor | None = None

    @classmethod
    def of(cls, further: Tensor, lengths: Tensor, budgets: Seq[int], siblings: Seq[int]) -> Siblings | None:
        """Lay out the further choices [B, K, M] of a draft; None where no row has siblings.

        Args:
            further: -1 where there is none.
            lengths: [B] of the drafts.
            budgets: [B], as `choices_of`.
            siblings: [B], as `choices_of`.
        """
        if not any(siblings):
            return None
        width, device = max(siblings), further.device
        at = [
            [divmod(index, budget)[::-1] for index in range(count)] + [(0, -1)] * (width - count)
            if budget
            else [(0, -1)] * width
            for budget, count in zip(budgets, siblings, strict=True)
        ]
        places, choice = upload(at, device, torch.int64).unbind(2)  # [B, S] each
        rows = torch.arange(len(at), device=device)[:, None]
        reached = (choice >= 0) & (places < lengths[:, None])
        steps = further.shape[1]  # all drafts may have ended before a place
        tokens = further[rows, places.clamp_max(steps - 1), choice].where(reached, -1)
        return cls(tokens, places.where(tokens >= 0, 0), further.shape[2])

    @classmethod
    def combine(cls, parts: Seq[tuple[Tensor, Siblings | None]]) -> Siblings | None:
        """Return the siblings of rows that several drafters drafted; each part's rows are [B] bool."""
        known = [(own, part) for own, part in parts if part is not None]
        if not known:
            return None
        width = max(part.tokens.shape[1] for _, part in known)
        tokens = torch.full((len(known[0][0]), width), -1, device=known[0][0].device)
        places = torch.zeros_like(tokens)
        for own, part in known:
            s = part.tokens.shape[1]
            tokens[:, :s] = part.tokens.where(own[:, None], tokens[:, :s])
            places[:, :s] = part.places.where(own[:, None], places[:, :s])
        return cls(tokens, places, max(part.most for _, part in known))

    def at(self, places: Tensor, choice: int) -> Tensor:
        """Return each row's sibling at a place [B]: the first for `choice` 0. [B] int64, -1 where none is."""
        there = (self.places == places[:, None]) & (self.tokens >= 0)
        own = there & (there.cumsum(1) == choice + 1)
        index = own.to(torch.int64).argmax(1)
        return self.tokens.gather(1, index[:, None])[:, 0].where(own.any(1), -1)

    def listed(self) -> list[list[tuple[int, int]]]:
        """Return (place, token) of every sibling, [B, S]; token -1 where there is none."""
        return [
            list(zip(places, tokens, strict=True))
            for places, tokens in zip(self.places.tolist(), self.tokens.tolist(), strict=True)
        ]

    def under(self, after: list[list[Tensor | None]], everything: Tensor) -> Siblings:
        """Return the siblings with the masks of constraints after each, [B, S] of [V]; None is no way on."""
        masks = [[everything if mask is None else mask for mask in row] for row in after]
        last = [[mask is None for mask in row] for row in after]
        stacked = torch.stack([torch.stack(row) for row in masks])
        return replace(self, masks=stacked, last=upload(last, self.tokens.device))

    def leaves(self, width: int) -> Leaves:
        """Return the leaves of a verifying pass whose columns from `width` on are the siblings."""
        return [
            {width + index: 1 + place for index, (place, token) in enumerate(row) if token >= 0}
            for row in self.listed()
        ]

    def written(self, verdict: Verdict) -> Tensor:
        """Return which sibling the rule wrote and the text goes on after, [B]; -1 where it is none."""
        same = (self.places == verdict.accepted[:, None]) & (self.tokens == verdict.next_token[:, None])
        if self.last is not None:
            same = same & ~self.last
        return same.to(torch.int64).argmax(1).where(same.any(1), -1)
