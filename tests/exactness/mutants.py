"""Planted defects of acceptance, noise, sampling and the draft loop, each with a check that must fail under it.

A table entry reads: name, seam, spoiler, check. A spoiler takes the sound function and returns the defective one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
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
from foredraft.decode.vocab_ops import TorchVocabOps, leading
from foredraft.decode.vocab_sums import running, total
from tests.exactness import round_checks as checks
from tests.exactness import test_chi_square as chi_square
from tests.exactness import test_identity as identity
from tests.support.planting import Mutant, Spoiler, defect
from tests.support.spoilers import (
    added,
    drawn_from_power_of_q,
    kept_after_a_rejection,
    matches_what_differs,
    padding_kept,
    residual_with_epsilon,
    ties_at_top_k_dropped,
)
from tests.unit import test_decode_accept as accept_unit
from tests.unit import test_decode_noise as noise_unit

Function = Callable[..., Any]


# --- acceptance -----------------------------------------------------------------------------------------


def rejected_often() -> None:
    chi_square.test_two_tokens_of_an_often_rejected_drafter(0)


def no_residual(minus: Function) -> Function:
    return lambda p, q, where: p


def residual_of_accepted_rows(minus: Function) -> Function:
    return lambda p, q, where: minus(p, q, torch.ones_like(where))


def zero_residual_divided_by_epsilon(residual: Function) -> Function:
    def spoilt(ops: TorchVocabOps, p: Tensor, q: Tensor, where: Tensor) -> Tensor:
        if q.dtype == torch.int64:
            q = torch.nn.functional.one_hot(q, p.shape[-1])
        left = (p - q).clamp_min(0.0)
        return torch.where(where[..., None], left / (left.sum(-1, keepdim=True) + 1e-10), p)

    return spoilt


def rejected_in_the_padding() -> tuple[tuple[Any, Spoiler], ...]:
    """A row whose draft is accepted whole, but shorter than the batch's longest, counts as rejected."""
    seen: dict[str, Any] = {}

    def remember(sound: Function) -> Function:
        def spoilt(keep: Tensor, lengths: Tensor) -> Tensor:
            accepted = sound(keep, lengths)
            seen["rejected"] = accepted < keep.shape[1]
            return accepted

        return spoilt

    def spoil_minus(minus: Function) -> Function:
        return lambda p, q, where: minus(p, q, seen["rejected"])

    return (leading, remember), (Distribution.minus, spoil_minus)


def bonus_from_raw_logits(of: Function) -> Function:
    def spoilt(cls: type, table: Any, p: Distribution, logits: Tensor, *rest: Any) -> Any:
        if p.probs is not None and p.probs.shape[1] > 1:
            p.probs[:, -1] = logits[:, -1].softmax(-1)
        return of(cls, table, p, logits, *rest)

    return spoilt


ACCEPTANCE = [
    defect("residual missing", Distribution.minus, no_residual, checks.distribution_of_sampled_drafts),
    defect("residual missing, sampled", Distribution.minus, no_residual, checks.samples_of_draft_model),
    defect(
        "epsilon in the residual",
        TorchVocabOps.residual,
        residual_with_epsilon(1e-10),
        checks.distribution_of_truncated_drafts,
    ),
    defect(
        "epsilon in the residual, by hand",
        TorchVocabOps.residual,
        residual_with_epsilon(1e-10),
        accept_unit.test_the_residual_holds_no_token_that_p_does_not,
    ),
    defect(
        "zero residual divided by epsilon",
        TorchVocabOps.residual,
        zero_residual_divided_by_epsilon,
        accept_unit.test_a_residual_that_rounds_to_zero_falls_back_to_p,
    ),
    defect(
        "u q <= p where p is 0",
        accept._keeps,
        lambda _: lambda u, q, p: u * q <= p,
        accept_unit.test_an_impossible_token_is_rejected_whatever_the_coin,
    ),
    defect(
        "bonus token from untransformed p",
        SurpriseLimit.of,
        bonus_from_raw_logits,
        checks.distribution_of_truncated_drafts,
    ),
    defect(
        "bonus token from the residual too",
        Distribution.minus,
        residual_of_accepted_rows,
        checks.distribution_of_sampled_drafts,
    ),
    Mutant(
        "a row of a shorter draft, or of none, treated as rejected",
        rejected_in_the_padding(),
        checks.distribution_of_ragged_drafts,
        IndexError,  # the residual of a token that was never drafted
    ),
    defect("padding accepted", leading, padding_kept, checks.distribution_of_ragged_drafts),
    defect("padding accepted, by hand", leading, padding_kept, accept_unit.test_padding_is_never_accepted),
    defect(
        "tokens after a rejection accepted",
        leading,
        kept_after_a_rejection,
        checks.distribution_of_sampled_drafts,
    ),
    defect(
        "coupled keeps what differs from the target's token",
        TorchVocabOps.match_prefix,
        matches_what_differs,
        checks.seeded_text,
    ),
]


