"""Checks of the round for planted defects: the exactness tests in their quickest form."""

from __future__ import annotations

import pytest

from foredraft.decode.policy import Fixed, TargetConfidence
from tests.exactness import test_chi_square as chi_square
from tests.exactness import test_conformance as conformance
from tests.exactness import test_coupled as coupled
from tests.exactness import test_enumeration as enumeration
from tests.exactness import test_identity as identity
from tests.support.parts import LateBan, RandomBudgets, StopUnsure
from tests.unit import test_decode_sampling as sampling_unit


def distribution_of_sampled_drafts() -> None:
    enumeration.enumerate_and_compare([enumeration.case("as it is", "draft-model")], lambda: Fixed(2))


def distribution_of_truncated_drafts() -> None:
    cases = [enumeration.case("top-k", "draft-model"), enumeration.case("cold top-k", "script")]
    enumeration.enumerate_and_compare(cases, lambda: Fixed(2))


def distribution_of_ragged_drafts() -> None:
    cases = [enumeration.case("as it is", d) for d in ("draft-model", "script", None)]
    for policy in (lambda: RandomBudgets(2), lambda: StopUnsure(2)):
        enumeration.enumerate_and_compare(cases, policy)


def distribution_of_confident_drafts() -> None:
    cases = [enumeration.case("as it is", d) for d in ("draft-model", "tapping")]
    enumeration.enumerate_and_compare(cases, enumeration.POLICIES["confidence"])


def distribution_behind_the_gate() -> None:
    cases = [enumeration.case("as it is", d, new=4) for d in ("draft-model", "script")]
    enumeration.enumerate_and_compare(cases, enumeration.POLICIES["target-confidence"])


def bonus_behind_the_gate() -> None:
    """Draft with the target itself: every round but the last emits one token more than it drafted."""
    policy = TargetConfidence(2, threshold=0.0)
    engine = identity.make_engine(identity.TARGET, identity.TARGET, policy, rows=1)
    one = identity.greedy((0,), "draft-model", max_new_tokens=13)
    identity.run(engine, [one])
    assert all(turn.emitted == turn.drafted + 1 for turn in one.rounds[:-1])


def decisions_among_drafters() -> None:
    enumeration.enumerate_and_compare(
        [enumeration.choosing("as it is", new=4)], lambda: enumeration.ArbitraryDecisions(3, 1)
    )


def distribution_of_mixed_rows() -> None:
    cases = [enumeration.case(t, "draft-model", new=2) for t in ("cold", "hot", "top-k", "greedy", "top-p")]
    enumeration.enumerate_and_compare(cases, lambda: Fixed(1), rows=4)


def distribution_under_constraints() -> None:
    cases = [
        enumeration.case("as it is", d, c)
        for d in ("draft-model", "script")
        for c in ("no repeat", "late ban")
    ]
    enumeration.enumerate_and_compare(cases, lambda: Fixed(2))


def distribution_under_a_mask() -> None:
    enumeration.enumerate_and_compare(
        [enumeration.case("as it is", "draft-model", "no repeat")], lambda: Fixed(2)
    )


def ties_at_a_cut() -> None:
    sampling_unit.test_ties_at_a_cut_are_kept()


def distribution_beside_broken_rows() -> None:
    sampling_unit.test_a_broken_row_harms_no_other({"top_p": 0.9}, float("nan"))


def bits_of_a_row() -> None:
    sampling_unit.test_mixed_rows_are_each_their_own()


def samples_of_draft_model() -> None:
    (found,) = chi_square.sample(1200, Fixed(3), chi_square.ROWS[:1])
    chi_square.assert_distributed(found, chi_square.distribution({}))


def samples_under_a_ban() -> None:
    chi_square.test_a_ban_that_rolls_back_keeps_the_distribution("coupled")


def greedy_tokens(drafter: str = "draft-model") -> None:
    sequences = [identity.greedy(p, drafter, max_new_tokens=12) for p in identity.PROMPTS[:5]]
    engine = identity.make_engine(identity.TARGET, identity.DRAFT, Fixed(3), rows=3)
    assert identity.run(engine, sequences) == [identity.reference(s.prompt, 12) for s in sequences]


def tapped_states() -> None:
    greedy_tokens("tapping")


def skipping_tokens() -> None:
    greedy_tokens("layer-skip")


def exiting_tokens() -> None:
    greedy_tokens("early-exit")


def tokens_of_a_copy() -> None:
    greedy_tokens("low-bit")


