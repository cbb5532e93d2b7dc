"""Planted defects of the lossy rule and of its options (form: `mutants`)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
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
from tests.support import mutations
from tests.support.mutation import Edit, caught_by
from tests.support.mutations import Function, added, argument, around, before, changed, instead
from tests.unit import test_decode_accept as accept_unit

lossy_distribution = partial(lossy.assert_defined, [lossy.case("as it is", 1.1), lossy.case("top-k", 2.5)], 2)
lossy_greedy_distribution = partial(
    lossy.assert_defined, [lossy.case("greedy", bound, prompt=(1, 1)) for bound in (0.4, 2.5)], 2
)
fallback_distribution = partial(
    lossy.assert_defined, [lossy.case("cold", 1.1), lossy.case("greedy", 2.5, prompt=(1,))], 3, threshold=0.55
)
strict_fallback_distribution = partial(
    enumeration.enumerate_and_compare,
    [enumeration.case("as it is", "draft-model")],
    lambda: Fallback(2, threshold=0.55),
)

bound_reversed = instead(lambda judged, p, bound: (judged > 0) & (-judged.log() >= bound) | (p == 1))
bound_excluded = instead(lambda judged, p, bound: (judged > 0) & (-judged.log() < bound) | (p == 1))
impossible_tokens_stand = instead(lambda judged, p, bound: (-judged.log() <= bound) | (p == 1))


def relative_to_q() -> tuple[Edit, ...]:
    seen: dict[str, Tensor] = {}

    def mutate_stands(stands: Function) -> Function:
        return lambda judged, p, bound: stands(judged / seen["q"], p, bound)

    remember = before(lambda draft, *rest: seen.update(q=draft.q.at(draft.tokens)))
    return (accept.bild, remember), (accept._stands, mutate_stands)


one_more_kept = around(lambda sound, keep, lengths: torch.minimum(sound(keep, lengths) + 1, lengths))


def next_token_from_a_residual() -> tuple[Edit, ...]:
    drafts: list[Draft] = []

    def remember(draft: Draft, *_: Any) -> None:
        drafts[:] = [draft] if draft.tokens.shape[1] else []

    @around
    def mutate_position(position: Function, p: Distribution, index: Tensor) -> Distribution:
        at: Distribution = position(p, index)
        if not drafts:
            return at
        draft = drafts.pop()
        last = index.clamp_max(draft.tokens.shape[1] - 1)
        return at.minus(position(draft.q, last), index < draft.lengths)

    return (accept.bild, before(remember)), (Distribution.position, mutate_position)


@around
def judged_before_the_transforms(
    of: Function, cls: type, table: SamplingTable, p: Any, logits: Tensor, *rest: Any
) -> SurpriseLimit | None:
    rollback: SurpriseLimit | None = of(cls, table, p, logits, *rest)
    if rollback is None or table.judge is not None:
        return rollback
    return replace(rollback, judge=Distribution(logits.softmax(-1)))


def one_bound(limit: SurpriseLimit | None) -> SurpriseLimit | None:
    most = limit and limit.bound.nan_to_num().amax()
    return limit and replace(limit, bound=most.expand_as(limit.bound))  # type: ignore[union-attr]


confidence_after_the_transforms = around(
    lambda may_draw, policy, sequences, position, q, logits: may_draw(
        policy, sequences, position, q, q.dense(logits.shape[-1]).log()
    )
)

a_position_early = argument(1, lambda index: (index - 1).clamp_min(0))
drawn_if_the_first = added(drawable=lambda token, q, drawable, finite: drawable | finite & (token == 0))
TABLE = {
    lossy_distribution: [
        ("the bound the wrong way round", accept._stands, bound_reversed),
        ("the draft's own distribution consulted", relative_to_q()),
        ("the token that is cut is kept", leading, one_more_kept),
        ("the token after a cut drawn from a residual", next_token_from_a_residual()),
        ("the token after a cut drawn from the position before it", Distribution.position, a_position_early),
        ("tokens after a cut stand", leading, mutations.kept_after_a_rejection),
        ("judged before the transforms", SurpriseLimit.of, judged_before_the_transforms),
        ("no row is of the lossy rule", SamplingTable.of, changed(lambda table: replace(table, bound=None))),
    ],
    accept_unit.test_a_drafted_token_stands_up_to_the_bound: [
        ("the bound the wrong way round, by hand", accept._stands, bound_reversed),
        ("a token exactly as surprising as the bound is cut", accept._stands, bound_excluded),
        ("padding stands", leading, mutations.padding_kept),
        ("an impossible token stands under an infinite bound", accept._stands, impossible_tokens_stand),
    ],
    accept_unit.test_greedy_rows_are_judged_by_another_distribution_than_they_are_drawn_from: [
        ("a token that the target is certain of is cut", accept._stands, argument(1, torch.zeros_like))
    ],
    lossy_greedy_distribution: [
        ("judged by certainty at temperature 0", SamplingParams.judged, lambda _: lambda params: params)
    ],
    lossy.test_rows_of_every_rule_share_a_batch: [
        ("other rules judged, too", accept.accept, argument(5, lambda x: x and replace(x, everywhere=True))),
        ("every row by one bound", SurpriseLimit.of, changed(one_bound)),
    ],
    fallback_distribution: [
        ("a token drafted where the drafter is unsure", _Steps.add, added(drawable=lambda *given: given[-1])),
        ("unsure by q after the transforms", Fallback.may_draw, confidence_after_the_transforms),
    ],
    strict_fallback_distribution: [("left to the target by the drawn token", _Steps.add, drawn_if_the_first)],
}
MUTANTS = caught_by(TABLE)