# --- the draft loop -------------------------------------------------------------------------------------


def q_before_the_transforms() -> tuple[tuple[Any, Spoiler], ...]:
    seen: dict[str, Tensor] = {}

    def remember(sound: Function) -> Function:
        def spoilt(logits: Tensor, *args: Any, **more: Any) -> Any:
            seen["logits"] = logits
            return sound(logits, *args, **more)

        return spoilt

    raw = added(q=lambda token, q, drawable, finite: Distribution(seen["logits"].softmax(-1)))
    return (distribution_of, remember), (_Steps.add, raw)


def of_the_next_column(column: Function) -> Function:
    return lambda keys, index: column(keys, index + 1)


def cut_at_improbable_tokens(draft: Function) -> Function:
    def spoilt(*args: Any, **options: Any) -> Draft:
        sound: Draft = draft(*args, **options)
        reached = torch.arange(sound.tokens.shape[1]) < sound.lengths[:, None]
        kept = reached & (sound.q.at(sound.tokens) > 0.4)
        return replace(sound, lengths=kept.cumprod(1).sum(1))

    return spoilt


def lengths_of_the_first(combine: Function) -> Function:
    return lambda cls, parts, inputs: replace(combine(cls, parts, inputs), lengths=parts[0][1].lengths)


def q_of_the_last(combine: Function) -> Function:
    def spoilt(cls: type, parts: Any, tokens: Tensor, vocabulary: int) -> Distribution:
        sound: Distribution = combine(cls, parts, tokens, vocabulary)
        for _, q in parts:
            if sound.probs is not None and q.probs is not None:
                sound.probs[:, : q.columns] = q.probs
        return sound

    return spoilt


DRAFT_LOOP = [
    Mutant("q before the transforms", q_before_the_transforms(), checks.distribution_of_truncated_drafts),
    defect(
        "the token is not drawn from q", step_draws._token, drawn_from_power_of_q(2), checks.distribution_of_sampled_drafts
    ),
    defect(
        "a drawn token of low confidence dropped",
        _Steps.add,
        added(drawable=lambda token, q, drawable, finite: drawable & (q.at(token) > 0.4)),
        checks.distribution_of_sampled_drafts,
    ),
    defect(
        "a threshold that drops the token it stops at",
        _Steps.draft,
        cut_at_improbable_tokens,
        checks.distribution_of_confident_drafts,
    ),
    defect("draft keys off by one", DrawKeys.column, of_the_next_column, checks.shared_noise),
    defect(
        "the drafter's non-finite logits go unnoticed",
        _Steps.add,
        added(finite=lambda token, q, drawable, finite: torch.ones_like(finite)),
        checks.broken_drafter,
    ),
    defect(
        "a drafter that a mask leaves nothing to draw counts as broken",
        _Steps.add,
        added(finite=lambda token, q, drawable, finite: drawable),
        identity.test_a_drafter_without_an_allowed_token_is_not_dropped,
    ),
    defect(
        "drafts of several drafters, each with the lengths of the first",
        Draft.combine,
        lengths_of_the_first,
        checks.mixed_drafters,
    ),
    defect(
        "drafts of several drafters, each with the q of the last",
        Distribution.combine,
        q_of_the_last,
        checks.distribution_of_mixed_drafters,
    ),
    defect(
        "p not masked along the draft", RoundInputs.masks,
        lambda sound: lambda inputs, drafted: (None, *sound(inputs, drafted)[1:]),
        checks.distribution_under_a_mask,
    ),
    defect(
        "the constraint left where the draft led it", Walks.undo, lambda _: lambda walks: None,
        checks.distribution_under_constraints,
    ),
]  # fmt: skip


# --- noise ----------------------------------------------------------------------------------------------


def residual_by_draft_noise(bits: Function) -> Function:
    return lambda keys, purpose: bits(keys, DRAFT if purpose == RESIDUAL else purpose)


def same_noise_in_all_samples(seed_key: Function) -> Function:
    return lambda seed, sample: seed_key(seed, 0)


def keys_without_the_round(hash_keys: Function) -> Function:
    return lambda ops, base, rounds, position, attempt, purpose: hash_keys(
        ops, base, None, position, attempt, purpose
    )


def keys_without_the_attempt(hash_keys: Function) -> Function:
    return lambda ops, base, rounds, position, attempt, purpose: hash_keys(
        ops, base, rounds, position, None, purpose
    )


