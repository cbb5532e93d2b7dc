"""Planted defects of the round, each with a check that must fail under it and passes without."""

from __future__ import annotations

import pytest

from foredraft.decode import (
    accept,
    choices,
    drafting,
    faults,
    merging,
    noise,
    rows,
    sampling,
    sequence,
    vocab_ops,
)
from foredraft.decode.draft import RoundInputs
from foredraft.decode.engine import Engine
from foredraft.decode.policy import Fixed, TargetConfidence
from foredraft.drafters import draft_model, layer_skip, lookup
from tests.exactness import test_chi_square as chi_square
from tests.exactness import test_conformance as conformance
from tests.exactness import test_coupled as coupled
from tests.exactness import test_enumeration as enumeration
from tests.exactness import test_identity as identity
from tests.support.parts import LateBan, RandomBudgets, StopUnsure
from tests.support.planting import Mutant
from tests.unit import test_decode_accept as accept_unit
from tests.unit import test_decode_noise as noise_unit
from tests.unit import test_decode_sampling as sampling_unit

# --- checks: the tests themselves, in their quickest form ---------------------------------------------


def law_of_sampled_drafts() -> None:
    enumeration.enumerate_and_compare([enumeration.case("as it is", "draft-model")], lambda: Fixed(2))


def law_of_cut_drafts() -> None:
    cases = [enumeration.case("top-k", "draft-model"), enumeration.case("cold top-k", "script")]
    enumeration.enumerate_and_compare(cases, lambda: Fixed(2))


def law_of_ragged_drafts() -> None:
    cases = [enumeration.case("as it is", d) for d in ("draft-model", "script", None)]
    for policy in (lambda: RandomBudgets(2), lambda: StopUnsure(2)):
        enumeration.enumerate_and_compare(cases, policy)


def law_of_confident_drafts() -> None:
    cases = [enumeration.case("as it is", d) for d in ("draft-model", "tapping")]
    enumeration.enumerate_and_compare(cases, enumeration.POLICIES["confidence"])


def law_behind_the_gate() -> None:
    cases = [enumeration.case("as it is", d, new=4) for d in ("draft-model", "script")]
    enumeration.enumerate_and_compare(cases, enumeration.POLICIES["target-confidence"])


def bonus_behind_the_gate() -> None:
    """With a perfect drafter every round but the last gives one token more than it drafted."""
    policy = TargetConfidence(2, threshold=0.0)
    engine = identity.make_engine(identity.TARGET, identity.TARGET, policy, rows=1)
    one = identity.greedy((0,), "draft-model", max_new_tokens=13)
    identity.run(engine, [one])
    assert all(turn.emitted == turn.drafted + 1 for turn in one.rounds[:-1])


def choices_among_drafters() -> None:
    enumeration.enumerate_and_compare(
        [enumeration.choosing("as it is", new=4)], lambda: enumeration.Whims(3, 1)
    )


def law_of_mixed_rows() -> None:
    cases = [enumeration.case(t, "draft-model", new=2) for t in ("cold", "hot", "top-k", "greedy", "top-p")]
    enumeration.enumerate_and_compare(cases, lambda: Fixed(1), rows=4)


def law_under_constraints() -> None:
    cases = [
        enumeration.case("as it is", d, c)
        for d in ("draft-model", "script")
        for c in ("no repeat", "late ban")
    ]
    enumeration.enumerate_and_compare(cases, lambda: Fixed(2))


def law_under_a_mask() -> None:
    enumeration.enumerate_and_compare(
        [enumeration.case("as it is", "draft-model", "no repeat")], lambda: Fixed(2)
    )


def law_of_ties() -> None:
    sampling_unit.test_ties_at_a_cut_are_kept()


def law_of_broken_rows() -> None:
    sampling_unit.test_a_broken_row_harms_no_other({"top_p": 0.9}, float("nan"))


def bits_of_a_row() -> None:
    sampling_unit.test_mixed_rows_are_each_their_own()


def samples_of_draft_model() -> None:
    (found,) = chi_square.sample(1200, Fixed(3), chi_square.ROWS[:1])
    chi_square.assert_law(found, chi_square.law({}))


def samples_under_a_ban() -> None:
    chi_square.test_a_late_ban("coupled")


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


def law_of_skipping_drafts() -> None:
    cases = [enumeration.case("as it is", d) for d in ("layer-skip", "early-exit", "script")]
    enumeration.enumerate_and_compare(cases, lambda: Fixed(2))


