"""Rounds on paper: a policy drives rows whose drafters are right at known positions, and a table is the clock."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from foredraft.decode.policy import PLAIN, Choice, CostTable, Offers, Policy
from foredraft.decode.policy.budgets import round_ms
from foredraft.decode.stats import Round
from foredraft.model.runner import StopThresholds

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
    sure: how sure it is of that. late: who may begin later than the text does. tells: how sure a drafter is of
    its token at a position of the text, told step by step. enters: rounds in which its prompt is read yet."""

    drafters: Mapping[str, Right]
    tokens: int = 256
    offered: Mapping[str, Callable[[int], int]] = field(default_factory=dict)
    prompt: int = 16
    sure: Mapping[str, Callable[[int], float]] = field(default_factory=dict)
    late: frozenset[str] = frozenset()
    tells: Mapping[str, Callable[[int], float]] = field(default_factory=dict)
    enters: int = 0


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
    for step in range(max(row.enters + row.tokens for row in rows)):
        seated = sum(row.enters + row.tokens > step for row in rows)
        plain += clock.verifying(seated, seated)
    while True:
        running_rows, idle = [], []
        for row, sequence in zip(rows, sequences, strict=True):
            done = len(sequence.tokens) - row.prompt
            sequence.remaining = row.tokens - done
            if row.enters > len(rounds):
                idle.append(Offers(sequence, {}, idle=True))
            elif sequence.remaining:
                running_rows.append((row, sequence, done))
        if not running_rows:
            assert not idle
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
        seated = [*offers, *idle]
        choices = ([PLAIN] * len(seated) if rests else policy.choose(seated))[: len(offers)]
        rounds.append([(choice.drafter, choice.budget) for choice in choices])
        stops = None
        if any(choice.drafter in row.tells for (row, *_), choice in zip(running_rows, choices, strict=True)):
            budgets = [choice.budget for choice in choices]
            stops = policy.stops([sequence for _, sequence, _ in running_rows], budgets, torch.device("cpu"))
        told: list[
            tuple[int, tuple[float, ...]]
        ] = []  # of each row: tokens drafted, and how sure at each step
        for place, ((row, _, done), choice) in enumerate(zip(running_rows, choices, strict=True)):
            tells = row.tells.get(choice.drafter or "")
            told.append((choice.budget, ()))
            if stops is not None and tells is not None and choice.budget:
                told[-1] = _drafted(
                    stops, place, choice.budget, [tells(done + j) for j in range(choice.budget)]
                )
        total += _round_ms(clock, [*choices, *[PLAIN] * len(idle)], [*told, *[(0, ())] * len(idle)])
        for (row, sequence, done), offer, choice, (budget, steps) in zip(
            running_rows, offers, choices, told, strict=True
        ):
            name, _, some = choice
            accepted = 0
            if choice.budget:
                assert name is not None
                assert budget <= offer.most[name]
                tokens = some if some is not None and name in offer.late else offer.behind.get(name, 0)
                total += clock.reading(name, tokens)
                if name in offer.behind and name not in sequence.read:
                    reads.append(tokens)
                while accepted < budget and row.drafters[name](done + accepted):
                    accepted += 1
            sequence.tokens += [0] * (accepted + 1)
            if choice.budget:
                sequence.read[name] = len(sequence.tokens) - 1 - (accepted == budget)
            if not rests:
                policy.learn(sequence, Round(budget, accepted, accepted + 1, steps), None)


def _drafted(
    stops: StopThresholds, place: int, budget: int, sure: list[float]
) -> tuple[int, tuple[float, ...]]:
    """As the draft loop has it: tokens that a row drafts, and how sure the drafter was at each step."""
    survival = torch.ones(len(stops.keep))
    for j in range(budget):
        survival = stops.survival(torch.full_like(survival, sure[j]), survival)
        if survival[place] < stops.keep[place, j]:
            return j, tuple(sure[: j + 1])
        if survival[place] < stops.more[place, j]:
            return j + 1, tuple(sure[: j + 1])
    return budget, tuple(sure)


def _round_ms(clock: CostTable, choices: list[Choice], told: list[tuple[int, tuple[float, ...]]]) -> float:
    """Of a round in which the rows drafted so much, in so many steps."""
    stepped = [
        choice._replace(budget=len(steps) or n) for choice, (n, steps) in zip(choices, told, strict=True)
    ]
    batch = len(choices)
    unused = sum(choice.budget for choice in stepped) - sum(drafted for drafted, _ in told)
    columns = batch + sum(choice.budget for choice in stepped)
    return (
        round_ms(clock, stepped) - clock.verifying(batch, columns) + clock.verifying(batch, columns - unused)
    )
