"""Planted defects of drafts that stop by how sure their drafter is."""

from __future__ import annotations

from foredraft.decode import drafting
from tests.exactness import test_enumeration as enumeration
from tests.exactness import test_stops as stops
from tests.support.parts import Halts
from tests.support.planting import Mutant

STEPS = drafting._step_through


def law_of_halting_drafts() -> None:
    cases = [enumeration.case("as it is", drafter) for drafter in ("draft-model", "tapping")]
    enumeration.enumerate_and_compare(cases, lambda: Halts(3))


SURVIVAL = "survival = stops.survival(sure, survival)"
DRAWN = "possible.append(finite if draws is None else finite & draws[:, None])"
CHECKS = [law_of_halting_drafts, stops.same_stops]
MUTANTS = [
    Mutant(
        "a drawn token dropped because it was unlikely",
        ((STEPS, DRAWN, "possible.append(finite & draws[:, None] & (q.at(token) > 0.4))"),),
        law_of_halting_drafts,
    ),
    Mutant(
        "the curve looked up one position late",
        ((STEPS, SURVIVAL, "survival = stops.survival(sures[-1][:, 0] if sures else sure, survival)"),),
        stops.same_stops,
    ),
    Mutant(
        "the confidence of another row",
        ((STEPS, "vocab_ops.max_prob(logits[:, 0])", "vocab_ops.max_prob(logits[:, 0]).roll(1)"),),
        stops.same_stops,
    ),
    Mutant(
        "what came before forgotten",
        ((STEPS, SURVIVAL, "survival = stops.survival(sure, survival * 0 + 1)"),),
        stops.same_stops,
    ),
    Mutant(
        "the one threshold for the other",
        ((STEPS, "survival >= stops.more[:, j]", "survival >= stops.keep[:, j]"),),
        stops.same_stops,
    ),
    Mutant(
        "a step counted that was not taken",
        ((STEPS, "sure.where(_still(wanted[:, j], going, j), -1.0)", "sure"),),
        stops.same_stops,
    ),
]
