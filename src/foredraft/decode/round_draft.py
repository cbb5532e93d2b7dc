"""Draft: the tokens that one round proposes, and the inputs of the round."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from foredraft.decode.constraint import masks_along
from foredraft.decode.distribution import Distribution
from foredraft.decode.noise import NoiseKeys
from foredraft.decode.penalty_context import PenaltyContext
from foredraft.decode.sampling import SamplingTable
from foredraft.decode.sequence import Sequence
from foredraft.decode.siblings import Siblings
from foredraft.model.runner import Resume
from foredraft.model.transfers import upload

__all__ = ["Draft", "RoundInputs", "lengths_tensor", "no_draft", "pad_rows", "with_siblings"]


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed tokens of every row.

    Attributes:
        tokens: [B, K] int64, padded with 0.
        lengths: [B] int64.
        q: The drafters' distributions at the K positions.
        resume: Hidden states of the target that a stepper already computed for [pending, *tokens].
        nonfinite: [B] bool, rows whose drafter gave non-finite logits; None where no row did.
        host_lengths: Upper bounds of `lengths` that the host knows without reading the device; None is none.
        undrawn: [B] int64, draft steps that proposed no token; None where the policy leaves no place undrawn.
        host_tokens: The tokens of every row as far as they reach, [B] lists; None where the host has to read
            them.
        siblings: Further choices beside the tokens; None without any.
    """

    tokens: Tensor
    lengths: Tensor
    q: Distribution
    resume: Resume | None = None
    nonfinite: Tensor | None = None
    host_lengths: list[int] | None = None
    undrawn: Tensor | None = None
    host_tokens: list[list[int]] | None = None
    siblings: Siblings | None = None

    @property
    def proposal(self) -> Draft:
        """Return what the decision reads: tokens, lengths, q and siblings."""
        return Draft(self.tokens, self.lengths, self.q, siblings=self.siblings)

    @classmethod
    def combine(cls, parts: list[tuple[list[bool], Draft]], inputs: RoundInputs) -> Draft:
        """Return one draft for a batch whose rows were drafted by several drafters.

        Args:
            parts: Each drafter's draft, with the rows that it speaks for, [B] bool.
            inputs: The round.
        """
        device, rows = inputs.device, len(inputs.sequences)
        width = max(draft.tokens.shape[1] for _, draft in parts)
        tokens = torch.zeros(rows, width, dtype=torch.int64, device=device)
        lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        nonfinite = torch.zeros(rows, dtype=torch.bool, device=device)
        undrawn: Tensor | None = None
        host_lengths = list(inputs.budgets)
        for own_rows, draft in parts:
            own = upload(own_rows, device)
            k = draft.tokens.shape[1]
            tokens[:, :k] = draft.tokens.where(own[:, None], tokens[:, :k])
            lengths = draft.lengths.where(own, lengths)
            if draft.nonfinite is not None:
                nonfinite = nonfinite | draft.nonfinite
            if draft.undrawn is not None:
                undrawn = draft.undrawn if undrawn is None else undrawn + draft.undrawn
            if draft.host_lengths is not None:
                pairs = zip(own_rows, draft.host_lengths, host_lengths, strict=True)
                host_lengths = [mine if is_own else other for is_own, mine, other in pairs]
        q = Distribution.combine(
            [(upload(own, device), draft.q) for own, draft in parts], tokens, inputs.vocabulary
        )
        # The verifying pass resumes at one depth; the lower layers of other rows simply run again.
        resume = next((draft.resume for _, draft in parts if draft.resume is not None), None)
        siblings = Siblings.combine([(upload(own, device), draft.siblings) for own, draft in parts])
        resume = resume and resume.fit(width + 1)
        return cls(tokens, lengths, q, resume, nonfinite, host_lengths, undrawn, siblings=siblings)


