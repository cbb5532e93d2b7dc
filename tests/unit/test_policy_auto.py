"""The cost policy on paper: tables are made up, rounds cost what a table says, and no clock runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from foredraft.decode.params import RuleName, SamplingParams
from foredraft.decode.policy import PLAIN, Candidates, Decision, Fixed
from foredraft.decode.policy.auto import (
    DECISION_ROUNDS,
    FIRST_WAIT,
    LATE_CONTEXT,
    LONGEST_WAIT,
    Auto,
    RequestState,
)
from foredraft.decode.policy.cost_table import CostTable
from foredraft.decode.stats import Round
from tests.support.simulation import Right, Row, Simulated, flat, right_with, sequence_of, simulate

LONGEST = 10
LATE = frozenset({"small"})


def play(policy: Auto, rows: list[Candidates], *accepted: int) -> list[Decision]:
    """Run one round in which so many drafted tokens of each row are accepted."""
    decisions = policy.decide(rows)
    for row, decision, count in zip(rows, decisions, accepted, strict=True):
        policy.learn(row.sequence, Round(decision.budget, count, count + 1, decision.drafter), None)
    return decisions


def test_a_decision_follows_from_the_equations() -> None:
    # A pass over 1 + k columns costs 1 + 0.1 k ms, a draft of k tokens 0.3 + 0.1 (k - 1) ms, so a round costs
    # 1.2 + 0.2 k ms, and loses 0.2 + 0.2 k ms against a plain step if the whole draft is rejected.
    policy = Auto(8, CostTable({1: {1: 1.0, 9: 1.8}}, {"small": {1: (0.3, 0.1)}}))
    sequence = sequence_of(policy)
    row = Candidates(sequence, {"small": 8}, confidence={"small": 0.9})
    state, lengths = sequence.policy_state, range(1, 9)

    def best(rates: list[float]) -> int:
        tokens = [1 + sum(itertools.accumulate(rates[:k], float.__mul__)) for k in lengths]
        return max(lengths, key=lambda k: tokens[k - 1] / (1.2 + 0.2 * k))

    # First decision. Nothing is known, so every rate is the confidence, 0.9. Then 7 tokens are best. The request
    # may lose 2 plain steps, but two rejected drafts of 7 tokens lose 2 x 1.6 ms. The longest draft is halved, to
    # 4: two rejected drafts of 4 tokens lose 2 x 1.0 ms. The decision stands for 2.0 // 1.0 = 2 rounds.
    assert best([0.9] * 8) == 7
    assert play(policy, [row], 2) == [Decision("small", 4)]
    assert play(policy, [row], 0) == [Decision("small", 4)], "the decision stands"

    # Second decision. The rounds cost 2 x 2.0 ms and emitted 3 + 1 tokens, so nothing is lost, and 2 plain steps
    # and 0.5 % of 4 ms may be. Positions 1 to 3 were tried and the first two kept, and then position 1 was tried
    # in vain; the first round counts 0.98 in the pooled estimate and 0.9 in the request's.
    decision = play(policy, [row], 0)
    assert (state.spent, state.lost) == pytest.approx((4.0, 0.0))
    assert state.left(1.0) == pytest.approx(2.0 + 0.005 * 4.0)
    alpha = (1.96 + 8 * 0.9) / (1.98 + 0.98 + 0.98 + 8)
    pooled = [(0.98 + 8 * alpha) / 9.98, (0.98 + 8 * alpha) / 8.98, 8 * alpha / 8.98, *[alpha] * 5]
    level = (1.8 + 8 * alpha) / (1.9 + 0.9 + 0.9 + 8) / alpha
    kept, tried = [0.9, 0.9, *[0.0] * 6], [1.9, 0.9, 0.9, *[0.0] * 5]
    rates = [(k + 8 * level * r) / (t + 8) for k, t, r in zip(kept, tried, pooled, strict=True)]
    length = best(rates)  # 2
    assert 2 * (0.2 + 0.2 * length) <= 2.02, "the loss account allows it"
    assert decision == [Decision("small", length)] == [Decision("small", 2)]
    assert state.last.rounds == 2.02 // (0.2 + 0.2 * 2) - 1


def test_a_row_that_waits_for_others_gets_back_what_the_smaller_batch_saves() -> None:
    """A plain step of two rows costs 1.5 ms, of one 1.0 ms. The first row emits 3 tokens more than the second."""
    policy = Auto(4, CostTable({1: {1: 1.0}, 2: {2: 1.5, 10: 2.3}}, {"small": {1: (0.1, 0.1)}}))
    rows = [Candidates(sequence_of(policy), {"small": 3}), Candidates(sequence_of(policy), {})]
    assert play(policy, rows, 3, 0) == [Decision("small", 3), PLAIN]
    policy.decide(rows)
    losses = [row.sequence.policy_state.lost for row in rows]
    assert losses == pytest.approx([2.1 - 4 * 1.5, 2.1 - 1.5 - 3 * 0.5])


class Counting(Auto):
    """Counts its decisions, and the most by which a round lost what its row could no longer lose."""

    made = 0
    overdraft = 0.0

    def _decide_anew(self, *given: Any) -> None:
        self.made += 1
        super()._decide_anew(*given)

    def decide(self, rows: Any) -> list[Decision]:
        before = [row.sequence.policy_state.lost for row in rows]
        decisions = super().decide(rows)
        for row, lost in zip(rows, before, strict=True):
            loss: RequestState = row.sequence.policy_state
            if loss.lost > lost + 1e-9:
                over = -loss.left(self.table.plain(len(rows))) - (loss.lost - lost)
                self.overdraft = max(self.overdraft, over)
        return decisions


def test_a_decision_stands_for_some_rounds() -> None:
    policy = Counting(LONGEST, flat())
    found = simulate(policy, flat(), [Row({"small": right_with(1.0)}, tokens=880)])
    assert len(found.rounds) <= 85
    assert policy.made <= len(found.rounds) / DECISION_ROUNDS + 3, "the first ones stand for 2 rounds or more"


def test_a_decision_is_dropped_after_two_rejected_drafts() -> None:
    policy = Counting(LONGEST, flat())
    row = Candidates(sequence_of(policy), {"small": LONGEST})
    for _ in range(20):
        play(policy, [row], 3)
    while row.sequence.policy_state.last.rounds != 6:
        play(policy, [row], 3)
    made = policy.made
    play(policy, [row], 0)
    play(policy, [row], 0)
    assert policy.made == made
    play(policy, [row], 0)
    assert policy.made == made + 1


def test_a_row_whose_candidates_change_is_decided_alone() -> None:
    """In every round lookup has something to propose for one of eight rows, each time with another confidence."""
    considered = []

    class Considering(Auto):
        def _best(self, row: Candidates, batch: int) -> Any:
            considered.append(row)
            return super()._best(row, batch)

    rows = []
    for at in range(8):
        drafters = {"small": right_with(0.1, at), "lookup": right_with(0.2, at)}
        offered = {"lookup": lambda emitted, at=at: 3 * (emitted % 8 == at)}
        rows.append(Row(drafters, 200, offered, confidence={"lookup": lambda emitted: emitted / 400}))
    policy = Considering(LONGEST, flat(2.0))
    found = simulate(policy, policy.greedy, rows)
    assert len(considered) < 0.5 * sum(map(len, found.rounds))


@pytest.mark.parametrize(("others", "lost"), [(3, 0.0), (0, 1.9)])
def test_a_decision_does_not_stand_for_other_rows_or_beyond_their_cap(others: int, lost: float) -> None:
    """Rows join a batch that drafts, or a row in prefill, which may lose next to nothing, begins to decode."""
    made = []

    class Deciding(Auto):
        def _decide_anew(self, rows: Any, keys: Any, standing: Any, left: float, plain: float) -> None:
            made.append(any(standing))
            super()._decide_anew(rows, keys, standing, left, plain)

    policy = Deciding(LONGEST, flat())
    good, late = (Candidates(sequence_of(policy), {"small": LONGEST}) for _ in range(2))
    last = None
    while last is None or last.rounds != 5:
        name, budget, *_ = policy.decide([good, replace(late, limits={}, idle=True)])[0]
        policy.learn(good.sequence, Round(budget, budget, budget + 1, name), None)
        last = good.sequence.policy_state.last
    late.sequence.policy_state.lost = lost
    joining = [Candidates(sequence_of(policy), {"small": LONGEST}) for _ in range(others)]
    policy.decide([good, late, *joining])
    assert not made[-1], "all rows are decided"


def test_rounds_that_draw_have_costs_of_their_own() -> None:
    policy = Auto(LONGEST)
    policy.use(flat(0.1), flat(2.0))
    for temperature, drafts in ((0, True), (0.7, False)):
        sequence = sequence_of(policy, params=SamplingParams(temperature=temperature))
        (decision,) = policy.decide([Candidates(sequence, {"small": LONGEST})])
        assert (decision.budget > 0) is drafts


def test_the_policy_says_why_it_decodes_plainly() -> None:
    """It counts with the costs of the batch: eight rows draft at 1.7 / (2 + 2 + 0.02 x 8) x 2 of plain decoding."""
    passes = {1: {1: 1.0, 2: 1.01}, 8: {8: 2.0, 16: 2.16}}
    policy = Auto(LONGEST, CostTable(passes, {"small": {1: (0.1, 0.1), 8: (2.0, 2.0)}}))
    rows = [Candidates(sequence_of(policy), {"small": 5}) for _ in range(8)]
    assert play(policy, rows, *[0] * 8) == [PLAIN] * 8
    reason = policy.why_plain(rows[0].sequence)
    assert reason == "no draft is expected to pay: small at 0.82 x plain decoding (acceptance 70%)"
    assert policy.why_plain(sequence_of(policy)) == "no drafter had a proposal"


def run(table: CostTable, right: Right, policy: Auto | Fixed, tokens: int = 256) -> Simulated:
    return simulate(policy, table, [Row({"small": right}, tokens)])


NEVER_SLOWER: dict[str, Right] = {
    "random": right_with(0.0),
    "seldom right": right_with(0.3),
    "right for 30 tokens, then never": lambda position: position < 30,
    "right at every other token": lambda position: position % 2 == 0,
}


@pytest.mark.parametrize(("prompt", "share"), [(16, 0.97), (4000, 0.95)])
@pytest.mark.parametrize("step", [0.1, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("name", NEVER_SLOWER)
def test_auto_is_hardly_slower_than_plain_decoding(name: str, step: float, prompt: int, share: float) -> None:
    """Step 1.0 is a drafter as dear as the target. Of a long text it may read 4 % of the request's rest."""
    policy = Auto(LONGEST, flat(step))
    row = Row({"small": NEVER_SLOWER[name]}, prompt=prompt, late=LATE)
    for _ in range(3):
        speedup = simulate(policy, flat(step), [row]).speedup
        assert speedup >= share
        assert speedup == 1.0 or step < 1.0, "a drafter that cannot pay is never tried"


