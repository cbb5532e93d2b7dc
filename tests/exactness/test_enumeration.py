"""The engine's exact output distribution, by taking every branch, against the definition."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from foredraft.decode.params import SamplingParams
from foredraft.decode.policy import (
    AdaptiveExit,
    Confidence,
    Fallback,
    Fixed,
    Heuristic,
    Policy,
    TargetConfidence,
)
from tests.support import distributions
from tests.support.forking import Case, Found, outputs_of
from tests.support.harness import DRAFTERS, make_engine
from tests.support.parts import (
    ArbitraryDecisions,
    Fickle,
    LateBan,
    NoRepeat,
    RandomBudgets,
    StopUnsure,
    solitary,
)
from tests.support.tabular import Table

V = 3
TOLERANCE = 1e-5

POLICIES: dict[str, Callable[[], Policy]] = {
    "fixed-1": lambda: Fixed(1),
    "fixed-2": lambda: Fixed(2),
    "fixed-3": lambda: Fixed(3),
    "heuristic": lambda: Heuristic(3, first=1),
    "fallback": lambda: Fallback(3, threshold=0.55),
    "stop-unsure": lambda: StopUnsure(3),
    "random": lambda: RandomBudgets(3),
    "fickle": lambda: Fickle(2),
    "confidence": lambda: Confidence(3, threshold=0.5),
    "adaptive-exit": lambda: AdaptiveExit(3, target=0.7, first=0.5, epsilon=0.9),
    "target-confidence": lambda: TargetConfidence(3, threshold=0.5),
    "target-entropy": lambda: TargetConfidence(2, threshold=0.3, by="entropy"),
    "target-margin": lambda: TargetConfidence(2, threshold=0.3, by="margin"),
}
TRANSFORMS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "cold": {"temperature": 0.7},
    "hot": {"temperature": 1.5},
    "top-k": {"top_k": 2},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.3},
    "cold top-k": {"temperature": 0.7, "top_k": 2},
    "hot top-p": {"temperature": 1.5, "top_p": 0.7},
    "hot min-p": {"temperature": 1.5, "min_p": 0.25},
    "top-k top-p": {"top_k": 2, "top_p": 0.6},
    "typical": {"typical_p": 0.6},
    "bias": {"logit_bias": {0: 1.25, 2: -0.75}},
    "repetition": {"repetition_penalty": 1.4},
    "presence": {"presence_penalty": 1.1},
    "frequency": {"frequency_penalty": 0.8},
    "late end": {"min_new_tokens": 2},
    "greedy": {"temperature": 0},
}
# one of each option, for pairs of them
SINGLES = [
    "cold",
    "top-k",
    "top-p",
    "min-p",
    "typical",
    "bias",
    "repetition",
    "presence",
    "frequency",
    "late end",
]
PAIRS = [TRANSFORMS[one] | TRANSFORMS[other] for one, other in itertools.combinations(SINGLES, 2)]
CONSTRAINTS: dict[str, Callable[[], Any]] = {
    "free": lambda: None,
    "no repeat": lambda: NoRepeat(V),
    "late ban": lambda: LateBan(V, (1, 0, 1)),
}
WORLDS = {
    "plain": (Table(V, 1), Table(V, 2)),
    "impossible tokens": (Table(V, 3, impossible=0.3), Table(V, 4, impossible=0.2)),
    "ties": (Table(V, 5, step=1.0), Table(V, 6, step=0.5)),
    "itself": (Table(V, 7), Table(V, 7)),
}


def case(transform: str, drafter: str | None, constraint: str = "free", *, new: int = 3, **more: Any) -> Case:
    """Return a request for one drafter, or for plain steps."""
    return case_of(transform, (drafter,) if drafter else (), constraint, new=new, **more)


def case_of(
    transform: str, drafters: tuple[str, ...], constraint: str = "free", *, new: int = 3, **more: Any
) -> Case:
    """Return a request for which the policy chooses among several drafters."""
    params = SamplingParams(max_new_tokens=new, acceptance="speculative", **TRANSFORMS[transform])
    name = f"{transform}, {'+'.join(drafters) or 'plain'}, {constraint}"
    return Case(name, params, drafters=drafters, constraint=CONSTRAINTS[constraint], **more)


def compare(cases: list[Case], found: list[Found], after: distributions.Logits) -> None:
    for one, got in zip(cases, found, strict=True):
        assert_law(one.name, got, law_of(one, after))


def compare_jointly(cases: list[Case], found: Found, after: distributions.Logits) -> None:
    """The outputs of rows that share a batch are independent."""
    laws = [law_of(one, after).items() for one in cases]
    want = {
        tuple(output for output, _ in together): math.prod(chance for _, chance in together)
        for together in itertools.product(*laws)
    }
    assert_law(", ".join(one.name for one in cases), found, want)


def law_of(one: Case, after: distributions.Logits) -> distributions.Distribution:
    return distributions.outputs(
        after, list(one.prompt), one.params, eos=one.eos, constraint=one.constraint()
    )


def assert_law(name: str, found: Found, want: dict[Any, float]) -> None:
    assert sum(found.distribution.values()) == pytest.approx(1, abs=1e-9), name
    assert set(found.distribution) <= set(want), f"{name}: an impossible output"
    for output, chance in want.items():
        assert found.distribution.get(output, 0.0) == pytest.approx(chance, abs=TOLERANCE), (name, output)


def enumerate_and_compare(
    cases: list[Case], policy: Callable[[], Policy], world: str = "plain", rows: int = 48, **engine: Any
) -> list[Found]:
    target, draft = WORLDS[world]

    def make(noise: Any) -> Any:
        return make_engine(target, draft, policy(), rows=rows, noise=noise, **engine)

    found = outputs_of(make, cases)
    compare(cases, found, target.after)
    return found


@pytest.mark.parametrize("policy", POLICIES)
def test_every_drafter_under_every_policy(policy: str) -> None:
    cases = [case("as it is", drafter, new=4) for drafter in (*DRAFTERS, "prediction")]
    found = enumerate_and_compare(cases, POLICIES[policy])
    for one, got in zip(cases, found, strict=True):
        assert (got.drafted > 0) == bool(one.drafters)
        assert (got.rejections > 0) == bool(one.drafters), "a weak drafter is rejected sometimes"


SEVERAL = ("lookup", "draft-model", "tapping", "script")


def choosing(transform: str, constraint: str = "free", **more: Any) -> Case:
    """Return a request for which the policy chooses among all of `SEVERAL`."""
    return case_of(transform, SEVERAL, constraint, **more)


@pytest.mark.parametrize("transform", ["as it is", "cold top-k", "greedy"])
def test_the_cost_model_chooses_among_drafters(transform: str) -> None:
    """One row at a time, because a row's decision depends on the batch."""
    (found,) = enumerate_and_compare([choosing(transform)], lambda: solitary(2, SEVERAL), rows=1)
    assert found.drafted > 0
    cases = [case(transform, drafter) for drafter in ("draft-model", "lookup")]
    enumerate_and_compare(cases, lambda: solitary(3, SEVERAL), rows=1)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    signal=st.sampled_from([None, "probability", "entropy", "margin"]),
    uses_costs=st.booleans(),
    alone=st.booleans(),
    transform=st.sampled_from(["as it is", "hot top-p", "top-k", "repetition"]),
)
def test_no_policy_changes_the_distribution(
    seed: int, signal: Any, uses_costs: bool, alone: bool, transform: str
) -> None:
    """The policy chooses drafter, budget, end of the draft and begin of the context by all that it may see."""
    prompt = {"alone": alone, "prompt": (0, 1, 0) if alone else (0,)}
    cases = [
        choosing(transform, **prompt),
        case(transform, "draft-model", "late ban", **prompt),
        choosing("cold", "no repeat", **prompt),
    ]
    enumerate_and_compare(cases, lambda: ArbitraryDecisions(3, seed, signal, uses_costs))


