"""Planted defects of acceptance, block verification, noise, sampling and the draft loop.

Here and in the other modules an entry of a check reads: name, injection point, mutation."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from foredraft.decode import accept, noise, step_draws, vocab_ops
from foredraft.decode.accept import SurpriseLimit
from foredraft.decode.constraint import Walks
from foredraft.decode.distribution import Distribution
from foredraft.decode.drafting import _Steps
from foredraft.decode.noise import COUPLED, DRAFT, RESIDUAL, DrawKeys, NoiseKeys
from foredraft.decode.round_draft import Draft, RoundInputs
from foredraft.decode.sampling import SamplingTable, distribution_of
from foredraft.decode.vocab_ops import TorchVocabOps, leading, running, total
from tests.exactness import round_checks as checks
from tests.exactness import test_block as block
from tests.exactness import test_chi_square as chi_square
from tests.exactness import test_coupled as coupled
from tests.exactness import test_identity as identity
from tests.support import mutations
from tests.support.mutation import Edit, caught_by
from tests.support.mutations import Function, added, argument, around, before, changed, during, instead
from tests.unit import test_decode_accept as accept_unit
from tests.unit import test_decode_noise as noise_unit
from tests.unit import test_decode_sampling as sampling_unit

no_residual = instead(lambda p, q, where: p)


@instead
def zero_residual_divided_by_epsilon(ops: TorchVocabOps, p: Tensor, q: Tensor, where: Tensor) -> Tensor:
    if q.dtype == torch.int64:
        q = torch.nn.functional.one_hot(q, p.shape[-1])
    left = (p - q).clamp_min(0.0)
    return torch.where(where[..., None], left / (left.sum(-1, keepdim=True) + 1e-10), p)


def rejected_in_the_padding() -> tuple[Edit, ...]:
    """A row whose draft is accepted whole, but shorter than the batch's longest, counts as rejected."""
    seen: dict[str, Any] = {}

    @around
    def remember(sound: Function, keep: Tensor, lengths: Tensor) -> Tensor:
        accepted: Tensor = sound(keep, lengths)
        seen["rejected"] = accepted < keep.shape[1]
        return accepted

    return (
        (leading, remember),
        (Distribution.minus, lambda minus: lambda p, q, where: minus(p, q, seen["rejected"])),
    )


def bonus_from_raw_logits(cls: type, table: Any, p: Distribution, logits: Tensor, *rest: Any) -> None:
    if p.probs is not None and p.probs.shape[1] > 1:
        p.probs[:, -1] = logits[:, -1].softmax(-1)


ACCEPTANCE = {
    checks.sampled_drafts: [
        ("residual missing", Distribution.minus, no_residual),
        ("bonus token from the residual too", Distribution.minus, argument(2, torch.ones_like)),
        ("tokens after a rejection accepted", leading, mutations.kept_after_a_rejection),
    ],
    checks.samples_of_draft_model: [("residual missing, sampled", Distribution.minus, no_residual)],
    checks.truncated_drafts: [
        ("epsilon in the residual", TorchVocabOps.residual, mutations.residual_with_epsilon(1e-10)),
        ("bonus token from untransformed p", SurpriseLimit.of, before(bonus_from_raw_logits)),
    ],
    accept_unit.test_the_residual_holds_no_token_that_p_does_not: [
        ("epsilon in the residual, by hand", TorchVocabOps.residual, mutations.residual_with_epsilon(1e-10))
    ],
    accept_unit.test_a_residual_that_rounds_to_zero_falls_back_to_p: [
        ("zero residual divided by epsilon", TorchVocabOps.residual, zero_residual_divided_by_epsilon)
    ],
    accept_unit.test_an_impossible_token_is_rejected_whatever_the_coin: [
        ("u q <= p where p is 0", accept._keeps, lambda _: lambda u, q, p: u * q <= p)
    ],
    checks.ragged_drafts: [
        # it takes the residual of a token that was never drafted
        ("a row of a shorter draft, or of none, treated as rejected", rejected_in_the_padding(), IndexError),
        ("padding accepted", leading, mutations.padding_kept),
    ],
    accept_unit.test_padding_is_never_accepted: [("padding, by hand", leading, mutations.padding_kept)],
    checks.seeded_text: [("what differs is kept", TorchVocabOps.match_prefix, mutations.matches_differing)],
}


@instead
def capped_at_the_end(q: Tensor, p: Tensor) -> Tensor:
    ratio = torch.where(q > 0, p.double() / q, 0.0)
    return torch.nn.functional.pad(ratio.cumprod(1).clamp_max(1.0), (1, 0), value=1.0)