@pytest.mark.parametrize("chance", [0.6, 0.8, 0.95])
@pytest.mark.parametrize("step", [0.1, 0.2, 0.35, 0.5])
def test_auto_is_near_the_best_fixed_length(chance: float, step: float) -> None:
    """Summed over texts whose right positions differ, the first request included."""
    policy, table = Auto(LONGEST, flat(step)), flat(step)
    own = sum(run(table, right_with(chance, seed), policy).ms for seed in range(4))
    fixed = [
        sum(run(table, right_with(chance, seed), Fixed(length)).ms for seed in range(4))
        for length in range(LONGEST + 1)
    ]
    assert min(fixed) / own >= 0.9


def test_the_wait_before_a_drafter_is_tried_again_doubles() -> None:
    policy = Auto(LONGEST, flat())
    row = Row({"lookup": right_with(0.0)}, 1200, {"lookup": lambda done: LONGEST})
    rounds = simulate(policy, flat(), [row]).rounds
    tried = [place for place, ((_, budget),) in enumerate(rounds) if budget]
    gaps = [later - earlier for earlier, later in itertools.pairwise(tried) if later - earlier > 1]
    waits = [FIRST_WAIT, 16, 32, 64, 128, LONGEST_WAIT, LONGEST_WAIT, LONGEST_WAIT]
    assert all(wait <= gap < wait + DECISION_ROUNDS for gap, wait in zip(gaps, waits, strict=True))


