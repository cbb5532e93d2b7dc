"""The losses: values, gradients, and what ce, kl and tv have in common."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft.errors import ConfigError
from foredraft.train.losses import FUNCTIONS, mixture, overlap
from foredraft.train.training_options import LOSSES, parse_loss
from tests.support.mutation import assert_caught, defect

P, Q = torch.tensor([[0.5, 0.3, 0.2]]).double(), torch.tensor([[0.2, 0.2, 0.6]]).double()
VALUES = {
    "ce": -(0.5 * math.log(0.2) + 0.3 * math.log(0.2) + 0.2 * math.log(0.6)),
    "kl": 0.5 * math.log(2.5) + 0.3 * math.log(1.5) + 0.2 * math.log(1 / 3),
    "reverse-kl": 0.2 * math.log(0.4) + 0.2 * math.log(2 / 3) + 0.6 * math.log(3),
    "tv": 0.4,
    "lk": math.exp(-1.8) * (0.5 * math.log(2.5) + 0.3 * math.log(1.5) + 0.2 * math.log(1 / 3))
    + (1 - math.exp(-1.8)) * 0.4,
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_value_of_a_loss(name: str) -> None:
    assert LOSSES.keys() == FUNCTIONS.keys() == VALUES.keys()
    assert FUNCTIONS[name](P.log(), Q.log()).item() == pytest.approx(VALUES[name])


def logits(seed: int, rows: int = 4, words: int = 7) -> Tensor:
    return torch.randn(rows, words, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("name", [*FUNCTIONS, "ce=0.1,tv=0.9"])
def test_the_gradient_of_a_loss(name: str) -> None:
    """Against finite differences in float64; λ of lk is no variable, so it is held."""
    log_p = logits(1).log_softmax(-1)
    start = logits(2)
    if name == "lk":
        with torch.no_grad():
            weight = torch.exp(-3 * overlap(log_p, start.log_softmax(-1)))

        def loss(q: Tensor) -> Tensor:
            log_q = q.log_softmax(-1)
            return weight * FUNCTIONS["kl"](log_p, log_q) + (1 - weight) * FUNCTIONS["tv"](log_p, log_q)

        own, other = start.clone().requires_grad_(), start.clone().requires_grad_()
        FUNCTIONS["lk"](log_p, own.log_softmax(-1)).sum().backward()
        loss(other).sum().backward()
        torch.testing.assert_close(own.grad, other.grad)
    else:
        made = mixture(parse_loss(name))

        def loss(q: Tensor) -> Tensor:
            return made(log_p, q.log_softmax(-1))

    assert torch.autograd.gradcheck(loss, start.clone().requires_grad_())


def test_tv_is_the_probability_of_a_rejection() -> None:
    """Against a count: drafts drawn from q, accepted with min(1, p / q)."""
    random = torch.Generator().manual_seed(0)
    drawn = torch.multinomial(Q[0], 200_000, replacement=True, generator=random)
    kept = torch.rand(len(drawn), generator=random) < (P[0] / Q[0])[drawn]
    assert kept.float().mean().item() == pytest.approx(1 - FUNCTIONS["tv"](P.log(), Q.log()).item(), abs=5e-3)


def test_the_sum_of_maxima_in_place_of_minima_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def larger(_: object) -> Any:
        return lambda log_p, log_q: torch.maximum(log_p, log_q).exp().sum(-1)

    check = test_tv_is_the_probability_of_a_rejection
    assert_caught(defect("maxima", overlap, larger, check), monkeypatch)


def test_tokens_that_a_reduced_head_lacks_count_as_rejected() -> None:
    """q has two of the three tokens; tv stays 1 less the probability of acceptance."""
    log_p, log_q = P.log()[:, :2], torch.tensor([[0.9, 0.1]]).double().log()
    assert FUNCTIONS["tv"](log_p, log_q).item() == pytest.approx(1 - (0.5 + 0.1))
    assert FUNCTIONS["ce"](log_p, log_q).item() == pytest.approx(-(0.5 * math.log(0.9) + 0.3 * math.log(0.1)))


def test_a_token_that_the_target_never_says_adds_nothing() -> None:
    log_p = torch.tensor([[1.0, 0.0]]).log()
    log_q = torch.tensor([[0.5, 0.5]]).log().requires_grad_()
    for name in ("ce", "kl", "tv"):
        value = FUNCTIONS[name](log_p, log_q)
        assert value.isfinite().all()
        value.sum().backward()
    assert log_q.grad is not None and log_q.grad.isfinite().all()


@pytest.mark.parametrize("text", ["mse", "", "kl=0", "kl=-1", "kl=x", "kl=1,kl=2", "kl=inf", "kl,tv"])
def test_other_losses_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="ce, kl, reverse-kl, tv, lk"):
        parse_loss(text)
