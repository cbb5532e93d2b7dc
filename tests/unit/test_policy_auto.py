"""The cost model on paper: best budgets against all budgets, and what auto makes of good and bad drafters.

No clock: tables are made, and rounds take what a table says.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from foredraft.decode.policy.candidates import Candidate, Made
from foredraft.decode.policy.survival import Track
from foredraft.decode.policy.weighing import Weighing

from foredraft.decode.policy import PLAIN, Auto, Choice, CostTable, Fixed, auto
from foredraft.decode.policy.budgets import Prospect, best_budgets, best_length, round_ms
from tests.support.simulation import Right, Row, Simulated, flat, right_with, simulate

LONGEST = 10
LATECOMER = frozenset({"small"})


def rate(table: CostTable, rows: list[Prospect | None], budgets: tuple[int, ...]) -> float:
    tokens = len(rows) + sum(
        sum(row.survives[:budget]) for row, budget in zip(rows, budgets, strict=True) if row is not None
    )
    names = [None if row is None else row.drafter for row in rows]
    return tokens / round_ms(table, list(map(Choice, names, budgets)))


@pytest.mark.parametrize("seed", range(60))
def test_no_budgets_are_better_than_the_best(seed: int) -> None:
    """Of up to three rows and two drafters that take time and one that does not."""
    dice = random.Random(seed)
    rows: list[Prospect | None] = []
    for _ in range(dice.randint(1, 3)):
        survives = itertools.accumulate(
            (dice.choice([0.2, 0.6, 0.9, 1.0]) for _ in range(dice.randint(1, 4))), float.__mul__
        )
        rows.append(
            Prospect(dice.choice(["small", "other", "lookup"]), tuple(survives))
            if dice.random() < 0.9
            else None
        )
    batch = len(rows)
    widths = sorted(dice.sample(range(batch + 1, 16), 3))
    times = sorted(dice.uniform(1, 2) for _ in range(4))
    table = CostTable(
        {batch: dict(zip([batch, *widths], times, strict=True))},
        {
            "small": {batch: (dice.uniform(0.05, 0.6), dice.uniform(0.05, 0.3))},
            "other": {batch: (dice.uniform(0.05, 0.6), dice.uniform(0.05, 0.3))},
            "lookup": {batch: (0.0, 0.0)},
        },
    )
    found = best_budgets(table, rows)
    ranges = [range(1 if row is None else len(row.survives) + 1) for row in rows]
    best = max(rate(table, rows, budgets) for budgets in itertools.product(*ranges))
    assert rate(table, rows, tuple(found)) == pytest.approx(best, rel=1e-12)
    if batch == 1 and rows[0] is not None:
        assert best_length(table, 1, rows[0]) == (pytest.approx(best), found[0])


def test_a_bad_row_among_good_ones_drafts_nothing() -> None:
    rows = [
        Prospect("small", (0.8, 0.64, 0.5)) if row else Prospect("small", (0.05, 0.0, 0.0))
        for row in range(8)
    ]
    budgets = best_budgets(flat(), list(rows))
    assert budgets[0] == 0
    assert min(budgets[1:]) > 1


def test_between_what_was_measured_lies_a_line() -> None:
    table = CostTable({1: {1: 1.0, 5: 2.0, 9: 4.0}, 4: {4: 3.0, 8: 5.0}}, {"small": {1: (0.3, 0.2)}})
    assert [table.verifying(1, n) for n in (1, 3, 5, 7, 9, 11)] == [1.0, 1.5, 2.0, 3.0, 4.0, 5.0]
    assert [table.verifying(4, n) for n in (4, 6, 8, 10)] == [3.0, 4.0, 5.0, 6.0]
    assert table.verifying(3, 5) == pytest.approx(1.5 / 3 + 4.0 * 2 / 3), "two drafted columns in each batch"
    assert table.verifying(6, 8) == table.verifying(4, 6), "nothing larger was measured"
    apart = CostTable({1: {1: 1.0}, 5: {5: 1.0}}, {"small": {1: (0.3, 0.2), 5: (0.7, 0.6)}})
    assert [apart.drafting("small", 2, 1), apart.step("small", 9)] == pytest.approx([0.4, 0.6])
    assert [table.drafting("small", 4, depth) for depth in (0, 1, 3)] == pytest.approx([0.0, 0.3, 0.7])
    assert table.reading("small", 5) == pytest.approx(0.3 * 2.0)
    assert CostTable({1: {1: 3.0, 2: 1.0, 3: 2.0}}, {}).passes == {1: [(1, 1.0), (2, 1.0), (3, 2.0)]}


def test_a_track_follows_a_change() -> None:
    track = Track(3, 0.9)
    for _ in range(30):
        track.learn(3, 3)
    assert track.survives(3)[2] > 0.9
    for _ in range(12):
        track.learn(3, 0)
    assert track.survives(1)[0] < 0.45


def test_what_a_request_saw_first_does_not_count_twice() -> None:
    """All that is known of a drafter may be what this request saw of it; what others saw is apart."""
    shared = Track(3, 0.98)
    for others in (0, 40):
        for _ in range(others):
            shared.learn(3, 2)
        own = Track(3, 0.9, shared)
        for _ in range(3):
            shared.learn(3, 0)
            own.learn(3, 0)
        fewer = shared.rates(1)[0] - own.rates(1)[0]
        assert fewer < 0.02 if not others else fewer > 0.1


def run(table: CostTable, right: Right, policy: Auto | Fixed, prompt: int = 16) -> Simulated:
    return simulate(policy, table, [Row({"small": right}, prompt=prompt)])


def best_fixed(table: CostTable, right: Right) -> float:
    return max(run(table, right, Fixed(gamma)).speedup for gamma in range(LONGEST + 1))


NEVER_SLOWER: dict[str, tuple[Right, float]] = {
    "random drafts": (right_with(0.0), 0.2),
    "random drafts, half a step each": (right_with(0.0), 0.5),
    "seldom right": (right_with(0.3), 0.5),
    "as dear as the target": (right_with(0.95), 1.0),
    "right for 30 tokens, then never": (lambda position: position < 30, 0.2),
    "right at every other token": (lambda position: position % 2 == 0, 0.2),
    "right at every other token, half a step each": (lambda position: position % 2 == 0, 0.5),
}


@pytest.mark.parametrize("name", NEVER_SLOWER)
def test_auto_is_never_much_slower_than_plain(name: str) -> None:
    """In a first request, and in one that knows what became of others."""
    right, step = NEVER_SLOWER[name]
    table = flat(step)
    policy = Auto(LONGEST, table)
    for _ in range(3):
        assert run(table, right, policy).speedup >= 0.97


@pytest.mark.parametrize("step", [0.1, 0.2, 0.35, 0.5])
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("bad", [1, 4, 8])
def test_bad_rows_hold_nobody_up(bad: int, known: bool, step: float) -> None:
    """known: earlier requests gained by their drafters, so that much is thought of these."""
    table = flat(step)
    policy = Auto(LONGEST, table)
    for worst, turns in ((0, 3 * known), (bad, 4)):
        for turn in range(turns):
            drafters = [right_with(0.0 if row < worst else 0.8, 100 * turn + row) for row in range(8)]
            speedup = simulate(policy, table, [Row({"small": d}, prompt=100) for d in drafters]).speedup
            assert speedup >= 0.955 or not worst


@pytest.mark.parametrize("spread", [0, 11])
@pytest.mark.parametrize("silent", [False, True])
def test_a_choice_outlives_rows_that_leave_or_fall_silent(
    monkeypatch: pytest.MonkeyPatch, spread: int, silent: bool
) -> None:
    """Eight rows whose drafts are always right: the others are not weighed anew when one ends, nor when it has
    nothing to offer for a while."""
    policy, table = Auto(LONGEST, flat()), flat()
    weighed: list[int] = []
    weigh = policy._weigh

    def counted(rows: Any, *given: Any, **named: Any) -> Any:
        weighed.append(len(rows))
        return weigh(rows, *given, **named)

    def offers(row: int) -> Callable[[int], int]:
        return lambda done: 0 if silent and (done // 20 + row) % 4 == 0 else LONGEST

    monkeypatch.setattr(policy, "_weigh", counted)
    rows = [
        Row({"small": right_with(1.0)}, tokens=240 + spread * row, offered={"small": offers(row)})
        for row in range(8)
    ]
    simulate(policy, table, rows)
    assert len(weighed) <= 12


def test_a_batch_of_good_rows_gains() -> None:
    policy, table = Auto(LONGEST, flat()), flat()

    def rows() -> list[Row]:
        return [Row({"small": right_with(0.8, row)}) for row in range(8)]

    best = max(simulate(Fixed(gamma), table, rows()).speedup for gamma in range(LONGEST + 1))
    simulate(policy, table, rows())
    assert simulate(policy, table, rows()).speedup >= 0.9 * best > 1


@pytest.mark.parametrize(("chance", "late"), [(0.3, 0), (0.6, 40)])
def test_a_row_joins_drafts_that_pay_for_others_alone(chance: float, late: int) -> None:
    """Steps that are paid for already cost a row nothing but its columns, and a few tokens to read again.

    late: places at which it is wrong at first, so that it falls behind.
    """
    passes = {1: {1: 1.0, 2: 1.05}, 8: {8: 4.0, 88: 8.0}}
    table = CostTable(passes, {"small": {1: (0.4, 0.4), 8: (2.0, 0.5)}}, {"small": 0.05})
    policy = Auto(LONGEST, table)
    simulate(policy, table, [Row({"small": right_with(0.9, row)}) for row in range(8)])
    seldom, good = right_with(chance), [right_with(0.85, row) for row in range(1, 8)]
    rights = [lambda place: place >= late and seldom(place), *good]
    found = simulate(policy, table, [Row({"small": right}) for right in rights])
    full = [choices for choices in found.rounds if len(choices) == 8]
    assert sum(budget > 0 for (_, budget), *_ in full) > 0.66 * len(full)


def test_where_nobody_drafts_one_row_at_a_time_is_tried() -> None:
    """Once its drafter is known for no good; the first time, all of them draft."""
    policy, table = Auto(LONGEST, flat()), flat()
    for most in (8, 1):
        rows = [Row({"small": right_with(0.0)}) for _ in range(8)]
        rounds = simulate(policy, table, rows).rounds
        assert max(sum(budget > 0 for _, budget in round) for round in rounds) == most


STEEP = CostTable(  # drafts pay for one row as assumed, for eight if they are better than that
    {1: {1: 0.9, 2: 1.1, 5: 1.25, 11: 1.5}, 8: {8: 2.2, 16: 3.7, 24: 4.6, 40: 6.0, 88: 10.6}},
    {"small": {1: (0.35, 0.1), 8: (0.6, 0.2)}},
    {"small": 0.01},
)


def entering(chance: float, seed: int = 0) -> list[Row]:
    """Eight rows, whose prompts are read one by one."""
    some: dict[str, Any] = {"prompt": 300, "late": LATECOMER}
    return [Row({"small": right_with(chance, seed + row)}, enters=row, **some) for row in range(8)]


def test_who_comes_first_is_weighed_with_those_whose_prompts_are_read() -> None:
    """Who will decode before its choice is over; for the first one alone drafts would pay."""
    alone = simulate(Auto(LONGEST, STEEP), STEEP, entering(0.8)[:1])
    assert alone.rounds[0] != [(None, 0)]
    batch = simulate(Auto(LONGEST, STEEP), STEEP, entering(0.8))
    assert all(choice == (None, 0) for round in batch.rounds[:8] for choice in round)


def test_what_some_rows_find_out_the_others_go_by() -> None:
    """None but a few may read to try the drafter, whose drafts pay if all of them draft. That takes some luck,
    as one in twenty fails at once."""
    luck = [0, 0]
    for seed in range(0, 80, 10):
        rows = entering(0.95, seed)
        best = max(simulate(Fixed(gamma), STEEP, rows).speedup for gamma in range(1, LONGEST))
        policy = Auto(LONGEST, STEEP)
        first = simulate(policy, STEEP, rows)
        tried = next(round for round in first.rounds if round != [(None, 0)] * len(round))
        assert 1 < sum(budget > 0 for _, budget in tried) < 8
        assert first.read[:2] == [64, 64], "the end, as long as little is known"
        later = [simulate(policy, STEEP, rows).speedup for _ in range(3)]
        for place, speedup in enumerate((first.speedup, later[-1])):
            luck[place] += speedup >= 0.97 * best > 1.2
    assert luck[0] >= 6 and luck[1] == 8, luck


def test_a_new_drafter_is_hoped_for_in_a_batch() -> None:
    """All rows read and draft at once, where a drafter as good as a row by itself assumes would not pay."""
    table = CostTable(
        {1: {1: 0.9, 2: 1.1, 5: 1.25, 11: 1.5}, 8: {8: 2.25, 16: 3.3, 24: 4.1, 40: 5.3, 88: 9.4}},
        {"small": {1: (0.35, 0.1), 8: (0.6, 0.2)}},
        {"small": 0.01},
    )
    luck = 0
    for seed in range(0, 80, 10):
        rows = entering(0.85, seed)
        best = max(simulate(Fixed(gamma), table, rows).speedup for gamma in range(1, LONGEST))
        luck += simulate(Auto(LONGEST, table), table, rows).speedup >= 0.97 * best > 1.1
    assert luck >= 7


@pytest.mark.parametrize(("bad", "share"), [(0, 0.95), (1, 1.0), (8, 0.97)])
def test_a_batch_drafts_for_those_who_gain(bad: int, share: float) -> None:
    """Where steps of a smaller batch take less, whoever gains nothing gets that back when others are done."""
    table = CostTable(
        {1: {1: 1.0, 11: 1.4}, 8: {8: 2.5, 16: 2.6, 24: 3.5, 40: 4.4, 88: 7.5}},
        {"small": {1: (0.35, 0.1), 8: (0.7, 0.18)}},
    )

    def rows() -> list[Row]:
        return [Row({"small": right_with(0.0 if row < bad else 0.8, row)}) for row in range(8)]

    best = max(simulate(Fixed(gamma), table, rows()).speedup for gamma in range(LONGEST + 1))
    policy = Auto(LONGEST, table)
    for _ in range(3):
        assert simulate(policy, table, rows()).speedup >= share * best
    assert best >= 1 and (best > 1.3) == (bad == 0)


@pytest.mark.parametrize("chance", [0.6, 0.8, 0.95])
@pytest.mark.parametrize("step", [0.02, 0.1, 0.2])
def test_auto_is_near_the_best_fixed_length(chance: float, step: float) -> None:
    """Over texts whose right positions differ, after one that taught it."""
    table = flat(step)
    policy = Auto(LONGEST, table)
    run(table, right_with(chance, 99), policy)
    got = sum(run(table, right_with(chance, seed), policy).ms for seed in range(5))
    fixed = [
        sum(run(table, right_with(chance, seed), Fixed(gamma)).ms for seed in range(5)) for gamma in range(11)
    ]
    assert min(fixed) / got >= 0.9


MIXES: dict[str, dict[str, tuple[Right, Callable[[int], int] | None]]] = {
    "the small model is best": {
        "lookup": (right_with(0.3, 1), lambda done: 10 if done % 3 == 0 else 0),
        "small": (right_with(0.85, 2), None),
        "other": (right_with(0.5, 3), None),
    },
    "the lookup is best": {
        "lookup": (right_with(0.9, 1), lambda done: 10),
        "small": (right_with(0.7, 2), None),
        "other": (right_with(0.3, 3), None),
    },
    "each has its turn": {
        "lookup": (right_with(0.95, 1), lambda done: 10 if done % 40 < 15 else 0),
        "small": (right_with(0.8, 2), None),
        "other": (right_with(0.8, 4), None),
    },
}


@pytest.mark.parametrize("name", MIXES)
def test_auto_is_near_the_best_drafter(name: str) -> None:
    table = flat(0.15, drafters=("small", "other"))
    mix = MIXES[name]

    def row(*names: str) -> Row:
        offered = {key: mix[key][1] for key in names if mix[key][1] is not None}
        return Row({key: mix[key][0] for key in names}, tokens=400, offered=offered)  # type: ignore[arg-type]

    def taught(*names: str) -> float:
        policy = Auto(LONGEST, table)
        simulate(policy, table, [row(*names)])
        return simulate(policy, table, [row(*names)]).speedup

    assert taught(*mix) >= 0.95 * max(taught(key) for key in mix)


SURE_AT = {0.85: range(12), 0.35: range(12, 40)}  # of every 40 places


def sure_of(place: int) -> float:
    return next(sure for sure, places in SURE_AT.items() if place % 40 in places)


def flickering(*, tells: bool) -> Row:
    """A drafter that is right wherever it is sure, and never else."""
    right = {"lookup": lambda place: sure_of(place) > 0.5}
    return Row(right, 400, {"lookup": lambda done: LONGEST}, sure={"lookup": sure_of} if tells else {})


def test_drafts_go_by_how_sure_a_drafter_says_that_it_is() -> None:
    table = flat(column=0.1)
    policy, deaf = Auto(LONGEST, table), Auto(LONGEST, table)
    for _ in range(2):
        found = simulate(policy, table, [flickering(tells=True)])
        merged = simulate(deaf, table, [flickering(tells=False)])
    done, drafted = 0, dict.fromkeys(SURE_AT, 0)
    for ((_, budget),) in found.rounds:
        sure = sure_of(done)
        drafted[sure] += budget
        done += 1 + next(n for n in range(budget + 1) if n == budget or sure_of(done + n) < 0.5)
    assert drafted[0.85] > 100 > 20 > drafted[0.35], "the last ones are tried again now and then"
    assert found.speedup > 1.1 * merged.speedup


def test_a_drafter_is_believed_at_first() -> None:
    table = flat(column=0.1)
    rows = [flickering(tells=True), flickering(tells=True)]
    rows[1].sure = {"lookup": lambda done: 0.35}
    surer, less = (simulate(Auto(LONGEST, table), table, [row]).rounds[0][0][1] for row in rows)
    assert surer > less > 0


def test_whoever_is_unsure_may_fail_without_being_weighed_anew() -> None:
    """To weigh takes time, and that it fails is no news."""
    table = flat(column=0.005)
    policy = Auto(LONGEST, table)
    weighed: list[bool] = []
    weigh = policy._weigh

    def counted(*given: Any, **named: Any) -> Any:
        weighed.append(True)
        return weigh(*given, **named)

    policy._weigh = counted  # type: ignore[method-assign]
    right = right_with(0.35)
    row = Row({"lookup": right}, 400, {"lookup": lambda done: LONGEST}, sure={"lookup": lambda done: 0.35})
    rounds = simulate(policy, table, [row]).rounds
    assert sum(budget > 0 for ((_, budget),) in rounds) > 0.9 * len(rounds)
    assert len(weighed) < 0.2 * len(rounds)


def test_drafts_that_are_all_kept_get_longer_again() -> None:
    """Of one that knows itself that its second token is mostly wrong at first, and is always right later: drafts
    of one token would never learn of it."""
    table, seldom = flat(0.2, 0.1), right_with(0.2)
    row = Row(
        {"small": lambda place: place >= 120 or place % 2 == 0 or seldom(place)},
        tokens=400,
        tells={"small": lambda place: 0.2 if place < 120 and place % 2 else 0.9},
    )
    rounds = simulate(Auto(LONGEST, table), table, [row]).rounds
    assert len(rounds) <= 110


@pytest.mark.parametrize(("bad", "requests"), [(8, 24), (26, 36)])
def test_one_that_became_good_is_found_beside_one_that_pays(bad: int, requests: int) -> None:
    """It reads nothing, and is right in none of the first requests, which are short."""
    table = flat(drafters=("small", "other"))
    policy = Auto(LONGEST, table)
    for turn in range(requests):
        rights = {"small": right_with(0.75, 50 + turn), "other": right_with(0.97 * (turn >= bad), turn)}
        tells = dict.fromkeys(rights, lambda place: 0.9)
        found = simulate(policy, table, [Row(rights, 64, {"other": lambda done: LONGEST}, tells=tells)])
    assert sum(name == "other" for [(name, _)] in found.rounds) > len(found.rounds) / 2


def test_a_trial_beside_one_that_pays_ends_by_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside nobody it is short, and nothing else ends it."""
    table = flat(drafters=("small", "other"))
    policy, ended = Auto(LONGEST, table), list[tuple[bool, bool]]()
    stops = policy.stops

    def seen(sequences: Any, *given: Any) -> Any:
        found = stops(sequences, *given)
        made = sequences[0].policy_state.last
        if made.trial:
            ended.append((bool(found.chances.min() < 1), made.silent))
        return found

    monkeypatch.setattr(policy, "stops", seen)
    for turn in range(16):
        rights = {"small": right_with(0.8 * (turn < 8), turn), "other": right_with(0.0)}
        simulate(policy, table, [Row(rights, tells=dict.fromkeys(rights, lambda place: 0.9))])
    assert set(ended) == {(True, False), (False, True)}


