"""Block verification by taking every branch, against the definition; how much it keeps; seeded texts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from foredraft.decode.accept import accept, block, coupled, speculative
from foredraft.decode.distribution import Distribution
from foredraft.decode.noise import DRAFT, Noise, NoiseKeys
from foredraft.decode.policy import Fixed
from foredraft.decode.round_draft import Draft
from tests.exactness.test_enumeration import POLICIES, WORLDS, case, compare, enumerate_and_compare
from tests.support.forking import Case, outputs_of
from tests.support.harness import make_engine, request, run
from tests.support.tabular import Table

TRANSFORMS = ("as it is", "cold top-k", "hot top-p", "repetition", "late end", "greedy")


def block_case(transform: str, drafter: str | None, constraint: str = "free", **more: Any) -> Case:
    made = case(transform, drafter, constraint, **more)
    return replace(made, name=f"{made.name}, block", params=made.params.replace(acceptance="block"))


@pytest.mark.parametrize(
    "policy", ["fixed-3", "stop-unsure", "fickle", "confidence", "siblings", "fallback", "random"]
)
def test_every_kind_of_draft_under_policies_of_every_kind(policy: str) -> None:
    drafters = ("draft-model", "script", "lookup", None)
    found = enumerate_and_compare([block_case("as it is", d, new=4) for d in drafters], POLICIES[policy])
    assert all(got.rejections > 0 for got in found[:-1]), "a weak drafter is rejected sometimes"


@pytest.mark.parametrize("world", ["plain", "impossible tokens", "ties", "itself"])
def test_transforms_along_drafts_of_three(world: str) -> None:
    cases = [block_case(t, "draft-model", new=4, eos=frozenset({2})) for t in TRANSFORMS]
    enumerate_and_compare(cases, POLICIES["fixed-3"], world)


def test_greedy_drafts_and_constraints() -> None:
    under = ("no repeat", "late ban")
    cases = [block_case("as it is", d, c) for d in ("draft-model", "script") for c in under]
    enumerate_and_compare(cases, POLICIES["fixed-2"])
    alone = [block_case("top-k", "draft-model", new=4)]
    enumerate_and_compare(alone, POLICIES["fixed-3"], greedy_drafts=True)


def test_rows_of_every_rule_share_a_batch() -> None:
    cases = [
        one
        for transform, drafter in itertools.product(("as it is", "greedy"), ("draft-model", "script", None))
        for one in (case(transform, drafter), block_case(transform, drafter))
    ]
    lossy = replace(cases[0], params=cases[0].params.replace(acceptance="bild", rollback=math.inf))
    target, draft = WORLDS["plain"]
    found = outputs_of(
        lambda noise: make_engine(target, draft, POLICIES["random"](), noise=noise, rows=24), [*cases, lossy]
    )
    compare(cases, found[:-1], target.after)


def drawn(
    p: Sequence[float], q: Sequence[float], length: int, rows: int
) -> tuple[Draft, Distribution, NoiseKeys, Noise]:
    """Return drafts of `length` tokens from q in so many rows, and p, the same at each place."""
    places = torch.arange(length + 1).expand(rows, -1)
    keys = NoiseKeys(torch.arange(rows), places, None, torch.zeros(rows, dtype=torch.int64))
    noise, own = Noise(), Distribution(torch.tensor(q).expand(rows, length, len(q)).contiguous())
    tokens = own.draw(lambda weights: noise.pick(weights, keys.first(length), DRAFT))
    draft = Draft(tokens, torch.full((rows,), length), own)
    return draft, Distribution(torch.tensor(p).expand(rows, length + 1, len(p)).contiguous()), keys, noise


def test_each_row_has_its_own_rule() -> None:
    draft, p, keys, noise = drawn((0.2, 0.5, 0.3), (0.5, 0.2, 0.3), 3, 60)
    rules = (speculative, coupled, block)
    of = [row % 3 for row in range(60)]
    mixed = accept(draft, p, keys, noise, [rules[n].__name__ for n in of])
    apart = [rule(draft, p, keys, noise) for rule in rules]
    for row, n in enumerate(of):
        assert mixed.accepted[row] == apart[n].accepted[row]
        assert mixed.next_token[row] == apart[n].next_token[row]


@pytest.mark.parametrize("length", [1, 2, 3])
def test_it_keeps_what_the_paper_says(length: int) -> None:
    """Sun et al. 2024, section 3: p = (1/3, 2/3), q = (2/3, 1/3), of two tokens 11/9 against 10/9."""
    p, q = (1 / 3, 2 / 3), (2 / 3, 1 / 3)
    expected = {"block": 0.0, "speculative": 0.0}
    for tokens in itertools.product(range(2), repeat=length):
        chance, whole, alone = math.prod(q[x] for x in tokens), 1.0, 1.0
        for x in tokens:
            whole, alone = min(1.0, whole * p[x] / q[x]), alone * min(1.0, p[x] / q[x])
            expected["block"] += chance * whole
            expected["speculative"] += chance * alone
    if length == 2:
        assert [9 * expected[rule] for rule in ("speculative", "block")] == pytest.approx([10, 11])
    draft, p_all, keys, noise = drawn(p, q, length, rows := 20_000)
    for name, rule in (("block", block), ("speculative", speculative)):
        accepted = rule(draft, p_all, keys, noise).accepted.double()
        error = float(accepted.std()) / math.sqrt(rows)
        assert float(accepted.mean()) == pytest.approx(expected[name], abs=4 * error), name


def test_a_seed_repeats_the_text_and_another_rule_does_not_share_its_noise() -> None:
    target, draft = Table(8, 1), Table(8, 2)

    def texts(rule: str) -> list[list[int]]:
        more: Any = {"acceptance": rule, "max_new_tokens": 24}
        rows = [request((1, at % 8), "draft-model", seed=at, **more) for at in range(6)]
        return run(make_engine(target, draft, Fixed(3), rows=6), rows)

    assert texts("block") == texts("block")
    assert texts("block") != texts("speculative")
