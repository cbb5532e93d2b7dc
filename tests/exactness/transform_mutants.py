"""Planted defects of the sampling transforms and of the counts behind penalties.

A table entry reads: name, seam, spoiler, check. A spoiler takes the sound function and returns the defective one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from foredraft.decode import sampling
from foredraft.decode.penalty_context import PenaltyContext
from foredraft.decode.policy import Fixed
from foredraft.decode.sampling import SamplingTable
from foredraft.decode.token_counts import TokenCounts
from foredraft.decode.vocab_ops import TorchVocabOps, total
from tests.exactness import test_enumeration as enumeration
from tests.support.planting import Spoiler, defect
from tests.support.spoilers import ties_at_top_k_dropped
from tests.unit import test_decode_sampling as unit

Function = Callable[..., Any]


def definition() -> None:
    for params in unit.PARAMS:
        unit.test_a_distribution_is_the_definition(params)


def definition_with_a_past() -> None:
    unit.test_what_was_said_and_drafted_counts()


def ties() -> None:
    unit.test_ties_at_a_cut_are_kept()


def bits() -> None:
    unit.test_a_past_is_each_rows_own()


def pairs() -> None:
    enumeration.test_every_pair_of_transforms("draft-model")


def bans() -> None:
    cases = [enumeration.case(t, "script", "late ban") for t in ("frequency", "presence")]
    enumeration.enumerate_and_compare(cases, lambda: Fixed(2))


# --- cuts ------------------------------------------------------------------------------------------------


def min_p_before_temperature(probs: Function) -> Function:
    def spoilt(ops: TorchVocabOps, x: Tensor, by: SamplingTable) -> Any:
        if by.min_p is not None:
            small = x - x.amax(-1, keepdim=True) < by.min_p.log()[:, None, None]
            x, by = x.masked_fill(small, -math.inf), replace(by, min_p=None)
        return probs(ops, x, by)

    return spoilt


def typical_p_before_min_p(transformed: Function) -> Function:
    def spoilt(logits: Tensor, table: SamplingTable) -> Any:
        if table.min_p is None:
            return transformed(logits, table)
        probs, finite = transformed(logits, replace(table, min_p=None))
        kept = probs.where(probs >= probs.amax(-1, keepdim=True) * table.min_p[:, None, None], 0.0)
        return kept / total(kept), finite

    return spoilt


def not_normalised_after_a_cut(probs: Function) -> Function:
    def spoilt(ops: TorchVocabOps, x: Tensor, by: SamplingTable) -> Any:
        cut, finite = probs(ops, x, by)
        whole, _ = probs(ops, x, replace(by, cut=None))
        return whole.where(cut > 0, 0.0), finite

    return spoilt


def top_k_after_temperature(probs: Function) -> Function:
    """No defect: dividing by the temperature changes no order."""

    def spoilt(ops: TorchVocabOps, x: Tensor, by: SamplingTable) -> Any:
        if by.top_k is None:
            return probs(ops, x, by)
        scaled = (x - x.amax(-1, keepdim=True)) / by.temperature[:, None, None]
        k = by.top_k[:, None, None].expand(-1, x.shape[1], 1)
        least = scaled.sort(-1, descending=True).values.gather(-1, (k - 1).clamp(0, x.shape[-1] - 1))
        return probs(ops, x.masked_fill((k > 0) & (scaled < least), -math.inf), replace(by, top_k=None))

    return spoilt


def dropped_from_typical(drop: Callable[[Tensor], Tensor]) -> Spoiler:
    """Drop some of the tokens that typical-p kept: `drop` gets those farthest from the entropy, [B, T, V] bool."""

    def spoiler(typical: Function) -> Function:
        def spoilt(probs: Tensor, mass: Tensor) -> Tensor:
            distribution: Tensor = typical(probs, mass)
            surprise = -probs.log()
            entropy = total((probs * surprise).where(probs > 0, 0.0))
            distance = (surprise - entropy).abs().where(distribution > 0, -math.inf)
            kept = distribution.where(~drop(distance == distance.amax(-1, keepdim=True)), 0.0)
            return torch.where(mass < 1, kept / total(kept), distribution)

        return spoilt

    return spoiler


# --- penalties, bias and bars ----------------------------------------------------------------------------


def bias_times_temperature(edited: Function) -> Function:
    def spoilt(logits: Tensor, table: SamplingTable, *rest: Any) -> Any:
        if table.bias is not None:
            values = table.bias.values * table.temperature[:, None]
            table = replace(table, bias=replace(table.bias, values=values))
        return edited(logits, table, *rest)

    return spoilt


def penalised(formula: Callable[..., Tensor]) -> Spoiler:
    """Penalise by another formula of (logits, counts, seen, repetition, presence, frequency)."""

    def spoiler(edited: Function) -> Function:
        def spoilt(
            logits: Tensor, table: SamplingTable, masks: Any, context: PenaltyContext | None
        ) -> Tensor:
            before: Tensor = edited(logits, replace(table, penalties=None), masks, context)
            if table.penalties is None:
                return before
            assert context is not None
            ids, counts, seen = context.token_counts(logits.shape[1])
            at = ids[:, None].expand(-1, logits.shape[1], -1)
            x = formula(before.gather(2, at), counts, seen, *table.penalties[..., None, None])
            return before.scatter(2, at, x)

        return spoilt

    return spoiler


def repeated(x: Tensor, seen: Tensor, repetition: Tensor) -> Tensor:
    """Return the logits under the repetition penalty as it should be."""
    return torch.where(seen, torch.where(x < 0, x * repetition, x / repetition), x)


@penalised
def presence_over_the_prompt(
    x: Any, counts: Any, seen: Any, repetition: Any, presence: Any, frequency: Any
) -> Any:
    return repeated(x, seen, repetition) - presence * seen - frequency * counts


@penalised
def presence_per_occurrence(
    x: Any, counts: Any, seen: Any, repetition: Any, presence: Any, frequency: Any
) -> Any:
    return repeated(x, seen, repetition) - presence * counts - frequency * counts


@penalised
def repetition_of_output_alone(
    x: Any, counts: Any, seen: Any, repetition: Any, presence: Any, frequency: Any
) -> Any:
    return repeated(x, counts > 0, repetition) - presence * (counts > 0) - frequency * counts


@penalised
def negative_logits_divided(
    x: Any, counts: Any, seen: Any, repetition: Any, presence: Any, frequency: Any
) -> Any:
    return torch.where(seen, x / repetition, x) - presence * (counts > 0) - frequency * counts


def drafts_not_counted(along: Function) -> Function:
    def spoilt(context: PenaltyContext, drafted: Tensor, ahead: int = 0) -> PenaltyContext:
        made: PenaltyContext = along(context, drafted if ahead else drafted[:, :0], ahead)
        return made

    return spoilt


def counted_a_column_early(token_counts: Function) -> Function:
    def spoilt(context: PenaltyContext, columns: int) -> Any:
        ids, counts, seen = token_counts(context, columns)
        counts, seen = (torch.cat([x[:, 1:], x[:, -1:]], 1) for x in (counts, seen))
        return ids, counts, seen

    return spoilt


def earlier_counts_of_drafted_tokens_lost(token_counts: Function) -> Function:
    def spoilt(context: PenaltyContext, columns: int) -> Any:
        assert context.ids is not None and context.counts is not None
        ids, counts, seen = token_counts(context, columns)
        _, drafted_only, _ = token_counts(replace(context, counts=context.counts * 0), columns)
        size = context.ids.shape[1]
        return ids, torch.cat([counts[..., :size], drafted_only[..., size:]], -1), seen

    return spoilt


def padding_counted(of: Function) -> Function:
    def spoilt(cls: type, sequences: Any, device: Any) -> PenaltyContext | None:
        context: PenaltyContext | None = of(cls, sequences, device)
        if context is None or context.ids is None:
            return context
        for row, sequence in enumerate(sequences):
            if sequence.token_counts is not None:
                for x in (context.ids, context.counts, context.prompted):
                    assert x is not None
                    x[row, len(sequence.token_counts) :] = 1
        return context

    return spoilt


def never_counted_down(count: Function) -> Function:
    def spoilt(counts: TokenCounts, token: int, times: int) -> None:
        if times > 0:
            count(counts, token, times)

    return spoilt


def first_column_for_all(said: Function) -> Function:
    return lambda context, columns: said(context, columns)[:, :1].expand(-1, columns)


EDITED, TYPICAL, PROBS, COUNTS = (
    sampling._edited, sampling._typical, TorchVocabOps.probs, PenaltyContext.token_counts
)  # fmt: skip

MUTANTS = [
    defect("bias after temperature", EDITED, bias_times_temperature, definition),
    defect("min-p before temperature", PROBS, min_p_before_temperature, definition),
    defect("typical-p before min-p", sampling._transformed, typical_p_before_min_p, definition),
    defect(
        "typical-p of a distribution that is not normalised after a cut",
        PROBS,
        not_normalised_after_a_cut,
        definition,
    ),
    defect(
        "the token that reaches the typical mass dropped",
        TYPICAL,
        dropped_from_typical(lambda farthest: farthest),
        definition,
    ),
    defect("a tie at the top-k cut dropped", PROBS, ties_at_top_k_dropped, ties),
    defect(
        "a tie at the typical cut dropped",
        TYPICAL,
        dropped_from_typical(lambda farthest: farthest & (farthest.cumsum(-1) > 1)),
        ties,
    ),
    defect("presence over the prompt too", EDITED, presence_over_the_prompt, pairs),
    defect("repetition over the output alone", EDITED, repetition_of_output_alone, pairs),
    defect("presence per occurrence", EDITED, presence_per_occurrence, definition_with_a_past),
    defect(
        "a negative logit divided by the repetition penalty",
        EDITED,
        negative_logits_divided,
        definition_with_a_past,
    ),
    defect("penalties not rolled along the draft", PenaltyContext.along, drafts_not_counted, pairs),
    defect("a drafted token counted a column early", COUNTS, counted_a_column_early, definition_with_a_past),
    defect(
        "earlier counts of a drafted token lost",
        COUNTS,
        earlier_counts_of_drafted_tokens_lost,
        definition_with_a_past,
    ),
    defect("padding of a shorter context counted", PenaltyContext.of, padding_counted, bits),
    defect("tokens that a ban took back still counted", TokenCounts.count, never_counted_down, bans),
    defect(
        "an end barred one token too long",
        PenaltyContext.said,
        lambda said: lambda context, columns: said(context, columns) - 1,
        pairs,
    ),
    defect("an end barred by the round's first column", PenaltyContext.said, first_column_for_all, pairs),
]
CHECKS = list(dict.fromkeys(mutant.check for mutant in MUTANTS))
HARMLESS = defect("top-k after temperature", PROBS, top_k_after_temperature, definition)