def coupled_keys_with_the_round(_: Function) -> Function:
    return lambda keys, purpose: keys.vocab_ops.hash_keys(
        keys.base, keys.round, keys.position, keys.attempt, purpose
    )


def drafts_by_coupled_noise(hashed: Function) -> Function:
    return lambda keys, purpose: hashed(keys, COUPLED if purpose == DRAFT else purpose)


def own_noise_in_mixed_batches(drafting_bits: Function) -> Function:
    return lambda keys: drafting_bits(keys) if all(keys.coupled) else keys._hash(DRAFT)


NOISE = [
    defect(
        "draft and residual share their noise",
        NoiseKeys.bits,
        residual_by_draft_noise,
        checks.distribution_of_sampled_drafts,
    ),
    defect(
        "draft and residual share their noise, sampled",
        NoiseKeys.bits,
        residual_by_draft_noise,
        rejected_often,
    ),
    defect(
        "samples share their noise", noise.seed_key, same_noise_in_all_samples, checks.samples_of_draft_model
    ),
    defect(
        "samples share their noise, with a seed",
        noise.seed_key,
        same_noise_in_all_samples,
        checks.independent_siblings,
    ),
    defect(
        "the round left out of the key",
        TorchVocabOps.hash_keys,
        keys_without_the_round,
        checks.distribution_of_sampled_drafts,
    ),
    defect(
        "the round left out of the key, sampled",
        TorchVocabOps.hash_keys,
        keys_without_the_round,
        chi_square.test_a_policy_that_looks_at_rejected_tokens_keeps_the_distribution,
    ),
    defect(
        "the attempt left out of the key",
        TorchVocabOps.hash_keys,
        keys_without_the_attempt,
        checks.samples_under_a_ban,
    ),
    defect("the round in the coupled key", NoiseKeys._hash, coupled_keys_with_the_round, checks.seeded_text),
    defect(
        "coupled noise for rows that are not coupled",
        NoiseKeys._hash,
        drafts_by_coupled_noise,
        checks.distribution_of_sampled_drafts,
    ),
    defect(
        "coupled noise for rows that are not coupled, beside some that are",
        NoiseKeys._drafting,
        lambda _: lambda keys: keys.bits(COUPLED),
        noise_unit.test_each_row_drafts_by_its_own_noise_or_by_what_it_shares,
    ),
    defect(
        "noise of their own for coupled rows",
        NoiseKeys._drafting,
        lambda _: lambda keys: keys._hash(DRAFT),
        checks.shared_noise,
    ),
    defect(
        "noise of their own for coupled rows, beside some that are not",
        NoiseKeys._drafting,
        own_noise_in_mixed_batches,
        checks.shared_noise_beside_others,
    ),
]


# --- sampling -------------------------------------------------------------------------------------------


def nucleus_without_clamp(_: Function) -> Function:
    def spoilt(probs: Tensor, mass: Tensor) -> Tensor:
        ordered = probs.sort(-1, descending=True).values
        last = (running(ordered) - ordered < mass[..., None]).sum(-1, keepdim=True) - 1
        return ordered.gather(-1, last)[..., 0]

    return spoilt


def one_temperature(of: Function) -> Function:
    def spoilt(*args: Any, **more: Any) -> SamplingTable:
        table: SamplingTable = of(*args, **more)
        return replace(table, temperature=table.temperature[:1].repeat(len(table.temperature)))

    return spoilt


def renormalised_without_a_cut(probs: Function) -> Function:
    def spoilt(ops: TorchVocabOps, x: Tensor, by: Any) -> Any:
        distribution, finite = probs(ops, x, by)
        return (distribution if by.cut is None else distribution / total(distribution)), finite

    return spoilt


SAMPLING = [
    defect(
        "NaN under top-p",
        vocab_ops.least_in_nucleus,
        nucleus_without_clamp,
        checks.distribution_beside_broken_rows,
        RuntimeError,  # a gather out of bounds breaks the whole batch
    ),
    defect("one row's temperature for all", SamplingTable.of, one_temperature, checks.distribution_of_mixed_rows),
    defect(
        "one row's cut in another's last bit",
        TorchVocabOps.probs,
        renormalised_without_a_cut,
        checks.bits_of_a_row,
    ),
    defect(
        "ties at a top-k cut dropped", TorchVocabOps.probs, ties_at_top_k_dropped, checks.ties_at_a_cut
    ),
]  # fmt: skip

MUTANTS = [*ACCEPTANCE, *DRAFT_LOOP, *NOISE, *SAMPLING]
CHECKS = list(dict.fromkeys(mutant.check for mutant in MUTANTS))