def test_a_trial_that_succeeds_goes_on() -> None:
    """The drafter becomes right late: it is tried round by round until its estimate says that it pays."""
    row = Row({"small": lambda position: position >= 60}, 512, {"small": lambda done: LONGEST})
    assert simulate(Auto(LONGEST, flat(0.35)), flat(0.35), [row]).speedup > 1.5


LEVELS = (0.45, 0.6, 0.7, 0.85, 0.95)


def unsure(position: int) -> float:
    return LEVELS[position % 5]


UNSURE = Row({"lookup": right_with(0.0)}, 256, {"lookup": lambda _: LONGEST}, confidence={"lookup": unsure})
DEAR_FIRST = CostTable({1: {1: 1.0, 11: 1.2}}, {"small": {1: (1.2, 0.1)}})
CAPPED: dict[str, tuple[CostTable, list[Row]]] = {
    "random": (flat(0.2), [Row({"small": right_with(0.0)})]),
    "right for 30 tokens": (flat(0.1), [Row({"small": lambda position: position < 30})]),
    "a dear first step": (DEAR_FIRST, [Row({"small": right_with(0.3)})]),
    "five confidences": (flat(column=0.1), [UNSURE]),
    "eight rows of five confidences": (flat(column=0.1), [UNSURE] * 8),
    "seven gain, one cannot": (flat(0.1), [Row({}), *(Row({"small": right_with(0.9, n)}) for n in range(7))]),
}