def test_a_choice_stands_by_what_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter that is as sure as this or as that: neither is weighed because the other one was met."""
    policy, weighed = Auto(LONGEST, flat()), list[float]()
    weigh = policy._weigh

    def counted(rows: Any, *given: Any) -> Any:
        weighed.append(rows[0].sure["lookup"])
        return weigh(rows, *given)

    monkeypatch.setattr(policy, "_weigh", counted)
    levels = 0.6, 0.7, 0.8, 0.9
    row = Row({"lookup": right_with(1.0)}, 800, {"lookup": lambda done: 3})
    row.sure = {"lookup": lambda done: levels[done // 4 % 4]}
    rounds = simulate(policy, flat(), [row]).rounds
    assert len(rounds) == 200
    assert all(weighed.count(level) <= 1 + 50 / 8 for level in levels)


@pytest.mark.parametrize("gained", [False, True])
def test_a_request_that_gained_bears_one_draft_that_fails(
    monkeypatch: pytest.MonkeyPatch, gained: bool
) -> None:
    """At first it is weighed anew at once."""
    policy, weighed = Auto(LONGEST, flat()), list[int]()
    weigh = policy._weigh

    def counted(rows: Any, *given: Any) -> Any:
        weighed.append(len(rows[0].sequence.tokens) - 16)
        return weigh(rows, *given)

    monkeypatch.setattr(policy, "_weigh", counted)
    fails = 24 if gained else 0
    row = Row({"lookup": lambda place: place != fails}, 90, {"lookup": lambda done: 1})
    simulate(policy, flat(), [row])
    assert (fails + 1 in weighed) is not gained


def test_drafts_do_not_stand_as_long_as_none_would() -> None:
    """After a request in which nobody is tried any more, another has things to say that will fail one day."""
    table = flat(column=0.05)
    policy = Auto(LONGEST, table)
    assert simulate(policy, table, [Row({"small": right_with(0.0)})]).rounds[-20:] == [[PLAIN[:2]]] * 20
    right = {"lookup": lambda place: place < 30}
    row = Row(right, 400, {"lookup": lambda done: LONGEST}, sure={"lookup": lambda done: 0.45})
    assert simulate(policy, table, [row]).speedup >= 0.97


def test_a_long_text_is_read_only_by_a_drafter_that_is_known_to_pay() -> None:
    table = flat()
    policy = Auto(LONGEST, table)
    long = run(table, right_with(0.8), policy, prompt=4000)
    assert long.speedup == 1.0
    run(table, right_with(0.8), policy)
    assert run(table, right_with(0.8), policy, prompt=4000).speedup > 1.3
    rows = [Row({"small": right_with(0.8)}, prompt=4000, tokens=8)]
    assert simulate(policy, table, rows).speedup == 1.0, "it would not earn that again"


def test_of_a_long_text_an_unknown_drafter_reads_the_end() -> None:
    """So that it is tried at once, and a bad one has taken little; one that is known to pay reads all of it, if
    there is much left to say."""
    table = flat()
    long = Row({"small": right_with(0.8)}, prompt=2400, late=LATECOMER)
    policy = Auto(LONGEST, table)
    first = simulate(policy, table, [long])
    whole = max(simulate(Fixed(gamma), table, [long]).speedup for gamma in range(1, LONGEST))
    assert first.read == [128] and first.speedup > whole > 1.3
    assert policy.ledger.spent == pytest.approx(first.ms, rel=0.03)
    assert simulate(policy, table, [long]).read == [2399]
    assert simulate(policy, table, [replace(long, prompt=4000)]).read == [128], "too much for what is left"
    short = simulate(policy, table, [replace(long, tokens=8)])
    assert short.read == [128] and short.speedup > 1.1
    for knows in (policy, Auto(LONGEST, table)):
        together = simulate(knows, table, [replace(long, prompt=1000)] * 8)
        assert 128 not in together.read and together.speedup >= 0.97, "all or nothing"
    for prompt, read in ((600, [128]), (100, [99])):
        assert simulate(Auto(LONGEST, table), table, [replace(long, prompt=prompt)]).read == read


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("name", NEVER_SLOWER)
def test_a_bad_drafter_that_begins_late_takes_little(name: str, rows: int) -> None:
    right, step = NEVER_SLOWER[name]
    table = flat(step)
    policy = Auto(LONGEST, table)
    for _ in range(3):
        several = [Row({"small": right}, prompt=4000, late=LATECOMER)] * rows
        assert simulate(policy, table, several).speedup >= 0.97


def test_a_drafter_that_was_no_good_begins_late_again() -> None:
    """Where it could read more: the ledger would let it."""
    policy, table = Auto(LONGEST, flat()), flat()
    bad = Row({"small": right_with(0.0)}, prompt=600, late=LATECOMER)
    read = [simulate(policy, table, [bad]).read for _ in range(12)]
    assert sum(map(len, read)) > 2 and all(one in ([], [128]) for one in read)


def test_a_batch_reads_its_texts_only_if_all_of_them_are_worth_it() -> None:
    """By a drafter that is known to pay: to read one text would be, eight of them take longer than they save."""
    policy, table = Auto(LONGEST, flat()), flat()
    for turn in range(3):
        simulate(policy, table, [Row({"small": right_with(0.8, 8 * turn + row)}) for row in range(8)])
    alone = simulate(policy, table, [Row({"small": right_with(0.8)}, tokens=64, prompt=1000)])
    assert alone.speedup > 1.1
    together = [Row({"small": right_with(0.8, row)}, tokens=64, prompt=1000) for row in range(8)]
    assert simulate(policy, table, together).speedup >= 0.97


def test_bad_luck_at_first_is_paid_by_what_others_gained() -> None:
    table = flat(0.2, 0.03)
    policy = Auto(LONGEST, table)
    for seed in range(3):
        run(table, right_with(0.95, seed), policy)
    assert run(table, lambda position: position >= 6, policy).speedup > 2


def test_few_first_requests_are_lost_by_bad_luck() -> None:
    """What was read at first need not be earned before a drafter is tried again, nor does what it missed since
    forbid it: else 6 of these 30 decode plainly."""
    lost = 0
    for seed in range(30):
        table = flat()
        table.reads = {"small": 0.02}
        row = Row({"small": right_with(0.6, seed)}, prompt=4000, late=LATECOMER)
        lost += simulate(Auto(LONGEST, table), table, [row]).speedup < 1
    assert lost <= 4


def test_a_batch_earns_what_its_drafters_read() -> None:
    """Before others are tried in it: a share of each row's time would be a large one of all of theirs."""
    table = flat()
    table.reads = {"small": 0.01}
    policy = Auto(LONGEST, table)
    for _ in range(3):
        rows = [Row({"small": right_with(0.0)}, prompt=190)] * 8
        assert simulate(policy, table, rows).speedup >= 0.985