def distribution_of_skipping_drafts() -> None:
    cases = [enumeration.case("as it is", d) for d in ("layer-skip", "early-exit", "script")]
    enumeration.enumerate_and_compare(cases, lambda: Fixed(2))


def broken_self_drafts() -> None:
    for drafter in ("layer-skip", "early-exit"):
        identity.test_a_target_with_nonfinite_self_drafts_continues_without_them(drafter, Fixed(3))


def draft_broken_off() -> None:
    identity.test_a_draft_that_broke_off_leaves_no_states(pytest.MonkeyPatch())


def whole_acceptance() -> None:
    identity.test_a_perfect_drafter_is_accepted_whole("draft-model")


def ends() -> None:
    identity.test_eos_at_every_place_of_a_run(2, 4)


def limits() -> None:
    identity.test_a_limit_at_every_place_of_a_run(7)


def siblings() -> None:
    for waves in (2, 4):
        identity.test_siblings_come_in_waves("draft-model", waves, 7)


def broken_rows() -> None:
    identity.test_broken_logits_end_one_request_alone("draft-model")


def several_broken_rows() -> None:
    for broken in ((False, True, False, True), (True, False, False, True)):
        identity.test_several_rows_break_and_end_in_one_round(broken)


def failed_batch() -> None:
    identity.test_a_failed_batch_leaves_clean_rows(pytest.MonkeyPatch())


def cancelled_prompt() -> None:
    identity.test_a_prompt_cancelled_while_it_is_read_leaves_nothing_behind()


def moved_prompt() -> None:
    identity.test_a_row_that_moves_before_its_first_round_leaves_nothing_behind()


def broken_drafts() -> None:
    identity.test_a_draft_that_breaks_the_pass_costs_only_the_draft("script")


def broken_drafter() -> None:
    identity.test_a_drafter_with_nonfinite_logits_is_reset_once_and_then_dropped()


def mixed_drafters() -> None:
    sequences = [identity.greedy((1, 2), drafter) for drafter in identity.DRAFTERS]
    engine = identity.make_engine(identity.TARGET, identity.DRAFT, Fixed(3), rows=8)
    identity.run(engine, sequences)
    drafted = [sum(turn.drafted for turn in s.rounds) for s in sequences]
    assert [count > 0 for count in drafted] == [bool(s.drafters) for s in sequences]


def distribution_of_mixed_drafters() -> None:
    cases = [enumeration.case("as it is", d, new=2) for d in ("draft-model", "tapping")]
    enumeration.enumerate_and_compare(cases, lambda: Fixed(1), rows=2)


def shared_noise() -> None:
    """Draft with the target itself under rule `coupled`: with the right keys no draft is rejected."""
    sequences = [identity.request(p, "draft-model", seed=3, max_new_tokens=20) for p in identity.PROMPTS]
    engine = identity.make_engine(identity.TARGET, identity.TARGET, Fixed(4), rows=3)
    identity.run(engine, sequences)
    assert all(turn.accepted == turn.drafted for s in sequences for turn in s.rounds)


def shared_noise_beside_others() -> None:
    coupled.test_drafts_of_the_target_itself_are_never_rejected("draft-model")


def cancelled() -> None:
    identity.test_cancelling_keeps_the_text_and_is_final()


def bans() -> None:
    identity.test_a_rollback_across_three_rounds()


def greedy_bans() -> None:
    for drafter in ("draft-model", "lookup"):
        free = identity.reference((0,), 12)
        run = tuple(free[2:5])
        wish = identity.greedy((0,), drafter, constraint=LateBan(identity.V, run), max_new_tokens=12)
        want = identity.reference((0,), 12, constraint=LateBan(identity.V, run))
        assert identity.run(identity.make_engine(identity.TARGET, identity.DRAFT, Fixed(3)), [wish]) == [want]


def seeded_text() -> None:
    wishes = [coupled.requests("draft-model")[i] for i in range(0, 12, 3)]
    alone = [
        coupled.run(coupled.make_engine(coupled.TARGET, rows=1), [coupled.requests(None)[i]])[0]
        for i in range(0, 12, 3)
    ]
    assert coupled.run(coupled.make_engine(coupled.TARGET, coupled.DRAFT, Fixed(3)), wishes) == alone


def rewound_lookup() -> None:
    conformance.check_rejections(conformance.TABLES, "lookup")
    conformance.check_rewound(conformance.TABLES, "lookup")


def rewound_suffix() -> None:
    for name in ("suffix", "recalling"):
        conformance.check_rewound(conformance.TABLES, name)


def independent_siblings() -> None:
    coupled.test_siblings_each_have_their_own_text()
