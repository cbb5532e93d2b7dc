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

import foredraft
from foredraft import SamplingParams
from foredraft.decode.sequence import Sequence
from foredraft.drafters.retokenize import Retokenize
from foredraft.model.byte_codec import ByteCodec
from foredraft.model.runner import Forward
from tests.support import alphabets, checkpoints
from tests.support.caches import poison
from tests.support.loaded import engine_of
from tests.support.planting import Spoiler, assert_caught, defect, replaced
from tests.support.prophet import TRUTH, Babbler, Prophet

Function = Callable[..., Any]
Said = dict[int, list[int]]  # row -> drafted tokens
TARGET, DRAFT = alphabets.make("byte-level"), alphabets.make("sentencepiece")
TEXT, SAID = ByteCodec(TARGET), ByteCodec(DRAFT)
IDS = [1, *TEXT.encode(TRUTH)]
ROWS = 4


def drafter_of(runner: Any, rows: int, positions: int = 90) -> Any:
    return Retokenize(runner, rows, positions, TARGET, DRAFT)


def sequence_of(id: int, tokens: list[int]) -> Sequence:
    made = Sequence(id, list(tokens), SamplingParams(max_new_tokens=999), seed=1, drafters=("retokenize",))
    made.cache_finite = True
    return made


class Company:
    """Sequences in one drafter, and each of them alone in another."""

    def __init__(self) -> None:
        self.together = drafter_of(Babbler(SAID), ROWS)
        self.alone: dict[int, Any] = {}
        self.sequences: dict[int, Sequence] = {}
        self.count = self.said = self.passes_alone = 0

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
        self.passes_alone += sum(p for p, _ in spent)
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


@settings(max_examples=15)
@given(st.integers(0, 10**6))
def test_a_batch_proposes_what_each_row_gets_alone(seed: int) -> None:
    company = Company()
    live(company, random.Random(seed), 20)
    assert company.said > 0


def test_a_round_takes_the_passes_of_its_longest_row() -> None:
    """Rows that are done, do not draft or have left are idle; the company checks every round."""
    company = Company()
    for id in range(ROWS):
        company.join(IDS[: 20 + 9 * id])
    sequences = list(company.sequences.values())
    company.leave(sequences[1])
    for budgets in ({0: 1, 2: 5, 3: 3}, {0: 4}, {3: 2, 2: 2}, {}):
        company.round([(sequences[id], budget) for id, budget in budgets.items()], set())
    assert 0 < company.together.draft_pass.runner.passes < 0.7 * company.passes_alone, (
        "not the sum over the rows"
    )


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


# --- real models ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the runner of a tiny draft model in float32."""
    folder = tmp_path_factory.mktemp("models")
    for name, kind in (("target", "byte-level"), ("draft", "sentencepiece")):
        inner = alphabets.KINDS[kind]()
        made = checkpoints.save_checkpoint(
            folder / name, seed=3, num_hidden_layers=2, vocab_size=inner.get_vocab_size()
        )
        alphabets.save(inner, made)
    llm: Any = foredraft.load(
        folder / "target", draft=folder / "draft", device="cpu", dtype="float32", policy="fixed"
    )
    return engine_of(llm).drafters["retokenize"].draft_pass.runner


def alone(runner: Any, sequence: Sequence, budget: int, positions: int = 90) -> tuple[list[int], list[int]]:
    """Return the proposal of a fresh drafter, and the draft's tokens that it read."""
    drafter = drafter_of(runner, 1, positions)
    drafter.join(sequence)
    (guess,) = drafter.propose([(sequence, budget)])
    return guess, drafter._rows[0]


def test_nonfinite_logits_harm_their_own_row_alone(runner: Any, caplog: pytest.LogCaptureFixture) -> None:
    sequences = [sequence_of(id, IDS[: 12 + 5 * id]) for id in range(ROWS)]
    drafter = drafter_of(runner, ROWS)
    for sequence in sequences:
        drafter.join(sequence)
    requests = [(sequence, 4) for sequence in sequences]
    for fault in range(3):
        clean = [alone(runner, *request)[0] for request in requests]
        assert clean[1]
        assert any(clean[2:])
        if fault < 2:
            assert drafter.propose(requests) == clean, "it starts anew"
            poison(drafter.cache, 1, 5)
        assert drafter.propose(requests) == [clean[0], [], *clean[2:]]
        assert drafter.cache.memory.isfinite().all()
        for sequence, guess in zip(sequences, clean, strict=True):
            sequence.tokens += [*guess[:2], 50]
            drafter.rewind(sequence)
    assert caplog.text.count("continues without retokenize") == 1


def test_rows_of_a_real_model_do_not_mix(runner: Any) -> None:
    """Rows pause in turn and have different budgets; the first reaches the end of its positions and is padded."""
    dice = random.Random(2)
    positions = len(SAID.encode(TEXT.join(IDS[1:41]).decode())) + 6
    sequences = [sequence_of(id, IDS[: (41, 12, 25, 30)[id]]) for id in range(ROWS)]
    drafter = drafter_of(runner, ROWS, positions)
    for sequence in sequences:
        drafter.join(sequence)
    said = 0
    for turn in range(12):
        asked = [s for s in sequences if s.id in (0, 3) or (turn and dice.random() < 0.6)]
        requests = [(sequence, dice.randint(1, 6)) for sequence in asked]
        for request, guess in zip(requests, drafter.propose(requests), strict=True):
            sequence = request[0]
            expected, read = alone(runner, *request, positions)
            assert guess == expected
            assert drafter._rows[drafter._seats[sequence.id].row] == read or not read
            said += guess != []
            kept = guess[: dice.randint(0, 2)] if sequence.id else []
            sequence.tokens += [*kept, dice.choice(IDS)]
            drafter.rewind(sequence)
    assert said > 8
    assert drafter.propose([(sequences[0], 4)]) == [[]], "no positions are left"


