"""The choice of drafts: which drafter drafts for each row, and how many tokens at most.

The policy decides, but where a constraint forces more tokens than it would draft: those are no bet (Zheng et
al. 2024, SGLang, arXiv:2312.07104). Forced text may have several tokenisations, so the target verifies it
like any draft.
"""

from __future__ import annotations

from collections.abc import Mapping

from foredraft.decode.drafter import AutoregressiveDrafter, Drafter, ModelFreeDrafter
from foredraft.decode.policy import Candidates, Decision, Policy
from foredraft.decode.sequence import Sequence

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
    policy: Policy,
    max_queries: int,
    takes_leaves: bool = False,
) -> tuple[list[int], list[str | None], list[int]]:
    """Return each row's budget (0: a plain step), its drafter, and its siblings at most; [B] each."""
    drafts: list[tuple[int, str | None, int]] = [(0, None, 0)] * len(sequences)
    if any(sequence.drafters for sequence in sequences):  # without one, the policy has nothing to decide
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
