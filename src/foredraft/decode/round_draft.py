"""Draft: the tokens that one round proposes, a chain or a token tree; which drafter drafts for each row, and
how far; the inputs of the round, and what an acceptance rule gives.

The policy decides about drafts, but where a constraint forces more tokens than it would draft: those are no
bet (Zheng et al. 2024, SGLang, arXiv:2312.07104). Forced text may have several tokenisations, so the target
verifies it like any draft.

A draft with siblings is a *token tree*: each sibling is a leaf in the place of a drafted token, and one pass
verifies all by tree attention. Where the rule writes a sibling, its leaf gives the token after it, too: the
plain step that would follow, a round earlier. So the text keeps its law, whatever the siblings are.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from foredraft.decode.constraint import masks_along
from foredraft.decode.distribution import Distribution, placed
from foredraft.decode.drafter import AutoregressiveDrafter, Drafter, ModelFreeDrafter
from foredraft.decode.noise import NoiseKeys
from foredraft.decode.policy import Candidates, Decision, Policy
from foredraft.decode.sampling import PenaltyContext, SamplingTable
from foredraft.decode.sequence import Sequence
from foredraft.model.memory import upload
from foredraft.model.runner import Leaves, Resume


@dataclass(frozen=True, slots=True)
class AcceptResult:
    """What is kept of a draft, and the token after it."""

    accepted: Tensor  # [B] int64, drafted tokens to keep
    next_token: Tensor  # [B] int64, correction or bonus
    sibling: Tensor | None = None  # [B] int64, the sibling that it is, -1 for none; None without siblings
    after_sibling: Tensor | None = None  # [B] int64, the token after it, if it is one

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


def choices_of(budgets: Seq[int], siblings: Seq[int]) -> list[int]:
    """Return how many further choices a batch needs of each draft step; budgets and siblings [B].

    The siblings of a row lie one to a place, from the first place on; those beyond the draft are third
    choices, and so on.

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
    """The siblings of every row's draft: the leaves of its token tree."""

    tokens: Tensor  # [B, S] int64; -1 where there is none. Those of one place lie in the order of the draw
    places: Tensor  # [B, S] int64, drafted tokens before each; 0 where there is none
    most: int  # siblings of one place, at most
    masks: Tensor | None = None  # of the constraints after each, [B, S, V] bool; None without any constraint
    last: Tensor | None = None  # [B, S] bool, a constraint ends the text after it; None as `masks`

    @classmethod
    def of(cls, further: Tensor, lengths: Tensor, budgets: Seq[int], siblings: Seq[int]) -> Siblings | None:
        """Lay out the further choices [B, K, M] of drafts, by rows [B]; None where no row has siblings."""
        if not any(siblings):
            return None
        width, device = max(siblings), further.device
        pairs = zip(budgets, siblings, strict=True)
        own = [[divmod(i, budget)[::-1] for i in range(count if budget else 0)] for budget, count in pairs]
        at = [row + [(0, -1)] * (width - len(row)) for row in own]
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
        none = torch.full((len(known[0][0]), width), -1, device=known[0][0].device)
        places = placed([(own, part.places) for own, part in known], torch.zeros_like(none))
        tokens = placed([(own, part.tokens) for own, part in known], none)
        return cls(tokens, places, max(part.most for _, part in known))

    def at(self, places: Tensor, choice: int) -> Tensor:
        """Return each row's sibling at a place [B]: the first for `choice` 0. [B] int64, -1 where none is."""
        there = (self.places == places[:, None]) & (self.tokens >= 0)
        own = there & (there.cumsum(1) == choice + 1)
        index = own.to(torch.int64).argmax(1)
        return self.tokens.gather(1, index[:, None])[:, 0].where(own.any(1), -1)

    def listed(self) -> list[list[tuple[int, int]]]:
        """Return (place, token) of every sibling, [B, S]; token -1 where there is none."""
        rows = zip(self.places.tolist(), self.tokens.tolist(), strict=True)
        return [list(zip(places, tokens, strict=True)) for places, tokens in rows]

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

    def written(self, verdict: AcceptResult) -> Tensor:
        """Return which sibling the rule wrote and the text goes on after, [B]; -1 where it is none."""
        same = (self.places == verdict.accepted[:, None]) & (self.tokens == verdict.next_token[:, None])
        if self.last is not None:
            same = same & ~self.last
        return same.to(torch.int64).argmax(1).where(same.any(1), -1)


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed tokens of every row."""

    tokens: Tensor  # [B, K] int64, padded with 0
    lengths: Tensor  # [B] int64
    q: Distribution  # the drafters' distributions at the K positions
    resume: Resume | None = None  # states of the target that a drafter has computed for [pending, *tokens]
    nonfinite: Tensor | None = None  # [B] bool, the drafter's logits were not finite; None where all were
    host_lengths: list[int] | None = None  # upper bounds of `lengths`, as far as the host knows them
    undrawn: Tensor | None = None  # [B] int64, draft steps without a token; None where there are none
    host_tokens: list[list[int]] | None = None  # each row's tokens, unpadded, where the host knows them
    siblings: Siblings | None = None  # the leaves of the token trees; None where all drafts are chains

    @classmethod
    def combine(cls, parts: list[tuple[list[bool], Draft]], inputs: RoundInputs) -> Draft:
        """Return one draft for a batch whose rows [B] were drafted by several drafters."""
        device, rows = inputs.device, len(inputs.sequences)
        masks = [upload(own, device) for own, _ in parts]
        several = [(own, draft) for own, (_, draft) in zip(masks, parts, strict=True)]
        width = max(draft.tokens.shape[1] for _, draft in parts)
        empty = torch.zeros(rows, width, dtype=torch.int64, device=device)
        tokens = placed([(own, draft.tokens) for own, draft in several], empty)
        lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        nonfinite = torch.zeros(rows, dtype=torch.bool, device=device)
        undrawn: Tensor | None = None
        host_lengths = list(inputs.budgets)
        for own, (own_rows, draft) in zip(masks, parts, strict=True):
            lengths = draft.lengths.where(own, lengths)
            if draft.nonfinite is not None:
                nonfinite = nonfinite | draft.nonfinite
            if draft.undrawn is not None:
                undrawn = draft.undrawn if undrawn is None else undrawn + draft.undrawn
            if draft.host_lengths is not None:
                pairs = zip(own_rows, draft.host_lengths, host_lengths, strict=True)
                host_lengths = [mine if is_own else other for is_own, mine, other in pairs]
        q = Distribution.combine([(own, draft.q) for own, draft in several], tokens, inputs.vocabulary)
        # The verifying pass resumes at one depth; the lower layers of other rows simply run again.
        resume = next((draft.resume for _, draft in parts if draft.resume is not None), None)
        siblings = Siblings.combine([(own, draft.siblings) for own, draft in several])
        resume = resume and resume.fit(width + 1)
        return cls(tokens, lengths, q, resume, nonfinite, host_lengths, undrawn, siblings=siblings)


@dataclass(frozen=True)
class RoundInputs:
    """Every row of the batch in one round, in row order."""

    sequences: list[Sequence]  # [B]
    idle: list[bool]  # [B], rows that are still in prefill, or paused
    budgets: list[int]  # [B] tokens to draft at most; 0 in idle rows and in plain ones
    drafters: list[str | None]  # [B] the drafter's name; None where the budget is 0
    table: SamplingTable  # sampling parameters of the rows
    vocabulary: int  # size V
    device: torch.device  # of the target
    siblings: Seq[int] = ()  # [B] leaves of each row's token tree, at most; empty: all drafts are chains
    asked: bool = False  # the policy decided this round, and learns of it

    @cached_property
    def penalty_context(self) -> PenaltyContext | None:
        return PenaltyContext.of(self.sequences, self.device)

    def masks(self, draft: Draft) -> tuple[Tensor | None, Siblings | None, list[int | None]]:
        """Walk the constraints along a draft and its siblings."""
        dead_ends: list[int | None] = [None] * len(self.sequences)
        siblings = draft.siblings
        if all(s.constraint is None for s in self.sequences):
            return None, siblings, dead_ends
        drafted, width = draft.host_tokens, draft.tokens.shape[1]
        drafted = draft.tokens.tolist() if drafted is None else pad_rows(drafted)
        free = torch.ones(width + 1, self.vocabulary, dtype=torch.bool, device=self.device)
        masks = [free] * len(self.sequences)
        listed: list[list[tuple[int, int]]] = [[]] * len(masks) if siblings is None else siblings.listed()
        after: list[list[Tensor | None]] = [[free[0]] * len(own) for own in listed]
        for row, (sequence, tokens) in enumerate(zip(self.sequences, drafted, strict=True)):
            if sequence.constraint is not None and not self.idle[row]:
                along = masks_along(sequence.constraint, tokens, self.vocabulary, self.device, listed[row])
                masks[row], dead_ends[row] = along.masks, along.legal if along.dead_end else None
                after[row] = along.after
        return torch.stack(masks), siblings and siblings.under(after, free[0]), dead_ends

    @cached_property
    def rules(self) -> list[str]:
        """[B], the lossless rule of each row; `speculative` beside the lossy one."""
        rules = [s.params.rule for s in self.sequences]
        return ["speculative" if rule == "bild" else rule for rule in rules]

    @property
    def one_rule(self) -> bool:
        """Whether all rows have one lossless rule, so that no mask of rows has to be uploaded."""
        return len({*self.rules}) == 1

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
        coupled = [rule == "coupled" for rule in self.rules]  # these drafts share the target's noise
        return NoiseKeys(base, position, attempt, rounds, self.table.vocab_ops, coupled)


@lru_cache(maxsize=1024)
def lengths_tensor(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Return `Draft.lengths` [B] int64. The same few recur round after round; they are never written to."""
    return upload(lengths, device)