def test_a_batch_reads_no_text_for_the_little_that_is_left_of_it() -> None:
    """Another row would try the drafter late, for which it reads all that it has said."""
    table = flat()
    table.reads = {"small": 0.005}
    policy = Auto(LONGEST, table)
    rows = [Row({"small": right_with(0.0)}, prompt=190)] * 8
    simulate(policy, table, rows)
    for _ in range(3):
        found = simulate(policy, table, rows)
        assert found.read == [189] and found.speedup >= 0.99
    alone = Auto(LONGEST, table)
    assert any(simulate(alone, table, rows[:1]).read for _ in range(3)), "of a row alone that bounds itself"


def test_a_trial_that_nothing_ends_says_nothing_of_the_next_choice() -> None:
    """By the same drafter, as long, before more is learned."""
    policy = Auto(LONGEST, flat())
    state = policy.start()
    sequence: Any = SimpleNamespace(id=0, policy_state=state)
    candidate, choice = Candidate.of(LONGEST), Choice("small", 3)
    state.choice, least = choice, []
    for trial in (True, False):
        state.last = Made(choice, candidate, trial=trial, silent=True, rate=1.0)
        least.append(policy.stops([sequence], [3], torch.device("cpu")).keep.min().item())
    assert least[0] == 0.0 < least[1]


