"""The cost policy by the clock, which is simulated: tables that are wrong, stalls, and loads that come and go."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from foredraft.decode.policy import Candidates, cost_table
from foredraft.decode.policy.auto import Auto
from foredraft.decode.policy.cost_table import CorrectedTable, TimedRound
from foredraft.decode.stats import Round
from tests.support.mutation import Mutant, assert_caught, defect
from tests.support.simulation import Row, Simulated, Slowdown, flat, right_with, sequence_of, simulate

LONGEST, TOKENS = 10, 300
COLUMN = 0.02  # of `flat`: what a further column costs


def work(found: Simulated, step: float) -> float:
    """Return what the rounds cost on an idle machine, for each token; a plain step costs 1."""
    budgets = [budget for ((_, budget),) in found.rounds]
    return sum(1 + COLUMN * budget + step * budget for budget in budgets) / TOKENS


def requests(predicted: float, step: float, chance: float, slowdown: Slowdown, count: int = 4) -> list[float]:
    """Return the work of requests in turn, of a draft model whose step costs `step` where the table says `predicted`."""
    policy = Auto(LONGEST, flat(predicted))
    rows = ([Row({"small": right_with(chance, seed)}, TOKENS)] for seed in range(count))
    return [work(simulate(policy, flat(predicted), row, flat(step), slowdown=slowdown), step) for row in rows]


def best(step: float, chance: float, count: int = 4) -> list[float]:
    """Return the work under a right table, or of plain decoding if that is less."""
    policy = Auto(LONGEST, flat(step))
    rows = ([Row({"small": right_with(chance, seed)}, TOKENS)] for seed in range(count))
    return [min(1.0, work(simulate(policy, flat(step), row), step)) for row in rows]


def idle(number: int, drafter: str | None) -> float:
    return 1.0


def noisy(load: Slowdown = idle, *, noise: float = 0.05, stalls: float = 0.0) -> Slowdown:
    """Return a load with noise; stalls: the chance that a round takes 200 times as long."""
    draw = random.Random(1)
    return lambda number, drafter: (
        load(number, drafter) * math.exp(draw.gauss(0, noise)) * (200 if draw.random() < stalls else 1)
    )


def check(predicted: float, step: float, chance: float, slowdown: Slowdown, later: float = 1.05) -> None:
    """Hold the first request against plain decoding, and the mean of the later ones against the best."""
    found, wanted = requests(predicted, step, chance, slowdown), best(step, chance)
    assert found[0] <= 1.15, found
    assert sum(found[1:]) <= later * sum(wanted[1:]), (found, wanted)


TABLES = [(0.1, 0.3), (0.2, 0.6), (0.5, 1.5), (0.25, 3.0), (0.3, 0.1), (0.6, 0.2), (0.9, 0.3), (0.2, 0.2)]


@pytest.mark.parametrize("chance", [0.0, 0.8])
@pytest.mark.parametrize(("predicted", "step"), TABLES)
def test_a_wrong_table_is_corrected(predicted: float, step: float, chance: float) -> None:
    check(predicted, step, chance, idle)


def test_a_drafter_that_the_table_says_can_never_pay_is_timed() -> None:
    found, wanted = requests(1.5, 0.5, 0.8, idle, 8), best(0.5, 0.8, 8)
    assert found[-1] <= 1.05 * wanted[-1] < 0.95


LOADS: dict[str, Callable[[], Slowdown]] = {
    "every fiftieth round takes 200 times as long": lambda: noisy(stalls=0.02),
    "comes": lambda: noisy(lambda number, drafter: 3.0 if number > 50 else 1.0),
    "goes": lambda: noisy(lambda number, drafter: 4.0 if number < 30 else 1.0),
    "comes and goes": lambda: noisy(lambda number, drafter: 3.0 if number // 40 % 2 else 1.0),
}


@pytest.mark.parametrize("chance", [0.0, 0.8])
@pytest.mark.parametrize(("predicted", "step"), [(0.2, 0.2), (0.1, 1.0), (0.6, 0.2)])
@pytest.mark.parametrize("load", LOADS)
def test_stalls_and_loads_that_slow_all_rounds_alike_change_little(
    load: str, predicted: float, step: float, chance: float
) -> None:
    check(predicted, step, chance, LOADS[load](), 1.05 if load.startswith("every") else 1.07)


def test_a_load_that_slows_drafting_alone_ends_drafting() -> None:
    def slower(number: int, drafter: str | None) -> float:
        return 6.0 if drafter and number > 40 else 1.0

    policy = Auto(LONGEST, flat())
    row = Row({"small": right_with(0.8)}, 600)
    rounds = simulate(policy, flat(), [row], flat(), slowdown=slower).rounds
    drafts = [bool(budget) for ((_, budget),) in rounds]
    assert sum(drafts[:40]) >= 30 and sum(drafts[50:]) <= 5


def test_what_was_found_heals() -> None:
    """Drafting was slow in the first request alone; some requests later it pays again."""
    policy, found = Auto(LONGEST, flat()), []
    for number in range(6):
        slow = 8.0 if number == 0 else 1.0
        row = Row({"small": right_with(0.8, number)}, TOKENS)
        simulated = simulate(
            policy, flat(), [row], flat(), slowdown=lambda _, drafter, slow=slow: slow if drafter else 1.0
        )
        found.append(work(simulated, 0.2))
    assert found[1] > 0.9 and found[-1] < 0.65, found


def test_what_is_confirmed_fades_ever_more_slowly() -> None:
    correction, slow, plain = CorrectedTable(flat()), TimedRound(9.0, 0.5), TimedRound(1.0)
    for sample, drafter in [(slow, "small")] * 2 + [(plain, None)] * 2:
        correction.learn(drafter, sample)
    assert correction.found("small") == (9.0, 0.5)
    for span in (cost_table.FADE, 2 * cost_table.FADE, 4 * cost_table.FADE):
        for _ in range(span - 5):
            correction.learn(None, plain)
        assert correction.found("small").ratio == 9.0
        for _ in range(10):
            correction.learn(None, plain)
        assert correction.found("small").ratio == 3.0
        correction.learn("small", slow)
        assert correction.found("small").ratio == 3.0, "it was seen once"
        correction.learn("small", slow)
        assert correction.found("small").ratio == pytest.approx(9.0)


def test_what_a_round_takes_beyond_the_table_is_its_drafting() -> None:
    """A draft of 2 tokens costs 0.4, and its pass 1.04: of a round that takes 3.04, drafting takes 2."""
    base, whole = flat(0.2), 0.4 + 1.04
    costs = CorrectedTable(base)
    for drafter, ratio in (("small", 3.04 / whole), ("small", 3.04 / whole), (None, 1.0), (None, 1.0)):
        costs.learn(drafter, TimedRound(ratio, 0.4 / whole if drafter else 0.0))
    assert [costs.draft("small", 1, tokens) for tokens in (2, 4)] == pytest.approx([2.0, 4.0])
    assert costs.read("small", 9) == pytest.approx(5 * base.read("small", 9))
    assert costs.draft("lookup", 1, 2) == 0.0 == costs.draft("small", 1, 0)
    for drafter, ratio in (("lookup", 1.5), ("lookup", 1.5), (None, 1.0), (None, 1.0)):
        costs.learn(drafter, TimedRound(ratio))
    assert costs.draft("lookup", 1, 2) == pytest.approx(0.5 * 1.04), "its rounds cost that much more"


def test_rounds_that_tell_nothing_of_one_drafter_are_not_counted() -> None:
    policy = Auto(LONGEST, flat(drafters=("small", "other")))
    rows = [Row({"small": right_with(1.0)}, 30), Row({"other": right_with(1.0)}, 30)]
    simulate(policy, policy.greedy, rows, slowdown=idle)
    found = policy.table.found
    assert found("small") == found("other") == TimedRound(1.0)


def test_guesses_beside_a_draft_model_hide_nothing() -> None:
    """Rounds in which one row drafts by it and another by lookup take three times what they are thought to."""
    policy = Auto(LONGEST, flat(0.2))
    rows = [Candidates(sequence_of(policy), {"small": 3}), Candidates(sequence_of(policy), {"lookup": 4})]
    drafts, plain = [Round(3, 3, 4, "small"), Round(4, 4, 5, "lookup")], [Round(0, 0, 1)] * 2
    for outcomes, slower in ((drafts, 3.0), (drafts, 3.0), (plain, 1.0), (plain, 1.0)):
        policy.decide(rows)
        for row, outcome in zip(rows, outcomes, strict=True):
            policy.learn(row.sequence, outcome, None)
        predicted = cost_table.round_ms(policy.greedy, [(each.drafter, each.drafted, 0) for each in outcomes])
        policy.took(slower * predicted / 1e3)
    assert policy.table.found("small").ratio == pytest.approx(3.0)
    assert policy.table.found("lookup") == TimedRound(1.0)


def test_reading_a_text_tells_nothing_of_drafting() -> None:
    base = flat(0.2)
    costs = CorrectedTable(base)
    for drafter, ratio in (("small", 0.2), ("small", 0.2), (None, 1.0), (None, 1.0)):
        costs.learn(drafter, TimedRound(ratio, 0.9 if drafter else 0.0), reads=drafter is not None)
    assert costs.draft("small", 1, 2) == base.draft("small", 1, 2) and costs.misses("small")
    assert costs.read("small", cost_table.TEXT) == pytest.approx(base.read("small", cost_table.TEXT) / 9)
    assert costs.read("small", cost_table.TEXT - 1) == base.read("small", cost_table.TEXT - 1)


def test_a_wrong_cost_of_reading_does_not_make_steps_cheap() -> None:
    """Reading is thought ten times as dear as it is, and steps that never pay are what they are thought to be."""
    base, real = flat(1.5), flat(1.5)
    base.reads, real.reads = {"small": 3.0}, {"small": 0.3}
    policy, drafted = Auto(LONGEST, base), []
    for seed in range(6):
        row = Row({"small": right_with(0.8, seed)}, TOKENS, prompt=64)
        drafted += simulate(policy, base, [row], real, slowdown=idle).rounds
    assert max(budget for ((_, budget),) in drafted) == 1, "it is timed, and no more"
    assert policy.table.draft("small", 1, 1) == pytest.approx(1.5)


def test_batches_have_corrections_of_their_own() -> None:
    policy = Auto(LONGEST, flat(0.2))
    simulate(policy, flat(0.2), [Row({"small": right_with(0.8)}, TOKENS)], flat(3.0), slowdown=idle)
    ratios = [policy._costs(False, batch).found("small").ratio for batch in (1, 8)]
    assert ratios[0] > 2 and ratios[1] == 1.0


def dear_drafts() -> None:
    check(0.25, 3.0, 0.8, idle)


def with_load() -> None:
    for load in LOADS:
        test_stalls_and_loads_that_slow_all_rounds_alike_change_little(load, 0.2, 0.2, 0.8)


def highest(samples: Any) -> TimedRound | None:
    known = sorted(samples)
    return known[-1] if len(known) >= 2 else None


MUTANTS: list[Mutant] = [
    defect("no correction", CorrectedTable.learn, lambda learn: lambda *given: None, dear_drafts),
    defect("ratios upside down", CorrectedTable.learn, lambda learn: lambda own, drafter, sample, *reads: learn(own, drafter, sample._replace(ratio=1 / sample.ratio), *reads), dear_drafts),
    defect("no checks", CorrectedTable.wants_plain, lambda wants: lambda correction: False, dear_drafts),
    defect("the slowest round", cost_table.median_of, lambda median_of: highest, with_load),
    defect("changes of load are not seen", cost_table.Window.add, lambda add: lambda own, sample: add(own, sample) and False, with_load),
    defect("nothing fades", cost_table.DrafterPace.faded, lambda faded: lambda pace, now: pace.found, test_what_was_found_heals),
    defect("a confirmed finding fades as fast", cost_table.DrafterPace.renew, lambda renew: lambda pace, now, plain, sample: renew(pace, now, plain, TimedRound(0.0)), test_what_is_confirmed_fades_ever_more_slowly),
    defect("drafting in proportion to the round", CorrectedTable.draft, lambda _: lambda own, drafter, *given: own.base.draft(drafter, *given) * own.found(drafter).ratio, test_what_a_round_takes_beyond_the_table_is_its_drafting),
    defect("reading counts as drafting", CorrectedTable.learn, lambda learn: lambda correction, drafter, sample, *reads: learn(correction, drafter, sample), test_a_wrong_cost_of_reading_does_not_make_steps_cheap),
    defect("one correction for all batches", Auto._costs, lambda costs: lambda policy, draws, batch: costs(policy, draws, 1), test_batches_have_corrections_of_their_own),
]  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: str(mutant.name))
def test_defects_are_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(mutant, monkeypatch)
