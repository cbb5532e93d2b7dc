"""`coupled`: the text is a function of the seed, its distribution is the target's, and drafts match often."""

from __future__ import annotations

import itertools
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from foredraft.decode.noise import COUPLED, Noise, NoiseKeys, seed_key
from foredraft.decode.params import SamplingParams
from foredraft.decode.policy import Fixed, Heuristic
from foredraft.decode.sequence import Sequence
from tests.exactness.test_enumeration import TRANSFORMS
from tests.support.distributions import transformed
from tests.support.harness import DRAFTERS, make_engine, request, run
from tests.support.parts import Fickle, RandomBudgets, StopUnsure
from tests.support.tabular import Table

V, NEW = 5, 16
TARGET, DRAFT = Table(V, 31), Table(V, 32)
POLICIES = [Fixed(1), Fixed(4), Fixed(3, 4), Heuristic(6), StopUnsure(5), RandomBudgets(5), Fickle(3)]
WISHES = [(prompt, t, seed) for seed, t in enumerate(TRANSFORMS) for prompt in ((0,), (3, 1, 4, 1, 2))]


def requests(drafter: str | None, **more: object) -> list[Sequence]:
    return [
        request(prompt, drafter, seed=seed, acceptance="coupled", max_new_tokens=NEW, **TRANSFORMS[t], **more)
        for prompt, t, seed in WISHES
    ]


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    return [run(make_engine(TARGET, rows=1), [wish])[0] for wish in requests(None)]


def test_greedy_drafts_do_not_change_the_text(alone: list[list[int]]) -> None:
    engine = make_engine(TARGET, DRAFT, Fixed(3), greedy_drafts=True)
    assert run(engine, requests("draft-model")) == alone


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("drafter", DRAFTERS[1:])
def test_the_text_is_a_function_of_the_seed(drafter: str, policy: object, alone: list[list[int]]) -> None:
    wishes = requests(drafter)
    assert run(make_engine(TARGET, DRAFT, policy, rows=5), wishes) == alone  # type: ignore[arg-type]
    assert any(turn.accepted < turn.drafted for s in wishes for turn in s.rounds)
    assert any(turn.accepted for s in wishes for turn in s.rounds)


@pytest.mark.parametrize("drafter", ["draft-model", "looping"])
def test_drafts_of_the_target_itself_are_never_rejected(drafter: str) -> None:
    """Beside rows of the other rule, too, which draft by noise of their own."""
    engine = make_engine(TARGET, TARGET, Fixed(3), rows=4)
    wishes = [request((1, 2), drafter, seed=seed, max_new_tokens=NEW) for seed in range(4)]
    others = [request((1, 2), drafter, acceptance="speculative", max_new_tokens=NEW) for _ in wishes]
    run(engine, [s for pair in zip(wishes, others, strict=True) for s in pair])
    assert all(turn.accepted == turn.drafted for s in wishes for turn in s.rounds)
    assert all(s.rounds[0].drafted == 3 for s in wishes)


@pytest.mark.parametrize(
    "rule", [{"acceptance": "speculative"}, {"acceptance": "block"}, {"acceptance": "bild", "rollback": 1.0}]
)
def test_rows_of_another_rule_do_not_change_the_text(rule: dict[str, Any], alone: list[list[int]]) -> None:
    drafters = ("draft-model", "looping", "aux-states", "layer-skip", "early-exit", "low-bit")
    wishes = requests("draft-model")
    others = [
        request((1, 2), drafter, max_new_tokens=8, temperature=t, **rule)
        for drafter in drafters
        for t in (0, 1)
    ]
    mixed = [s for pair in itertools.zip_longest(wishes, others) for s in pair if s]
    run(make_engine(TARGET, DRAFT, Fixed(3, siblings=4), rows=6), mixed)
    assert [s.new_ids for s in wishes] == alone


def test_choices_each_have_their_own_text() -> None:
    def choices(drafter: str | None) -> list[Sequence]:
        return [request((2, 0, 1), drafter, seed=9, sample=i, group=1, max_new_tokens=NEW) for i in range(6)]

    plain = run(make_engine(TARGET, rows=1), choices(None))
    assert len({tuple(ids) for ids in plain}) == 6
    assert run(make_engine(TARGET, DRAFT, Fixed(3), rows=4), choices("draft-model")) == plain


def keys(n: int, position: int = 0) -> NoiseKeys:
    base = torch.tensor([seed_key(seed, 0) for seed in range(n)])
    return NoiseKeys(base, torch.full((n, 1), position), None, torch.zeros(n, dtype=torch.int64))


@given(st.lists(st.floats(-3, 3), min_size=2, max_size=6), st.lists(st.floats(-3, 3), min_size=6, max_size=6))
@settings(max_examples=15)
def test_matches_are_as_likely_as_in_theory(ours: list[float], theirs: list[float]) -> None:
    """Those of p and q agree with probability sum_v 1 / sum_u max(p_u / p_v, q_u / q_v)."""
    n = 3000
    p, q = (transformed(x, SamplingParams()) for x in (ours, theirs[: len(ours)]))
    noise = Noise()
    y, x = (noise.pick(torch.tensor(w).expand(n, 1, -1), keys(n), COUPLED) for w in (p, q))
    matched = (x == y).double().mean().item()
    both = list(zip(p, q, strict=True))
    exact = sum(1 / sum(max(pu / pv, qu / qv) for pu, qu in both) for pv, qv in both)
    distance = sum(abs(pu - qu) for pu, qu in both) / 2
    assert exact >= (1 - distance) / (1 + distance) - 1e-12
    assert abs(matched - exact) < 4.5 * (exact * (1 - exact) / n) ** 0.5 + 1e-9
