"""Noise: counter-based randomness. `coin` and `pick`, and nothing else.

Every draw is a pure function of its key (seed, sample index, position, attempt, purpose, and but for
`coupled` the round), hashed by the splitmix64 finaliser (Steele, Lea, Flood, OOPSLA 2014; `vocab_ops`): no
state is saved or rolled back. `pick` draws by the exponential race, argmax_v w_v / E_v with E_v ~ Exp(1), or
argmax(log w_v + g_v) with Gumbel noise. Two distributions drawn with one key tend to agree: the coupling that
`coupled` uses.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from foredraft.decode.distribution import Distribution
from foredraft.decode.vocab_ops import TORCH_VOCAB_OPS, VocabOps
from foredraft.model.memory import upload

DRAFT: Final = 1  # the drafter's own draw
ACCEPT: Final = 2  # the coin of the acceptance test
RESIDUAL: Final = 3  # the target's correction or bonus token
COUPLED: Final = 4  # shared by drafter and target, on purpose
ROLLBACK: Final = 5  # the target's token after what a lossy rule let stand
BLOCK: Final = 6  # the coins of block verification
BLOCK_NEXT: Final = 7  # the target's token after what it keeps
SIBLING: Final = 8  # the target's token after a sibling, but under `coupled`
SIBLING_COIN: Final = 9  # the coin of a place's first sibling; further ones have the purposes after it


def seed_key(seed: int, sample: int) -> int:
    """Return the part of the key that a sequence keeps for life, as a signed 64-bit integer."""
    mask = (1 << 64) - 1

    def mix(x: int) -> int:
        x &= mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    key = mix(mix(seed + 0x9E3779B97F4A7C15) + sample + 0x9E3779B97F4A7C15)
    return key - (1 << 64) if key >> 63 else key


class DrawKeys:
    """Noise keys of B rows at T positions; draws are a function of them."""

    base: Tensor  # [B] int64 from `seed_key`
    vocab_ops: VocabOps  # draws by the keys

    def bits(self, purpose: int) -> Tensor:
        """Return the hashed keys for one purpose, [B, T] int64."""
        raise NotImplementedError

    def column(self, index: int) -> DrawKeys:
        """Return the keys of one column, the same in every row, with T = 1."""
        return _Part(self.base, self.vocab_ops, self, lambda x: x[:, index : index + 1])

    def first(self, count: int) -> DrawKeys:
        """Return the keys of the first `count` columns."""
        return _Part(self.base, self.vocab_ops, self, lambda x: x[:, :count])

    def columns(self, index: Tensor) -> DrawKeys:
        """Return the keys at column `index` [B] of every row, with T = 1."""
        return _Part(self.base, self.vocab_ops, self, lambda x: x.gather(1, index[:, None]))


@dataclass(frozen=True)
class NoiseKeys(DrawKeys):
    """Keys of whole rows."""

    base: Tensor  # [B] int64 from `seed_key`
    position: Tensor  # [B, T] int64, absolute
    attempt: Tensor | None  # [B, T] int64, rollbacks of a ban that crossed the position; None where none did
    round: Tensor  # [B] int64, the sequence's own count
    vocab_ops: VocabOps = TORCH_VOCAB_OPS  # draws by the keys
    coupled: Seq[bool] = ()  # [B], rows whose drafts are drawn by the target's noise; empty for none
    _hashed: dict[int, Tensor] = field(init=False, default_factory=dict, repr=False)  # purpose -> bits

    def bits(self, purpose: int) -> Tensor:
        if purpose not in self._hashed:
            mixed = purpose == DRAFT and any(self.coupled)
            self._hashed[purpose] = self._drafting() if mixed else self._hash(purpose)
        return self._hashed[purpose]

    def _drafting(self) -> Tensor:
        shared = self.bits(COUPLED)
        if all(self.coupled):
            return shared
        return torch.where(upload(self.coupled, shared.device)[:, None], shared, self._hash(DRAFT))

    def _hash(self, purpose: int) -> Tensor:
        # The round is left out for `coupled`: its noise belongs to the position.
        rounds = None if purpose == COUPLED else self.round
        return self.vocab_ops.hash_keys(self.base, rounds, self.position, self.attempt, purpose)


@dataclass(frozen=True)
class HashedKeys(DrawKeys):
    """Keys that were hashed for one purpose."""

    base: Tensor
    vocab_ops: VocabOps
    hashed: Tensor  # [B, T] int64

    def bits(self, purpose: int) -> Tensor:
        return self.hashed


@dataclass(frozen=True)
class _Part(DrawKeys):
    """Some of the positions of other keys, which are hashed once as a whole."""

    base: Tensor
    vocab_ops: VocabOps
    whole: DrawKeys
    part: Callable[[Tensor], Tensor]

    def bits(self, purpose: int) -> Tensor:
        return self.part(self.whole.bits(purpose))


def draw_from(p: Distribution, keys: DrawKeys | None, noise: Noise, purpose: int) -> Tensor:
    """Draw a token from each distribution, [B, T] int64; where all are one-hot, no keys are needed."""

    def pick(weights: Tensor) -> Tensor:
        assert keys is not None
        return noise.pick(weights, keys, purpose)

    return p.draw(pick)


class Noise:
    """The two draws. Tests swap in noise that forks every branch and multiplies the probabilities."""

    # `pick` is the exponential race by hashed keys, so a kernel may run it elsewhere
    uses_gumbel_argmax = True

    def coin(self, keys: DrawKeys, purpose: int) -> Tensor:
        """Return uniform numbers in [0, 1), [B, T] float64."""
        return keys.vocab_ops.uniform(keys.bits(purpose))

    def pick(self, weights: Tensor, keys: DrawKeys, purpose: int) -> Tensor:
        """Draw token ids by weights [B, T, V], unnormalised -> [B, T] int64; ties go to the smallest id."""
        return keys.vocab_ops.gumbel_argmax(weights, keys.bits(purpose))