@lru_cache(maxsize=64)
def no_draft(rows: int, device: torch.device) -> Draft:
    """Return the draft of K = 0: every row takes a plain step."""
    none = torch.zeros(rows, 0, dtype=torch.int64, device=device)
    return Draft(none, torch.zeros(rows, dtype=torch.int64, device=device), Distribution(ids=none))


def pad_rows(rows: Seq[Seq[int]]) -> list[list[int]]:
    """Pad every row with 0 to the longest."""
    width = max(map(len, rows))
    return [[*row, *[0] * (width - len(row))] for row in rows]


JUMP_FORWARD = "jump-forward"


class JumpForward(ModelFreeDrafter):
    """Proposes the tokens that each sequence's constraint forces. Every constrained sequence has it."""

    name = JUMP_FORWARD

    def propose(self, requests: list[tuple[Sequence, int]]) -> list[list[int]]:
        return [
            [] if sequence.constraint is None else sequence.constraint.forced(budget)
            for sequence, budget in requests
        ]


def choose_drafts(
    sequences: list[Sequence],
    idle: list[bool],
    drafters: Mapping[str, Drafter],
    policy: Policy | None,  # None: it is not asked
    max_queries: int,
    takes_leaves: bool = False,
) -> tuple[list[int], list[str | None], list[int]]:
    """Return each row's budget (0: a plain step), its drafter, and its siblings at most; [B] each."""
    drafts: list[tuple[int, str | None, int]] = [(0, None, 0)] * len(sequences)
    if policy is not None:
        rows = [
            Candidates(sequence, {}, idle=True)
            if is_idle
            else _candidates(sequence, drafters, policy.of(sequence), max_queries, takes_leaves)
            for sequence, is_idle in zip(sequences, idle, strict=True)
        ]
        decided = zip(rows, policy.decide(rows), strict=True)
        drafts = [_allowed(row, decision, drafters, max_queries) for row, decision in decided]
    for at, sequence in enumerate(sequences):
        most = min(sequence.remaining, max_queries) - 1
        if not idle[at] and not sequence.skip_draft and sequence.constraint is not None and most > 0:
            forced = len(sequence.constraint.forced(most))
            if forced > drafts[at][0]:
                drafts[at] = forced, JUMP_FORWARD, 0
    return [budget for budget, *_ in drafts], [name for _, name, _ in drafts], [count for *_, count in drafts]


