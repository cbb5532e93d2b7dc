"""Planted defects of the lossy rule and of its options, each with a check that must fail under it.

A table entry reads: name, seam, spoiler, check. A spoiler takes the sound function and returns the defective one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from foredraft.decode import accept
from foredraft.decode.accept import SurpriseLimit
from foredraft.decode.distribution import Distribution
from foredraft.decode.drafting import _Steps
from foredraft.decode.params import SamplingParams
from foredraft.decode.policy import Fallback
from foredraft.decode.round_draft import Draft
from foredraft.decode.sampling import SamplingTable
from foredraft.decode.vocab_ops import leading
from tests.exactness import test_enumeration as enumeration
from tests.exactness import test_lossy as lossy
from tests.support.planting import Mutant, Spoiler, defect
from tests.support.spoilers import added, kept_after_a_rejection, padding_kept
from tests.unit import test_decode_accept as accept_unit

Function = Callable[..., Any]

# --- checks: the tests themselves, in their quickest form ---------------------------------------------


def lossy_distribution() -> None:
    lossy.assert_defined([lossy.case("as it is", 1.1), lossy.case("top-k", 2.5)], 2)


def lossy_greedy_distribution() -> None:
    lossy.assert_defined([lossy.case("greedy", bound, prompt=(1, 1)) for bound in (0.4, 2.5)], 2)


def rules_side_by_side() -> None:
    lossy.test_rows_of_every_rule_share_a_batch()


def fallback_distribution() -> None:
    lossy.assert_defined([lossy.case("cold", 1.1), lossy.case("greedy", 2.5, prompt=(1,))], 3, threshold=0.55)


def strict_fallback_distribution() -> None:
    cases = [enumeration.case("as it is", "draft-model")]
    enumeration.enumerate_and_compare(cases, lambda: Fallback(2, threshold=0.55))


def by_hand() -> None:
    accept_unit.test_a_drafted_token_stands_up_to_the_bound()


def greedy_by_hand() -> None:
    accept_unit.test_greedy_rows_are_judged_by_another_distribution_than_they_are_drawn_from()


# --- spoilers -------------------------------------------------------------------------------------------


def bound_reversed(_: Function) -> Function:
    return lambda judged, p, bound: (judged > 0) & (-judged.log() >= bound) | (p == 1)


def bound_excluded(_: Function) -> Function:
    return lambda judged, p, bound: (judged > 0) & (-judged.log() < bound) | (p == 1)


def certain_tokens_cut(stands: Function) -> Function:
    return lambda judged, p, bound: stands(judged, torch.zeros_like(p), bound)


def impossible_tokens_stand(_: Function) -> Function:
    return lambda judged, p, bound: (-judged.log() <= bound) | (p == 1)


def relative_to_q() -> tuple[tuple[Any, Spoiler], ...]:
    seen: dict[str, Tensor] = {}

    def remember(bild: Function) -> Function:
        def spoilt(draft: Draft, *rest: Any) -> Any:
            seen["q"] = draft.q.at(draft.tokens)
            return bild(draft, *rest)

        return spoilt

    def spoil_stands(stands: Function) -> Function:
        return lambda judged, p, bound: stands(judged / seen["q"], p, bound)

    return (accept.bild, remember), (accept._stands, spoil_stands)


def one_more_kept(sound: Function) -> Function:
    return lambda keep, lengths: torch.minimum(sound(keep, lengths) + 1, lengths)


def next_token_from_a_residual() -> tuple[tuple[Any, Spoiler], ...]:
    drafts: list[Draft] = []

    def remember(bild: Function) -> Function:
        def spoilt(draft: Draft, *rest: Any) -> Any:
            drafts[:] = [draft] if draft.tokens.shape[1] else []
            return bild(draft, *rest)

        return spoilt

    def spoil_position(position: Function) -> Function:
        def spoilt(p: Distribution, index: Tensor) -> Distribution:
            at: Distribution = position(p, index)
            if not drafts:
                return at
            draft = drafts.pop()
            last = index.clamp_max(draft.tokens.shape[1] - 1)
            return at.minus(position(draft.q, last), index < draft.lengths)

        return spoilt

    return (accept.bild, remember), (Distribution.position, spoil_position)


def one_position_before(position: Function) -> Function:
    return lambda p, index: position(p, (index - 1).clamp_min(0))


def judged_before_the_transforms(of: Function) -> Function:
    def spoilt(cls: type, table: SamplingTable, p: Any, logits: Tensor, *rest: Any) -> SurpriseLimit | None:
        rollback: SurpriseLimit | None = of(cls, table, p, logits, *rest)
        if rollback is None or table.judge is not None:
            return rollback
        return replace(rollback, judge=Distribution(logits.softmax(-1)))

    return spoilt


def every_row_lossy(sound: Function) -> Function:
    def spoilt(*args: Any) -> Any:
        *rest, rollback, is_block = args
        return sound(*rest, rollback and replace(rollback, everywhere=True), is_block)

    return spoilt


def one_bound(of: Function) -> Function:
    def spoilt(*args: Any) -> SurpriseLimit | None:
        rollback: SurpriseLimit | None = of(*args)
        if rollback is None:
            return None
        most = rollback.bound.nan_to_num().amax()
        return replace(rollback, bound=most.expand_as(rollback.bound))

    return spoilt


def without_bounds(of: Function) -> Function:
    return lambda *args, **more: replace(of(*args, **more), bound=None)


def confidence_after_the_transforms(may_draw: Function) -> Function:
    return lambda policy, sequences, position, q, logits: may_draw(
        policy, sequences, position, q, q.dense(logits.shape[-1]).log()
    )


# --- the defects ------------------------------------------------------------------------------------

MUTANTS = [
    defect("the bound the wrong way round", accept._stands, bound_reversed, lossy_distribution),
    defect("the bound the wrong way round, by hand", accept._stands, bound_reversed, by_hand),
    defect("a token exactly as surprising as the bound is cut", accept._stands, bound_excluded, by_hand),
    defect(
        "a token that the target is certain of is cut", accept._stands, certain_tokens_cut, greedy_by_hand
    ),
    Mutant("the draft's own distribution consulted", relative_to_q(), lossy_distribution),
    defect("the token that is cut is kept", leading, one_more_kept, lossy_distribution),
    Mutant("the token after a cut drawn from a residual", next_token_from_a_residual(), lossy_distribution),
    defect(
        "the token after a cut drawn from the position before it",
        Distribution.position,
        one_position_before,
        lossy_distribution,
    ),
    defect("tokens after a cut stand", leading, kept_after_a_rejection, lossy_distribution),
    defect("padding stands", leading, padding_kept, by_hand),
    defect(
        "an impossible token stands under an infinite bound", accept._stands, impossible_tokens_stand, by_hand
    ),
    defect(
        "judged by certainty at temperature 0",
        SamplingParams.judged,
        lambda _: lambda params: params,
        lossy_greedy_distribution,
    ),
    defect(
        "judged before the transforms", SurpriseLimit.of, judged_before_the_transforms, lossy_distribution
    ),
    defect("rows of other rules judged, too", accept.accept, every_row_lossy, rules_side_by_side),
    defect("every row by one bound", SurpriseLimit.of, one_bound, rules_side_by_side),
    defect(
        "a token drafted where the drafter is unsure",
        _Steps.add,
        added(drawable=lambda token, q, drawable, finite: finite),
        fallback_distribution,
    ),
    defect(
        "unsure by the distribution after the transforms",
        Fallback.may_draw,
        confidence_after_the_transforms,
        fallback_distribution,
    ),
    defect(
        "left to the target by the drawn token",
        _Steps.add,
        added(drawable=lambda token, q, drawable, finite: drawable | finite & (token == 0)),
        strict_fallback_distribution,
    ),
    defect("no row is of the lossy rule", SamplingTable.of, without_bounds, lossy_distribution),
]

CHECKS = list(dict.fromkeys(mutant.check for mutant in MUTANTS))
