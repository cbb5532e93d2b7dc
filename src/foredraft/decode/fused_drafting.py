"""Fused drafting: a stepper's draft by calls that draw tokens themselves, of all steps or of one at a time.

A call masks its first step alone. So under a constraint each step is a call of its own, unless the draft of
one call turns out to be what masks at every step would have given.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.decode.constraint import Walks
from foredraft.decode.distribution import Distribution
from foredraft.decode.drafter import Stepper
from foredraft.decode.round_draft import Draft, lengths_tensor, pad_rows, with_siblings
from foredraft.model.runner import DraftInputs

__all__ = ["FusedDrafting"]


@dataclass(frozen=True, slots=True)
class FusedDrafting:
    """One round's draft by a drafter's fused calls: the draft of the loop, by the same noise.

    Both methods return None where the drafter has to be stepped by the loop.

    Attributes:
        drafter: The drafter.
        inputs: What each row reads first, and drafts at most; no token is masked.
        walks: Constraints along the drafts; None without any.
        siblings: [B] further choices beside each row's draft, at most.
    """

    drafter: Stepper
    inputs: DraftInputs
    walks: Walks | None
    siblings: Seq[int] = ()

    def all_steps(self) -> Draft | None:
        """Return the draft by one call; None also where a mask of a later step would change a draw."""
        walks, inputs = self.walks, self.inputs
        budgets, samples = inputs.lengths, inputs.sampling is not None
        if walks is not None:
            if walks.narrow:
                return None
            masks = walks.allowed()
            if samples and any(mask is not None for mask in masks):
                return None
            inputs = replace(inputs, allowed=masks)
        fused = self.drafter.fused_draft(inputs)
        if fused is None:
            return None
        lengths, nonfinite = list[int](), list[bool]()
        for row, (tokens, finite, budget) in enumerate(
            zip(fused.tokens.tolist(), fused.finite.tolist(), budgets, strict=True)
        ):
            length, goes_on = 0, True
            while goes_on and length < budget and finite[length] and tokens[length] >= 0:
                mask = None if walks is None else walks.mask(row)
                if mask is not None and (samples or not bool(mask[tokens[length]])):
                    assert walks is not None
                    walks.undo()
                    self.drafter.resume()  # of a draft that is taken back
                    return None
                length += 1
                goes_on = walks is None or length == budget or walks.goes_on(row, tokens[length - 1])
            lengths.append(length)
            nonfinite.append(goes_on and length < budget and not finite[length])
        if walks is not None:
            walks.undo()
        tokens = fused.tokens[:, : max(lengths)]
        if lengths != budgets:
            beyond = torch.arange(tokens.shape[1]) >= torch.tensor(lengths)[:, None]
            tokens = tokens.masked_fill(beyond, 0)
        return self._draft(tokens, fused.probs, lengths, nonfinite, fused.further)

    def single_steps(self) -> Draft | None:
        """Return the draft by one call a step."""
        walks, inputs, budgets = self.walks, self.inputs, self.inputs.lengths
        if walks is None:
            return None
        drafts: list[list[int]] = [[] for _ in budgets]
        nonfinite = [False] * len(budgets)
        columns: list[Tensor] = []
        further: list[Tensor] = []
        going = [budget > 0 for budget in budgets]
        tokens, starts = inputs.tokens, inputs.starts
        for j in range(max(budgets)):
            sampling = None if inputs.sampling is None else inputs.sampling.step(j)
            step = DraftInputs(
                tokens, starts, list(map(int, going)), sampling, walks.allowed(),
                choices=inputs.choices[j : j + 1],
            )  # fmt: skip
            fused = self.drafter.fused_draft(step)
            if fused is None:
                walks.undo()
                return None
            if fused.probs is not None:
                columns.append(fused.probs)
            if fused.further is not None:
                missing = inputs.choices[0] - inputs.choices[j]
                further.append(F.pad(fused.further, (0, missing), value=-1))
            found = fused.tokens[:, 0].tolist()
            for row, (token, finite) in enumerate(zip(found, fused.finite[:, 0].tolist(), strict=True)):
                if going[row]:
                    nonfinite[row] = not finite
                    drawn = finite and token >= 0
                    drafts[row] += [token] * drawn
                    going[row] = drawn and j + 1 < budgets[row] and walks.goes_on(row, token)
            if not any(going):
                break
            starts = [start + len(own) for start, own in zip(starts, tokens, strict=True)]
            tokens = [[token] for token in found]
        walks.undo()
        drafted = torch.tensor(pad_rows(drafts), dtype=torch.int64)
        probs, others = (torch.cat(each, 1) if each else None for each in (columns, further))
        return self._draft(drafted, probs, list(map(len, drafts)), nonfinite, others)

    def _draft(
        self,
        tokens: Tensor,
        probs: Tensor | None,
        lengths: list[int],
        nonfinite: list[bool],
        further: Tensor | None,
    ) -> Draft:
        q = Distribution(ids=tokens) if probs is None else Distribution(probs[:, : tokens.shape[1]])
        faults = torch.tensor(nonfinite) if any(nonfinite) else None
        on_device = lengths_tensor(tuple(lengths), tokens.device)
        resume = self.drafter.resume()
        draft = Draft(tokens, on_device, q, resume and resume.fit(tokens.shape[1] + 1), faults, lengths)
        if further is None:
            return draft
        return with_siblings(draft, further, self.inputs.lengths, self.siblings)