# --- planted defects ------------------------------------------------------------------------------------


def forwards(change: Function | None = None, out: Function = lambda forward: forward) -> Spoiler:
    """Spoil the forwards of a round.

    Args:
        change: Gets (options of the round's first forward, starts, options) and alters the last two.
        out: Returns another result of the forward.
    """

    def spoiler(go_on: Function) -> Function:
        def spoilt(drafter: Retokenize, turns: Any) -> Said:
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

        return spoilt

    return spoiler


def length_of_another_row(first: Any, starts: list[int], options: Any) -> None:
    if options["counts"] is not first["counts"]:  # a later step
        starts[:] = [
            start + max(first["counts"]) - own for start, own in zip(starts, first["counts"], strict=True)
        ]


def column_of_another_row(first: Any, starts: list[int], options: Any) -> None:
    options["at"] = options["at"][:1].expand_as(options["at"])


def no_row_idle_at_first(first: Any, starts: list[int], options: Any) -> None:
    if options["counts"] is first["counts"]:
        options["idle"] = [False] * len(starts)


def idle_as_at_first(first: Any, starts: list[int], options: Any) -> None:
    options["idle"] = first["idle"]


def into_the_first_row(first: Any, starts: list[int], options: Any) -> None:
    options["first_row"] = 0


def as_if_finite(forward: Any) -> Forward:
    return replace(forward, logits=forward.logits.nan_to_num(nan=99.0))


def padding_counted(behind: Function) -> Function:
    def spoilt(*args: Any) -> Any:
        tokens, starts, counts = behind(*args)
        return tokens, starts, [max(counts)] * len(counts)

    return spoilt


def said_by(change: Callable[[Any, Said], Said]) -> Spoiler:
    """Return another result of a round: `change` gets its turns by row, and what each row said."""
    return lambda go_on: lambda drafter, turns: change(turns, go_on(drafter, turns))


def shared_fault(go_on: Function) -> Function:
    def spoilt(drafter: Retokenize, turns: Any) -> Said:
        said: Said = go_on(drafter, turns)
        if len(said) == len(turns):
            return said
        for row in said:
            drafter._fault(turns[row].seat)
        return {}

    return spoilt


def fault_of_an_idle_step(go_on: Function) -> Function:
    def spoilt(drafter: Retokenize, turns: Any) -> Said:
        sound: list[torch.Tensor] = []

        def note(forward: Any) -> Forward:
            sound.append(forward.logits.isfinite().all(-1))  # [B, 1]
            return forward

        said: Said = forwards(out=note)(go_on)(drafter, turns)
        for row in [row for row in said if not all(step[row - min(turns)] for step in sound)]:
            drafter._fault(turns[row].seat)
            del said[row]
        return said

    return spoilt


def as_long_as_the_longest(go_on: Function) -> Function:
    def spoilt(drafter: Retokenize, turns: Any) -> Said:
        most = max((turn.count for turn in turns.values()), default=0)
        said: Said = go_on(drafter, {row: replace(turn, count=most) for row, turn in turns.items()})
        return said

    return spoilt


def row_by_row(go_on: Function) -> Function:
    return lambda drafter, turns: {
        row: ids for own in turns for row, ids in go_on(drafter, {own: turns[own]}).items()
    }


CONTINUE = Retokenize._continue
DEFECTS: list[tuple[str, Any, Spoiler]] = [
    ("one row's length for another", CONTINUE, forwards(length_of_another_row)),
    ("one row's last column for another", CONTINUE, forwards(column_of_another_row)),
    ("padding is real", Retokenize._behind, padding_counted),
    ("an idle row is overwritten", CONTINUE, forwards(no_row_idle_at_first)),
    ("a row goes on after its end", CONTINUE, forwards(idle_as_at_first)),
    ("the first row of the cache", CONTINUE, forwards(into_the_first_row)),
    ("another row's tokens", CONTINUE, said_by(lambda turns, said: {row: said[min(said)] for row in said})),
    ("another row's tokens, by order", CONTINUE, said_by(lambda turns, said: dict(zip(turns, said.values(), strict=False)))),
    ("a fault is every row's", CONTINUE, shared_fault),
    ("an idle step is a fault", CONTINUE, fault_of_an_idle_step),
    ("faults are ignored", CONTINUE, forwards(out=as_if_finite)),
    ("every row drafts as much as the longest", CONTINUE, as_long_as_the_longest),
    ("row by row", CONTINUE, row_by_row),
]  # fmt: skip


@pytest.mark.parametrize(("name", "seam", "spoiler"), DEFECTS, ids=[name for name, _, _ in DEFECTS])
def test_defects_are_caught(name: str, seam: Any, spoiler: Spoiler, monkeypatch: pytest.MonkeyPatch) -> None:
    def check() -> None:
        for seed in range(4):
            live(Company(), random.Random(seed), 20)

    assert_caught(defect(name, seam, spoiler, check), monkeypatch)
