"""Planted defects of siblings, each with a check that must fail under it.

A table entry reads: name, seam, spoiler, check. A spoiler takes the sound function and returns the defective one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from foredraft.decode import constraint, decision, draft_choice, step_draws
from foredraft.decode.accept import Turns
from foredraft.decode.constraint import Constraint
from foredraft.decode.decision import Decision, Evidence
from foredraft.decode.distribution import Distribution
from foredraft.decode.drafter import Stepper
from foredraft.decode.engine import Engine
from foredraft.decode.noise import ACCEPT, DrawKeys, Noise
from foredraft.decode.penalty_context import PenaltyContext
from foredraft.decode.policy import Fixed
from foredraft.decode.sequence import Sequence
from foredraft.decode.siblings import Siblings
from foredraft.decode.verdict import Verdict
from tests.exactness import test_chi_square as chi
from tests.exactness import test_siblings as tests
from tests.support.parts import StopUnsure
from tests.support.planting import Mutant, defect, replaced

Function = Callable[..., Any]

# --- checks: the tests themselves, in their quickest form ---------------------------------------------


def greedy_siblings() -> None:
    tests.test_tokens_are_those_of_plain_decoding(Fixed(3, siblings=5), 8)


def sampled_siblings() -> None:
    chi.test_two_tokens_of_an_often_rejected_drafter(2)


def law_of_several_siblings() -> None:
    tests.test_the_law_of_every_rule("speculative", 3)


def coupled_siblings() -> None:
    tests.test_the_coupled_text_is_a_function_of_the_seed("draft-model", Fixed(3, siblings=5))


def law_of_siblings() -> None:
    tests.test_the_law_of_every_rule("speculative", 1)


def lossy_law_of_siblings() -> None:
    tests.test_the_law_of_every_rule("bild", 1)


def law_of_siblings_with_penalties() -> None:
    tests.test_the_law_under_transforms("repetition")


def law_of_constrained_siblings() -> None:
    tests.test_constrained_texts_are_those_of_plain_decoding(2)


def law_of_siblings_of_short_drafts() -> None:
    tests.test_the_law_of_drafts_that_end_early(StopUnsure(3, least=0.98), 24)


def failing_siblings() -> None:
    tests.test_a_sibling_that_makes_the_target_fail_harms_no_text()


def scores_of_siblings() -> None:
    tests.test_scores_are_those_of_plain_decoding()


# --- spoilers -------------------------------------------------------------------------------------------


def at_any_place(_: Function) -> Function:
    def written(siblings: Siblings, verdict: Verdict) -> Tensor:
        same = siblings.tokens == verdict.next_token[:, None]
        return same.to(torch.int64).argmax(1).where(same.any(1), -1)

    return written


def of_the_next_row(written: Function) -> Function:
    return lambda siblings, verdict: written(siblings, verdict).roll(1)


def whatever_is_written(written: Function) -> Function:
    """The first sibling of the place is taken for the token that the rule wrote."""

    def spoilt(siblings: Siblings, verdict: Verdict) -> Tensor:
        there = (siblings.places == verdict.accepted[:, None]) & (siblings.tokens >= 0)
        return there.to(torch.int64).argmax(1).where(there.any(1), -1)

    return spoilt


def row_of_the_chain(_: Function) -> Function:
    return lambda verdict, k: verdict.accepted


def in_the_next_column(leaves: Function) -> Function:
    return lambda siblings, width: [
        {column: place + 1 for column, place in row.items()} for row in leaves(siblings, width)
    ]


def by_column(leaves: Function) -> Function:
    return lambda siblings, width: [{column: column for column in row} for row in leaves(siblings, width)]


def not_moved(append: Function) -> Function:
    def spoilt(engine: Engine, *rest: Any) -> int:
        with replaced(engine.cache, "move", lambda *_: None):
            return int(append(engine, *rest))

    return spoilt


def moved_from_another_column(append: Function) -> Function:
    def spoilt(engine: Engine, *rest: Any) -> int:
        move = engine.cache.move
        with replaced(engine.cache, "move", lambda row, source, target: move(row, source - 1, target)):
            return int(append(engine, *rest))

    return spoilt


def believed_to_be_read(append: Function) -> Function:
    """The draft model counts a sibling among what it has read: its cache holds the rejected token there."""

    def spoilt(engine: Engine, sequence: Sequence, *rest: Any) -> int:
        if "draft-model" in sequence.drafters:
            [cache] = engine.drafters["draft-model"].caches
            cache.lengths[sequence.row] += 1
        return int(append(engine, sequence, *rest))

    return spoilt


def states_of_the_chain(append: Function) -> Function:
    def spoilt(engine: Engine, sequence: Sequence, result: Any, base: int, column: int, forward: Any) -> int:
        tell = engine._tell_drafters

        def told(sequence: Sequence, first: int, emitted: int, forward: Any, column: int) -> None:
            tell(sequence, first, emitted, forward, first - base)

        with replaced(engine, "_tell_drafters", told):
            return int(append(engine, sequence, result, base, column, forward))

    return spoilt


def without_coupling(go_on: Function) -> Function:
    def spoilt(evidence: Evidence, *rest: Any) -> Decision:
        uncoupled = replace(evidence, coupled=[False] * len(evidence.coupled))
        found: Decision = go_on(uncoupled, *rest)
        return found

    return spoilt


def noise_of_the_sibling(go_on: Function) -> Function:
    """The token after a sibling is drawn by the noise of the sibling's own position."""

    def spoilt(evidence: Evidence, *rest: Any) -> Decision:
        keys = evidence.keys
        assert keys is not None
        moved = SimpleNamespace(columns=lambda index: keys.columns(index - 1))
        found: Decision = go_on(replace(evidence, keys=moved), *rest)  # type: ignore[arg-type]
        return found

    return spoilt


