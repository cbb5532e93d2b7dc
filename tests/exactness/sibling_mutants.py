"""Planted defects of siblings (form: `mutants`)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from foredraft.decode import accept, constraint, round_draft, step_draws
from foredraft.decode.constraint import Constraint
from foredraft.decode.distribution import Distribution
from foredraft.decode.engine import Engine
from foredraft.decode.noise import ACCEPT
from foredraft.decode.params import SamplingParams
from foredraft.decode.round_draft import AcceptResult, Siblings
from foredraft.decode.sampling import PenaltyContext
from foredraft.decode.sequence import Sequence
from tests.exactness import round_checks as checks
from tests.exactness import test_chi_square as chi
from tests.exactness import test_enumeration as enumeration
from tests.exactness import test_siblings as tests
from tests.support.mutation import caught_by
from tests.support.mutations import Function, argument, around, before, changed, during, holding, instead
from tests.support.parts import StopUnsure

greedy_siblings = checks.in_each_case(checks.greedy_tokens, ("draft-model", 5), ("aux-states", 5))
sampled_siblings = partial(chi.test_two_tokens_of_an_often_rejected_drafter, 2)
law_of_siblings = checks.law_of_siblings(1, "draft-model", "aux-states")
coupled_siblings = partial(checks.seeded_text, 5, slice(None))
law_of_constrained_siblings = partial(tests.test_constrained_texts_are_those_of_plain_decoding, 2)


@instead
def at_any_place(siblings: Siblings, verdict: AcceptResult) -> Tensor:
    same = siblings.tokens == verdict.next_token[:, None]
    return same.to(torch.int64).argmax(1).where(same.any(1), -1)


@instead
def whatever_is_written(siblings: Siblings, verdict: AcceptResult) -> Tensor:
    """The first sibling of the place is taken for the token that the rule wrote."""
    there = (siblings.places == verdict.accepted[:, None]) & (siblings.tokens >= 0)
    return there.to(torch.int64).argmax(1).where(there.any(1), -1)


row_of_the_chain = instead(lambda verdict, k: verdict.accepted)

in_the_next_column = changed(lambda rows: [{at: place + 1 for at, place in row.items()} for row in rows])
by_column = changed(lambda rows: [{column: column for column in row} for row in rows])


not_moved = holding(lambda engine, *_: (engine.cache, "move", lambda *_: None))


def moved_from_another_column(engine: Engine, *_: Any) -> tuple[Any, str, Any]:
    move = engine.cache.move
    return engine.cache, "move", lambda row, source, target: move(row, source - 1, target)


def believe_it_is_read(engine: Engine, sequence: Sequence, *_: Any) -> None:
    if "draft-model" in sequence.drafters:
        [cache] = engine.drafters["draft-model"].caches
        cache.lengths[sequence.row] += 1


def tell_of_the_chain(engine: Engine, sequence: Any, result: Any, base: int, *_: Any) -> tuple[Any, str, Any]:
    tell = engine._tell_drafters
    return engine, "_tell_drafters", lambda own, first, *rest: tell(own, first, *rest[:2], first - base)


def with_noise_of_the_sibling(inputs: Any) -> Any:
    keys = inputs.keys  # none where every row is greedy
    return replace(inputs, keys=keys and SimpleNamespace(columns=lambda index: keys.columns(index - 1)))


nonfinite_unseen = around(
    lambda go_on, inputs, siblings, decided: replace(go_on(inputs, siblings, decided), finite=decided.finite)
)
sibling_not_counted = around(
    lambda along, context, drafted, ahead=0: along(
        context, drafted, ahead - 1 if isinstance(ahead, Tensor) else ahead
    )
)
# a token is drawn from what was left before the siblings had their turns
with_the_rejected_residual = around(
    lambda take, siblings, places, drawn, p, *rest: (p, take(siblings, places, drawn, p, *rest)[1])
)


@around
def kept_at_its_turn(
    take: Function, siblings: Siblings, places: Tensor, drawn: Tensor, p: Distribution, *rest: Any
) -> tuple[Distribution, Tensor]:
    """A sibling is kept whatever the coin says, if the target may write it."""
    left, kept = take(siblings, places, drawn, p, *rest)
    first = siblings.at(places, 0)
    may_be = (first >= 0) & (p.at(first.clamp_min(0)[:, None])[:, 0] > 0)
    return left, first.where(may_be, kept)


coin_of_the_draft = argument(
    6, lambda noise: SimpleNamespace(coin=lambda keys, purpose: noise.coin(keys, ACCEPT))
)


@around
def drawn_again(next_in_draw: Function, step: Any, drawn: Any, count: int) -> Tensor:
    found: Tensor = next_in_draw(step, drawn, count)
    found[..., 0] = drawn.token
    return found


@around
def left_there(
    along: Function, own: Constraint, draft: Any, vocabulary: int, device: Any, siblings: Any = ()
) -> Any:
    found = along(own, draft, vocabulary, device, siblings)
    for place, token in siblings:
        if place == 0 and token >= 0:
            own.advance(token)
            break
    return found


none_coupled = argument(0, lambda inputs: replace(inputs, rules=["speculative"] * len(inputs.rules)))
under_any_rule = during(SamplingParams, "bound", property(lambda params: None))
TABLE = {
    law_of_siblings: [
        ("a sibling of another place written", Siblings.written, at_any_place),
        ("a sibling that is not written", Siblings.written, whatever_is_written),
        ("the token after a sibling from the chain's row", AcceptResult.last_column, row_of_the_chain),
        ("q as if nothing was drawn", Distribution.without, lambda _: lambda q, *_: q),
        ("a sibling kept whatever the coin says", accept._take_turns, kept_at_its_turn),
    ],
    greedy_siblings: [
        ("a sibling of another row written", Siblings.written, changed(lambda written: written.roll(1))),
        ("the same, greedily", AcceptResult.last_column, row_of_the_chain),
        ("a sibling read a place too late", Siblings.leaves, in_the_next_column),
        ("a sibling's position by its column", Siblings.leaves, by_column),
        ("a sibling's keys not moved", Engine._append_after_sibling, not_moved),
        ("another sibling's keys moved", Engine._append_after_sibling, holding(moved_from_another_column)),
        ("a sibling believed to be read", Engine._append_after_sibling, before(believe_it_is_read)),
        ("the chain's states for a sibling", Engine._append_after_sibling, holding(tell_of_the_chain)),
        ("a duplicate sibling", step_draws.next_in_draw, drawn_again),
    ],
    coupled_siblings: [
        ("a coupled row that draws otherwise", accept._go_on, none_coupled),
        ("noise of a sibling's own position", accept._go_on, argument(0, with_noise_of_the_sibling)),
    ],
    tests.test_a_sibling_that_makes_the_target_fail_harms_no_text: [
        ("a sibling's NaN unseen", accept._go_on, nonfinite_unseen)
    ],
    partial(enumeration.check_siblings, "repetition"): [
        ("a sibling missing from the penalties", PenaltyContext.along, sibling_not_counted)
    ],
    sampled_siblings: [
        ("a residual that is no law", Distribution.normalised, lambda _: lambda p, _: p),
        ("a sibling by the draft's coin", accept._take_turns, coin_of_the_draft),
    ],
    checks.law_of_siblings(3, "draft-model"): [
        ("a rejected sibling's part drawn", accept._take_turns, with_the_rejected_residual)
    ],
    partial(tests.test_the_law_of_drafts_that_end_early, StopUnsure(3, least=0.98), 24): [
        ("siblings beyond a draft", Siblings.of, argument(2, lambda lengths: lengths + 1))
    ],
    tests.test_the_lossy_rule_drafts_chains: [
        ("siblings under the lossy rule", round_draft._candidates, under_any_rule)
    ],
    law_of_constrained_siblings: [
        ("no mask after a sibling", Siblings.under, changed(lambda own: replace(own, masks=None))),
        ("another sibling's mask", Siblings.under, argument(1, lambda rows: [x[1:] + x[:1] for x in rows])),
        ("a text going on where it may not", Siblings.under, changed(lambda own: replace(own, last=None))),
        ("a constraint left after a sibling", constraint.masks_along, left_there),
    ],
    tests.test_scores_are_those_of_plain_decoding: [
        ("scores of the chain's row", AcceptResult.last_column, row_of_the_chain)
    ],
}
MUTANTS = caught_by(TABLE)
