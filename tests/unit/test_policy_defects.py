"""Defects planted into the cost policy: a test of it dies of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from foredraft.decode.policy import Auto, CostTable
from foredraft.decode.policy import auto as auto_module
from foredraft.decode.policy.acceptance import Acceptance
from foredraft.decode.policy.auto import Estimate, LossBudget
from foredraft.decode.policy.budgets import best_budgets, best_length
from foredraft.decode.policy.cost_table import round_ms
from tests.support.planting import Mutant, assert_caught
from tests.unit import test_policy_auto as auto
from tests.unit import test_policy_cost_table as costs

STANDS = auto_module._stands
ALPHA = Acceptance.alpha.fget  # type: ignore[attr-defined]


def brute_force() -> None:
    for seed in range(40):
        costs.test_no_budgets_are_better_than_the_best(seed)


def never_slower() -> None:
    for step in (0.1, 0.2, 0.5, 1.0):
        for name in auto.NEVER_SLOWER:
            auto.test_auto_is_never_much_slower_than_plain_decoding(name, step, 16, 0.97)


def near_the_best() -> None:
    auto.test_auto_is_near_the_best_fixed_length(0.95, 0.1)


DEFECTS: list[tuple[str, Any, str, str, Callable[[], object]]] = [
    ("columns of another batch", CostTable.verify, "size + columns - batch", "columns", costs.test_costs_lie_on_lines_between_measured_ones),
    ("columns may cost less", CostTable.__init__, "if m >= n", "if m == n", costs.test_costs_lie_on_lines_between_measured_ones),
    ("a first step too many", CostTable.draft, "max(steps - 1, 0)", "steps", costs.test_costs_lie_on_lines_between_measured_ones),
    ("rows do not share steps", round_ms, "max(steps.get(drafter, 0), drafted)", "steps.get(drafter, 0) + drafted", costs.test_a_round_costs_its_drafts_and_its_pass),
    ("the pending token is read twice", CostTable.read, "(tokens - 1)", "tokens", costs.test_reading_costs_as_measured_or_as_a_pass_of_the_target),
    ("reads are not kept", CostTable.as_dict, '"reads": self.reads', '"reads": {}', costs.test_a_table_survives_json),
    ("empty proposals are not counted", Acceptance.learn, "max(outcome.drafted, 1)", "outcome.drafted", costs.test_acceptance_is_estimated_as_its_equations_say),
    ("a position after the rejection", Acceptance.learn, "outcome.accepted + 1", "outcome.accepted + 2", costs.test_acceptance_is_estimated_as_its_equations_say),
    ("no level", Acceptance.rates, "level * rate", "rate", costs.test_acceptance_is_estimated_as_its_equations_say),
    ("no prior", ALPHA, "if self.prior is None", "if True", costs.test_acceptance_is_estimated_as_its_equations_say),
    ("full depth only", best_budgets, "range(most + 1)", "(most,)", brute_force),
    ("one column too few", best_length, "batch * (1 + k)", "batch * k", brute_force),
    ("drafts that do not pay", best_budgets, "<= batch / passes[0]", "<= 0", costs.test_a_free_proposal_that_does_not_pay_for_its_columns_is_left_out),
    ("no loss budget", LossBudget.left, "LOSS_STEPS * plain", "1e9", never_slower),
    ("no share of the time", LossBudget.left, "+ LOSS_SHARE * self.spent", "", auto.test_a_decision_follows_from_the_equations),
    ("no cap", Auto._paying, "<= left", "<= 1e9", auto.test_a_decision_follows_from_the_equations),
    ("a decision stands beyond the cap", STANDS, "left >= 0 or", "True or", lambda: auto.test_the_loss_budget_is_never_exceeded_by_more_than_one_round("five confidences")),
    ("a trial beyond the cap", Auto._try_another, "<= left", "<= 1e9", lambda: auto.test_the_loss_budget_is_never_exceeded_by_more_than_one_round("a dear first step")),
    ("the last round is not charged", Auto._settle, "state.loss.lost += ms - plain * tokens", "state.loss.lost += 0.0 * ms", never_slower),
    ("no credit", Auto.start, "self._gained", "", auto.test_bad_luck_at_first_is_paid_by_what_earlier_requests_gained),
    ("no smaller batch", Auto._settle, "- smaller * ahead", "", auto.test_a_row_that_waits_for_others_gets_back_what_the_smaller_batch_saves),
    ("no decision stands", STANDS, "standing.rounds < 1", "True", auto.test_a_decision_stands_for_some_rounds),
    ("rejected drafts drop no decision", STANDS, "or standing.rejected >= REJECTED_DRAFTS", "", auto.test_a_decision_is_dropped_after_two_rejected_drafts),
    ("one rejected draft drops a decision", STANDS, ">= REJECTED_DRAFTS", ">= 1", auto.test_a_decision_is_dropped_after_two_rejected_drafts),
    ("greedy costs for all rounds", Auto.decide, "self.sampled if draws else", "", auto.test_rounds_that_draw_have_costs_of_their_own),
    ("reasons of one row", Auto.why_plain, "[(name, 1)] * state.batch", "[(name, 1)]", auto.test_the_policy_says_why_it_decodes_plainly),
    ("the wait stays", Estimate.learn, "2 * max(", "max(", auto.test_the_wait_before_a_drafter_is_tried_again_doubles),
    ("a trial ends at once", Estimate.learn, "pooled.wait = 1 ", "pooled.wait = LONGEST_WAIT ", auto.test_a_trial_that_succeeds_goes_on),
    ("hopeless trials", Auto._try_another, "or not best_length(self.table, 1, certain)[1]", "", never_slower),
    ("short drafts", Auto._paying, "limit = self.max_draft", "limit = 1", near_the_best),
    ("short drafts in a batch", Auto._paying, "limit = self.max_draft", "limit = 1", lambda: auto.test_a_batch_of_good_rows_gains(0.1)),
    ("the first drafter", Auto._best, "if rate > best", "if best == 0", lambda: auto.test_three_drafters_are_as_fast_as_the_best_of_them("the small model is best")),
    ("one estimate for all confidences", Auto._estimate, "source = name, confidence", "source = name, None", auto.test_each_confidence_of_a_drafter_has_an_estimate_of_its_own),
    ("an unknown drafter reads all", Auto._reading, "is_chosen else 0.0", "is_chosen else 1e9", auto.test_an_unknown_draft_model_reads_the_end_of_a_long_text),
    ("a trial reads as much as a choice", Auto._reading, "not trial and", "", auto.test_a_drafter_that_was_no_good_reads_the_end_of_a_long_text_again),
    ("reading is free", Auto._best, "if read_ms:", "if False:", auto.test_a_text_that_cannot_begin_late_is_read_only_by_a_drafter_that_pays),
    ("bad rows pay for good ones", Auto.decide, "min(_state(row)", "max(_state(row)", lambda: auto.test_bad_rows_of_a_batch_are_hardly_slowed_down(0.1, 1, True)),
    ("all rows try a known drafter", Auto._try_another, "if tried and (drafts or", "if tried and (False and", auto.test_a_batch_without_drafts_tries_a_known_drafter_in_one_row_only),
    ("prefill is ignored", Auto._plan, "plans = self._paying(rows, left, plain)", "plans = self._paying([r for r in rows if not r.idle], left, self.table.plain(sum(not r.idle for r in rows))) + [Standing(PLAIN) for r in rows if r.idle]", auto.test_prompts_in_prefill_count_in_the_batch),
]  # fmt: skip


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: str(defect[0]))
def test_defects_are_caught(
    defect: tuple[str, Any, str, str, Callable[[], object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, function, old, new, check = defect
    assert_caught(Mutant(name, ((function, old, new),), check), monkeypatch)