def nonfinite_unseen(go_on: Function) -> Function:
    def spoilt(evidence: Evidence, siblings: Siblings, decided: Decision) -> Decision:
        found: Decision = go_on(evidence, siblings, decided)
        return replace(found, finite=decided.finite)

    return spoilt


def sibling_not_counted(along: Function) -> Function:
    def spoilt(context: PenaltyContext, drafted: Tensor, ahead: int | Tensor = 0) -> PenaltyContext:
        found: PenaltyContext = along(context, drafted, ahead - 1 if isinstance(ahead, Tensor) else ahead)
        return found

    return spoilt


def with_the_rejected_residual(take: Function) -> Function:
    """A token is drawn from what was left before the siblings had their turns."""
    return lambda turns, p, *rest: (p, take(turns, p, *rest)[1])


def kept_at_its_turn(take: Function) -> Function:
    """A sibling is kept whatever the coin says, if the target may write it."""

    def spoilt(turns: Turns, p: Distribution, q: Distribution, *rest: Any) -> tuple[Distribution, Tensor]:
        left, kept = take(turns, p, q, *rest)
        first = turns.siblings.at(turns.places, 0)
        may_be = (first >= 0) & (p.at(first.clamp_min(0)[:, None])[:, 0] > 0)
        return left, first.where(may_be, kept)

    return spoilt


def by_the_coin_of_the_draft(take: Function) -> Function:
    def spoilt(turns: Turns, p: Distribution, q: Distribution, keys: DrawKeys, noise: Noise) -> Any:
        class Same:
            def coin(self, keys: DrawKeys, purpose: int) -> Tensor:
                return noise.coin(keys, ACCEPT)

        return take(turns, p, q, keys, Same())

    return spoilt


def drawn_again(next_in_draw: Function) -> Function:
    def spoilt(step: Any, drawn: Any, count: int) -> Tensor:
        found: Tensor = next_in_draw(step, drawn, count)
        found[..., 0] = drawn.token
        return found

    return spoilt


def without_masks(under: Function) -> Function:
    return lambda *args: replace(under(*args), masks=None)


def masks_of_the_next(under: Function) -> Function:
    return lambda siblings, after, *rest: under(siblings, [row[1:] + row[:1] for row in after], *rest)


