"""Choices: who drafts for each row in a round, and how much at most. The policy makes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from foredraft.decode.draft import Drafter, as_free, as_latecomer, as_reader
from foredraft.decode.policy import Offers, Policy
from foredraft.decode.sequence import Sequence

__all__ = ["choose", "may_draft"]


def may_draft(sequences: Iterable[Sequence]) -> bool:
    """Whether anybody may, for one of them; a policy is neither asked nor told anything where nobody may."""
    return any(sequence.drafters for sequence in sequences)


def choose(
    sequences: list[Sequence], idle: list[bool], drafters: Mapping[str, Drafter], policy: Policy, widest: int
) -> list[int] | None:
    """Each row's budget, and who drafts is noted in it; 0 = a plain step. None where the policy was not
    asked. widest: the longest [pending, *draft] that one pass takes."""
    running = [s for s, i in zip(sequences, idle, strict=True) if not i]
    if not may_draft(sequences) or policy.rests(running):
        return None
    budgets = [0] * len(sequences)
    rows = [
        Offers(s, {}, idle=True) if i else _offers(s, drafters, policy, widest)
        for s, i in zip(sequences, idle, strict=True)
    ]
    for row, choice in zip(rows, policy.choose(rows), strict=True):
        if choice.drafter in row.most and choice.budget > 0:
            row.sequence.drafter = choice.drafter
            budgets[row.sequence.row] = min(choice.budget, row.most[choice.drafter])
            if choice.reads is not None and choice.drafter in row.late:
                late = as_latecomer(drafters[choice.drafter])
                assert late is not None
                late.begin(row.sequence, max(0, len(row.sequence.tokens) - 1 - choice.reads))
    return budgets


def _offers(sequence: Sequence, drafters: Mapping[str, Drafter], policy: Policy, widest: int) -> Offers:
    """A round emits one more token than it drafts, so no draft is longer than what may be emitted, but for
    one."""
    offers = Offers(sequence, {})
    if sequence.skip_draft:
        return offers
    room = min(sequence.remaining, widest) - 1
    for name in sequence.drafters:
        drafter, most = drafters[name], room
        late = as_latecomer(drafter)
        if drafter.max_length is not None:
            began = late.began(sequence) if late is not None else 0
            most = min(most, drafter.max_length - (len(sequence.tokens) - began))
        if policy.weighs and most > 0:
            if (reader := as_reader(drafter)) is not None:
                read = reader.length(sequence)
                offers.behind[name] = len(sequence.tokens) - 1 - read
                if not read and sequence.group is None and late is not None:
                    offers.late.add(name)
            elif (guesser := as_free(drafter)) is not None:
                most, sure = guesser.has(sequence, most)
                if most > 0:
                    offers.sure[name] = sure
        if most > 0:
            offers.most[name] = most
    return offers
