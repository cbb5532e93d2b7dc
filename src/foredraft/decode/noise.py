"""Noise: counter-based randomness. `coin` and `pick`, and nothing else.

Every draw is a pure function of its key, so no state has to be saved, rolled back or shared
between threads, and the same key gives the same draw on every device and in every batch. A key is
(seed, sample index, position, attempt, purpose), and under `speculative` the round too: a position
may be drafted again after a rejection, and noise is never used twice. Hashing is the splitmix64
finaliser (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014) folded
over the fields of the key (`vocab_ops`).

`pick` draws by the exponential race: argmax_v w_v / E_v with E_v ~ Exp(1) independent, which has
exactly the distribution w / sum(w); equivalently argmax(log w_v + g_v) with Gumbel noise g indexed by the
token id v. Two distributions drawn with one key therefore tend to agree: the coupling that `coupled` uses.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from foredraft.decode.vocab_ops import TORCH_VOCAB_OPS, VocabOps
from foredraft.model.transfers import upload

__all__ = [
    "ACCEPT",
    "BLOCK",
    "BLOCK_NEXT",
    "COUPLED",
    "DRAFT",
    "RESIDUAL",
    "ROLLBACK",
    "SIBLING",
    "SIBLING_COIN",
    "DrawKeys",
    "Noise",
    "NoiseKeys",
    "seed_key",
]

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
    """Noise keys of B rows at T positions; draws are a function of them.

    Attributes:
        base: [B] int64 from `seed_key`.
        vocab_ops: Draws by the keys.
    """

    base: Tensor
    vocab_ops: VocabOps

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
    """Keys of whole rows.

    Attributes:
        base: [B] int64 from `seed_key`.
        position: [B, T] int64, absolute.
        attempt: [B, T] int64, rollbacks of a ban that crossed the position; None where none did.
        round: [B] int64, the sequence's own count.
        vocab_ops: Draws by the keys.
        coupled: [B], rows whose drafts are drawn by the target's noise; empty for none.
    """

    base: Tensor
    position: Tensor
    attempt: Tensor | None
    round: Tensor
    vocab_ops: VocabOps = TORCH_VOCAB_OPS
    coupled: Seq[bool] = ()
    _hashed: dict[int, Tensor] = field(init=False, default_factory=dict, repr=False)  # purpose -> bits

    def bits(self, purpose: int) -> Tensor:
        # Coupled rows draft by the noise that their target draws by.
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
    """Keys that were hashed for one purpose.

    Attributes:
        hashed: [B, T] int64.
    """

    base: Tensor
    vocab_ops: VocabOps
    hashed: Tensor

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


class Noise:
    """The two draws. Tests swap in noise that forks every branch and multiplies the probabilities.

    Attributes:
        uses_gumbel_argmax: `pick` is the exponential race by hashed keys, so a kernel may run it elsewhere.
    """

    uses_gumbel_argmax = True

    def coin(self, keys: DrawKeys, purpose: int) -> Tensor:
        """Return uniform numbers in [0, 1), [B, T] float64."""
        return keys.vocab_ops.uniform(keys.bits(purpose))

    def pick(self, weights: Tensor, keys: DrawKeys, purpose: int) -> Tensor:
        """Draw token ids by weights [B, T, V], unnormalised -> [B, T] int64.

        Ties go to the smallest id. A row of zeros or NaN gives some id; the caller has ruled both out.
        """
        return keys.vocab_ops.gumbel_argmax(weights, keys.bits(purpose))