def test_a_drafter_that_comes_right_late_is_met_again() -> None:
    """After rounds that nobody was asked about."""
    table = flat(0.1)
    policy = Auto(LONGEST, table)
    found = run(table, lambda position: position >= 60, policy)
    assert found.rounds[60:65].count([PLAIN[:2]]) == 5
    assert found.speedup > 1.3
    assert policy.ledger.spent == pytest.approx(found.ms, rel=0.1), "but for the last choice"


def test_rounds_that_nobody_was_asked_about_are_learned_of_before_anything_new_is_weighed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are of a choice among more drafters than there are later."""
    table = flat()
    policy, rested = Auto(LONGEST, table), list[int]()
    choices = Weighing.choices

    def watched(weighing: Weighing) -> list[Choice]:
        rested.append(policy._rested)
        return choices(weighing)

    monkeypatch.setattr(Weighing, "choices", watched)
    bad = right_with(0.0)
    row = Row({"small": bad, "lookup": bad}, offered={"lookup": lambda done: LONGEST * (done < 60)})
    found = simulate(policy, table, [row])
    assert found.rounds.count([PLAIN[:2]]) > 200
    assert len(rested) > 4 and not any(rested)


def test_what_was_missed_is_read_only_where_enough_is_left() -> None:
    """To try a drafter again that was no good: of a row alone 1 % of the rest, of those in a batch less."""
    table = flat()
    bad = Row({"small": right_with(0.0)})
    for rows, reads, last in ((1, 0.01, 100), (2, 0.001, 128)):
        table.reads = {"small": reads}
        policy, tried = Auto(LONGEST, table), list[int]()
        for _ in range(4):
            rounds = simulate(policy, table, [bad] * rows).rounds
            tried += [place for place, round in enumerate(rounds) if any(budget for _, budget in round)]
        assert 8 < max(tried) <= last


def test_a_drafter_that_was_no_good_is_heard_again_in_later_requests() -> None:
    """Reading takes 2.2 steps of 64; time without drafts earns that slowly."""
    table = flat()
    policy = Auto(LONGEST, table)
    drafted = [
        any(budget for round in run_short(policy, table).rounds for _, budget in round) for _ in range(40)
    ]
    assert drafted[0] and not drafted[1]
    assert 2 <= sum(drafted) <= 8


def run_short(policy: Auto, table: CostTable) -> Simulated:
    return simulate(policy, table, [Row({"small": right_with(0.0)}, tokens=64, prompt=500)])


def test_choices_are_a_function_of_the_table_and_the_outcomes() -> None:
    table = flat()
    one, other = (run(table, right_with(0.7), Auto(LONGEST, table)) for _ in range(2))
    assert one.rounds == other.rounds


def test_columns_never_fall_in_price() -> None:
    """A step in what was measured holds nobody up who drafts beyond it; what is measured at the end is kept."""
    table = CostTable({1: {1: 1.0, 2: 1.1, 3: 1.6, 5: 1.6, 11: 1.6}}, {})
    assert table.columns(1, 10) == pytest.approx([0.06] * 10)
    assert table.columns(1, 1) == pytest.approx([0.1])
    dear = CostTable({1: {1: 1.0, 3: 1.2, 5: 2.0}, 8: {8: 2.0, 16: 2.8, 24: 5.2}}, {})
    assert dear.columns(1, 4) == pytest.approx([0.1, 0.1, 0.4, 0.4])
    assert dear.columns(8, 2) == pytest.approx([0.1, 0.3])


def test_what_nobody_knows_yet_is_learned_of_before_it_costs_much() -> None:
    """A drafter that is never right, and sure of it in another way every time: no choice ever ends."""
    table = flat(column=0.1)
    row = Row({"lookup": right_with(0.0)}, 256, {"lookup": lambda done: LONGEST})
    row.sure = {"lookup": lambda done: 0.6 + done / 1000}
    assert simulate(Auto(LONGEST, table), table, [row]).speedup >= 0.97


def test_a_request_begins_with_what_the_last_one_came_to() -> None:
    """However few its rounds were."""
    table = flat(0.2)
    policy = Auto(LONGEST, table)
    first, second = (
        simulate(policy, table, [Row({"small": right_with(1.0)}, tokens=12)]).rounds for _ in range(2)
    )
    assert len(first) < 4 and second[0][0][1] > first[0][0][1]


def test_what_is_new_on_offer_is_weighed_by_what_was_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    """To learn takes time."""
    policy, learned = Auto(LONGEST, flat()), list[bool]()
    learn = policy._learn

    def counted() -> None:
        learned.append(True)
        learn()

    monkeypatch.setattr(policy, "_learn", counted)
    row = Row({"lookup": right_with(1.0)}, 16, {"lookup": lambda done: 3})
    row.sure = {"lookup": lambda done: (0.6, 0.7, 0.8, 0.9)[done // 4]}
    assert len(simulate(policy, flat(), [row]).rounds) == 4
    assert len(learned) == 1


def test_a_drafter_that_nobody_knows_is_tried_within_its_credit() -> None:
    """One that takes three plain steps to begin, and then next to nothing: if it were right, it would pay."""
    table = CostTable({1: {1: 1.0, 11: 1.2}}, {"small": {1: (3.0, 0.1)}})
    row = Row({"small": right_with(0.0)}, 256, {"small": lambda done: LONGEST})
    found = simulate(Auto(LONGEST, table), table, [row])
    assert any(budget for ((_, budget),) in found.rounds)
    assert found.speedup >= 0.97


def test_a_draft_ends_by_what_its_own_choice_promises(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by what another drafter does, which was weighed since."""
    promised, ended = set[tuple[str | None, float]](), list[tuple[str, float]]()
    promise, end = Weighing.promised, auto.ends

    def promising(weighing: Weighing, choices: Any) -> float:
        rate = promise(weighing, choices)
        promised.add((choices[0].drafter, rate))
        return rate

    def ending(table: CostTable, drafter: str, batch: int, sharing: int, rate: float, *given: Any) -> Any:
        ended.append((drafter, rate))
        return end(table, drafter, batch, sharing, rate, *given)

    monkeypatch.setattr(Weighing, "promised", promising)
    monkeypatch.setattr(auto, "ends", ending)
    row = Row(
        {"small": right_with(0.7), "lookup": right_with(1.0)},
        offered={"lookup": lambda done: LONGEST if done % 30 < 10 else 0},
        sure={"lookup": lambda done: 0.85},
        tells={"small": lambda place: 0.7},
    )
    simulate(Auto(LONGEST, flat()), flat(), [row])
    assert {"small", "lookup"} <= {name for name, _ in promised}
    assert ended and set(ended) <= promised
