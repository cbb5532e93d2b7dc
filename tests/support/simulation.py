"""Rounds on paper: a policy drives rows whose drafters are right at known positions; a cost table is the clock."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any

from foredraft.decode.params import SamplingParams
from foredraft.decode.policy import Candidates, Decision, Policy
from foredraft.decode.policy.cost_table import CostTable, round_ms
from foredraft.decode.stats import Round

IDS = count()  # no two sequences of a process have one
Right = Callable[[int], bool]  # does the drafter have the token at this position of the text right?


def flat(step: float = 0.2, column: float = 0.02, *, drafters: tuple[str, ...] = ("small",)) -> CostTable:
    """Return a table where a plain step costs 1 and each further column and draft step what is given, at any batch."""
    passes = {batch: {batch: 1.0, 2 * batch: 1.0 + column * batch} for batch in (1, 2, 4, 8)}
    steps = dict.fromkeys((1, 8), (step, step))
    return CostTable(passes, dict.fromkeys(drafters, steps) | {"lookup": {1: (0.0, 0.0)}})


def right_with(chance: float, seed: int = 0) -> Right:
    return lambda position: random.Random(f"{seed} {position}").random() < chance


def sequence_of(policy: Policy, **more: Any) -> Any:
    params = SamplingParams(temperature=0)
    fields = {"id": 0, "params": params, "policy_state": policy.start(), "tokens": [0] * 9, "remaining": 50}
    fields["drafters"] = ("small",)
    return SimpleNamespace(**fields | more)


@dataclass
class Row:
    drafters: Mapping[str, Right]
    tokens: int = 256  # new ones
    # tokens that a drafter, which then reads nothing, has to propose, by tokens emitted
    offered: Mapping[str, Callable[[int], int]] = field(default_factory=dict)
    prompt: int = 16
    confidence: Mapping[str, Callable[[int], float]] = field(default_factory=dict)  # by tokens emitted
    late: frozenset[str] = frozenset()  # drafters for which the text may begin late
    enters: int = 0  # rounds in which the row is still in prefill
    sibling: Mapping[str, Right] = field(default_factory=dict)  # where the sibling of a wrong token is right


@dataclass
class Simulated:
    ms: float
    plain: float  # ms of plain decoding
    rounds: list[list[tuple[str | None, int]]]  # of every round, (drafter, budget) of the rows that decode
    siblings: list[int] = field(default_factory=list)  # of every round, in all
    read: list[int] = field(default_factory=list)  # tokens of texts that were new to a drafter, in order
    rests: int = 0  # rounds of which the policy was not asked
    ended: list[float] = field(default_factory=list)  # when each row ended, in ms

    @property
    def speedup(self) -> float:
        return self.plain / self.ms


Slowdown = Callable[[int, str | None], float]


def simulate(
    policy: Policy,
    table: CostTable,
    rows: list[Row],
    clock: CostTable | None = None,
    *,
    slowdown: Slowdown | None = None,
) -> Simulated:
    """Run all rows to their end, side by side, with a policy that was told the costs in a table.

    The rounds cost what `clock` says, by default the table, and by `slowdown`, of the round's number and its drafter, so
    many times longer; the policy is then told what each round took.
    """
    clock = clock or table
    sequences: list[Any] = []
    for row in rows:
        texts = {"prompt": [0] * row.prompt, "tokens": [0] * row.prompt}
        more = {"id": next(IDS), "drafters": tuple(row.drafters), "constraint": None, "read": {}}
        sequences.append(sequence_of(policy, **texts, **more))
    result = Simulated(0.0, 0.0, [], ended=[0.0] * len(rows))
    for step in range(max(row.enters + row.tokens for row in rows)):
        seated = sum(row.enters + row.tokens > step for row in rows)
        result.plain += clock.plain(seated)
    while True:
        decoding, idle = [], []
        for index, (row, sequence) in enumerate(zip(rows, sequences, strict=True)):
            sequence.remaining = row.tokens - (len(sequence.tokens) - row.prompt)
            if row.enters > len(result.rounds):
                idle.append(Candidates(sequence, {}, idle=True))
            elif sequence.remaining:
                decoding.append((index, row, sequence))
        if not decoding:
            assert not idle
            return result
        candidates = [_candidates(row, sequence) for _, row, sequence in decoding]
        if not idle and policy.rests([sequence for *_, sequence in decoding]):
            _rest(decoding, result, clock)
            continue
        decisions = policy.decide([*candidates, *idle])[: len(candidates)]
        result.rounds.append([(decision.drafter, decision.budget) for decision in decisions])
        result.siblings.append(sum(decision.siblings for decision in decisions))
        drafts = [*((d.drafter, d.budget, d.siblings) for d in decisions), *[(None, 0, 0)] * len(idle)]
        before = result.ms
        result.ms += round_ms(clock, drafts)
        for (index, row, sequence), options, decision in zip(decoding, candidates, decisions, strict=True):
            accepted = _draft(row, sequence, options, decision, clock, result)
            sibling = _sibling(row, sequence, decision, accepted)
            sequence.tokens += [0] * (accepted + 1 + sibling)
            if decision.drafter is not None and decision.budget:
                sequence.read[decision.drafter] = len(sequence.tokens) - 1 - (accepted == decision.budget)
            siblings = {"siblings": decision.siblings, "sibling": sibling}
            outcome = Round(decision.budget, accepted, accepted + 1 + sibling, decision.drafter, **siblings)
            policy.learn(sequence, outcome, None)
            result.ended[index] = result.ms
        if slowdown is not None:
            drafter = next((name for name, budget, _ in drafts if budget), None)
            taken = (result.ms - before) * slowdown(len(result.rounds) - 1, drafter)
            result.ms = before + taken
            policy.took(taken / 1e3)


def _rest(decoding: list[tuple[int, Row, Any]], result: Simulated, clock: CostTable) -> None:
    result.rounds.append([(None, 0)] * len(decoding))
    result.siblings.append(0)
    result.rests += 1
    result.ms += clock.plain(len(decoding))
    for index, _, sequence in decoding:
        sequence.tokens.append(0)
        result.ended[index] = result.ms


def _candidates(row: Row, sequence: Any) -> Candidates:
    done = len(sequence.tokens) - row.prompt
    room = sequence.remaining - 1
    rooms = {name: min(room, row.offered.get(name, lambda done: room)(done)) for name in row.drafters}
    limits = {name: room for name, room in rooms.items() if room > 0}
    unread = {
        name: 0 if name in row.offered else len(sequence.tokens) - 1 - sequence.read.get(name, 0)
        for name in row.drafters
    }
    confidence = {name: row.confidence[name](done) for name in row.confidence if name in limits}
    late = {name for name in row.late if name not in sequence.read}
    trees = {name for name in row.sibling if name in limits}
    return Candidates(sequence, limits, unread, confidence, late, trees)


def _sibling(row: Row, sequence: Any, decision: Decision, accepted: int) -> bool:
    if decision.drafter is None or accepted >= min(decision.budget, decision.siblings):
        return False
    done = len(sequence.tokens) - row.prompt + accepted
    return done + 1 < row.tokens and row.sibling[decision.drafter](done)


def _draft(
    row: Row, sequence: Any, options: Candidates, decision: Decision, clock: CostTable, result: Simulated
) -> int:
    name, budget, context, _ = decision
    if name is None or not budget:
        return 0
    assert budget <= options.limits[name]
    unread = options.unread[name]
    tokens = context if context is not None and name in options.late else unread
    result.ms += clock.read(name, tokens)
    if name not in row.offered and name not in sequence.read:
        result.read.append(tokens)
    accepted, done = 0, len(sequence.tokens) - row.prompt
    while accepted < budget and row.drafters[name](done + accepted):
        accepted += 1
    return accepted
