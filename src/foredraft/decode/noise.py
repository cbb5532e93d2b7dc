"""Noise: counter-based randomness. `coin` and `pick`, and nothing else.

Every draw is a pure function of its key, so no state has to be saved, rolled back or shared
between threads, and the same key gives the same draw on every device and in every batch. A key is
(seed, sample index, position, attempt, purpose), and under `speculative` the round too: a position
may be drafted again after a rejection, and noise is never used twice. Hashing is the splitmix64
finaliser (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014) folded
over the fields of the key.

`pick` draws by the exponential race: argmax_v w_v / E_v with E_v ~ Exp(1) independent, which has
exactly the law w / sum(w); equivalently argmax(log w_v + g_v) with Gumbel noise g indexed by the
token id v. Two laws drawn with one key therefore tend to agree: the coupling that `coupled` uses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from foredraft.kernels.rows import noise_keys, race, units

__all__ = ["ACCEPT", "COUPLED", "DRAFT", "RESIDUAL", "ROLLBACK", "Keys", "Noise", "NoiseKeys", "seed_key"]

DRAFT: Final = 1  # the drafter's own draw
ACCEPT: Final = 2  # the coin of the acceptance test
RESIDUAL: Final = 3  # the target's correction or bonus token
COUPLED: Final = 4  # shared by drafter and target, on purpose
ROLLBACK: Final = 5  # the target's token after what a lossy rule let stand

_MASK = (1 << 64) - 1


def _signed(x: int) -> int:
    x &= _MASK
    return x - (1 << 64) if x >> 63 else x


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _mix(x: Tensor) -> Tensor:
    """splitmix64's finaliser on int64 bit patterns; `>>` is arithmetic, hence the masks."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _MIX_1
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _MIX_2
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _fold(key: Tensor, field: Tensor | int) -> Tensor:
    return _mix(key + _GOLDEN + (field if isinstance(field, Tensor) else _signed(field)))


def _keys(
    base: Tensor, rounds: Tensor | None, position: Tensor, attempt: Tensor | None, purpose: int
) -> Tensor:
    """One field folded in after the other -> [B, T] int64."""
    found = noise_keys(base, rounds, position, attempt, purpose)
    if found is not None:
        return found
    key = _fold(base, purpose)
    if rounds is not None:
        key = _fold(key, rounds)
    key = _fold(key[:, None], position)
    return _fold(key, 0 if attempt is None else attempt)


def _unit(key: Tensor) -> Tensor:
    """Uniform float64 in [0, 1) with 53 bits."""
    found = units(key)
    if found is not None:
        return found
    return ((key >> 11) & ((1 << 53) - 1)).to(torch.float64) * 2.0**-53


def seed_key(seed: int, sample: int) -> int:
    """The part of the key that a sequence keeps for life, as a signed 64-bit integer."""

    def mix(x: int) -> int:
        x &= _MASK
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
        return x ^ (x >> 31)

    return _signed(mix(mix(seed + 0x9E3779B97F4A7C15) + sample + 0x9E3779B97F4A7C15))


class Keys:
    """Keys of B rows at T positions: what draws are a function of.

    base: [B] int64 from `seed_key`.
    """

    base: Tensor

    def positions(self) -> Tensor:
        """[B, T] int64, absolute"""
        raise NotImplementedError

    def bits(self, purpose: int) -> Tensor:
        """[B, T] int64"""
        raise NotImplementedError

    def column(self, index: int) -> Keys:
        """The keys of one column, the same in every row, as T = 1."""
        return _Part(self.base, self, lambda x: x[:, index : index + 1])

    def first(self, count: int) -> Keys:
        """The keys of the first `count` columns."""
        return _Part(self.base, self, lambda x: x[:, :count])

    def columns(self, index: Tensor) -> Keys:
        """The keys at column `index` [B] of every row, as T = 1."""
        return _Part(self.base, self, lambda x: x.gather(1, index[:, None]))


@dataclass(frozen=True)
class NoiseKeys(Keys):
    """position: [B, T] int64, absolute; attempt: [B, T] int64, how many rollbacks of a ban crossed the
    position, None where none did; round: [B] int64, the sequence's own count."""

    base: Tensor
    position: Tensor
    attempt: Tensor | None
    round: Tensor
    _hashed: dict[int, Tensor] = field(default_factory=dict, repr=False)  # purpose -> bits

    def bits(self, purpose: int) -> Tensor:
        """The round is left out for `coupled`: its noise belongs to the position."""
        if purpose not in self._hashed:
            rounds = None if purpose == COUPLED else self.round
            self._hashed[purpose] = _keys(self.base, rounds, self.position, self.attempt, purpose)
        return self._hashed[purpose]

    def positions(self) -> Tensor:
        return self.position


@dataclass(frozen=True)
class _Part(Keys):
    """Some of the positions: what is hashed, is hashed once, of the whole."""

    base: Tensor
    whole: Keys
    part: Callable[[Tensor], Tensor]

    def bits(self, purpose: int) -> Tensor:
        return self.part(self.whole.bits(purpose))

    def positions(self) -> Tensor:
        return self.part(self.whole.positions())


class Noise:
    """The two draws. Tests swap in one that forks every branch and multiplies the probabilities.

    raced: its picks are the exponential race by the bits of their keys, so a kernel may run it elsewhere.
    """

    raced = True

    def coin(self, keys: Keys, purpose: int) -> Tensor:
        """Uniform in [0, 1) -> [B, T] float64."""
        return _unit(keys.bits(purpose))

    def pick(self, weights: Tensor, keys: Keys, purpose: int) -> Tensor:
        """Draw token ids with the law of weights [B, T, V] (unnormalised) -> [B, T] int64.

        Ties go to the smallest id. A row of zeros or NaN gives some id; the caller has ruled both out.
        """
        bits = keys.bits(purpose)  # [B, T]
        winners = race(weights, bits)
        if winners is not None:
            return winners
        tokens = torch.arange(weights.shape[-1], device=weights.device)
        unit = _unit(_fold(bits[..., None], tokens))  # [B, T, V]
        times = weights.to(torch.float64) / -torch.log1p(-unit)  # unit = 0 gives w / 0 = inf: it wins
        return torch.where(weights > 0, times, -1.0).argmax(-1)
