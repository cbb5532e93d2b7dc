"""The engine's exact output distribution, by taking every branch, against the definition."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from foredraft.decode import policy as policies
from foredraft.decode.params import SamplingParams
from foredraft.decode.policy import Fixed, Policy
from tests.support import distributions, parts
from tests.support.distributions import Logits
from tests.support.forking import Case, Found, joint_outputs_of, outputs_of
from tests.support.harness import DRAFTERS, make_engine
from tests.support.parts import ArbitraryDecisions, Fickle, LateBan, NoRepeat, RandomBudgets, StopUnsure
from tests.support.tabular import Table

V = 3
TOLERANCE = 1e-5

POLICIES: dict[str, Callable[[], Policy]] = {
    "fixed-1": lambda: Fixed(1),
    "fixed-2": lambda: Fixed(2),
    "fixed-3": lambda: Fixed(3),
    "siblings": lambda: Fixed(2, siblings=2),
    "heuristic": lambda: policies.Heuristic(3, first=1),
    "fallback": lambda: policies.Fallback(3, threshold=0.55),
    "stop-unsure": lambda: StopUnsure(3),
    "random": lambda: RandomBudgets(3),
    "fickle": lambda: Fickle(2),
    "confidence": lambda: policies.Confidence(3, threshold=0.5),
    "adaptive-exit": lambda: policies.AdaptiveExit(3, target=0.7, first=0.5, epsilon=0.9),
    "target-confidence": lambda: policies.TargetConfidence(3, threshold=0.5),
    "target-entropy": lambda: policies.TargetConfidence(2, threshold=0.3, by="entropy"),
    "target-margin": lambda: policies.TargetConfidence(2, threshold=0.3, by="margin"),
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
SINGLES = [name for name, own in TRANSFORMS.items() if len(own) == 1 and name not in ("hot", "greedy")]
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


def case(
    transform: str,
    drafter: str | tuple[str, ...] | None,
    constraint: str = "free",
    *,
    new: int = 3,
    **more: Any,
) -> Case:
    """Return a request for plain steps, for one drafter, or for several among which the policy chooses."""
    drafters = (drafter,) if isinstance(drafter, str) else drafter or ()
    params = SamplingParams(max_new_tokens=new, acceptance="speculative", **TRANSFORMS[transform])
    name = f"{transform}, {'+'.join(drafters) or 'plain'}, {constraint}"
    return Case(name, params, drafters=drafters, constraint=CONSTRAINTS[constraint], **more)


def compare(
    cases: list[Case], found: list[Found], after: Logits, constraint: Callable[[], Any] | None = None
) -> None:
    """Compare with the law of each case; `constraint` defines its own."""
    for one, got in zip(cases, found, strict=True):
        law = law_of(one if constraint is None else replace(one, constraint=constraint), after)
        assert_law(one.name, got, law)


def compare_jointly(cases: list[Case], found: Found, after: Logits) -> None:
    laws = [law_of(one, after).items() for one in cases]
    want = {
        tuple(output for output, _ in together): math.prod(chance for _, chance in together)
        for together in itertools.product(*laws)
    }
    assert_law(", ".join(one.name for one in cases), found, want)


def check_law(engine: Callable[..., Any], one: Case, after: Logits) -> None:
    """Compare the outputs of a request that drafts; `engine` takes a policy, the number of rows and the noise."""
    found = outputs_of(lambda noise: engine(Fixed(2), rows=8, noise=noise), [one])
    compare([one], found, after)
    assert found[0].drafted > 0


def check_joint_law(
    engine: Any, drafters: Any, after: Logits, policy: Policy | None = None, transform: str = "cold top-k"
) -> Found:
    cases = [
        case(transform, drafter, prompt=prompt, new=new)
        for drafter, prompt, new in zip(drafters, ((3,), (1, 3)), (3, 2), strict=True)
    ]
    found = joint_outputs_of(lambda noise: engine(policy or Fixed(2), noise=noise), cases)
    compare_jointly(cases, found, after)
    return found


def law_of(one: Case, after: Logits) -> distributions.Distribution:
    return distributions.outputs(after, [*one.prompt], one.params, eos=one.eos, constraint=one.constraint())


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


@pytest.mark.heavy
@pytest.mark.parametrize("policy", POLICIES)
def test_every_drafter_under_every_policy(policy: str) -> None:
    cases = [case("as it is", drafter, new=4) for drafter in (*DRAFTERS, "prediction")]
    found = enumerate_and_compare(cases, POLICIES[policy])
    for one, got in zip(cases, found, strict=True):
        assert (got.drafted > 0) == bool(one.drafters)
        assert (got.rejections > 0) == bool(one.drafters), "a weak drafter is rejected sometimes"


SEVERAL = ("lookup", "draft-model", "aux-states", "script")


@pytest.mark.heavy
@pytest.mark.parametrize("transform", ["as it is", "cold top-k", "greedy"])
def test_the_cost_model_chooses_among_drafters(transform: str) -> None:
    """One row at a time, because a row's decision depends on the batch."""
    (found,) = enumerate_and_compare([case(transform, SEVERAL)], lambda: parts.solitary(2, SEVERAL), rows=1)
    assert found.drafted > 0
    cases = [case(transform, drafter) for drafter in ("draft-model", "lookup")]
    enumerate_and_compare(cases, lambda: parts.solitary(3, SEVERAL), rows=1)


