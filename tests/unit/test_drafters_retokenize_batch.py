"""Retokenize in a batch: each row gets the proposal that it gets alone, and a step is one forward of all rows."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from foredraft.decode.sequence import Sequence
from foredraft.drafters.retokenize import Retokenize
from foredraft.model.byte_codec import ByteCodec
from foredraft.model.runner import Forward
from tests.support import alphabets
from tests.support.mutation import Mutation, assert_caught, defect, replaced
from tests.support.mutations import argument, around, changed
from tests.support.prophet import TRUTH, Babbler, Prophet, sequence_of

Function = Callable[..., Any]
Said = dict[int, list[int]]  # row -> drafted tokens
TARGET, DRAFT = alphabets.make("byte-level"), alphabets.make("sentencepiece")
TEXT, SAID = ByteCodec(TARGET), ByteCodec(DRAFT)
IDS = [1, *TEXT.encode(TRUTH)]
ROWS = 4


def drafter_of(runner: Any, rows: int, positions: int = 90) -> Any:
    return Retokenize(runner, rows, positions, TARGET, DRAFT)


class Company:
    """Sequences in one drafter, and each of them alone in another."""

    def __init__(self) -> None:
        self.together = drafter_of(Babbler(SAID), ROWS)
        self.alone: dict[int, Any] = {}
        self.sequences: dict[int, Sequence] = {}
        self.count = self.said = 0

    def join(self, tokens: list[int]) -> None:
        sequence = sequence_of(self.count, tokens)
        self.count += 1
        self.sequences[sequence.id] = sequence
        self.alone[sequence.id] = drafter_of(Babbler(SAID), 1)
        for drafter in (self.together, self.alone[sequence.id]):
            drafter.join(sequence)

    def leave(self, sequence: Sequence) -> None:
        for drafter in (self.together, self.alone.pop(sequence.id)):
            drafter.leave(sequence)
        del self.sequences[sequence.id]

    def round(self, requests: list[tuple[Sequence, int]], faulty: set[int]) -> list[list[int]]:
        """Return the proposals, the same together as alone; the drafts of `faulty` ids see NaN at their first step."""
        together = self.together.draft_pass.runner
        for id in faulty:
            together.broken[self.together._seats[id].row] = self.alone[id].draft_pass.runner.broken[0] = 1
        passes, forwarded = together.passes, together.forwarded
        guesses: list[list[int]] = self.together.propose(requests)
        spent: list[tuple[int, int]] = []
        for (sequence, budget), guess in zip(requests, guesses, strict=True):
            runner = self.alone[sequence.id].draft_pass.runner
            before = runner.passes, runner.forwarded
            assert self.alone[sequence.id].propose([(sequence, budget)]) == [guess]
            assert guess == [] or sequence.id not in faulty
            spent.append((runner.passes - before[0], runner.forwarded - before[1]))
            runner.broken.clear()
        together.broken.clear()
        assert together.passes - passes == max((p for p, _ in spent), default=0), "the longest row's"
        # a row may hold the text of its last sequence; idle and finished rows read nothing
        assert together.forwarded - forwarded <= sum(f for _, f in spent)
        for held, read in zip(together.rows, self.together._rows, strict=True):
            assert held[: len(read)] == read, "the cache holds the tokens that count as read"
        self.said += sum(map(bool, guesses))
        return guesses

    def commit(self, sequence: Sequence, tokens: list[int], *, back: int = 0) -> None:
        kept = max(1, len(sequence.tokens) - back)
        sequence.tokens[:] = [*sequence.tokens[:kept], *tokens]
        for drafter in (self.together, self.alone[sequence.id]):
            drafter.rewind(sequence)


def live(company: Company, dice: random.Random, rounds: int) -> None:
    """Play joins, rounds of some rows with any budgets, rejections, rollbacks, faults and leaves."""
    for _ in range(rounds):
        while len(company.sequences) < ROWS and dice.random() < 0.5:
            start = dice.choice([0, 0, 30])
            company.join(IDS[start : start + dice.randint(1, 40)])
        asked = [(s, dice.randint(1, 5)) for s in company.sequences.values() if dice.random() < 0.7]
        dice.shuffle(asked)
        faulty = {s.id for s, _ in asked if dice.random() < 0.08}
        for (sequence, _), guess in zip(asked, company.round(asked, faulty), strict=True):
            accepted = guess[: dice.randint(0, len(guess))]
            company.commit(sequence, [*accepted, dice.choice(IDS)], back=dice.choice([0, 0, 0, 2, 9]))
        for sequence in list(company.sequences.values()):
            if dice.random() < 0.1:
                company.leave(sequence)


@settings(max_examples=8)
@given(st.integers(0, 10**6))
def test_a_batch_proposes_what_each_row_gets_alone(seed: int) -> None:
    company = Company()
    live(company, random.Random(seed), 20)
    assert company.said > 0


def test_the_lowest_free_row_is_taken() -> None:
    """A pass spans all rows between the first and the last that draft."""
    drafter = drafter_of(Prophet(SAID), ROWS)
    sequences = [sequence_of(id, IDS[:9]) for id in range(6)]
    for sequence in sequences[:4]:
        drafter.join(sequence)
    for gone in (2, 0):
        drafter.leave(sequences[gone])
    for late in sequences[4:]:
        drafter.join(late)
    assert [drafter._seats[id].row for id in (4, 5)] == [0, 2]


def forwards(change: Function | None = None, out: Function = lambda forward: forward) -> Mutation:
    """Mutate the forwards of a round.

    Args:
        change: Gets (options of the round's first forward, starts, options) and alters the last two.
        out: Returns another result of the forward.
    """

    @around
    def mutation(go_on: Function, drafter: Retokenize, turns: Any) -> Said:
        runner, made = drafter.draft_pass.runner, []
        sound = runner.forward

        def forward(cache: Any, tokens: Any, starts: list[int], **options: Any) -> Forward:
            made.append(dict(options))
            starts = list(starts)
            if change is not None:
                change(made[0], starts, options)
            return out(sound(cache, tokens, starts, **options))

        with replaced(runner, "forward", forward):
            said: Said = go_on(drafter, turns)
        return said

    return mutation


def length_of_another_row(first: Any, starts: list[int], options: Any) -> None:
    if options["counts"] is not first["counts"]:  # a later step
        counts = first["counts"]
        starts[:] = [start + max(counts) - own for start, own in zip(starts, counts, strict=True)]


def no_row_idle_at_first(first: Any, starts: list[int], options: Any) -> None:
    if options["counts"] is first["counts"]:
        options["idle"] = [False] * len(starts)


def said_by(change: Callable[[Any, Said], Said]) -> Mutation:
    """Return another result of a round: `change` gets its turns by row, and what each row said."""
    return lambda go_on: lambda drafter, turns: change(turns, go_on(drafter, turns))


@around
def shared_fault(go_on: Function, drafter: Retokenize, turns: Any) -> Said:
    said: Said = go_on(drafter, turns)
    if len(said) == len(turns):
        return said
    for row in said:
        drafter._fault(turns[row].seat)
    return {}


@around
def fault_of_an_idle_step(go_on: Function, drafter: Retokenize, turns: Any) -> Said:
    sound: list[torch.Tensor] = []

    def note(forward: Any) -> Forward:
        sound.append(forward.logits.isfinite().all(-1))  # [B, 1]
        return forward

    said: Said = forwards(out=note)(go_on)(drafter, turns)
    for row in [row for row in said if not all(step[row - min(turns)] for step in sound)]:
        drafter._fault(turns[row].seat)
        del said[row]
    return said


def as_long_as_the_longest(turns: Any) -> Any:
    most = max((turn.count for turn in turns.values()), default=0)
    return {row: replace(turn, count=most) for row, turn in turns.items()}


CONTINUE = Retokenize._continue
DEFECTS: list[tuple[str, Any, Mutation]] = [
    ("one row's length for another", CONTINUE, forwards(length_of_another_row)),
    ("one row's last column for another", CONTINUE,
     forwards(lambda first, starts, options: options.update(at=options["at"][:1].expand_as(options["at"])))),
    ("padding is real", Retokenize._behind, changed(lambda made: (*made[:2], [max(made[2])] * len(made[2])))),
    ("an idle row is overwritten", CONTINUE, forwards(no_row_idle_at_first)),
    ("a row goes on after its end", CONTINUE, forwards(lambda first, starts, options: options.update(idle=first["idle"]))),
    ("the first row of the cache", CONTINUE, forwards(lambda first, starts, options: options.update(first_row=0))),
    ("another row's tokens", CONTINUE, said_by(lambda turns, said: {row: said[min(said)] for row in said})),
    ("another row's tokens, by order", CONTINUE, said_by(lambda turns, said: dict(zip(turns, said.values(), strict=False)))),
    ("a fault is every row's", CONTINUE, shared_fault),
    ("an idle step is a fault", CONTINUE, fault_of_an_idle_step),
    ("faults are ignored", CONTINUE, forwards(out=lambda made: replace(made, logits=made.logits.nan_to_num(nan=99.0)))),
    ("every row drafts as much as the longest", CONTINUE, argument(1, as_long_as_the_longest)),
    ("row by row", CONTINUE, lambda go_on: lambda drafter, turns: {
        row: ids for own in turns for row, ids in go_on(drafter, {own: turns[own]}).items()
    }),
]  # fmt: skip


@pytest.mark.parametrize(("name", "point", "mutation"), DEFECTS, ids=[name for name, _, _ in DEFECTS])
def test_defects_are_caught(name: str, point: Any, mutation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def check() -> None:
        for seed in range(4):
            live(Company(), random.Random(seed), 20)

    assert_caught(defect(name, point, mutation, check), monkeypatch)