def broken_self_drafts() -> None:
    for drafter in ("layer-skip", "early-exit"):
        identity.test_a_target_whose_own_drafts_break_goes_on_without_them(drafter, Fixed(3))


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
    identity.test_a_drafter_that_breaks_starts_anew_and_then_is_left_alone()


def mixed_drafters() -> None:
    sequences = [identity.greedy((1, 2), drafter) for drafter in identity.DRAFTERS]
    engine = identity.make_engine(identity.TARGET, identity.DRAFT, Fixed(3), rows=8)
    identity.run(engine, sequences)
    drafted = [sum(turn.drafted for turn in s.rounds) for s in sequences]
    assert [count > 0 for count in drafted] == [s.drafter is not None for s in sequences]


def law_of_mixed_drafters() -> None:
    cases = [enumeration.case("as it is", d, new=2) for d in ("draft-model", "tapping")]
    enumeration.enumerate_and_compare(cases, lambda: Fixed(1), rows=2)


def shared_noise() -> None:
    """Sampled drafts of the target itself, coupled: whoever draws with the right key is never rejected."""
    sequences = [identity.request(p, "draft-model", seed=3, max_new_tokens=20) for p in identity.PROMPTS]
    engine = identity.make_engine(identity.TARGET, identity.TARGET, Fixed(4), rows=3)
    identity.run(engine, sequences)
    assert all(turn.accepted == turn.drafted for s in sequences for turn in s.rounds)


def shared_noise_beside_others() -> None:
    coupled.test_drafts_of_the_target_itself_are_never_rejected("draft-model")


def cancelled() -> None:
    identity.test_cancelling_keeps_what_was_said_and_is_final()


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
    conformance.test_a_rejection_at_every_place_leaves_no_trace("lookup")
    conformance.test_a_rewound_drafter_is_a_fresh_one("lookup")


def independent_siblings() -> None:
    coupled.test_siblings_each_have_their_own_text()


# --- the defects ------------------------------------------------------------------------------------

RESIDUAL, STEP_THROUGH, COMMIT = vocab_ops.TorchVocabOps.residual, drafting._step_through, Engine._commit
USABLE = "where[..., None] & (left.sum(-1, keepdim=True) > 0)"

