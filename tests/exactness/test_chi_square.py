"""The joint distribution of four tokens, sampled through batches with the shipped noise and weak drafters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np
import pytest
from scipy.stats import chi2

from foredraft.decode.params import SamplingParams
from foredraft.decode.policy import Fixed, Policy
from foredraft.decode.sequence import Sequence
from tests.support.distributions import Distribution, outputs
from tests.support.harness import make_engine, run
from tests.support.parts import Fickle, LateBan, RandomBudgets, StopUnsure
from tests.support.tabular import Table

V, JOINT = 3, 4
TARGET, DRAFT = Table(V, 41), Table(V, 42)
ROWS: list[tuple[str | None, dict[str, Any]]] = [
    ("draft-model", {}),
    ("aux-states", {"temperature": 0.8}),
    ("script", {"temperature": 1.4}),
    ("draft-model", {"top_k": 2}),
    ("aux-states", {"top_p": 0.8, "acceptance": "coupled"}),
    ("lookup", {"min_p": 0.2}),
    (None, {}),
    ("layer-skip", {}),
    ("early-exit", {"temperature": 0.8}),
    ("draft-model", {"acceptance": "block"}),
    ("aux-states", {"acceptance": "block", "top_k": 2, "temperature": 0.8}),
]


LEAST = 1e-4  # a right distribution fails once in ten thousand; seeds are fixed, so a test that passes keeps passing


def p_value(samples: Iterable[Iterable[int]], distribution: Distribution) -> float:
    """Merge cells from the rarest on until each is expected five times; an impossible sample gives zero."""
    counts = Counter(tuple(sample) for sample in samples)
    if not set(counts) <= set(distribution):
        return 0.0
    total = sum(counts.values())
    cells = [(chance * total, counts[output]) for output, chance in distribution.items()]
    merged: list[list[float]] = [[0.0, 0.0]]
    for expected, seen in sorted(cells, key=lambda cell: cell[0]):
        if merged[-1][0] >= 5:
            merged.append([0.0, 0.0])
        merged[-1][0] += expected
        merged[-1][1] += seen
    if len(merged) > 1 and merged[-1][0] < 5:
        expected, seen = merged.pop()
        merged[-1][0] += expected
        merged[-1][1] += seen
    if len(merged) == 1:
        return 1.0
    expected, seen = np.array(merged).T
    return float(chi2.sf(((seen - expected) ** 2 / expected).sum(), len(merged) - 1))


def assert_distributed(samples: Iterable[Iterable[int]], distribution: Distribution, name: str = "") -> None:
    chance = p_value(list(samples), distribution)
    assert chance > LEAST, f"{name}: p = {chance:.2e}"


def sample(
    n: int, policy: Policy, rows: list[tuple[str | None, dict[str, Any]]] = ROWS, *, new: int = 6, **more: Any
) -> list[list[list[int]]]:
    """`n` choices of every kind of row, kind after kind, mixed in one engine."""
    kinds = []
    for kind, (drafter, options) in enumerate(rows):
        params = SamplingParams(max_new_tokens=new, **{"acceptance": "speculative", **options})
        kinds.append(several(n, params, drafter, first=kind * n, seed=7 + kind))
    shuffled = [sequence for some in zip(*kinds, strict=True) for sequence in some]
    run(make_engine(TARGET, DRAFT, policy, rows=42, **more), shuffled, steps=100 * n)
    return [[sequence.new_ids[:JOINT] for sequence in kind] for kind in kinds]


def several(
    n: int,
    params: SamplingParams,
    drafter: Any = "draft-model",
    prompt: Any = (1, 0),
    first: int = 0,
    seed: int = 3,
) -> list[Sequence]:
    drafters = (drafter,) if drafter else ()
    return [Sequence(first + i, [*prompt], params, seed, i, drafters=drafters, group=first) for i in range(n)]


def distribution(options: dict[str, Any]) -> dict[tuple[int, ...], float]:
    return outputs(TARGET.after, [1, 0], SamplingParams(max_new_tokens=JOINT, **options))


MANY = [
    pytest.param(policy, 20_000, 9, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])
    for policy in (Fixed(3), Fixed(5), RandomBudgets(5), StopUnsure(5), Fickle(4))
]


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("policy", "n", "new"),
    [*((policy, 300, 6) for policy in (Fixed(3), RandomBudgets(4), Fixed(3, siblings=5))), *MANY],
    ids=str,
)
def test_the_joint_distribution_of_four_tokens(policy: Policy, n: int, new: int) -> None:
    for found, (drafter, options) in zip(sample(n, policy, new=new), ROWS, strict=True):
        assert_distributed(found, distribution(options), f"{drafter} {options}")


@pytest.mark.heavy
def test_a_policy_that_looks_at_rejected_tokens_keeps_the_distribution() -> None:
    """The policy decides by drafts of positions that are drawn again later: with other noise."""
    target, draft = Table(V, 74, scale=0.5), Table(V, 174, scale=2.0)
    params = SamplingParams(max_new_tokens=6)
    found = run(make_engine(target, draft, Fickle(4), rows=48), several(5000, params))
    assert_distributed([output[:3] for output in found], outputs(target.after, [1, 0], params, limit=3))


@pytest.mark.heavy
@pytest.mark.parametrize("siblings", [0, 1, 2, 3])
def test_two_tokens_of_an_often_rejected_drafter(siblings: int) -> None:
    target, draft = Table(4, 43, scale=0.5), Table(4, 44, scale=1.5)
    params = SamplingParams(max_new_tokens=2)
    engine = make_engine(target, draft, Fixed(1, siblings), rows=48)
    found = run(engine, several(3000, params, prompt=(1,)))
    assert_distributed(found, outputs(target.after, [1], params))


@pytest.mark.heavy
@pytest.mark.parametrize("siblings", [0, 3, 6])
def test_greedy_drafts_keep_the_distribution(siblings: int) -> None:
    (found,) = sample(1500, Fixed(3, siblings=siblings), ROWS[:1], greedy_drafts=True)
    assert_distributed(found, distribution({}))


@pytest.mark.parametrize("acceptance", ["speculative", "coupled"])
def test_a_ban_that_rolls_back_keeps_the_distribution(acceptance: Literal["speculative", "coupled"]) -> None:
    ban = (2, 1)
    want = outputs(TARGET.after, [1], SamplingParams(max_new_tokens=JOINT), constraint=LateBan(V, ban))
    params = SamplingParams(max_new_tokens=JOINT, acceptance=acceptance)
    own = ("draft-model",)
    banned = [Sequence(i, [1], params, i, drafters=own, constraint=LateBan(V, ban)) for i in range(2000)]
    assert_distributed(run(make_engine(TARGET, DRAFT, Fixed(3), rows=48), banned), want)


def test_samples_are_independent() -> None:
    params = SamplingParams(max_new_tokens=2)
    one = outputs(TARGET.after, [1], params)
    product = {a + b: p * q for a, p in one.items() for b, q in one.items()}
    own = ("draft-model",)
    pairs = [[Sequence(2 * n + i, [1], params, n, i, drafters=own) for i in range(2)] for n in range(1500)]
    run(make_engine(TARGET, DRAFT, Fixed(1), rows=48), [sequence for pair in pairs for sequence in pair])
    assert_distributed([a.new_ids + b.new_ids for a, b in pairs], product)


def test_the_chi_square_test_detects_another_distribution() -> None:
    (found,) = sample(1000, Fixed(3), ROWS[:1])
    other = outputs(DRAFT.after, [1, 0], SamplingParams(max_new_tokens=JOINT))
    assert p_value(found, other) < 1e-20
    assert p_value([*found, [9, 9, 9, 9]], distribution({})) == 0
