"""Shares of clients in counted steps of the engine, of which each reads a chunk of a prompt and runs one round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest

from foredraft.decode.policy import Fixed
from foredraft.decode.scheduler import TURNS, Rows, Scheduler, Shares
from foredraft.decode.sequence import Sequence
from tests.support.harness import CheckedEngine, make_engine, request
from tests.support.mutation import assert_caught, defect
from tests.support.mutations import around, before, instead
from tests.support.tabular import Table, Tabular

CHUNK, CHUNKS = 4, 32
LONG = CHUNK * CHUNKS + 1
TARGET = Table(5, 51)


def engine(rows: int = 4) -> CheckedEngine:
    return make_engine(Tabular(TARGET, chunk=CHUNK), policy=Fixed(0), rows=rows, positions=2 * LONG)


def prompt(tokens: int, client: str = "", new: int = 1, **more: Any) -> Sequence:
    ids = [place % 4 for place in range(tokens)]
    return request(ids, client=client, temperature=0, max_new_tokens=new, **more)


def steps(
    engine: CheckedEngine,
    holds: Callable[[], object],
    meanwhile: Callable[[], object] = lambda: None,
    most: int = 1000,
) -> int:
    for number in range(most):
        if holds():
            return number
        meanwhile()
        engine.step()
    raise AssertionError("it never came true")


def submit(engine: CheckedEngine, sequences: Iterable[Sequence]) -> list[Sequence]:
    found = list(sequences)
    for each in found:
        engine.submit(each)
    return found


def finish(engine: CheckedEngine) -> None:
    steps(engine, lambda: engine.scheduler.idle)


def alone(sequence: Sequence) -> list[int]:
    own = engine(1)
    [copy] = submit(own, [prompt(len(sequence.prompt), new=sequence.params.max_new_tokens)])
    finish(own)
    return copy.new_ids


@pytest.mark.parametrize("client", ["", "other"])
def test_a_short_prompt_waits_for_one_chunk_of_long_ones(client: str) -> None:
    one = engine()
    long = submit(one, [prompt(LONG), prompt(LONG), prompt(LONG)])
    steps(one, lambda: one.cache.lengths[0] >= 2 * CHUNK)
    [short] = submit(one, [prompt(3, client)])
    assert steps(one, lambda: short.new_ids) <= 2
    finish(one)
    assert [each.new_ids for each in [*long, short]] == [alone(each) for each in [*long, short]]


@pytest.mark.parametrize("client", ["", "other"])
def test_a_long_prompt_under_a_stream_of_short_ones_is_read_in_four_times_its_chunks(client: str) -> None:
    one = engine(4)
    [long] = submit(one, [prompt(LONG)])

    def short_ones() -> None:
        while len(one.scheduler.waiting) < 4:
            submit(one, [prompt(3, client)])

    assert steps(one, lambda: long.new_ids, short_ones, most=TURNS * (CHUNKS + 1) + 1) > CHUNKS


def test_equal_prompts_are_read_one_after_the_other() -> None:
    one = engine()
    several = submit(one, [prompt(9 * CHUNK + 1) for _ in range(4)])
    found = []
    while not all(one.cache.lengths[each.row] == 9 * CHUNK for each in several):
        one.step()
        found.append([one.cache.lengths[row] // CHUNK for row in range(4)])
        for each in several:
            one.pause(each)  # so that it keeps its row
    assert found == [[min(9, max(0, step - 9 * row)) for row in range(4)] for step in range(1, 37)]


def test_prompts_of_clients_take_turns() -> None:
    one = engine(6)
    submit(one, [prompt(LONG, "many") for _ in range(3)])
    one.step()
    [victim] = submit(one, [prompt(LONG, "one")])
    assert steps(one, lambda: victim.new_ids) <= TURNS * 2 * (CHUNKS + 1) / (TURNS - 1)


@pytest.mark.parametrize(("tokens", "new"), [(3, 90), (LONG, 2)], ids=["that decode", "that are being read"])
def test_a_hundred_requests_of_one_client_delay_another_by_a_step(tokens: int, new: int) -> None:
    one = engine(4)
    many = submit(one, [prompt(tokens, "many", new) for _ in range(100)])
    for _ in range(6):
        one.step()
    [victim] = submit(one, [prompt(3, "one", new=20)])
    assert steps(one, lambda: victim.new_ids) <= 3
    assert steps(one, lambda: victim.finish) <= 22
    assert tokens > 3 or sum(len(each.new_ids) for each in many) > 60, "the others go on meanwhile"
    for each in many[8:]:
        one.cancel(each)
    finish(one)
    assert victim.new_ids == alone(victim)
    assert {tuple(each.new_ids) for each in many[:8]} == {tuple(alone(many[0]))}


def test_rows_are_equal_and_samples_count_for_their_client() -> None:
    one = engine(6)
    submit(one, [prompt(3, "samples", 90, group=7, sample=sample) for sample in range(12)])
    submit(one, [prompt(3, client, 90) for client in "ab" for _ in range(5)])
    for _ in range(12):
        one.step()
    assert Counter(each.client for each in one.rows.sequences) == {"samples": 2, "a": 2, "b": 2}


def test_a_client_alone_gets_every_row_first_come_first_served() -> None:
    one = engine(4)
    several = submit(one, [prompt(3, "a", 5) for _ in range(10)])
    while not one.scheduler.idle:
        one.step()
        waiting = one.scheduler.waiting
        assert waiting == several[len(several) - len(waiting) :]
        assert len(one.rows.sequences) + sum(bool(each.finish) for each in several) + len(waiting) == 10
    assert all(each.new_ids for each in several)


def test_tokens_decide_among_clients_with_as_many_rows() -> None:
    """With one row, a client of long texts gets as many tokens as one of short texts, not as many turns."""
    one = engine(1)
    pairs = [(prompt(2, "long", 60), prompt(2, "short", 5)) for _ in range(40)]
    submit(one, [each for pair in pairs for each in pair])
    long, short = zip(*pairs, strict=True)
    for _ in range(500):
        one.step()
    tokens = [sum(len(each.new_ids) for each in of) for of in (short, long)]
    assert abs(tokens[0] - tokens[1]) < 2 * 60 or tokens[0] == 40 * 5, tokens


def test_no_client_starves_under_ever_new_ones() -> None:
    """One row; a client that is ahead of the clock meets clients that come fresh, without end."""
    one = engine(1)
    submit(one, [prompt(2, "ahead", 30), prompt(2, "other", 2)])
    steps(one, lambda: one.rows.sequences and len(one.rows.sequences[0].new_ids) > 25)
    [second] = submit(one, [prompt(2, "ahead", 2)])
    number = iter(range(10**6))

    def fresh() -> None:
        while len(one.scheduler.waiting) < 4:
            submit(one, [prompt(2, f"fresh {next(number)}", 2)])

    ahead, wait = 30, 7  # clients that wait at a time
    assert steps(one, lambda: second.finish, fresh, 2 * ahead * wait)  # a step may give no token


@around
def clock_at_the_least(advance: Any, self: Shares, waiting: frozenset[str]) -> None:
    advance(self, waiting)
    least = min((self.lead(client) for client in waiting if client in self._leads), default=0)
    self._leads = {client: lead - least for client, lead in self._leads.items()}


nothing = instead(lambda *given: None)
unled = instead(lambda self, client: 0)

short_prompt = partial(test_a_short_prompt_waits_for_one_chunk_of_long_ones, "")
long_prompt = partial(test_a_long_prompt_under_a_stream_of_short_ones_is_read_in_four_times_its_chunks, "")
starving = test_no_client_starves_under_ever_new_ones
hundred = partial(test_a_hundred_requests_of_one_client_delay_another_by_a_step, 3, 90)
DEFECTS = [
    ("prompts by age", Scheduler._length, lambda _: lambda self, sequence: sequence.id, short_prompt),
    (
        "never the oldest",
        Scheduler.prefilling,
        before(lambda plan: setattr(plan, "_read", 0)),
        long_prompt,
    ),
    ("rows are kept", Scheduler._above_share, nothing, hundred),
    ("tokens count nothing", Shares.lead, unled, test_tokens_decide_among_clients_with_as_many_rows),
    ("tokens of prompts count nothing", Shares.lead, unled, test_prompts_of_clients_take_turns),
    ("the clock at the least", Shares.advance, clock_at_the_least, starving),
    ("tokens are not charged", Shares.charge, nothing, test_tokens_decide_among_clients_with_as_many_rows),
]


@pytest.mark.parametrize("row", DEFECTS, ids=lambda row: str(row[0]))
def test_a_planted_defect_is_caught(row: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(defect(*row), monkeypatch)


def test_the_clock_moves_by_an_equal_part_of_what_those_that_wait_get() -> None:
    shares = Shares()
    shares.advance(frozenset("abc"))
    for client, tokens in (("a", 10), ("b", 2), ("d", 9)):
        shares.charge(client, tokens)
    shares.advance(frozenset("ac"))  # b has had less than 4, but waits no longer, so that it saves nothing up
    assert [shares.lead(client) for client in "abcde"] == [6, 0, -4, 5, 0]
    shares.advance(frozenset("abc"))
    assert [shares.lead(client) for client in "abcde"] == [6, 0, -4, 5, 0]


def test_a_parked_prompt_is_read_on_where_it_was() -> None:
    one = engine(2)
    many = submit(one, [prompt(LONG, "many", 3), prompt(LONG, "many", 3)])
    steps(one, lambda: one.cache.lengths[0] == 8 * CHUNK)
    [victim] = submit(one, [prompt(3, "one", 4)])
    one.step()
    assert many[1].parked is not None and not many[1].decoding
    one.cancel(victim)
    steps(one, lambda: many[1].row >= 0)
    finish(one)
    assert [each.new_ids for each in many] == [alone(each) for each in many]
    assert isinstance(one.rows, Rows) and not any(each.parked for each in many)
