"""Vocabulary operations: argmax, softmax with truncation, residual and draws, a row at a time.

Contract: `VocabOps` is all that distributions and noise need. `TorchVocabOps` defines each operation in
    PyTorch, on
any device; `kernels.vocab.KernelVocabOps` computes the same in C for float32 rows on a CPU. A row's result is
the same alone and in a batch. An engine gets one of the two; its `SamplingTable`, distributions and noise
carry it along.
"""

from __future__ import annotations

import math
from typing import Final, Protocol

import torch
from torch import Tensor

from foredraft.decode.vocab_sums import running, softmax, total
from foredraft.kernels.vocab import KernelVocabOps, Truncation
from foredraft.model.runner import Runner

__all__ = [
    "TORCH_VOCAB_OPS",
    "TorchVocabOps",
    "VocabOps",
    "leading",
    "least_in_nucleus",
    "vocab_ops_of",
]


# Rows that a GPU draws for at a time: over a vocabulary of 128k each of a draw's tensors takes 33 MB.
PIECE = 32


class VocabOps(Protocol):
    def argmax(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the likeliest token of rows [..., V], int64 [...], and whether its logit is finite, bool.

        Ties go to the smallest id. NaN and +inf anywhere in the row count as its maximum.
        """
        ...

    def probs(self, x: Tensor, by: Truncation) -> tuple[Tensor, Tensor]:
        """Return softmax(x / temperature) of rows [B, T, V], truncated by top_k, top_p and min_p.

        Also return whether every row's maximum is finite, [B, T] bool.
        """
        ...

    def max_prob(self, x: Tensor) -> Tensor:
        """Return the largest probability of the raw softmax of rows [..., V]; NaN where not finite."""
        ...

    def residual(self, p: Tensor, q: Tensor, where: Tensor) -> Tensor:
        """Return max(p - q, 0) in rows [..., V] of `where` [...] in which any of it is positive, else p.

        q: [..., V], or the id of a one-hot q, [...] int64.
        """
        ...

    def excess(self, p: Tensor, q: Tensor, weights: Tensor) -> Tensor:
        """Return the sum of max(weight p - q, 0) over rows [..., V], by float32 weights [...]; float64."""
        ...

    def match_prefix(self, drafted: Tensor, own: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return how many leading drafted tokens [B, K], of `lengths` [B], equal the row's own [B, K + 1].

        Also return the row's own token after these; int64, [B] each.
        """
        ...

    def gumbel_argmax(self, weights: Tensor, keys: Tensor) -> Tensor:
        """Draw from weights [..., V] by the exponential race with the noise of each row's key [...]."""
        ...

    def hash_keys(
        self, base: Tensor, rounds: Tensor | None, position: Tensor, attempt: Tensor | None, purpose: int
    ) -> Tensor:
        """Return the hash of keys, [B, T] int64, from base and rounds [B], position and attempt [B, T].

        Without rounds they have no part in it; without attempts each is 0.
        """
        ...

    def uniform(self, keys: Tensor) -> Tensor:
        """Return uniform numbers in [0, 1) from 53 bits of each key, float64 of the same shape."""
        ...


class TorchVocabOps:
    """The definition, in PyTorch."""

    def argmax(self, x: Tensor) -> tuple[Tensor, Tensor]:
        ids = x.argmax(-1)
        top = x.gather(-1, ids[..., None])[..., 0]
        return ids, top - top == 0  # NaN and +inf win

    def probs(self, x: Tensor, by: Truncation) -> tuple[Tensor, Tensor]:
        if by.top_k is not None:  # before the temperature, which changes no order
            most = min(by.max_top_k, x.shape[-1])
            largest = x.topk(most, dim=-1).values  # [B, T, most]
            k = by.top_k.clamp(1, most)[:, None, None].expand(-1, x.shape[1], 1)
            cut = (by.top_k > 0)[:, None, None] & (x < largest.gather(-1, k - 1))
            x = x.masked_fill(cut, -math.inf)
        top = x.amax(-1)
        # The largest logit is subtracted before the division: no temperature, however small, overflows.
        probs = softmax((x - top[..., None]) / by.temperature[:, None, None])
        finite = top - top == 0  # NaN and +inf win
        if by.cut is None:
            return probs, finite
        least = torch.zeros_like(top)  # [B, T]
        if by.top_p is not None:
            top_p = by.top_p[:, None]
            least = least_in_nucleus(probs, top_p).where(top_p < 1, 0.0)
        if by.min_p is not None:
            least = least.maximum(probs.amax(-1) * by.min_p[:, None])
        kept = probs.where(probs >= least[..., None], 0.0)
        # only rows that are cut: no other's bits may change
        return torch.where(by.cut[:, None, None], kept / total(kept), kept), finite

    def max_prob(self, x: Tensor) -> Tensor:
        return softmax(x).amax(-1)

    def residual(self, p: Tensor, q: Tensor, where: Tensor) -> Tensor:
        if q.dtype == torch.int64:
            q = torch.nn.functional.one_hot(q, p.shape[-1]).to(torch.float32)
        left = (p - q).clamp_min(0.0)
        usable = where[..., None] & (left.sum(-1, keepdim=True) > 0)
        return torch.where(usable, left, p)

    def excess(self, p: Tensor, q: Tensor, weights: Tensor) -> Tensor:
        return total((p * weights[..., None] - q).clamp_min(0.0))[..., 0].double()

    def match_prefix(self, drafted: Tensor, own: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        found = leading(drafted == own[:, :-1], lengths)
        return found, own.gather(1, found[:, None])[:, 0]

    def gumbel_argmax(self, weights: Tensor, keys: Tensor) -> Tensor:
        if not weights.is_cuda or keys.numel() <= PIECE:
            return _race(self, weights, keys)
        pieces = (torch.split(weights.flatten(0, -2), PIECE), torch.split(keys.flatten(), PIECE))
        return torch.cat([_race(self, *pair) for pair in zip(*pieces, strict=True)]).view(keys.shape)

    def hash_keys(
        self, base: Tensor, rounds: Tensor | None, position: Tensor, attempt: Tensor | None, purpose: int
    ) -> Tensor:
        key = _fold(base, purpose)
        if rounds is not None:
            key = _fold(key, rounds)
        key = _fold(key[:, None], position)
        return _fold(key, 0 if attempt is None else attempt)

    def uniform(self, keys: Tensor) -> Tensor:
        return ((keys >> 11) & ((1 << 53) - 1)).to(torch.float64) * 2.0**-53


TORCH_VOCAB_OPS: Final = TorchVocabOps()


def vocab_ops_of(runner: Runner) -> VocabOps:
    """Return the operations that go with a runner's passes: kernels where kernels run the passes."""
    return KernelVocabOps() if runner.by_kernels else TORCH_VOCAB_OPS


def _race(ops: VocabOps, weights: Tensor, keys: Tensor) -> Tensor:
    """Return argmax_v w_v / E_v of rows [..., V], with E_v ~ Exp(1) by each row's key and the token id."""
    tokens = torch.arange(weights.shape[-1], device=weights.device)
    unit = ops.uniform(_fold(keys[..., None], tokens))  # [..., V]
    times = weights.to(torch.float64) / -torch.log1p(-unit)  # unit = 0 gives w / 0 = inf: it wins
    return torch.where(weights > 0, times, -1.0).argmax(-1)


def leading(keep: Tensor, lengths: Tensor) -> Tensor:
    """Return the length of the run of kept tokens at the start of each row, [B]; padding is never kept."""
    return torch.minimum(keep.cumprod(1).sum(1), lengths)


def least_in_nucleus(probs: Tensor, mass: Tensor) -> Tensor:
    """Return the least probability [B, T] in the nucleus of mass [B, 1]."""
    ordered = probs.sort(-1, descending=True).values
    before = running(ordered) - ordered  # mass ranked above; the first is always kept
    # a mass too small for float32 keeps the first all the same, and NaN has no last at all
    last = ((before < mass[..., None]).sum(-1, keepdim=True) - 1).clamp_min(0)
    return ordered.gather(-1, last)[..., 0]


# --- the hash of noise: splitmix64's finaliser, folded over the fields of a key -------------------------


def _signed(x: int) -> int:
    """The 64 bits of x as a signed number, which is what tensors hold."""
    x &= (1 << 64) - 1
    return x - (1 << 64) if x >> 63 else x


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _mix(x: Tensor) -> Tensor:
    """On int64 bit patterns; `>>` is arithmetic, hence the masks."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _MIX_1
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _MIX_2
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _fold(key: Tensor, field: Tensor | int) -> Tensor:
    return _mix(key + _GOLDEN + (field if isinstance(field, Tensor) else _signed(field)))
