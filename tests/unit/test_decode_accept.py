"""The acceptance rules, with coins chosen by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from foredraft.decode.accept import SurpriseLimit, accept, bild, coupled, speculative
from foredraft.decode.distribution import Distribution
from foredraft.decode.noise import COUPLED, RESIDUAL, ROLLBACK, Noise, NoiseKeys
from foredraft.decode.round_draft import Draft, no_draft


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


def keys(rows: int, count: int, first: int = 5) -> NoiseKeys:
    positions = torch.arange(first, first + count).expand(rows, count)
    return NoiseKeys(torch.arange(rows), positions, None, torch.zeros(rows, dtype=torch.int64))


def draft(tokens: list[list[int]], lengths: list[int], q: list[list[list[float]]] | None = None) -> Draft:
    ids = torch.tensor(tokens)
    return Draft(
        ids, torch.tensor(lengths), Distribution(ids=ids) if q is None else Distribution(torch.tensor(q))
    )


P = [[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.0, 0.25, 0.75]]
Q = [[0.2, 0.2, 0.6], [0.1, 0.1, 0.8]]


def test_a_coin_below_p_over_q_keeps_the_token() -> None:
    below, above = 0.2 / 0.6 - 1e-6, 0.2 / 0.6 + 1e-6
    for coin, kept in ((below, 1), (above, 0)):
        verdict = speculative(
            draft([[2, 1]], [2], [Q]),
            Distribution(torch.tensor([P])),
            keys(1, 3),
            Coins([[coin, 0.999999, 0]]),
        )  # type: ignore[arg-type]
        assert verdict.accepted.tolist() == [2 * kept]  # p(1) > q(1): no coin rejects the second


def test_the_correction_comes_from_the_residual_of_the_first_rejection() -> None:
    noise = Coins([[0.999, 0.5, 0.5]])
    verdict = speculative(draft([[2, 1]], [2], [Q]), Distribution(torch.tensor([P])), keys(1, 3), noise)  # type: ignore[arg-type]
    ((weights, asked, purpose),) = noise.asked
    torch.testing.assert_close(weights[0, 0], torch.tensor([0.3, 0.1, 0.0]))
    assert purpose == RESIDUAL
    assert torch.equal(asked.bits(purpose), keys(1, 3).bits(RESIDUAL)[:, :1])
    assert verdict.next_token.tolist() == [0]


def test_the_bonus_token_comes_from_p_itself() -> None:
    noise = Coins([[0.0, 0.0, 0.0]])
    verdict = speculative(draft([[2, 1]], [2], [Q]), Distribution(torch.tensor([P])), keys(1, 3), noise)  # type: ignore[arg-type]
    ((weights, asked, purpose),) = noise.asked
    assert verdict.accepted.tolist() == [2]
    assert weights[0, 0].tolist() == pytest.approx(P[2])
    assert torch.equal(asked.bits(purpose), keys(1, 3).bits(RESIDUAL)[:, 2:])


def test_an_impossible_token_is_rejected_whatever_the_coin() -> None:
    """u = 0, and q of any size: u q <= p would keep it."""
    for q in ([[[1.0, 0.0, 0.0]]], [[[1e-38, 0.5, 0.5]]], [[[0.0, 0.5, 0.5]]], None):
        verdict = speculative(
            draft([[0]], [1], q),
            Distribution(torch.tensor([[[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]])),
            keys(1, 2),
            Coins([[0.0, 0.0]]),  # type: ignore[arg-type]
        )
        assert verdict.accepted.tolist() == [0]
        assert verdict.next_token.tolist() == [1]


def test_padding_is_never_accepted() -> None:
    """Row 0 drafted one token, row 1 none; padding is token 0, which p likes best."""
    p = Distribution(torch.tensor([[[0.9, 0.05, 0.05]] * 3] * 2))
    for q in (None, [[[1.0, 0.0, 0.0]] * 2] * 2, [[[0.0, 0.5, 0.5]] * 2] * 2):
        made = draft([[0, 0], [0, 0]], [1, 0], q)
        assert speculative(made, p, keys(2, 3), Coins([[0.0] * 3] * 2)).accepted.tolist() == [1, 0]  # type: ignore[arg-type]
        assert coupled(
            made, Distribution(ids=torch.zeros(2, 3, dtype=torch.int64)), keys(2, 3), Noise()
        ).accepted.tolist() == [1, 0]


def test_nothing_after_a_rejection_is_accepted() -> None:
    p = Distribution(torch.tensor([[[0.0, 1.0], [1.0, 0.0], [1.0, 0.0], [1.0, 0.0]]]))
    verdict = speculative(draft([[0, 0, 0]], [3]), p, keys(1, 4), Coins([[0.5] * 4]))  # type: ignore[arg-type]
    assert verdict.accepted.tolist() == [0]


def test_a_residual_that_rounds_to_zero_falls_back_to_p() -> None:
    """q is p but for one rounding upwards: the token is rejected by the last coin, and nothing is left over."""
    up = math.nextafter(0.5, 1)
    p = torch.tensor([0.5, 0.5, 0.0])
    q = torch.nextafter(p, torch.tensor(1.0)).where(p > 0, p)
    assert float(q[0]) > up > 0.5
    noise = Coins([[1 - 2**-53, 0.0]])
    verdict = speculative(
        Draft(torch.tensor([[0]]), torch.tensor([1]), Distribution(q.view(1, 1, 3))),
        Distribution(p.expand(1, 2, 3)),
        keys(1, 2),
        noise,  # type: ignore[arg-type]
    )
    assert verdict.accepted.tolist() == [0]
    assert torch.equal(noise.asked[0][0][0, 0], p)


def test_the_residual_holds_no_token_that_p_does_not() -> None:
    """Exactly zero stays exactly zero: an epsilon would make impossible tokens possible."""
    noise = Coins([[0.999999, 0.0]])
    p = Distribution(torch.tensor([[[0.4, 0.6, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]]]))
    speculative(draft([[0]], [1], [[[0.8, 0.1, 0.1, 0.0]]]), p, keys(1, 2), noise)  # type: ignore[arg-type]
    weights = noise.asked[0][0][0, 0]
    assert weights[[0, 2, 3]].tolist() == [0.0, 0.0, 0.0]
    assert weights[1] == torch.tensor(0.6) - torch.tensor(0.1)


def test_no_draft_is_a_plain_step() -> None:
    p = Distribution(torch.tensor([[P[0]], [P[2]]]))
    nothing = no_draft(2, torch.device("cpu"))
    for rule in (speculative, coupled):
        verdict = rule(nothing, p, keys(2, 1), Noise())
        assert verdict.accepted.tolist() == [0, 0]
        assert verdict.next_token.shape == (2,)
    one = speculative(nothing, p, keys(2, 1), Coins([[0.0], [0.0]]))  # type: ignore[arg-type]
    assert one.next_token.tolist() == [0, 2]


def test_the_coupled_rule_keeps_the_tokens_of_plain_decoding() -> None:
    p, noise = Distribution(torch.tensor([P])), Noise()
    y = noise.pick(torch.tensor([P]), keys(1, 3), COUPLED)[0].tolist()
    for wrong in range(3):
        tokens = [*y[:wrong], *[(t + 1) % 3 for t in y[wrong:2]]]
        verdict = coupled(draft([tokens], [2]), p, keys(1, 3), noise)
        assert verdict.accepted.tolist() == [min(wrong, 2)]
        assert verdict.next_token.tolist() == [y[min(wrong, 2)]]


def test_each_row_has_its_own_acceptance_rule() -> None:
    p = Distribution(torch.tensor([P, P, P, P]))
    made = draft([[2, 1]] * 4, [2, 1, 2, 0], [Q] * 4)
    noise = Noise()
    wanted = [False, True, True, False]
    mixed = accept(made, p, keys(4, 3), noise, wanted)
    apart = [speculative(made, p, keys(4, 3), noise), coupled(made, p, keys(4, 3), noise)]
    for row, which in enumerate(wanted):
        assert mixed.accepted[row] == apart[which].accepted[row]
        assert mixed.next_token[row] == apart[which].next_token[row]
    for which in (False, True):
        same = accept(made, p, keys(4, 3), noise, [which] * 4)
        assert torch.equal(same.next_token, apart[which].next_token)


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
        assert weights[0, 0].tolist() == pytest.approx(P[kept]), (
            "the target's own distribution, and no residual"
        )
        assert torch.equal(asked.bits(purpose), keys(1, 3).bits(ROLLBACK)[:, kept : kept + 1])
    assert bild(draft([[0, 0]], [1]), p, keys(1, 3), Noise(), rollback(p, [9.0])).accepted.tolist() == [1]
    ruled_out = Distribution(torch.tensor([[[0.0, 0.7, 0.3]] * 2]))
    verdict = bild(draft([[0]], [1]), ruled_out, keys(1, 2), Noise(), rollback(ruled_out, [math.inf]))
    assert verdict.accepted.tolist() == [0]


def test_greedy_rows_are_judged_by_another_distribution_than_they_are_drawn_from() -> None:
    """The judge says how surprising a token is, and p, which is certain, what follows."""
    p = Distribution(ids=torch.tensor([[0, 1, 2]]))
    verdict = bild(draft([[2, 2]], [2]), p, None, Noise(), rollback(Distribution(torch.tensor([P])), [1.62]))
    assert (verdict.accepted.tolist(), verdict.next_token.tolist()) == ([2], [2])
    verdict = bild(draft([[2, 0]], [2]), p, None, Noise(), rollback(Distribution(torch.tensor([P])), [1.62]))
    assert (verdict.accepted.tolist(), verdict.next_token.tolist()) == ([1], [1])
    own = bild(draft([[0, 1]], [2]), p, None, Noise(), rollback(Distribution(torch.tensor([P])), [0.0]))
    assert own.accepted.tolist() == [2], "what it would say itself surprises it, and stands"


def test_lossy_and_lossless_rows_keep_their_own_rules() -> None:
    p, noise = Distribution(torch.tensor([P] * 3)), Noise()
    made = draft([[2, 1]] * 3, [2, 1, 2], [Q] * 3)
    lossy = rollback(p, [1.62, math.nan, math.nan])
    mixed = accept(made, p, keys(3, 3), noise, [False, False, True], lossy)
    apart = [bild(made, p, keys(3, 3), noise, lossy), speculative(made, p, keys(3, 3), noise)]
    apart.append(coupled(made, p, keys(3, 3), noise))
    for row, verdict in enumerate(apart):
        assert mixed.accepted[row] == verdict.accepted[row]
        assert mixed.next_token[row] == verdict.next_token[row]


def test_greedy_rows_need_no_noise() -> None:
    class Silent:
        def coin(self, *_: object) -> Tensor:
            raise AssertionError("temperature 0 needs no coin")

        pick = coin

    p = Distribution(ids=torch.tensor([[1, 2, 0], [1, 2, 0], [1, 2, 0]]))
    made = draft([[1, 2], [1, 0], [0, 2]], [2, 2, 2])
    for is_coupled in ([False] * 3, [True] * 3, [True, False, True]):
        verdict = accept(made, p, keys(3, 3), Silent(), is_coupled)  # type: ignore[arg-type]
        assert verdict.accepted.tolist() == [2, 1, 0]
        assert verdict.next_token.tolist() == [0, 2, 1]