def never_last(under: Function) -> Function:
    return lambda *args: replace(under(*args), last=None)


def left_there(along: Function) -> Function:
    """The constraint is not rewound after siblings."""

    def spoilt(own: Constraint, draft: Any, vocabulary: int, device: Any, siblings: Any = ()) -> Any:
        found = along(own, draft, vocabulary, device, siblings)
        for place, token in siblings:
            if place == 0 and token >= 0:
                own.advance(token)
                break
        return found

    return spoilt


def beyond_the_draft(of: Function) -> Function:
    return lambda cls, further, lengths, *rest: of(cls, further, lengths + 1, *rest)


DEFECTS: list[Mutant] = [
    defect("a sibling of another place written", Siblings.written, at_any_place, law_of_siblings),
    defect("a sibling of another row written", Siblings.written, of_the_next_row, greedy_siblings),
    defect("a sibling that is not written", Siblings.written, whatever_is_written, law_of_siblings),
    defect(
        "the token after a sibling from the chain's row",
        Verdict.last_column,
        row_of_the_chain,
        law_of_siblings,
    ),
    defect("the same, greedily", Verdict.last_column, row_of_the_chain, greedy_siblings),
    defect("a sibling read a place too late", Siblings.leaves, in_the_next_column, greedy_siblings),
    defect("a sibling's position by its column", Siblings.leaves, by_column, greedy_siblings),
    defect("a sibling's keys not moved", Engine._append_after_sibling, not_moved, greedy_siblings),
    defect(
        "another sibling's keys moved",
        Engine._append_after_sibling,
        moved_from_another_column,
        greedy_siblings,
    ),
    defect(
        "a sibling believed to be read", Engine._append_after_sibling, believed_to_be_read, greedy_siblings
    ),
    defect(
        "the chain's states for a sibling", Engine._append_after_sibling, states_of_the_chain, greedy_siblings
    ),
    defect("a coupled row that draws otherwise", decision._go_on, without_coupling, coupled_siblings),
    defect("noise of a sibling's own position", decision._go_on, noise_of_the_sibling, coupled_siblings),
    defect("a sibling's NaN unseen", decision._go_on, nonfinite_unseen, failing_siblings),
    defect(
        "a sibling missing from the penalties",
        PenaltyContext.along,
        sibling_not_counted,
        law_of_siblings_with_penalties,
    ),
    defect("q as if nothing was drawn", Distribution.without, lambda _: lambda q, *_: q, law_of_siblings),
    defect("a residual that is no law", Distribution.normalised, lambda _: lambda p, _: p, sampled_siblings),
    defect(
        "a rejected sibling's part drawn", Turns.take, with_the_rejected_residual, law_of_several_siblings
    ),
    defect("a sibling kept whatever the coin says", Turns.take, kept_at_its_turn, law_of_siblings),
    defect("a sibling by the coin of the draft", Turns.take, by_the_coin_of_the_draft, sampled_siblings),
    defect("a duplicate sibling", step_draws.next_in_draw, drawn_again, greedy_siblings),
    defect("siblings beyond a draft", Siblings.of, beyond_the_draft, law_of_siblings_of_short_drafts),
    defect(
        "siblings under the lossy rule",
        draft_choice._may_have_siblings,
        lambda _: lambda sequence, drafter: isinstance(drafter, Stepper),
        lossy_law_of_siblings,
    ),
    defect("no mask after a sibling", Siblings.under, without_masks, law_of_constrained_siblings),
    defect("the mask after another sibling", Siblings.under, masks_of_the_next, law_of_constrained_siblings),
    defect("a text that goes on where it may not", Siblings.under, never_last, law_of_constrained_siblings),
    defect(
        "a constraint left after a sibling", constraint.masks_along, left_there, law_of_constrained_siblings
    ),
    defect("scores of the chain's row", Verdict.last_column, row_of_the_chain, scores_of_siblings),
]
CHECKS = list(dict.fromkeys(mutant.check for mutant in DEFECTS))
MUTANTS = DEFECTS