@pytest.mark.parametrize("policy", ["fixed-2", "stop-unsure", "random"])
def test_greedy_drafts_keep_the_distribution(policy: str) -> None:
    cases = [case(t, d) for t in ("as it is", "top-k") for d in ("draft-model", "tapping")]
    enumerate_and_compare(cases, POLICIES[policy], greedy_drafts=True)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_every_transform(transform: str) -> None:
    cases = [case(transform, "draft-model"), case(transform, "script"), case(transform, None)]
    enumerate_and_compare(cases, POLICIES["fixed-2"])


@pytest.mark.parametrize("drafter", ["draft-model", "script"])
def test_every_pair_of_transforms(drafter: str) -> None:
    """Rows of all pairs in one batch; token 2 ends a text, and 0 and 2 are biased."""
    cases = [
        Case(
            str(options),
            SamplingParams(max_new_tokens=3, acceptance="speculative", **options),
            drafters=(drafter,),
            eos=frozenset({2}),
            prompt=(0, 1),
        )
        for options in PAIRS
    ]
    enumerate_and_compare(cases, POLICIES["fixed-2"])


@pytest.mark.parametrize("transform", ["repetition", "presence", "frequency", "late end"])
def test_penalties_count_the_text_under_every_drafter(transform: str) -> None:
    """Penalties along drafts of every kind, under a ban that takes tokens back, and to greedy drafts."""
    end = frozenset({2})
    cases = [case(transform, drafter, eos=end) for drafter in DRAFTERS]
    cases += [case(transform, drafter, "late ban") for drafter in ("draft-model", "script", None)]
    enumerate_and_compare(cases, POLICIES["fixed-2"])
    enumerate_and_compare([case(transform, "tapping", eos=end)], POLICIES["random"], greedy_drafts=True)


