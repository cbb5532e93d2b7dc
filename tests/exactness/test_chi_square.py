"""The joint distribution of four tokens, sampled through batches with the shipped noise and weak drafters."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from foredraft.decode.params import SamplingParams
from foredraft.decode.policy import Fixed, Policy
from foredraft.decode.sequence import Sequence
from tests.support.chi import assert_distributed, p_value
from tests.support.distributions import outputs
from tests.support.harness import make_engine, run
from tests.support.parts import Fickle, LateBan, RandomBudgets, StopUnsure
from tests.support.tabular import Table

V, JOINT = 3, 4
TARGET, DRAFT = Table(V, 41), Table(V, 42)
ROWS: list[tuple[str | None, dict[str, Any]]] = [
    ("draft-model", {}),
    ("tapping", {"temperature": 0.8}),
    ("script", {"temperature": 1.4}),
    ("draft-model", {"top_k": 2}),
    ("tapping", {"top_p": 0.8, "acceptance": "coupled"}),
    ("lookup", {"min_p": 0.2}),
    (None, {}),
    ("layer-skip", {}),
    ("early-exit", {"temperature": 0.8}),
]


def sample(
    n: int, policy: Policy, rows: list[tuple[str | None, dict[str, Any]]] = ROWS, *, new: int = 6, **more: Any
) -> list[list[list[int]]]:
    """`n` siblings of every kind of row, kind after kind, mixed in one engine."""
    kinds = []
    for kind, (drafter, options) in enumerate(rows):
        params = SamplingParams(max_new_tokens=new, **{"acceptance": "speculative", **options})
        drafters = (drafter,) if drafter else ()
        kinds.append(
            [
                Sequence(kind * n + i, [1, 0], params, 7 + kind, i, drafters=drafters, group=kind)
                for i in range(n)
            ]
        )
    shuffled = [sequence for some in zip(*kinds, strict=True) for sequence in some]
    run(make_engine(TARGET, DRAFT, policy, rows=42, **more), shuffled, steps=100 * n)
    return [[sequence.new_ids[:JOINT] for sequence in kind] for kind in kinds]


def distribution(options: dict[str, Any]) -> dict[tuple[int, ...], float]:
    return outputs(TARGET.after, [1, 0], SamplingParams(max_new_tokens=JOINT, **options))


@pytest.mark.parametrize("policy", [Fixed(3), RandomBudgets(4), Fixed(3, siblings=5)], ids=str)
def test_the_joint_distribution_of_four_tokens(policy: Policy) -> None:
    for found, (drafter, options) in zip(sample(600, policy), ROWS, strict=True):
        assert_distributed(found, distribution(options), f"{drafter} {options}")


def test_a_policy_that_stops_by_content_keeps_the_distribution() -> None:
    (found,) = sample(3000, StopUnsure(4), ROWS[:1])
    assert_distributed(found, distribution({}))


def test_a_policy_that_looks_at_rejected_tokens_keeps_the_distribution() -> None:
    """The policy decides by drafts of positions that are drawn again later: with other noise."""
    target, draft = Table(V, 74, scale=0.5), Table(V, 174, scale=2.0)
    params = SamplingParams(max_new_tokens=6)
    several = [
        Sequence(i, [1, 0], params, seed=3, sample=i, drafters=("draft-model",), group=0) for i in range(5000)
    ]
    found = run(make_engine(target, draft, Fickle(4), rows=48), several)
    assert_distributed([output[:3] for output in found], outputs(target.after, [1, 0], params, limit=3))


@pytest.mark.parametrize("siblings", [0, 1, 2, 3])
def test_two_tokens_of_an_often_rejected_drafter(siblings: int) -> None:
    """Rejected often, with residuals of several tokens."""
    target, draft = Table(4, 43, scale=0.5), Table(4, 44, scale=1.5)
    params = SamplingParams(max_new_tokens=2)
    several = [
        Sequence(i, [1], params, seed=3, sample=i, drafters=("draft-model",), group=0) for i in range(3000)
    ]
    assert_distributed(
        run(make_engine(target, draft, Fixed(1, siblings), rows=48), several),
        outputs(target.after, [1], params),
    )


@pytest.mark.parametrize("siblings", [0, 3, 6])
def test_greedy_drafts_keep_the_distribution(siblings: int) -> None:
    (found,) = sample(3000, Fixed(3, siblings=siblings), ROWS[:1], greedy_drafts=True)
    assert_distributed(found, distribution({}))


@pytest.mark.parametrize("acceptance", ["speculative", "coupled"])
def test_a_ban_that_rolls_back_keeps_the_distribution(acceptance: Literal["speculative", "coupled"]) -> None:
    """Positions are drawn twice, never with the same noise."""
    ban = (2, 1)
    want = outputs(TARGET.after, [1], SamplingParams(max_new_tokens=JOINT), constraint=LateBan(V, ban))
    params = SamplingParams(max_new_tokens=JOINT, acceptance=acceptance)
    several = [
        Sequence(i, [1], params, seed=i, drafters=("draft-model",), constraint=LateBan(V, ban))
        for i in range(2000)
    ]
    assert_distributed(run(make_engine(TARGET, DRAFT, Fixed(3), rows=48), several), want)


def test_samples_are_independent() -> None:
    """Pairs of siblings have the product distribution."""
    params = SamplingParams(max_new_tokens=2)
    one = outputs(TARGET.after, [1], params)
    product = {a + b: p * q for a, p in one.items() for b, q in one.items()}
    pairs = []
    for seed in range(1500):
        pairs.append(
            [Sequence(2 * seed + i, [1], params, seed, i, drafters=("draft-model",)) for i in range(2)]
        )
    run(make_engine(TARGET, DRAFT, Fixed(1), rows=48), [sequence for pair in pairs for sequence in pair])
    assert_distributed([a.new_ids + b.new_ids for a, b in pairs], product)


def test_the_chi_square_test_detects_another_distribution() -> None:
    """The test rejects the distribution of another table, and an impossible sample."""
    (found,) = sample(1000, Fixed(3), ROWS[:1])
    other = outputs(DRAFT.after, [1, 0], SamplingParams(max_new_tokens=JOINT))
    assert p_value(found, other) < 1e-20
    assert p_value([*found, [9, 9, 9, 9]], distribution({})) == 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "policy",
    [Fixed(3), Fixed(5), RandomBudgets(5), StopUnsure(5), Fickle(4)],
    ids=lambda p: f"{p.name}-{p.max_draft}",
)
def test_the_joint_distribution_with_many_samples(policy: Policy) -> None:
    for found, (drafter, options) in zip(sample(20_000, policy, new=9), ROWS, strict=True):
        assert_distributed(found, distribution(options), f"{drafter} {options}")
