"""Defects planted into the cost policy: a test of it dies of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from math import inf
from typing import Any

import pytest

from foredraft.decode.policy import PLAIN, Candidates
from foredraft.decode.policy import auto as auto_module
from foredraft.decode.policy import budgets as budgets_module
from foredraft.decode.policy import requests as requests_module
from foredraft.decode.policy.auto import Auto
from foredraft.decode.policy.budgets import (
    AcceptanceEstimate,
    Candidate,
    Others,
    TreeShape,
    best_budgets,
    best_length,
)
from foredraft.decode.policy.cost_table import CostTable, round_ms
from foredraft.decode.policy.requests import FIRST_WAIT, LONGEST_WAIT, Estimate, HeldDecision, RequestState
from foredraft.decode.stats import Round
from tests.support.mutation import Mutation, assert_caught, defect
from tests.support.mutations import around, during, holding
from tests.unit import test_policy_auto as auto
from tests.unit import test_policy_cost_table as costs

Function = Callable[..., Any]
ALPHA: Any = AcceptanceEstimate.alpha
ACCEPTANCE_SIBLING: Any = AcceptanceEstimate.sibling
GAINS: Any = Candidate.gains


def brute_force() -> None:
    for seed in range(40):
        costs.test_no_budgets_are_better_than_the_best(seed)


def never_slower() -> None:
    for step in (0.1, 0.2, 0.5, 1.0):
        for name in auto.NEVER_SLOWER:
            auto.test_auto_is_hardly_slower_than_plain_decoding(name, step, 16, 0.97)


def near_the_best() -> None:
    auto.test_auto_is_near_the_best_fixed_length(0.95, 0.1)


def after(change: Function) -> Mutation:
    return lambda sound: lambda *given: (sound(*given), change(*given))[0]


def columns_of_another_batch(table: CostTable, batch: int, columns: int) -> tuple[Any, ...]:
    """Look for the columns themselves among those of a measured batch, not for as many drafted ones."""
    moved = {size: [(n + size - batch, ms) for n, ms in points] for size, points in table.passes.items()}
    return table, "passes", moved


def columns_may_cost_less(table: CostTable, passes: Any, *rest: Any) -> None:
    table.passes = {batch: sorted(by.items()) for batch, by in passes.items()}


@around
def rows_do_not_share_steps(cost: Function, table: CostTable, rows: Any) -> float:
    drafted = Counter[str | None]()
    for drafter, tokens, _ in rows:
        drafted[drafter] += tokens
    shared = [(drafter, tokens, 0) for drafter, tokens in drafted.items()]
    ms: float = cost(table, [*shared, *[(None, 0, 0)] * (len(rows) - len(drafted))])
    return ms


def empty_proposals_are_not_counted(own: AcceptanceEstimate, outcome: Round) -> None:
    own.tried[0] -= not outcome.drafted


def a_position_after_the_rejection(own: AcceptanceEstimate, outcome: Round) -> None:
    if (position := outcome.accepted + 1) < min(outcome.drafted, len(own.tried)):
        own.tried[position] += 1


def one_column_too_few(table: CostTable, *_: Any) -> tuple[Any, ...]:
    verify = table.verify
    return table, "verify", lambda rows, columns: verify(rows, max(columns - rows, rows))


def endless_plain_steps(table: CostTable, *_: Any) -> tuple[Any, ...]:
    verify = table.verify
    return table, "verify", lambda batch, n: verify(batch, n) if n > batch else inf


def with_own(name: str, value: Callable[[Any], Any]) -> Mutation:
    return holding(lambda own, *_: (own, name, value(own)))


@around
def the_last_round_is_not_charged(settle: Function, policy: Auto) -> None:
    lost = [(state, state.lost) for state, _ in policy._round]
    settle(policy)
    for loss, before in lost:
        loss.lost = before


def no_smaller_batch(policy: Auto) -> tuple[Any, ...]:
    plain = policy.table.plain(max(1, len(policy._round)))
    return policy.table, "plain", lambda batch: plain


@around
def the_wait_stays(learn: Function, estimate: Estimate, outcome: Round, held: HeldDecision) -> None:
    wait = max(estimate.pooled.wait, FIRST_WAIT)
    learn(estimate, outcome, held)
    estimate.pooled.wait = min(estimate.pooled.wait, wait)


def a_trial_ends_at_once(estimate: Estimate, outcome: Round, held: HeldDecision) -> None:
    if held.trial and held.alone and outcome.accepted:
        estimate.pooled.wait = LONGEST_WAIT


def a_draft_always_pays(table: CostTable, batch: int, candidate: Candidate) -> tuple[float, TreeShape]:
    rate, shape = best_length(table, batch, candidate)
    return rate, max(shape, TreeShape(1))


def one_token(table: CostTable, rows: Any, others: Others) -> list[TreeShape]:
    return best_budgets(table, [row and Candidate(row.drafter, row.survival[:1]) for row in rows], others)


@around
def the_first_drafter(best: Function, policy: Auto, row: Candidates, batch: int) -> Candidate | None:
    alone = (replace(row, limits={name: limit}) for name, limit in row.limits.items())
    return next(filter(None, (best(policy, each, batch) for each in alone)), None)


def one_estimate_for_all_confidences(estimate: Function) -> Function:
    first: dict[tuple[Auto, str], float] = {}

    def mutated(policy: Auto, row: Candidates, name: str) -> Any:
        confidence = {key: first.setdefault((policy, key), own) for key, own in row.confidence.items()}
        return estimate(policy, replace(row, confidence=confidence), name)

    return mutated


@around
def an_unknown_drafter_reads_all(
    reading: Function, policy: Auto, row: Candidates, name: str, trial: bool = False
) -> Any:
    if trial or not policy._estimate(row, name).pooled.acceptance.known:
        row = replace(row, late=set())
    return reading(policy, row, name, trial)


def bad_rows_pay_for_good_ones(policy: Auto, rows: Any) -> tuple[Any, ...]:
    left, losses = RequestState.left, [row.sequence.policy_state for row in rows if not row.idle]
    return RequestState, "left", lambda own, plain: max(left(loss, plain) for loss in losses)


@around
def prefill_is_ignored(
    paying: Function, policy: Auto, rows: Any, standing: Any, left: float, plain: float
) -> list[HeldDecision]:
    decoding = [row for row in rows if not row.idle]
    standing = [held for row, held in zip(rows, standing, strict=True) if not row.idle]
    choices = iter(paying(policy, decoding, standing, left, policy.table.plain(len(decoding))))
    return [HeldDecision(PLAIN) if row.idle else next(choices) for row in rows]


DEFECTS: list[tuple[str, Any, Mutation, Callable[[], object]]] = [
    ("columns of another batch", CostTable.verify, holding(columns_of_another_batch), costs.test_costs_lie_on_lines_between_measured_ones),
    ("columns may cost less", CostTable.__init__, after(columns_may_cost_less), costs.test_costs_lie_on_lines_between_measured_ones),
    ("a first step too many", CostTable.draft, lambda draft: lambda table, drafter, batch, steps: draft(table, drafter, batch, steps + (steps > 0 and drafter in table.drafts)), costs.test_costs_lie_on_lines_between_measured_ones),
    ("rows do not share steps", round_ms, rows_do_not_share_steps, costs.test_a_round_costs_its_drafts_and_its_pass),
    ("the pending token is read twice", CostTable.read, lambda read: lambda table, drafter, tokens: read(table, drafter, tokens + (tokens > 1 and drafter in table.reads)), costs.test_reading_costs_as_measured_or_as_a_pass_of_the_target),
    ("empty proposals are not counted", AcceptanceEstimate.learn, after(empty_proposals_are_not_counted), costs.test_acceptance_is_estimated_as_its_equations_say),
    ("a position after the rejection", AcceptanceEstimate.learn, after(a_position_after_the_rejection), costs.test_acceptance_is_estimated_as_its_equations_say),
    ("no level", AcceptanceEstimate.rates, during(AcceptanceEstimate, "alpha", property(lambda own: ALPHA.fget(own.prior or own))), costs.test_acceptance_is_estimated_as_its_equations_say),
    ("no prior", ALPHA, with_own("prior", lambda own: None), costs.test_acceptance_is_estimated_as_its_equations_say),
    ("full depth only", best_budgets, during(budgets_module, "product", lambda *depths: product(*(each[-1:] for each in depths))), brute_force),
    ("one column too few", best_length, holding(one_column_too_few), brute_force),
    ("drafts that do not pay", best_budgets, holding(endless_plain_steps), costs.test_a_free_proposal_that_does_not_pay_for_its_columns_is_left_out),
    ("no loss account", RequestState.left, lambda left: lambda loss, plain: left(loss, plain) + 1e9, never_slower),
    ("no share of the time", RequestState.left, during(requests_module, "LOSS_SHARE", 0.0), auto.test_a_decision_follows_from_the_equations),
    ("no cap", Auto._paying, lambda paying: lambda policy, rows, standing, left, plain: paying(policy, rows, standing, inf, plain), auto.test_a_decision_follows_from_the_equations),
    ("a decision stands beyond the cap", auto_module._standing, lambda stands: lambda row, key, left: stands(row, key, 0.0), lambda: auto.test_the_loss_account_is_never_exceeded_by_more_than_one_round("five confidences")),
    ("a trial beyond the cap", Auto._try_another, lambda attempt: lambda policy, rows, choices, left, plain: attempt(policy, rows, choices, inf, plain), lambda: auto.test_the_loss_account_is_never_exceeded_by_more_than_one_round("a dear first step")),
    ("the last round is not charged", Auto._settle, the_last_round_is_not_charged, lambda: auto.test_bad_rows_of_a_batch_are_hardly_slowed_down(0.1, 1, taught=False)),
    ("no credit", Auto.start, with_own("_gained", lambda policy: 0.0), auto.test_bad_luck_at_first_is_paid_by_what_earlier_requests_gained),
    ("no smaller batch", Auto._settle, holding(no_smaller_batch), auto.test_a_row_that_waits_for_others_gets_back_what_the_smaller_batch_saves),
    ("no decision stands", auto_module._standing, lambda stands: lambda row, key, left: None, auto.test_a_decision_stands_for_some_rounds),
    ("rejected drafts drop no decision", auto_module._standing, during(auto_module, "REJECTED_DRAFTS", inf), auto.test_a_decision_is_dropped_after_two_rejected_drafts),
    ("one rejected draft drops a decision", auto_module._standing, during(auto_module, "REJECTED_DRAFTS", 1), auto.test_a_decision_is_dropped_after_two_rejected_drafts),
    ("greedy costs for all rounds", Auto.decide, with_own("sampled", lambda policy: policy.greedy), auto.test_rounds_that_draw_have_costs_of_their_own),
    ("reasons of one row", Auto.why_plain, during(auto_module, "round_ms", lambda table, rows: round_ms(table, rows[:1])), auto.test_the_policy_says_why_it_decodes_plainly),
    ("siblings cost nothing", round_ms, lambda sound: lambda table, rows: sound(table, [(*row[:2], 0) for row in rows]), costs.test_siblings_cost_their_columns_and_host_work),
    ("siblings that gain nothing", GAINS, lambda _: lambda candidate: [], lambda: auto.test_siblings_are_drafted_where_they_pay(0.4)),
    ("siblings believed to stand", ACCEPTANCE_SIBLING, lambda _: lambda own: 0.9, auto.test_siblings_that_never_stand_cost_little),
    ("siblings at no host work", CostTable.tree, lambda _: lambda *args: 0.0, auto.test_no_siblings_where_their_host_work_is_dear),
    ("one estimate for all rules", auto_module._rule_of, lambda _: lambda sequence: "", auto.test_each_rule_has_estimates_of_its_own),
    ("the wait stays", Estimate.learn, the_wait_stays, auto.test_the_wait_before_a_drafter_is_tried_again_doubles),
    ("a trial ends at once", Estimate.learn, after(a_trial_ends_at_once), auto.test_a_trial_that_succeeds_goes_on),
    ("hopeless trials", Auto._try_another, during(auto_module, "best_length", a_draft_always_pays), never_slower),
    ("short drafts", Auto._paying, during(auto_module, "best_budgets", one_token), near_the_best),
    ("short drafts in a batch", Auto._paying, during(auto_module, "best_budgets", one_token), lambda: auto.test_a_batch_of_good_rows_gains(0.1)),
    ("the first drafter", Auto._best, the_first_drafter, lambda: auto.test_three_drafters_are_as_fast_as_the_best_of_them("the small model is best")),
    ("one estimate for all confidences", Auto._estimate, one_estimate_for_all_confidences, auto.test_each_confidence_of_a_drafter_has_an_estimate_of_its_own),
    ("an unknown drafter reads all", Auto._reading, an_unknown_drafter_reads_all, auto.test_an_unknown_draft_model_reads_the_end_of_a_long_text),
    ("a trial reads as much as a choice", Auto._reading, lambda reading: lambda policy, row, name, trial=False: reading(policy, row, name), auto.test_a_drafter_that_was_no_good_reads_the_end_of_a_long_text_again),
    ("reading is free", Auto._best, with_own("_reading", lambda policy: lambda row, name: (None, 0.0, 0.0)), auto.test_a_text_that_cannot_begin_late_is_read_only_by_a_drafter_that_pays),
    ("bad rows pay for good ones", Auto.decide, holding(bad_rows_pay_for_good_ones), lambda: auto.test_bad_rows_of_a_batch_are_hardly_slowed_down(0.1, 1, True)),
    ("all rows try a known drafter", Auto._try_another, during(AcceptanceEstimate, "known", False), auto.test_a_batch_without_drafts_tries_a_known_drafter_in_one_row_only),
    ("prefill is ignored", Auto._paying, prefill_is_ignored, auto.test_prompts_in_prefill_count_in_the_batch),
]  # fmt: skip


@pytest.mark.parametrize("row", DEFECTS, ids=lambda row: str(row[0]))
def test_defects_are_caught(row: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(defect(*row), monkeypatch)