capped_token_by_token = around(lambda survival, q, p: survival(q, torch.minimum(p, q)))
# h = k before the end of the draft, too
survival_before_the_end = instead(lambda survival, p, draft: survival[:, 1 : draft.tokens.shape[1]])


@around
def q_of_the_position_before(missing: Function, survival: Tensor, p: Distribution, draft: Draft) -> Any:
    probs = None if draft.q.probs is None else draft.q.probs.roll(1, 1)
    ids = None if draft.q.ids is None else draft.q.ids.roll(1, 1)
    q = Distribution(probs, ids, draft.q.one_hot)
    return missing(survival, p, Draft(draft.tokens, draft.lengths, q))


padding_counts = around(
    lambda longest, kept, lengths: longest(kept, torch.full_like(lengths, kept.shape[1])).minimum(lengths)
)

BLOCK = {
    checks.block_drafts: [
        ("survival capped at the end", accept._survival, capped_at_the_end),
        ("kept by k before the end", accept._missing, survival_before_the_end),
        ("q of the position before", accept._missing, q_of_the_position_before),
        ("p without its weight", accept._missing, argument(0, torch.ones_like)),
        ("residual of p, not of k p", Distribution.scaled, lambda _: lambda p, weight: p),
        ("residual missing in a block", Distribution.minus, no_residual),
        ("coin and next token share noise", accept.block, during(accept, "BLOCK_NEXT", noise.BLOCK)),
    ],
    partial(block.test_it_keeps_what_the_paper_says, 3): [
        ("survival capped token by token", accept._survival, capped_token_by_token),
        ("the shortest beginning kept", accept._longest, lambda _: leading),
    ],
    checks.ragged_block_drafts: [("coins of padding", accept._longest, padding_counts)],
    block.test_rows_of_every_rule_share_a_batch: [
        ("coins of another rule", accept.block, during(accept, "BLOCK", noise.ACCEPT))
    ],
    block.test_each_row_has_its_own_rule: [
        ("rows of other rules judged as a whole", accept._either, argument(0, torch.ones_like))
    ],
}


drafts_of_the_target = partial(coupled.test_drafts_of_the_target_itself_are_never_rejected, "draft-model")


def q_before_the_transforms() -> tuple[Edit, ...]:
    seen: dict[str, Tensor] = {}
    raw = added(q=lambda token, q, drawable, finite: Distribution(seen["logits"].softmax(-1)))
    return (distribution_of, before(lambda logits, *rest: seen.update(logits=logits))), (_Steps.add, raw)


def cut_at_improbable_tokens(draft: Draft) -> Draft:
    reached = torch.arange(draft.tokens.shape[1]) < draft.lengths[:, None]
    kept = reached & (draft.q.at(draft.tokens) > 0.4)
    return replace(draft, lengths=kept.cumprod(1).sum(1))


lengths_of_the_first = around(
    lambda combine, cls, parts, inputs: replace(combine(cls, parts, inputs), lengths=parts[0][1].lengths)
)


@around
def q_of_the_last(combine: Function, cls: type, parts: Any, tokens: Tensor, vocabulary: int) -> Distribution:
    sound: Distribution = combine(cls, parts, tokens, vocabulary)
    for _, q in parts:
        if sound.probs is not None and q.probs is not None:
            sound.probs[:, : q.columns] = q.probs
    return sound


unsure_dropped = added(drawable=lambda token, q, drawable, finite: drawable & (q.at(token) > 0.4))
masked_as_broken = added(finite=lambda token, q, drawable, finite: drawable)
DRAFT_LOOP = {
    checks.truncated_drafts: [("q before the transforms", q_before_the_transforms())],
    checks.sampled_drafts: [
        ("the token is not drawn from q", step_draws._token, mutations.drawn_from_power_of_q(2)),
        ("a drawn token of low confidence dropped", _Steps.add, unsure_dropped),
    ],
    checks.confident_drafts: [
        ("a threshold that drops the token it stops at", _Steps.draft, changed(cut_at_improbable_tokens))
    ],
    drafts_of_the_target: [("draft keys off by one", DrawKeys.column, argument(1, lambda index: index + 1))],
    identity.test_a_drafter_with_nonfinite_logits_is_reset_once_and_then_dropped: [
        ("the drafter's non-finite logits go unnoticed", _Steps.add, argument(4, torch.ones_like))
    ],
    identity.test_a_drafter_without_an_allowed_token_is_not_dropped: [
        ("a drafter that a mask leaves nothing to draw counts as broken", _Steps.add, masked_as_broken)
    ],
    checks.mixed_drafters: [
        ("several drafters, each with the lengths of the first", Draft.combine, lengths_of_the_first)
    ],
    checks.drafts_of_mixed_drafters: [
        ("several drafters, each with the q of the last", Distribution.combine, q_of_the_last)
    ],
    checks.drafts_under_a_mask: [
        ("p not masked along the draft", RoundInputs.masks, changed(lambda masks: (None, *masks[1:])))
    ],
    checks.drafts_under_constraints: [
        ("the constraint left where the draft led it", Walks.undo, lambda _: lambda walks: None)
    ],
}