@pytest.mark.heavy
@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    signal=st.sampled_from([None, "probability", "entropy", "margin"]),
    uses_costs=st.booleans(),
    alone=st.booleans(),
    transform=st.sampled_from(["as it is", "hot top-p", "top-k", "repetition"]),
)
def test_policies_keep_the_law(seed: int, signal: Any, uses_costs: bool, alone: bool, transform: str) -> None:
    """The policy chooses drafter, budget, end of the draft and begin of the context by all that it may see."""
    prompt = {"alone": alone, "prompt": (0, 1, 0) if alone else (0,)}
    cases = [
        case(transform, SEVERAL, **prompt),
        case(transform, "draft-model", "late ban", **prompt),
        case("cold", SEVERAL, "no repeat", **prompt),
    ]
    enumerate_and_compare(cases, lambda: ArbitraryDecisions(3, seed, signal, uses_costs))


@pytest.mark.parametrize("policy", ["fixed-2", "stop-unsure", "random"])
def test_greedy_drafts_keep_the_distribution(policy: str) -> None:
    cases = [case(t, d) for t in ("as it is", "top-k") for d in ("draft-model", "aux-states")]
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
    """Penalties along drafts of every kind, of siblings, too; under a ban that takes tokens back; to greedy drafts."""
    end = frozenset({2})
    cases = [case(transform, drafter, eos=end) for drafter in DRAFTERS]
    cases += [case(transform, drafter, "late ban") for drafter in ("draft-model", "script", None)]
    enumerate_and_compare(cases, POLICIES["fixed-2"])
    enumerate_and_compare([case(transform, "aux-states", eos=end)], POLICIES["random"], greedy_drafts=True)
    check_siblings(transform)


def check_siblings(transform: str) -> None:
    cases = [case(transform, drafter, eos=frozenset({2})) for drafter in ("draft-model", "low-bit")]
    enumerate_and_compare(cases, POLICIES["siblings"])


def test_rows_of_different_parameters_share_a_batch() -> None:
    drafters = itertools.cycle(DRAFTERS)
    enumerate_and_compare([case(t, next(drafters)) for t in TRANSFORMS], POLICIES["random"], rows=24)


@pytest.mark.parametrize("policy", ["fixed-2", "siblings"])
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("transform", ["as it is", "top-k"])
def test_targets_and_drafts_with_ties_and_impossible_tokens(world: str, transform: str, policy: str) -> None:
    cases = [case(transform, "draft-model"), case(transform, "aux-states"), case("greedy", "draft-model")]
    enumerate_and_compare(cases, POLICIES[policy], world)


@pytest.mark.heavy
@pytest.mark.parametrize("policy", ["fixed-2", "stop-unsure", "random", "siblings"])
@pytest.mark.parametrize("constraint", ["no repeat", "late ban"])
def test_constraints_keep_the_output(policy: str, constraint: str) -> None:
    cases = [case("as it is", drafter, constraint) for drafter in DRAFTERS]
    cases += [case("top-k", "draft-model", constraint), case("greedy", "aux-states", constraint)]
    cases.append(case("hot", "script"))
    enumerate_and_compare(cases, POLICIES[policy])


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["fixed-1", "fixed-2", "random"])
def test_repeated_bans_keep_the_distribution(policy: str) -> None:
    """A path ends, because a rollback bars the run's first token after that text for good."""
    cases = [case("as it is", d, "late ban", new=4) for d in (None, "draft-model", "aux-states", "script")]
    for got in enumerate_and_compare(cases, POLICIES[policy]):
        assert got.rollbacks == 3


def test_an_end_inside_a_draft_keeps_the_distribution() -> None:
    cases = [case("as it is", drafter, new=4, eos=frozenset({1, 2})) for drafter in DRAFTERS]
    enumerate_and_compare(cases, POLICIES["fixed-3"])


def test_prompts_with_a_prefill_and_choices() -> None:
    prompt = (0, 2, 1, 1, 0, 2, 0)
    cases = [case("as it is", drafter, prompt=prompt, new=2) for drafter in DRAFTERS]
    cases.append(case("cold", "aux-states", prompt=prompt[:3], new=2))
    cases.append(case("hot", "lookup", prompt=prompt[2:], new=3))
    enumerate_and_compare(cases, POLICIES["random"], rows=7)


def test_a_stepper_that_hands_on_fewer_states() -> None:
    cases = [case("as it is", "aux-states"), case("hot", "script")]
    enumerate_and_compare(cases, POLICIES["fixed-2"], forgetful=True)


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
