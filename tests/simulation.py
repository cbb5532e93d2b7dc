"""Rounds on paper: a policy drives rows whose drafters are right at known positions, and a table is the clock."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from foredraft.decode.policy import PLAIN, CostTable, Offers, Policy
from foredraft.decode.policy.budgets import round_ms
from foredraft.decode.stats import Round

__all__ = ["Row", "Simulated", "flat", "right_with", "simulate"]

Right = Callable[[int], bool]  # of a position of the text: whether a drafter has its token right


def flat(step: float = 0.2, column: float = 0.02, *, drafters: tuple[str, ...] = ("small",)) -> CostTable:
    """A plain step takes 1, each further column and each drafted step what is said, for any batch."""
    passes = {batch: {batch: 1.0, 2 * batch: 1.0 + column * batch} for batch in (1, 2, 4, 8)}
    steps = dict.fromkeys((1, 8), (step, step))
    return CostTable(passes, dict.fromkeys(drafters, steps) | {"lookup": {1: (0.0, 0.0)}})


def right_with(chance: float, seed: int = 0) -> Right:
    """Right at positions of their own, as often as that."""
    return lambda position: random.Random(f"{seed} {position}").random() < chance


@dataclass
class Row:
    """One request: who is right where, and how many tokens are wanted. offered: what a drafter has to say;
    sure: how sure it is of that. late: who may begin later than the text does."""

    drafters: Mapping[str, Right]
    tokens: int = 256
    offered: Mapping[str, Callable[[int], int]] = field(default_factory=dict)
    prompt: int = 16
    sure: Mapping[str, Callable[[int], float]] = field(default_factory=dict)
    late: frozenset[str] = frozenset()


@dataclass
class Simulated:
    """Time taken, what plain steps would have taken, every round's choices, and how much of a text that was new
    to them drafters read, in their order."""

    ms: float
    plain: float
    rounds: list[list[tuple[str | None, int]]]
    read: list[int] = field(default_factory=list)

    @property
    def speedup(self) -> float:
        return self.plain / self.ms


def simulate(policy: Policy, table: CostTable, rows: list[Row], clock: CostTable | None = None) -> Simulated:
    """All rows to their end, side by side; clock: where the time is not what the policy's table says."""
    clock = clock or table
    sequences: list[Any] = [
        SimpleNamespace(
            id=index,
            drafters=tuple(row.drafters),
            prompt=[0] * row.prompt,
            tokens=[0] * row.prompt,
            params=SimpleNamespace(temperature=0),
            policy_state=policy.start(),
            read={},
        )
        for index, row in enumerate(rows)
    ]
    total, plain, rounds = 0.0, 0.0, []
    reads: list[int] = []
    for step in range(max(row.tokens for row in rows)):
        running = sum(row.tokens > step for row in rows)
        plain += clock.verifying(running, running)
    while True:
        running_rows = []
        for row, sequence in zip(rows, sequences, strict=True):
            done = len(sequence.tokens) - row.prompt
            sequence.remaining = row.tokens - done
            if sequence.remaining:
                running_rows.append((row, sequence, done))
        if not running_rows:
            return Simulated(total, plain, rounds, reads)
        offers = []
        for row, sequence, done in running_rows:
            most = {}
            for name in row.drafters:
                room = sequence.remaining - 1
                room = min(room, row.offered[name](done)) if name in row.offered else room
                if room > 0:
                    most[name] = room
            behind = {
                name: len(sequence.tokens) - 1 - sequence.read.get(name, 0)
                for name in row.drafters
                if name not in row.offered
            }
            sure = {name: row.sure[name](done) for name in row.sure if name in most}
            late = {name for name in row.late if name not in sequence.read}
            offers.append(Offers(sequence, most, behind, sure, late))
        rests = policy.rests([sequence for _, sequence, _ in running_rows])
        choices = [PLAIN] * len(offers) if rests else policy.choose(offers)
        rounds.append([(choice.drafter, choice.budget) for choice in choices])
        total += round_ms(clock, choices)
        for (row, sequence, done), offer, choice in zip(running_rows, offers, choices, strict=True):
            name, budget, some = choice
            accepted = 0
            if budget:
                assert name is not None
                assert budget <= offer.most[name]
                tokens = some if some is not None and name in offer.late else offer.behind.get(name, 0)
                total += clock.reading(name, tokens)
                if name in offer.behind and name not in sequence.read:
                    reads.append(tokens)
                while accepted < budget and row.drafters[name](done + accepted):
                    accepted += 1
            sequence.tokens += [0] * (accepted + 1)
            if budget:
                sequence.read[name] = len(sequence.tokens) - 1 - (accepted == budget)
            if not rests:
                policy.learn(sequence, Round(budget, accepted, accepted + 1), None)