@pytest.mark.parametrize("name", CAPPED)
def test_the_loss_account_is_never_exceeded_by_more_than_one_round(name: str) -> None:
    table, rows = CAPPED[name]
    policy = Counting(LONGEST, table)
    for _ in range(3):
        found = simulate(policy, table, rows)
        assert any(budget for each in found.rounds for _, budget in each)
    assert policy.overdraft <= 1e-9


def test_bad_luck_at_first_is_paid_by_what_earlier_requests_gained() -> None:
    policy = Auto(LONGEST, flat())
    for seed in range(3):
        run(flat(), right_with(0.95, seed), policy)
    assert run(flat(), lambda position: position >= 4, policy).speedup > 2


def test_each_confidence_of_a_drafter_has_an_estimate_of_its_own() -> None:
    """The drafter is right where it is confident: at 12 of every 40 places."""
    table, speeds = flat(column=0.1), []

    def confidence(place: int) -> float:
        return 0.85 if place % 40 < 12 else 0.35

    row = Row({"lookup": lambda place: confidence(place) > 0.5}, 400, {"lookup": lambda done: LONGEST})
    for each in (replace(row, confidence={"lookup": confidence}), row):
        policy = Auto(LONGEST, table)
        simulate(policy, table, [each])
        speeds.append(simulate(policy, table, [each]).speedup)
    assert speeds[0] > 1.1 * speeds[1]


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
    "the lookup is best where it has a proposal": {
        "lookup": (right_with(0.95, 1), lambda done: 10 if done % 40 < 15 else 0),
        "small": (right_with(0.8, 2), None),
        "other": (right_with(0.8, 4), None),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", MIXES)
def test_three_drafters_are_as_fast_as_the_best_of_them(name: str) -> None:
    table, mix = flat(0.15, drafters=("small", "other")), MIXES[name]

    def speedups(*names: str) -> list[float]:
        offered: Any = {key: mix[key][1] for key in names if mix[key][1] is not None}
        policy, row = Auto(LONGEST, table), Row({key: mix[key][0] for key in names}, 400, offered)
        return [simulate(policy, table, [row]).speedup for _ in range(2)]

    first, later = speedups(*mix)
    best = max(speedups(key)[1] for key in mix)
    assert first >= 0.85 * best
    assert later >= (1.2 if "where" in name else 0.95) * best


def test_an_unknown_draft_model_reads_the_end_of_a_long_text() -> None:
    """A known one reads as much as READ_SHARE of the request's rest pays for: 0.04 x 256 plain steps."""
    table, policy = flat(), Auto(LONGEST, flat())
    row = Row({"small": right_with(0.8)}, prompt=2400, late=LATE)
    first = simulate(policy, table, [row])
    assert first.read == [LATE_CONTEXT] and first.speedup > 1.5
    assert simulate(policy, table, [row]).read == [2399], "0.2 x (1 + 0.02 x 2398) = 9.8 plain steps"
    whole = 0.2 * (1 + 0.02 * 3998)
    assert simulate(policy, table, [replace(row, prompt=4000)]).read == [int(3999 * 10.24 / whole)]
    assert simulate(Auto(LONGEST, table), table, [replace(row, prompt=60)]).read == [59]


def test_a_drafter_that_was_no_good_reads_the_end_of_a_long_text_again() -> None:
    policy, row = Auto(LONGEST, flat()), Row({"small": right_with(0.0)}, prompt=600, late=LATE)
    read = [simulate(policy, flat(), [row]).read for _ in range(12)]
    assert sum(map(len, read)) > 2 and all(each in ([], [LATE_CONTEXT]) for each in read)


def test_a_text_that_cannot_begin_late_is_read_only_by_a_drafter_that_pays() -> None:
    table, policy = flat(), Auto(LONGEST, flat())
    row = Row({"small": right_with(0.8)}, prompt=4000)
    assert simulate(policy, table, [row]).read == []
    run(table, right_with(0.8), policy)
    found = simulate(policy, table, [row])
    assert found.read == [3999] and found.speedup > 1.3
    assert simulate(policy, table, [replace(row, tokens=8)]).read == [], "too little of the text is left"


STEEP = CostTable(  # drafts pay for one row under the prior, for eight rows only if they are better than that
    {1: {1: 0.9, 2: 1.1, 5: 1.25, 11: 1.5}, 8: {8: 2.2, 16: 3.7, 24: 4.6, 40: 6.0, 88: 10.6}},
    {"small": {1: (0.35, 0.1), 8: (0.6, 0.2)}},
    {"small": 0.01},
)


def eight(bad: int = 0, turn: int = 0) -> list[Row]:
    chances = [0.0 if row < bad else 0.8 for row in range(8)]
    return [Row({"small": right_with(chance, 100 * turn + row)}, prompt=100, late=LATE) for row, chance in enumerate(chances)]  # fmt: skip


@pytest.mark.parametrize("step", [0.1, 0.2, 0.35])
def test_a_batch_of_good_rows_gains(step: float) -> None:
    policy, table = Auto(LONGEST, flat(step)), flat(step)
    for turn in range(3):
        best = max(simulate(Fixed(length), table, eight(0, turn)).speedup for length in range(LONGEST + 1))
        assert simulate(policy, table, eight(0, turn)).speedup >= 0.9 * best > 1


@pytest.mark.parametrize("taught", [False, True])
@pytest.mark.parametrize("bad", [1, 4, 8])
@pytest.mark.parametrize("step", [0.1, 0.2, 0.5])
def test_bad_rows_of_a_batch_are_hardly_slowed_down(step: float, bad: int, taught: bool) -> None:
    """taught: earlier requests gained, so the pooled acceptance is high. All eight texts are read: 3 % by itself."""
    policy, table = Auto(LONGEST, flat(step)), flat(step)
    for turn in range(3 * taught):
        simulate(policy, table, eight(0, turn))
    for turn in range(4):
        assert simulate(policy, table, eight(bad, turn)).speedup >= 0.94


def test_a_batch_without_drafts_tries_a_known_drafter_in_one_row_only() -> None:
    policy, table = Auto(LONGEST, flat()), flat()
    for most in (8, 1):
        rounds = simulate(policy, table, eight(8)).rounds
        assert max(sum(budget > 0 for _, budget in each) for each in rounds) == most


def test_prompts_in_prefill_count_in_the_batch() -> None:
    """For the first row alone drafts would pay; seven rows follow it while its decision stands."""
    rows = [Row({"small": right_with(0.8, row)}, enters=row, prompt=300, late=LATE) for row in range(8)]
    assert simulate(Auto(LONGEST, STEEP), STEEP, rows[:1]).rounds[0] != [(None, 0)]
    batch = simulate(Auto(LONGEST, STEEP), STEEP, rows)
    assert all(choice == (None, 0) for each in batch.rounds[:8] for choice in each)


def with_siblings(right: float, stands: float) -> Row:
    """Return a row whose drafter is right, and whose siblings stand where it is not, with these probabilities."""
    return Row({"small": right_with(right)}, tokens=1200, sibling={"small": right_with(stands, seed=1)})


@pytest.mark.heavy
@pytest.mark.parametrize("right", [0.4, 0.7])
def test_siblings_are_drafted_where_they_pay(right: float) -> None:
    table, row = flat(), with_siblings(right, 0.6)

    def fixed(budget: int, siblings: int) -> float:
        return simulate(Fixed(budget, siblings), table, [row]).speedup

    chain = max(fixed(budget, 0) for budget in range(1, 9))
    tree = max(fixed(budget, siblings) for budget in range(1, 9) for siblings in range(1, budget + 1))
    found = simulate(Auto(LONGEST, table), table, [row]).speedup
    assert tree > 1.05 * chain
    assert found > chain and found > 0.97 * tree


def test_siblings_that_never_stand_cost_little() -> None:
    table, row = flat(column=0.05), with_siblings(0.7, 0.0)
    without = simulate(Auto(LONGEST, table), table, [replace(row, sibling={})]).speedup
    assert simulate(Auto(LONGEST, table), table, [row]).speedup > 0.97 * without


def test_no_siblings_where_their_host_work_is_dear() -> None:
    table, row = flat(), with_siblings(0.7, 0.9)
    table.trees = [(1, 2.0)]
    found = simulate(Auto(LONGEST, table), table, [row])
    assert found.speedup > 1.2 and not any(found.siblings)


def test_each_rule_has_estimates_of_its_own() -> None:
    """A sibling stands less often where a token was drawn from a residual."""
    policy = Auto(LONGEST, flat())
    rules: list[tuple[float, RuleName | None]] = [(0, "block"), (1, None), (1, "coupled"), (1, "block")]
    params = [SamplingParams(temperature=temperature, acceptance=rule) for temperature, rule in rules]
    rows = [Candidates(sequence_of(policy, params=own), {"small": 8}, trees={"small"}) for own in params]
    assert len({id(policy._estimate(row, "small").pooled) for row in rows}) == 4