MUTANTS = [
    Mutant("residual missing", ((RESIDUAL, USABLE, "where[..., None] & False"),), law_of_sampled_drafts),
    Mutant(
        "residual missing, sampled",
        ((RESIDUAL, USABLE, "where[..., None] & False"),),
        samples_of_draft_model,
    ),
    Mutant(
        "epsilon in the residual", ((RESIDUAL, ".clamp_min(0.0)", ".clamp_min(1e-10)"),), law_of_cut_drafts
    ),
    Mutant(
        "epsilon in the residual, by hand",
        ((RESIDUAL, ".clamp_min(0.0)", ".clamp_min(1e-10)"),),
        accept_unit.test_the_residual_holds_no_token_that_p_does_not,
    ),
    Mutant(
        "zero residual divided by epsilon",
        (
            (
                RESIDUAL,
                "return torch.where(usable, left, p)",
                "return torch.where(where[..., None], left / (left.sum(-1, keepdim=True) + 1e-10), p)",
            ),
        ),
        accept_unit.test_a_residual_that_rounds_to_zero_falls_back_to_p,
    ),
    Mutant(
        "u q <= p where p is 0",
        ((accept.speculative, "* draft.q.at(x) < p.at(x)", "* draft.q.at(x) <= p.at(x)"),),
        accept_unit.test_an_impossible_token_is_rejected_whatever_the_coin,
    ),
    Mutant(
        "q before the transforms",
        (
            (
                STEP_THROUGH,
                "laws.append(q)",
                "laws.append(Distribution(logits.softmax(-1)))",
            ),
        ),
        law_of_cut_drafts,
    ),
    Mutant(
        "the token is not drawn from q",
        ((STEP_THROUGH, "token = _draw(q,", "token = _draw(Distribution(q.probs**2, q.ids, q.one_hot),"),),
        law_of_sampled_drafts,
    ),
    Mutant(
        "bonus token from untransformed p",
        (
            (
                Engine.round,
                "keys = None if",
                "\n    if p.probs is not None and p.probs.shape[1] > 1:\n"
                "        p.probs[:, -1] = forward.logits[:, -1].softmax(-1)\n    keys = None if",
            ),
        ),
        law_of_cut_drafts,
    ),
    Mutant(
        "bonus token from the residual too",
        ((accept.speculative, "rejected = accepted < draft.lengths", "rejected = accepted <= k"),),
        law_of_sampled_drafts,
    ),
    Mutant(
        "a row of a shorter draft, or of none, treated as rejected",
        ((accept.speculative, "rejected = accepted < draft.lengths", "rejected = accepted < k"),),
        law_of_ragged_drafts,
        IndexError,  # the residual of a token that was never drafted
    ),
    Mutant(
        "padding accepted",
        ((vocab_ops.leading, "torch.minimum(keep.cumprod(1).sum(1), lengths)", "keep.cumprod(1).sum(1)"),),
        law_of_ragged_drafts,
    ),
    Mutant(
        "padding accepted, by hand",
        ((vocab_ops.leading, "torch.minimum(keep.cumprod(1).sum(1), lengths)", "keep.cumprod(1).sum(1)"),),
        accept_unit.test_padding_is_never_accepted,
    ),
    Mutant(
        "tokens after a rejection accepted",
        ((vocab_ops.leading, ".cumprod(1).sum(1)", ".sum(1)"),),
        law_of_sampled_drafts,
    ),
    Mutant(
        "a drawn token of low confidence dropped",
        (
            (
                STEP_THROUGH,
                "possible.append(finite if draws is None else finite & draws[:, None])",
                "possible.append(finite & (q.at(token) > 0.4))",
            ),
        ),
        law_of_sampled_drafts,
    ),
    Mutant(
        "a threshold that drops the token it stops at",
        (
            (
                STEP_THROUGH,
                "lengths = (reached & torch.cat(possible, 1)).sum(1)",
                "lengths = (reached & (Distribution.along(laws).at(torch.cat(drawn, 1)) > 0.4)).cumprod(1).sum(1)",
            ),
        ),
        law_of_confident_drafts,
    ),
    Mutant(
        "a bonus that the target was unsure of dropped",
        (
            (
                Engine._extend,
                "sequence.extend(reading.new, origins, reading.scores)",
                "sequence.extend(*(x[:-1] if whole and reading.sure < 0.5 else x for x in (reading.new, origins)))",
            ),
        ),
        law_behind_the_gate,
    ),
    Mutant(
        "the bonus token missing after a gate",
        (
            (
                Engine._extend,
                "sequence.extend(reading.new, origins, reading.scores)",
                "sequence.extend(*(x[:-1] if whole else x for x in (reading.new, origins)))",
            ),
        ),
        bonus_behind_the_gate,
    ),
    Mutant(
        "a round drafted by whoever drafted before",
        ((choices.choose, "row.sequence.drafter = choice.drafter", "pass"),),
        choices_among_drafters,
        (AssertionError, KeyError),
    ),
    Mutant(
        "only the round's drafter told of a commit",
        ((COMMIT, "for name in sequence.drafters:", "for name in filter(None, (sequence.drafter,)):"),),
        choices_among_drafters,
    ),
    Mutant(
        "draft and residual share their noise",
        ((accept.speculative, "keys.columns(accepted), RESIDUAL", "keys.columns(accepted), 1"),),
        law_of_sampled_drafts,
    ),
    Mutant(
        "draft and residual share their noise, sampled",
        ((accept.speculative, "keys.columns(accepted), RESIDUAL", "keys.columns(accepted), 1"),),
        chi_square.test_two_tokens_of_a_weak_drafter,
    ),
    Mutant(
        "samples share their noise",
        ((sequence.Sequence.key.fget, "seed_key(self.seed, self.sample)", "seed_key(self.seed, 0)"),),
        samples_of_draft_model,
    ),
    Mutant(
        "samples share their noise, with a seed",
        ((sequence.Sequence.key.fget, "seed_key(self.seed, self.sample)", "seed_key(self.seed, 0)"),),
        independent_siblings,
    ),
    Mutant(
        "the round left out of the key",
        ((vocab_ops.TorchVocabOps.hash_keys, "key = _fold(key, rounds)", "pass"),),
        law_of_sampled_drafts,
    ),
    Mutant(
        "the round left out of the key, sampled",
        ((vocab_ops.TorchVocabOps.hash_keys, "key = _fold(key, rounds)", "pass"),),
        chi_square.test_a_policy_that_looks_at_rejected_tokens,
    ),
    Mutant(
        "the attempt left out of the key",
        ((sequence.Sequence._roll_back, "self.attempts.get(position, 0) + 1", "0"),),
        samples_under_a_ban,
    ),
    Mutant(
        "the round in the coupled key",
        ((noise.NoiseKeys._hash, "None if purpose == COUPLED else self.round", "self.round"),),
        seeded_text,
    ),
    Mutant(
        "coupled stops at the first match",
        ((vocab_ops.TorchVocabOps.match_prefix, "drafted == own", "drafted != own"),),
        seeded_text,
    ),
    Mutant(
        "EOS inside a run ignored",
        (
            (
                sequence.Sequence.extend,
                "if self.finish is not None:",
                "if self.finish is not None and (index + 1 == len(tokens) or self.finish is not Finish.EOS):",
            ),
        ),
        ends,
    ),
    Mutant(
        "the limit inside a run ignored",
        (
            (
                sequence.Sequence.extend,
                "if self.finish is not None:",
                "if self.finish is not None and (index + 1 == len(tokens) or self.finish is not Finish.LENGTH):",
            ),
            (choices._offers, "min(sequence.remaining, widest)", "widest"),
        ),
        limits,
    ),
    Mutant(
        "cache not rolled back",
        (
            (
                COMMIT,
                "self.cache.lengths[sequence.row] = len(sequence.tokens) - 1",
                "self.cache.lengths[sequence.row] += 1 + reading.drafted",
            ),
        ),
        greedy_tokens,
    ),
    Mutant(
        "a draft's own rows taken for the text while it is made",
        (
            (
                layer_skip.LayerSkip.step,
                "assert forward.logits is not None",
                "self.cache.lengths[0] = starts[0] + 1; assert forward.logits is not None",
            ),
        ),
        skipping_tokens,
    ),
    Mutant(
        "a draft's own rows left visible to the next round",
        (
            (
                layer_skip.LayerSkip.step,
                "assert forward.logits is not None",
                "self.reach = starts[0] + 1; assert forward.logits is not None",
            ),
            (
                COMMIT,
                "self.cache.lengths[sequence.row] = len(sequence.tokens) - 1",
                "self.cache.lengths[sequence.row] = max(len(sequence.tokens) - 1,"
                " getattr(self.drafters.get(sequence.drafter), 'reach', 0))",
            ),
        ),
        skipping_tokens,
    ),
    Mutant(
        "a draft begins after the rows of the last one",
        (
            (
                layer_skip.LayerSkip.step,
                "forward = self.draft_pass(self.cache, tokens, starts, idle=idle)",
                "starts = [start + (start > 8) for start in starts];"
                " forward = self.draft_pass(self.cache, tokens, starts, idle=idle)",
            ),
        ),
        exiting_tokens,
    ),
    Mutant(
        "the plan of a draft applied to the verifying pass",
        (
            (
                Engine._verify,
                "taps=taps,\n",
                "taps=taps, plan=self.drafters['layer-skip'].draft_pass.plan,\n",
            ),
        ),
        law_of_skipping_drafts,
    ),
    Mutant(
        "the last drafted token taken for read",
        (
            (
                layer_skip.LayerSkip.resume,
                "1), self._known)",
                "1), [known + (known > 0) for known in self._known])",
            ),
        ),
        exiting_tokens,
    ),
    Mutant(
        "states known of rows that took no part in a step",
        ((layer_skip.LayerSkip.step, "known + (not dummy)", "known + 1"),),
        law_of_skipping_drafts,
    ),
    Mutant(
        "states of a draft that broke off handed on",
        ((layer_skip.LayerSkip.leave, "self._forget()", "pass"),),
        draft_broken_off,
    ),
    Mutant(
        "states of the draft before handed on",
        ((layer_skip.LayerSkip.resume, "self._forget()", "pass"),),
        exiting_tokens,
    ),
    Mutant(
        "the target's own row emptied for what it drafted",
        ((faults.cure, "if cache is target:", "if False:"),),
        broken_self_drafts,
    ),
    Mutant(
        "draft model's cache not rolled back",
        (
            (
                draft_model.DraftModel.rewind,
                "max(0, min(read, most))",
                "read",
            ),
        ),
        greedy_tokens,
    ),
    Mutant(
        "position off by one after a draft accepted whole",
        (
            (
                Engine._verify,
                "[len(s.tokens) - 1 for s in inputs.sequences]",
                "[len(s.tokens) - 1 + bool(s.rounds and s.rounds[-1].accepted == s.rounds[-1].drafted > 0)"
                " for s in inputs.sequences]",
            ),
        ),
        greedy_tokens,
    ),
    Mutant(
        "the draft model never reads the last token of a draft accepted whole",
        ((draft_model.DraftModel.step, "start + count", "start + count + 1"),),
        whole_acceptance,
    ),
    Mutant(
        "a failed row used again as it is",
        ((rows.Rows.remove, "cache.zero_row(row)", "pass"),),
        broken_rows,
    ),
    Mutant(
        "what a failed row leaves behind when it moves",
        ((rows.Rows.remove, "cache.zero_row(last.row)", "pass"),),
        several_broken_rows,
    ),
    Mutant(
        "only rows that failed are zeroed, not those that were never cache_finite",
        ((rows.Rows.remove, "if not sequence.cache_finite:", "if sequence.error is not None:"),),
        cancelled_prompt,
    ),
    Mutant(
        "only rows that failed are zeroed when they move",
        ((rows.Rows.remove, "if not last.cache_finite:", "if last.error is not None:"),),
        moved_prompt,
    ),
    Mutant(
        "a failed batch leaves its rows cache_finite",
        (
            (Engine.fail_batch, "sequence.cache_finite = False", "pass"),
            (Engine._leave, "sequence.cache_finite = False", "pass"),
        ),
        failed_batch,
    ),
    Mutant(
        "drafters leave a failed batch after rows have moved",
        ((Engine.fail_batch, "self.drafters[name].leave(sequence)", "pass"),),
        failed_batch,
    ),
    Mutant(
        "a row that its draft broke is not wiped",
        ((COMMIT, "self.cache.wipe(sequence.row, base)", "pass"),),
        broken_drafts,
    ),
    Mutant(
        "a row that its draft broke drafts again at once",
        ((choices._offers, "if sequence.skip_draft", "if False"),),
        broken_drafts,
    ),
    Mutant(
        "a row that its draft broke fails",
        ((COMMIT, "if reading.broken and reading.drafted == 0:", "if reading.broken:"),),
        broken_drafts,
    ),
    Mutant(
        "a drafter that breaks keeps its rows",
        ((faults.cure, "cache.zero_row(sequence.row)", "pass"),),
        broken_drafter,
    ),
    Mutant(
        "nobody looks at the drafter's logits",
        ((STEP_THROUGH, "(reached & ~torch.cat(sound, 1))", "(reached & False)"),),
        broken_drafter,
    ),
    Mutant(
        "a drafter that a mask leaves nothing is drafter_nonfinite",
        ((STEP_THROUGH, "if masks is None else logits.amax(-1).isfinite()", ""),),
        identity.test_a_drafter_that_cannot_say_what_is_allowed_is_not_sick,
    ),
    Mutant(
        "resumes above a tapped depth",
        ((Engine._verify, "any(tap < resume.depth for tap in taps)", "False"),),
        identity.test_states_below_a_resumed_depth_are_computed_for_who_taps_them,
    ),
    Mutant(
        "a donor's rows damaged by the copy",
        (
            (
                rows.Rows.add,
                "cache.copy_row(donor.row, sequence.row, _prompt_rows(cache, donor, sequence))",
                "cache.copy_row(donor.row, sequence.row, _prompt_rows(cache, donor, sequence))\n"
                "            donor is not None and cache.wipe(donor.row, 0)",
            ),
        ),
        siblings,
    ),
    Mutant(
        "coupled noise for rows that are not",
        (
            (
                noise.NoiseKeys.bits,
                "self._hash(purpose)",
                "self._hash(COUPLED if purpose == DRAFT else purpose)",
            ),
        ),
        law_of_sampled_drafts,
    ),
    Mutant(
        "coupled noise for rows that are not, beside some that are",
        ((noise.NoiseKeys._drafting, "all(self.coupled)", "any(self.coupled)"),),
        noise_unit.test_each_row_drafts_by_its_own_noise_or_by_what_it_shares,
    ),
    Mutant(
        "noise of their own for rows that are coupled",
        ((noise.NoiseKeys.bits, "any(self.coupled)", "False"),),
        shared_noise,
    ),
    Mutant(
        "noise of their own for rows that are coupled, beside some that are not",
        ((noise.NoiseKeys.bits, "any(self.coupled)", "all(self.coupled)"),),
        shared_noise_beside_others,
    ),
    Mutant(
        "draft keys off by one",
        ((STEP_THROUGH, "_draw(q, inputs, j,", "_draw(q, inputs, min(j + 1, width),"),),
        shared_noise,
    ),
    Mutant(
        "drafts of several drafters, each with the lengths of the first",
        ((merging.merged, "lengths = draft.lengths.where(mask, lengths)", "lengths = parts[0][1].lengths"),),
        mixed_drafters,
    ),
    Mutant(
        "drafts of several drafters, each with the law of the last",
        (
            (
                merging.merged,
                "probs[:, :k] = q.probs.where(mask[:, None, None], probs[:, :k])",
                "probs[:, :k] = q.probs",
            ),
        ),
        law_of_mixed_drafters,
    ),
    Mutant(
        "NaN under top-p",
        ((vocab_ops.least_in_nucleus, ".clamp_min(0)", ""),),
        law_of_broken_rows,
        RuntimeError,  # a gather out of bounds, and the whole batch with it
    ),
    Mutant(
        "a donor's prompt one token short",
        ((rows._prompt_rows, "len(sequence.prompt) - 1", "len(sequence.prompt) - 2"),),
        siblings,
    ),
    Mutant(
        "the wrong donor",
        ((rows.Rows.add, "cache.copy_row(donor.row,", "cache.copy_row(0,"),),
        siblings,
    ),
    Mutant(
        "the last row moved without its cache",
        ((rows.Rows.remove, "cache.copy_row(last.row, row, cache.lengths[last.row])", "pass"),),
        greedy_tokens,
    ),
    Mutant(
        "parameters of the batch before",
        ((Engine._inputs, "self._table[0] != ids", "len(self._table[0]) != len(ids)"),),
        law_of_mixed_rows,
    ),
    Mutant(
        "one row's temperature for all",
        (
            (
                sampling.SamplingTable.of.__func__,
                "_single(p.temperature or 1.0) for p in params",
                "_single(p.temperature or 1.0) for p in params[:1] * len(params)",
            ),
        ),
        law_of_mixed_rows,
    ),
    Mutant(
        "one row's cut in another's last bit",
        (
            (
                vocab_ops.TorchVocabOps.probs,
                "torch.where(by.cut[:, None, None], kept / total(kept), kept)",
                "kept / total(kept)",
            ),
        ),
        bits_of_a_row,
    ),
    Mutant(
        "ties at a top-k cut dropped",
        (
            (
                vocab_ops.TorchVocabOps.probs,
                "(x < largest.gather(-1, k - 1))",
                "(x.sort(dim=-1, descending=True, stable=True).indices.argsort(-1) >= k)",
            ),
        ),
        law_of_ties,
    ),
    Mutant(
        "p not masked along the draft",
        (
            (
                RoundInputs.masks,
                "masks.append(masks_along(sequence.constraint, tokens, self.vocabulary, self.device)[0])",
                "masks.append(free)",
            ),
        ),
        law_under_a_mask,
    ),
    Mutant(
        "the constraint left where the draft led it",
        ((STEP_THROUGH, "walks.undo()", "pass"),),
        law_under_constraints,
    ),
    Mutant(
        "a ban's rollback not told to the drafter",
        (
            (
                COMMIT,
                "drafter.rewind(sequence)",
                "if outcome.emitted >= 0:\n                    drafter.rewind(sequence)",
            ),
        ),
        greedy_bans,
    ),
    Mutant(
        "a ban's rollback that bars nothing at temperature 0",
        ((sequence.Sequence.extend, "self.constraint.roll_back(kept)", "self.constraint.rewind(kept)"),),
        bans,
    ),
    Mutant(
        "taps of tokens that were not kept",
        ((COMMIT, "[row, : outcome.emitted]", "[row, : outcome.emitted + 1]"),),
        tapped_states,
    ),
    Mutant(
        "no taps",
        ((COMMIT, "drafter.observe(sequence, base, states)", "pass"),),
        tapped_states,
    ),
    Mutant(
        "an end overwritten by a cancellation",
        ((Engine.cancel, "self._leave(", "sequence.finish = Finish.CANCELLED\n    self._leave("),),
        cancelled,
    ),
    Mutant(
        "an index that does not go back",
        ((lookup.NGramIndex.rewind, "self._after[gram] = before", "pass"),),
        rewound_lookup,
    ),
]

CHECKS = list(dict.fromkeys(mutant.check for mutant in MUTANTS))
