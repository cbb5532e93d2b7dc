"""The choice of drafts: which drafter drafts for each row in a round, and how many tokens at most.

The policy decides, but where a constraint forces more tokens than the policy would draft: those are no bet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from foredraft.decode.drafter import Drafter, Stepper
from foredraft.decode.jump_forward import JUMP_FORWARD, forced_length
from foredraft.decode.policy import Candidates, Policy
from foredraft.decode.sequence import Sequence

__all__ = ["choose_drafts", "has_drafters"]


def has_drafters(sequences: Iterable[Sequence]) -> bool:
    """Return whether any sequence has a drafter.

    Without one, the policy neither decides nor learns.
    """
    return any(sequence.drafters for sequence in sequences)


def choose_drafts(
    sequences: list[Sequence],
    idle: list[bool],
    drafters: Mapping[str, Drafter],
    policy: Policy,
    max_queries: int,
    takes_leaves: bool = False,
) -> tuple[list[int], list[str | None], list[int]]:
    """Return each row's budget [B], 0 for a plain step, and its drafter [B], None where the budget is 0.

    Also return how many siblings each draft may have [B].

    Args:
        sequences: [B].
        idle: [B], rows in prefill, or paused.
        drafters: By name.
        policy: Decides.
        max_queries: Longest [pending, *draft, *siblings] that one pass of the target takes.
        takes_leaves: Its passes take siblings.
    """
    budgets = [0] * len(sequences)
    siblings = [0] * len(sequences)
    chosen: list[str | None] = [None] * len(sequences)
    if has_drafters(sequences):
        rows = [
            Candidates(sequence, {}, idle=True)
            if is_idle
            else _candidates(sequence, drafters, policy.of(sequence), max_queries, takes_leaves)
            for sequence, is_idle in zip(sequences, idle, strict=True)
        ]
        _ask_policy(rows, drafters, policy, max_queries, budgets, chosen, siblings)
    for at, sequence in enumerate(sequences):
        if not idle[at] and not sequence.skip_draft:
            forced = forced_length(sequence, min(sequence.remaining, max_queries) - 1)
            if forced > budgets[at]:
                budgets[at], chosen[at], siblings[at] = forced, JUMP_FORWARD, 0
    return budgets, chosen, siblings


def _may_have_siblings(sequence: Sequence, drafter: Drafter) -> bool:
    """Return whether a row's draft may have siblings.

    A guesser has no further choices. The lossy rule would say another text with siblings: the token after one
    is the target's own, where a drafted one might have stood.
    """
    return sequence.params.bound is None and isinstance(drafter, Stepper)


def _ask_policy(
    rows: list[Candidates],
    drafters: Mapping[str, Drafter],
    policy: Policy,
    max_queries: int,
    budgets: list[int],
    chosen: list[str | None],
    siblings: list[int],
) -> None:
    """Write the policy's decisions into budgets, drafters and siblings [B]; others as `choose_drafts`."""
    for at, (row, decision) in enumerate(zip(rows, policy.decide(rows), strict=True)):
        name = decision.drafter
        if name not in row.limits or decision.budget < 1:
            continue
        budgets[at], chosen[at] = min(decision.budget, row.limits[name]), name
        if name in row.combs:
            siblings[at] = min(decision.siblings, max_queries - 1 - budgets[at])
        if decision.context is not None and name in row.late:
            start = len(row.sequence.tokens) - 1 - decision.context
            drafters[name].start_context(row.sequence, max(0, start))


def _candidates(
    sequence: Sequence,
    drafters: Mapping[str, Drafter],
    policy: Policy,
    max_queries: int,
    takes_leaves: bool,
) -> Candidates:
    """Return what the row may draft.

    A round emits one token more than it drafts, which must be wanted too.
    """
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
            # Siblings share the drafter's cache rows of their prompt, so none may begin it elsewhere.
            is_new = row.unread[name] == len(sequence.tokens) - 1 > 0
            if drafter.starts_late and is_new and sequence.group is None:
                row.late.add(name)
        if limit > 0:
            row.limits[name] = limit
            if takes_leaves and _may_have_siblings(sequence, drafter):
                row.combs.add(name)
    return row
