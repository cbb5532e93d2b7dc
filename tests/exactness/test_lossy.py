"""The lossy rule against its own definition, by taking every branch; other rules beside it stay lossless."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import pytest

from foredraft.decode.params import SamplingParams
from foredraft.decode.policy import Fallback, Fixed, Policy
from tests.exactness.test_enumeration import TRANSFORMS as LOSSLESS
from tests.exactness.test_enumeration import assert_law, compare
from tests.exactness.test_enumeration import case as lossless_case
from tests.support import distributions
from tests.support.forking import Case, outputs_of
from tests.support.harness import make_engine
from tests.support.tabular import Table

V = 3
TARGET, DRAFT = Table(V, 1), Table(V, 2)
TRANSFORMS: dict[str, dict[str, Any]] = {
    **{name: LOSSLESS[name] for name in ("as it is", "cold", "hot", "top-k", "top-p", "repetition", "bias")},
    "greedy": {"temperature": 0},
    "greedy, biased": {"temperature": 0, "logit_bias": {0: 1.25, 2: -0.75}},
    "greedy, cut": {"temperature": 0, "top_k": 1},
}
BOUNDS = [0.0, 0.4, 1.1, 2.5, math.inf]
PROMPTS = ((0,), (1,), (1, 1))  # after the last two, greedy output depends on the bound
END = frozenset({2})


def defined(
    params: SamplingParams, budget: int, prompt: list[int], eos: Any = frozenset(), threshold: float = 0.0
) -> distributions.Distribution:
    """The probability of every output where rounds draft `budget` tokens, up to one that the drafter gives no
    token a probability of `threshold` at, by its logits as they are. In plain Python and float64."""
    found: distributions.Distribution = defaultdict(float)
    assert params.bound is not None
    edits = ("logit_bias", "repetition_penalty", "presence_penalty", "frequency_penalty")
    uncut = SamplingParams(**{name: getattr(params, name) for name in edits})
    judging = uncut if params.temperature == 0 else params

    def distribution(table: Table, new: list[int], wanted: SamplingParams) -> list[float]:
        return distributions.transformed(table.after(prompt + new), wanted, None, prompt, new, eos)

    def say(new: list[int], left: int | None, chance: float) -> None:
        """left: of this round's draft; None: the round is over."""
        if len(new) == params.max_new_tokens or (new and new[-1] in eos):
            found[tuple(new)] += chance
            return
        draft(new, min(budget, params.max_new_tokens - len(new) - 1) if left is None else left, chance)

    def draft(new: list[int], left: int, chance: float) -> None:
        own = distribution(TARGET, new, params)
        rest = 1.0  # probability that the target's own token follows: the draft is over, or its token cut
        sure = max(distributions.transformed(DRAFT.after(prompt + new), SamplingParams()))
        assert abs(sure - threshold) > distributions.TOO_CLOSE
        if left and sure > threshold:
            judge = distribution(TARGET, new, judging)
            for x, q in enumerate(distribution(DRAFT, new, params)):
                bearable = judge[x] > 0 and -math.log(judge[x]) <= params.bound
                if q > 0 and (bearable or own[x] == 1):
                    say([*new, x], left - 1, chance * q)
                    rest -= q
        if rest > 1e-12:
            for y, p in enumerate(own):
                if p > 0:
                    say([*new, y], None, chance * rest * p)

    say([], None, 1.0)
    return dict(found)


def case(transform: str, bound: float, drafter: str | None = "draft-model", **more: Any) -> Case:
    params = SamplingParams(max_new_tokens=3, acceptance="bild", rollback=bound, **TRANSFORMS[transform])
    return Case(f"{transform}, {bound}, {drafter}", params, drafters=(drafter,) if drafter else (), **more)


def assert_defined(cases: list[Case], budget: int, *others: Case, threshold: float = 0.0) -> None:
    policy: Policy = Fallback(budget, threshold) if threshold else Fixed(budget)
    every = [*cases, *others]
    found = outputs_of(lambda noise: make_engine(TARGET, DRAFT, policy, rows=24, noise=noise), every)
    for one, got in zip(cases, found, strict=False):
        prompt, most = list(one.prompt), budget if one.drafters else 0
        assert_law(one.name, got, defined(one.params, most, prompt, one.eos, threshold))
    compare([*others], found[len(cases) :], TARGET.after)


@pytest.mark.heavy
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_the_distribution_of_the_output_is_the_defined_one(transform: str) -> None:
    cases = [case(transform, bound, prompt=prompt) for bound in BOUNDS for prompt in PROMPTS]
    cases += [case(transform, 1.1, "aux-states", eos=END), case(transform, 1.1, None)]
    assert_defined(cases, 2)


@pytest.mark.parametrize("budget", [1, 3])
def test_drafts_of_other_lengths(budget: int) -> None:
    assert_defined([case("as it is", 1.1, eos=END), case("greedy", 1.1), case("cold", 0.4)], budget)


@pytest.mark.heavy
@pytest.mark.parametrize("transform", ["as it is", "cold", "greedy", "top-k"])
def test_the_published_pair_of_rule_and_fallback_policy(transform: str) -> None:
    """The threshold is of the logits as they are, at every temperature."""
    for threshold in (0.55, 0.8):
        cases = [case(transform, bound, prompt=prompt) for bound in (0.4, 2.5) for prompt in PROMPTS]
        assert_defined(cases, 3, threshold=threshold)


def test_rows_of_every_rule_share_a_batch() -> None:
    lossless = [lossless_case(transform, "draft-model") for transform in ("as it is", "greedy", "top-k")]
    assert_defined([case(t, b) for t in ("as it is", "greedy", "top-k") for b in (0.4, 1.1)], 2, *lossless)


def test_bound_zero_is_lossless_and_an_infinite_bound_keeps_every_draft() -> None:
    strict, lenient = [case("greedy", bound) for bound in (0.0, math.inf)]
    assert set(defined(strict.params, 3, [0])) == {tuple(distributions.greedy(TARGET.after, [0], 3))}
    (drafted,) = defined(lenient.params, 3, [0])
    said, own = (tuple(distributions.greedy(table.after, [0], 2)) for table in (DRAFT, TARGET))
    assert drafted[:2] == said != own
    assert_defined([strict, lenient], 3)


def test_the_lossy_distribution_differs_from_the_targets() -> None:
    lossy = case("as it is", 1.1)
    want = distributions.outputs(TARGET.after, [0], lossy.params)
    assert sum(abs(p - want[output]) for output, p in defined(lossy.params, 2, [0]).items()) / 2 > 0.1