@dataclass(frozen=True)
class RoundInputs:
    """Every row of the batch in one round, in row order.

    Attributes:
        sequences: [B].
        idle: [B], rows that are still in prefill, or paused.
        budgets: [B] tokens to draft at most; 0 in idle rows and in plain ones.
        drafters: [B] the drafter's name; None where the budget is 0.
        table: Sampling parameters of the rows.
        vocabulary: Size V.
        device: Of the target.
        siblings: [B] further choices beside the draft of each row, at most; none without.
        penalty_context: What the rows said, where penalties depend on it.
    """

    sequences: list[Sequence]
    idle: list[bool]
    budgets: list[int]
    drafters: list[str | None]
    table: SamplingTable
    vocabulary: int
    device: torch.device
    siblings: Seq[int] = ()

    @cached_property
    def penalty_context(self) -> PenaltyContext | None:
        return PenaltyContext.of(self.sequences, self.device)

    def masks(self, draft: Draft) -> tuple[Tensor | None, Siblings | None, list[int | None]]:
        """Walk the constraints along a draft and its siblings.

        Returns:
            Masks [B, K + 1, V] bool, None without any constraint; the siblings with their own; and [B] the
            drafted tokens after which a row's constraint allows no token, None where there is no such place.
        """
        dead_ends: list[int | None] = [None] * len(self.sequences)
        siblings = draft.siblings
        if all(s.constraint is None for s in self.sequences):
            return None, siblings, dead_ends
        drafted, width = draft.host_tokens, draft.tokens.shape[1]
        drafted = draft.tokens.tolist() if drafted is None else pad_rows(drafted)
        free = torch.ones(width + 1, self.vocabulary, dtype=torch.bool, device=self.device)
        masks = [free] * len(self.sequences)
        beside: list[list[tuple[int, int]]] = [[]] * len(masks) if siblings is None else siblings.listed()
        after: list[list[Tensor | None]] = [[free[0]] * len(own) for own in beside]
        for row, (sequence, tokens) in enumerate(zip(self.sequences, drafted, strict=True)):
            if sequence.constraint is not None and not self.idle[row]:
                along = masks_along(sequence.constraint, tokens, self.vocabulary, self.device, beside[row])
                masks[row], dead_ends[row] = along.masks, along.legal if along.dead_end else None
                after[row] = along.after
        return torch.stack(masks), siblings and siblings.under(after, free[0]), dead_ends

    @cached_property
    def coupled(self) -> list[bool]:
        """[B], rows under the coupled acceptance rule: their drafts share the target's noise."""
        return [s.params.is_coupled for s in self.sequences]

    @cached_property
    def block(self) -> list[bool]:
        """[B], rows whose drafts are judged as a whole."""
        return [s.params.acceptance == "block" for s in self.sequences]

    @cached_property
    def one_rule(self) -> bool:
        """Whether all rows have one lossless rule, so that no mask of rows has to be uploaded."""
        return len(set(zip(self.coupled, self.block, strict=True))) == 1

    @cached_property
    def noise(self) -> NoiseKeys:
        """Noise keys of every position that the round may draw at; uploaded once, if anything is drawn."""
        width = max(self.budgets) + 1
        starts = [len(s.tokens) for s in self.sequences]
        base, start, rounds = upload(
            [[s.key for s in self.sequences], starts, [s.round_count for s in self.sequences]], self.device
        )
        attempt = None
        if any(s.attempts for s in self.sequences):
            rows = [
                [s.attempts.get(position, 0) for position in range(at, at + width)]
                for s, at in zip(self.sequences, starts, strict=True)
            ]
            attempt = upload(rows, self.device)
        position = start[:, None] + torch.arange(width, device=self.device)
        return NoiseKeys(base, position, attempt, rounds, self.table.vocab_ops, self.coupled)


def with_siblings(draft: Draft, further: Tensor, budgets: Seq[int], siblings: Seq[int]) -> Draft:
    """Return the draft with siblings out of its further choices; arguments as `Siblings.of`."""
    return replace(draft, siblings=Siblings.of(further, draft.lengths, budgets, siblings))


@lru_cache(maxsize=1024)
def lengths_tensor(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Return `Draft.lengths` [B] int64. The same few recur round after round; they are never written to."""
    return upload(lengths, device)


@lru_cache(maxsize=64)
def no_draft(rows: int, device: torch.device) -> Draft:
    """Return the draft of K = 0: every row takes a plain step."""
    none = torch.zeros(rows, 0, dtype=torch.int64, device=device)
    return Draft(none, torch.zeros(rows, dtype=torch.int64, device=device), Distribution(ids=none))


def pad_rows(rows: list[list[int]]) -> list[list[int]]:
    """Pad every row with 0 to the longest."""
    width = max(map(len, rows))
    return [row + [0] * (width - len(row)) for row in rows]