def test_rows_of_different_parameters_share_a_batch() -> None:
    drafters = itertools.cycle(DRAFTERS)
    enumerate_and_compare([case(t, next(drafters)) for t in TRANSFORMS], POLICIES["random"], rows=24)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("transform", ["as it is", "top-k"])
def test_targets_and_drafts_with_ties_and_impossible_tokens(world: str, transform: str) -> None:
    cases = [case(transform, "draft-model"), case(transform, "tapping"), case("greedy", "draft-model")]
    enumerate_and_compare(cases, POLICIES["fixed-2"], world)


@pytest.mark.parametrize("policy", ["fixed-2", "stop-unsure", "random"])
@pytest.mark.parametrize("constraint", ["no repeat", "late ban"])
def test_constraints_keep_the_output(policy: str, constraint: str) -> None:
    cases = [case("as it is", drafter, constraint) for drafter in DRAFTERS]
    cases += [
        case("top-k", "draft-model", constraint),
        case("greedy", "tapping", constraint),
        case("hot", "script"),
    ]
    enumerate_and_compare(cases, POLICIES[policy])


def test_a_ban_takes_back_the_tokens_of_three_rounds() -> None:
    """Plain steps, one token a round: the run is complete in the third."""
    cases = [case("as it is", None, "late ban"), case("as it is", "draft-model", "late ban")]
    enumerate_and_compare(cases, lambda: Fixed(0))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["fixed-1", "fixed-2", "random"])
def test_repeated_bans_keep_the_distribution(policy: str) -> None:
    """A path ends, because no ban is met twice: its rollback bars the run's first token after that text for
    good. So with n new tokens a path has no more rollbacks than there are texts of n - 3 tokens or fewer: one
    with three. With four these are the empty text and three more, of which a path meets (1,) before the ban
    at the empty one, and (0,) or (2,) after it. Each rollback multiplies the paths: a draft model under
    `Fixed(3)` has 209 with three tokens, 45 413 with four, 300 million with five.
    """
    drafters = (None, "draft-model", "tapping", "script")
    cases = [case("as it is", drafter, "late ban", new=4) for drafter in drafters]
    for got in enumerate_and_compare(cases, POLICIES[policy]):
        assert got.rollbacks == 3


def test_an_end_inside_a_draft_keeps_the_distribution() -> None:
    cases = [case("as it is", drafter, new=4, eos=frozenset({1, 2})) for drafter in DRAFTERS]
    enumerate_and_compare(cases, POLICIES["fixed-3"])


def test_four_tokens_of_which_three_are_drafted() -> None:
    cases = [case("top-k top-p", drafter, new=4) for drafter in ("draft-model", "tapping", "script")]
    found = enumerate_and_compare(cases, POLICIES["fixed-3"])
    assert all(got.accepted > 0 for got in found)


def test_prompts_with_a_prefill_and_siblings() -> None:
    """Idle rows, donors and successors: the prompt is longer than a chunk."""
    prompt = (0, 2, 1, 1, 0, 2, 0)
    cases = [case("as it is", drafter, prompt=prompt, new=2) for drafter in DRAFTERS]
    cases += [
        case("cold", "tapping", prompt=prompt[:3], new=2),
        case("hot", "lookup", prompt=prompt[2:], new=3),
    ]
    enumerate_and_compare(cases, POLICIES["random"], rows=7)


def test_a_stepper_that_hands_on_fewer_states() -> None:
    enumerate_and_compare(
        [case("as it is", "tapping"), case("hot", "script")], POLICIES["fixed-2"], forgetful=True
    )


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("greedy_drafts", [False, True])
@pytest.mark.parametrize("constraint", CONSTRAINTS)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_combination(policy: str, world: str, constraint: str, greedy_drafts: bool) -> None:
    """A late ban comes once on a path of three tokens; four have too many paths (`test_repeated_bans_keep_the_distribution`)."""
    new = 3 if constraint == "late ban" else 4
    cases = [case(t, d, constraint, new=new) for t in TRANSFORMS for d in DRAFTERS]
    enumerate_and_compare(cases, POLICIES[policy], world, greedy_drafts=greedy_drafts)