residual_by_draft_noise = argument(1, lambda purpose: DRAFT if purpose == RESIDUAL else purpose)
drafts_by_coupled_noise = argument(1, lambda purpose: COUPLED if purpose == DRAFT else purpose)
same_noise_in_all_samples = argument(1, lambda sample: 0)
without_the_round = argument(2, lambda rounds: None)

coupled_keys_with_the_round = instead(
    lambda own, purpose: own.vocab_ops.hash_keys(own.base, own.round, own.position, own.attempt, purpose)
)
own_noise_in_mixed_batches = around(
    lambda drafting_bits, keys: drafting_bits(keys) if all(keys.coupled) else keys._hash(DRAFT)
)

NOISE = {
    checks.sampled_drafts: [
        ("draft and residual share their noise", NoiseKeys.bits, residual_by_draft_noise),
        ("the round left out of the key", TorchVocabOps.hash_keys, without_the_round),
        ("coupled noise for rows that are not coupled", NoiseKeys._hash, drafts_by_coupled_noise),
    ],
    partial(chi_square.test_two_tokens_of_an_often_rejected_drafter, 0): [
        ("draft and residual share their noise, sampled", NoiseKeys.bits, residual_by_draft_noise)
    ],
    checks.samples_of_draft_model: [("samples share their noise", noise.seed_key, same_noise_in_all_samples)],
    coupled.test_choices_each_have_their_own_text: [
        ("samples share their noise, with a seed", noise.seed_key, same_noise_in_all_samples)
    ],
    chi_square.test_a_policy_that_looks_at_rejected_tokens_keeps_the_distribution: [
        ("the round left out of the key, sampled", TorchVocabOps.hash_keys, without_the_round)
    ],
    partial(chi_square.test_a_ban_that_rolls_back_keeps_the_distribution, "coupled"): [
        ("the attempt left out of the key", TorchVocabOps.hash_keys, argument(4, lambda attempt: None))
    ],
    checks.seeded_text: [("the round in the coupled key", NoiseKeys._hash, coupled_keys_with_the_round)],
    noise_unit.test_each_row_drafts_by_its_own_noise_or_by_what_it_shares: [
        (
            "coupled noise for rows of other rules, beside some",
            NoiseKeys._drafting,
            instead(lambda own: own.bits(COUPLED)),
        )
    ],
    drafts_of_the_target: [
        ("own noise of coupled rows", NoiseKeys._drafting, lambda _: lambda keys: keys._hash(DRAFT)),
        ("own noise of coupled rows, beside others", NoiseKeys._drafting, own_noise_in_mixed_batches),
    ],
}


@instead
def nucleus_without_clamp(probs: Tensor, mass: Tensor) -> Tensor:
    ordered = probs.sort(-1, descending=True).values
    last = (running(ordered) - ordered < mass[..., None]).sum(-1, keepdim=True) - 1
    return ordered.gather(-1, last)[..., 0]


one_temperature = changed(
    lambda table: replace(table, temperature=table.temperature[:1].expand_as(table.temperature))
)


@around
def renormalised_without_a_cut(probs: Function, ops: TorchVocabOps, x: Tensor, by: Any) -> Any:
    distribution, finite = probs(ops, x, by)
    return (distribution if by.cut is None else distribution / total(distribution)), finite


SAMPLING = {
    partial(sampling_unit.test_a_broken_row_harms_no_other, {"top_p": 0.9}, float("nan")): [
        # a gather out of bounds breaks the batch
        ("NaN under top-p", vocab_ops.least_in_nucleus, nucleus_without_clamp, RuntimeError)
    ],
    checks.mixed_rows: [("one row's temperature for all", SamplingTable.of, one_temperature)],
    sampling_unit.test_mixed_rows_are_each_their_own: [
        ("one row's cut in another's last bit", TorchVocabOps.probs, renormalised_without_a_cut)
    ],
}

MUTANTS = caught_by(ACCEPTANCE, BLOCK, DRAFT_LOOP, NOISE, SAMPLING)