def _allowed(
    row: Candidates, decision: Decision, drafters: Mapping[str, Drafter], max_queries: int
) -> tuple[int, str | None, int]:
    """Return (budget, drafter, siblings) of a decision, as far as the row may draft so."""
    name = decision.drafter
    if name not in row.limits or decision.budget < 1:
        return 0, None, 0
    budget = min(decision.budget, row.limits[name])
    if decision.context is not None and name in row.late:
        start = len(row.sequence.tokens) - 1 - decision.context
        drafters[name].start_context(row.sequence, max(0, start))
    return budget, name, min(decision.siblings, max_queries - 1 - budget) if name in row.trees else 0


def _candidates(
    sequence: Sequence,
    drafters: Mapping[str, Drafter],
    policy: Policy,
    max_queries: int,
    takes_leaves: bool,
) -> Candidates:
    """Return what the row may draft; a round emits one token more, which must be wanted too."""
    row = Candidates(sequence, {})
    if sequence.skip_draft or (sequence.constraint is not None and sequence.constraint.at_dead_end):
        return row
    room = min(sequence.remaining, max_queries) - 1
    if sequence.params.max_draft is not None:
        room = min(room, sequence.params.max_draft)
    for name in sequence.drafters:
        drafter, limit = drafters[name], room
        if drafter.max_length is not None:
            limit = min(limit, drafter.max_length - (len(sequence.tokens) - drafter.context_start(sequence)))
        if drafter.max_draft is not None:
            limit = min(limit, drafter.max_draft)
        if policy.uses_costs and limit > 0:
            limit, confidence = drafter.peek(sequence, limit)
            if confidence is not None and limit > 0:
                row.confidence[name] = confidence
            row.unread[name] = drafter.unread(sequence)
            # Choices of a prompt share the drafter's cache rows of it, so none may begin it elsewhere.
            is_new = row.unread[name] == len(sequence.tokens) - 1 > 0
            if drafter.starts_late and is_new and sequence.group is None:
                row.late.add(name)
        if limit > 0:
            row.limits[name] = limit
            is_lossy = sequence.params.bound is not None  # such a rule would say another text with siblings
            if takes_leaves and not is_lossy and isinstance(drafter, AutoregressiveDrafter):
                row.trees.add(name)
    return row
