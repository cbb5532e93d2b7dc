"""The acceptance rules where rounding and padding decide, with coins chosen by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft.decode.accept import SurpriseLimit, accept, bild, coupled, speculative
from foredraft.decode.distribution import Distribution
from foredraft.decode.noise import ROLLBACK, Noise, NoiseKeys
from foredraft.decode.round_draft import AcceptResult, Draft


class Coins:
    """coin: [B, T] given ones; pick: the most likely token, and what it was asked is noted."""

    def __init__(self, coins: list[list[float]]) -> None:
        self.coins = torch.tensor(coins, dtype=torch.float64)
        self.asked: list[tuple[Tensor, NoiseKeys, int]] = []

    def coin(self, keys: NoiseKeys, purpose: int) -> Tensor:
        return self.coins

    def pick(self, weights: Tensor, keys: NoiseKeys, purpose: int) -> Tensor:
        self.asked.append((weights, keys, purpose))
        return weights.argmax(-1)


def by_coins(made: Draft, p: Distribution, coins: list[list[float]]) -> tuple[AcceptResult, Tensor]:
    noise: Any = Coins(coins)
    verdict = speculative(made, p, keys(len(coins), len(coins[0])), noise)
    return verdict, noise.asked[0][0]


def keys(rows: int, count: int, first: int = 5) -> NoiseKeys:
    positions = torch.arange(first, first + count).expand(rows, count)
    return NoiseKeys(torch.arange(rows), positions, None, torch.zeros(rows, dtype=torch.int64))


def draft(tokens: list[list[int]], lengths: list[int], q: list[list[list[float]]] | None = None) -> Draft:
    ids = torch.tensor(tokens)
    own = Distribution(ids=ids) if q is None else Distribution(torch.tensor(q))
    return Draft(ids, torch.tensor(lengths), own)


P = [[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.0, 0.25, 0.75]]
Q = [[0.2, 0.2, 0.6], [0.1, 0.1, 0.8]]


def test_an_impossible_token_is_rejected_whatever_the_coin() -> None:
    """u = 0, and q of any size: u q <= p would keep it."""
    p = Distribution(torch.tensor([[[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]]))
    for q in ([[[1.0, 0.0, 0.0]]], [[[1e-38, 0.5, 0.5]]], [[[0.0, 0.5, 0.5]]], None):
        verdict, _ = by_coins(draft([[0]], [1], q), p, [[0.0, 0.0]])
        assert (verdict.accepted.tolist(), verdict.next_token.tolist()) == ([0], [1]), q


def test_padding_is_never_accepted() -> None:
    """Row 0 drafted one token, row 1 none; padding is token 0, which p likes best."""
    p = Distribution(torch.tensor([[[0.9, 0.05, 0.05]] * 3] * 2))
    own = Distribution(ids=torch.zeros(2, 3, dtype=torch.int64))
    for q in (None, [[[1.0, 0.0, 0.0]] * 2] * 2, [[[0.0, 0.5, 0.5]] * 2] * 2):
        made = draft([[0, 0], [0, 0]], [1, 0], q)
        assert by_coins(made, p, [[0.0] * 3] * 2)[0].accepted.tolist() == [1, 0]
        assert coupled(made, own, keys(2, 3), Noise()).accepted.tolist() == [1, 0]


def test_a_residual_that_rounds_to_zero_falls_back_to_p() -> None:
    """q is p but for one rounding upwards: the token is rejected by the last coin, and nothing is left over."""
    p = torch.tensor([0.5, 0.5, 0.0])
    q = torch.nextafter(p, torch.tensor(1.0)).where(p > 0, p)
    assert float(q[0]) > math.nextafter(0.5, 1) > 0.5
    made = Draft(torch.tensor([[0]]), torch.tensor([1]), Distribution(q.view(1, 1, 3)))
    verdict, weights = by_coins(made, Distribution(p.expand(1, 2, 3)), [[1 - 2**-53, 0.0]])
    assert verdict.accepted.tolist() == [0]
    assert torch.equal(weights[0, 0], p)


def test_the_residual_holds_no_token_that_p_does_not() -> None:
    p = Distribution(torch.tensor([[[0.4, 0.6, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]]]))
    _, weights = by_coins(draft([[0]], [1], [[[0.8, 0.1, 0.1, 0.0]]]), p, [[0.999999, 0.0]])
    assert weights[0, 0, [0, 2, 3]].tolist() == [0.0, 0.0, 0.0]
    assert weights[0, 0, 1] == torch.tensor(0.6) - torch.tensor(0.1)


def rollback(judge: Distribution, bounds: list[float]) -> SurpriseLimit:
    bound = torch.tensor(bounds)
    return SurpriseLimit(judge, bound, ~bound.isnan(), not bound.isnan().any())


def test_a_drafted_token_stands_up_to_the_bound() -> None:
    """-log p of the two drafted tokens: 1.609 and 0.511; padding is token 0, which p would let stand."""
    p = Distribution(torch.tensor([P]))
    for limit, kept in ((1.62, 2), (1.60, 0), (float(-torch.tensor(0.2).log()), 2), (math.inf, 2), (0.0, 0)):
        noise = Coins([[0.0] * 3])
        verdict = bild(draft([[2, 1]], [2], [Q]), p, keys(1, 3), noise, rollback(p, [limit]))  # type: ignore[arg-type]
        ((weights, asked, purpose),) = noise.asked
        assert verdict.accepted.tolist() == [kept]
        assert weights[0, 0].tolist() == pytest.approx(P[kept]), "the target's own, and no residual"
        assert torch.equal(asked.bits(purpose), keys(1, 3).bits(ROLLBACK)[:, kept : kept + 1])
    assert bild(draft([[0, 0]], [1]), p, keys(1, 3), Noise(), rollback(p, [9.0])).accepted.tolist() == [1]
    ruled_out = Distribution(torch.tensor([[[0.0, 0.7, 0.3]] * 2]))
    verdict = bild(draft([[0]], [1]), ruled_out, keys(1, 2), Noise(), rollback(ruled_out, [math.inf]))
    assert verdict.accepted.tolist() == [0]


def test_greedy_rows_are_judged_by_another_distribution_than_they_are_drawn_from() -> None:
    """The judge says how surprising a token is, and p, which is certain, what follows."""
    p, judge = Distribution(ids=torch.tensor([[0, 1, 2]])), Distribution(torch.tensor([P]))
    cases = (([2, 2], 1.62, 2, 2), ([2, 0], 1.62, 1, 1), ([0, 1], 0.0, 2, 2))
    for tokens, bound, accepted, following in cases:
        verdict = bild(draft([tokens], [2]), p, None, Noise(), rollback(judge, [bound]))
        assert (verdict.accepted.tolist(), verdict.next_token.tolist()) == ([accepted], [following]), tokens


def test_greedy_rows_need_no_noise() -> None:
    p = Distribution(ids=torch.tensor([[1, 2, 0], [1, 2, 0], [1, 2, 0]]))
    made = draft([[1, 2], [1, 0], [0, 2]], [2, 2, 2])
    for rules in (["speculative"] * 3, ["coupled"] * 3, ["coupled", "speculative", "block"]):
        verdict = accept(made, p, keys(3, 3), None, rules)  # type: ignore[arg-type]
        assert verdict.accepted.tolist() == [2, 1, 0]
        assert verdict.next_token.tolist() == [0, 2, 1]
