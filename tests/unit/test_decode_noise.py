"""Noise: uniform, independent over every field of its key, and the same everywhere."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy.stats import chi2, kstest

from foredraft.decode.noise import ACCEPT, COUPLED, DRAFT, RESIDUAL, Noise, NoiseKeys, seed_key
from foredraft.decode.vocab_ops import TorchVocabOps

NOISE = Noise()


def keys(
    seeds: Any, positions: Any = 0, *, sample: int = 0, attempt: int | None = None, turn: int = 0
) -> NoiseKeys:
    base = torch.tensor([seed_key(seed, sample) for seed in seeds])
    position = torch.as_tensor(positions).expand(len(base), -1 if hasattr(positions, "__len__") else 1)
    tries = None if attempt is None else torch.full_like(position, attempt)
    return NoiseKeys(base, position, tries, torch.full((len(base),), turn))


def test_coins_are_uniform() -> None:
    coins = NOISE.coin(keys(range(3000)), ACCEPT).flatten()
    assert coins.dtype == torch.float64
    assert kstest(coins.numpy(), "uniform").pvalue > 1e-4
    along = NOISE.coin(keys([0], range(3000)), ACCEPT).flatten()
    assert kstest(along.numpy(), "uniform").pvalue > 1e-4
    assert abs(float(torch.corrcoef(torch.stack([along[1:], along[:-1]]))[0, 1])) < 0.08


@pytest.mark.parametrize(
    "weights", [[1.0, 1.0, 1.0], [0.1, 0.0, 0.7, 0.2], [5.0, 1.0], [1e-30, 1e-30], [1e-40, 3e-40]]
)
def test_picks_are_distributed_as_their_weights(weights: list[float]) -> None:
    n = 4000
    w = torch.tensor(weights)
    drawn = NOISE.pick(w.expand(n, 1, -1), keys(range(n)), DRAFT).flatten()
    seen = torch.bincount(drawn, minlength=len(w)).double()
    assert seen[w == 0].sum() == 0
    expected = (w.double() / w.double().sum() * n)[w > 0]
    statistic = float(((seen[w > 0] - expected) ** 2 / expected).sum())
    assert chi2.sf(statistic, len(expected) - 1) > 1e-4


def test_every_field_of_a_key_matters() -> None:
    changed = {
        "sample": (keys(range(500), sample=1), DRAFT),
        "position": (keys(range(500), 1), DRAFT),
        "attempt": (keys(range(500), attempt=1), DRAFT),
        "round": (keys(range(500), turn=1), DRAFT),
        "accept": (keys(range(500)), ACCEPT),
        "residual": (keys(range(500)), RESIDUAL),
        "coupled": (keys(range(500)), COUPLED),
        "nothing": (keys(range(500)), DRAFT),
    }
    coins = {name: NOISE.coin(k, purpose).flatten() for name, (k, purpose) in changed.items()}
    for one, other in itertools.combinations(changed, 2):
        correlation = float(torch.corrcoef(torch.stack([coins[one], coins[other]]))[0, 1])
        assert abs(correlation) < 0.18, (one, other)
        assert not (coins[one] == coins[other]).any()
    assert len(coins["nothing"].unique()) == 500, "every seed has its own"
    same = {"attempt 0": keys(range(500), attempt=0), "coupled, round 9": keys(range(500), turn=9)}
    assert torch.equal(NOISE.coin(same["attempt 0"], DRAFT).flatten(), coins["nothing"])
    assert torch.equal(NOISE.coin(same["coupled, round 9"], COUPLED).flatten(), coins["coupled"])


def test_each_row_drafts_by_its_own_noise_or_by_what_it_shares() -> None:
    own = keys(range(4), range(5), turn=2)
    for coupled in itertools.product([False, True], repeat=4):
        found = replace(own, coupled=coupled)
        rows = zip(coupled, own.bits(COUPLED), own.bits(DRAFT), strict=True)
        want = torch.stack([shared if is_coupled else drafting for is_coupled, shared, drafting in rows])
        assert torch.equal(found.bits(DRAFT), want)
        for purpose in (ACCEPT, RESIDUAL, COUPLED):
            assert torch.equal(found.bits(purpose), own.bits(purpose))
        assert torch.equal(found.column(3).bits(DRAFT), want[:, 3:4])


def test_a_draw_does_not_depend_on_its_neighbours() -> None:
    w = torch.rand(8, 5, 33, generator=torch.Generator().manual_seed(0))
    whole = NOISE.pick(w, keys(range(8), range(5)), COUPLED)
    for b, t in itertools.product(range(8), range(5)):
        alone = NOISE.pick(w[b : b + 1, t : t + 1], keys([b], [t]), COUPLED)
        assert alone.item() == whole[b, t]
        strided = NOISE.pick(w.flip(0)[7 - b : 8 - b, t : t + 1], keys([b], [t]), COUPLED)
        assert strided.item() == whole[b, t]


def test_a_zero_uniform_wins_and_breaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """unit = 0 makes an infinite race: that token is drawn if it is possible at all."""
    monkeypatch.setattr(TorchVocabOps, "uniform", lambda _, key: torch.zeros_like(key, dtype=torch.float64))
    assert NOISE.pick(torch.tensor([[[0.0, 0.2, 0.8]]]), keys([0]), DRAFT).item() == 1


def test_keys_of_known_seeds() -> None:
    """The text of a seed is part of the interface: these numbers must not change."""
    assert seed_key(0, 0) == -6411193824288604561
    coins = NOISE.coin(keys([7], [0, 1, 100]), ACCEPT)[0].tolist()
    assert coins == [0.811505937459727, 0.5867669364816912, 0.015670368793155087]
    picks = NOISE.pick(torch.ones(1, 6, 1000), keys([7], range(6)), COUPLED)[0].tolist()
    assert picks == [689, 880, 728, 252, 31, 250]


@pytest.mark.parametrize("seed", [-(2**63), -2, 0, 1, 2**31, 2**53 + 1, 2**63 - 1])
def test_seed_keys_are_signed_words(seed: int) -> None:
    found = {seed_key(seed, sample) for sample in range(100)}
    assert len(found) == 100 and all(-(2**63) <= key < 2**63 for key in found)
    assert seed_key(seed + 1, 0) not in found
