"""What is decided over a vocabulary, a row at a time, and the noise that decides.

Contract: `Operators` is all that laws and noise ask for. `Definition` says in PyTorch's operators what each
of them is, on any device; `kernels.rows.RowKernels` are the same in C, for float32 rows on a CPU. A row's
result is the same alone and among others. An engine is given one of the two, and what it makes of logits
and keys (its `SamplingTable`, and from that laws and noise) carries it along: nothing else decides who
computes.
"""

from __future__ import annotations

import math
from typing import Final, Protocol

import torch
from torch import Tensor

from foredraft.kernels.vocab import KernelVocabOps, Truncation
from foredraft.model.runner import Runner

__all__ = [
    "TORCH_VOCAB_OPS",
    "TorchVocabOps",
    "VocabOps",
    "leading",
    "least_in_nucleus",
    "running",
    "total",
    "vocab_ops_of",
]


class VocabOps(Protocol):
    def argmax(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The likeliest token of every row [..., V], ties to the smallest id: int64 [...]; whether its logit
        is finite, which NaN and +inf anywhere in the row are not: bool [...]."""
        ...

    def probs(self, x: Tensor, by: Truncation) -> tuple[Tensor, Tensor]:
        """softmax(x / temperature) of every row [B, T, V], cut by top_k, top_p and min_p, and whether its
        largest value is finite [B, T] bool."""
        ...

    def max_prob(self, x: Tensor) -> Tensor:
        """The probability of every row's likeliest token [..., V] -> [...], by softmax as it is; NaN where it
        is not finite."""
        ...

    def residual(self, p: Tensor, q: Tensor, where: Tensor) -> Tensor:
        """What is positive of p - q in the rows [..., V] where `where` [...] says so and anything is, else p.

        q: [..., V], or the one id that it is certain of [...] int64.
        """
        ...

    def match_prefix(self, drafted: Tensor, own: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """How many drafted tokens [B, K] at the start of each row, of so many [B], are its own [B, K + 1],
        and its own one after these; int64 all -> [B] each."""
        ...

    def gumbel_argmax(self, weights: Tensor, keys: Tensor) -> Tensor:
        """The winners of the exponential race of each row [..., V], by the noise of its key [...]: [...]."""
        ...

    def hash_keys(
        self, base: Tensor, rounds: Tensor | None, position: Tensor, attempt: Tensor | None, purpose: int
    ) -> Tensor:
        """The hash of the fields of a key: base and rounds [B], position and attempt [B, T], all int64.
        [B, T]. No rounds: they have no part in it; no attempts: each is 0."""
        ...

    def uniform(self, keys: Tensor) -> Tensor:
        """Uniform in [0, 1), 53 bits of each key: int64 -> float64, of the same shape."""
        ...


class TorchVocabOps:
    """In PyTorch's operators."""

    def argmax(self, x: Tensor) -> tuple[Tensor, Tensor]:
        ids = x.argmax(-1)
        top = x.gather(-1, ids[..., None])[..., 0]
        return ids, top - top == 0  # NaN and +inf win

    def probs(self, x: Tensor, by: Truncation) -> tuple[Tensor, Tensor]:
        if by.top_k is not None:  # before the temperature, which changes no order
            most = min(by.top_k_most, x.shape[-1])
            largest = x.topk(most, dim=-1).values  # [B, T, most]
            k = by.top_k.clamp(1, most)[:, None, None].expand(-1, x.shape[1], 1)
            cut = (by.top_k > 0)[:, None, None] & (x < largest.gather(-1, k - 1))
            x = x.masked_fill(cut, -math.inf)
        top = x.amax(-1)
        # The largest logit is subtracted before the division: no temperature, however small, overflows.
        probs = ((x - top[..., None]) / by.temperature[:, None, None]).softmax(-1)
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
        return x.softmax(-1).amax(-1)

    def residual(self, p: Tensor, q: Tensor, where: Tensor) -> Tensor:
        if q.dtype == torch.int64:
            q = torch.nn.functional.one_hot(q, p.shape[-1]).to(torch.float32)
        left = (p - q).clamp_min(0.0)
        usable = where[..., None] & (left.sum(-1, keepdim=True) > 0)
        return torch.where(usable, left, p)

    def match_prefix(self, drafted: Tensor, own: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        found = leading(drafted == own[:, :-1], lengths)
        return found, own.gather(1, found[:, None])[:, 0]

    def gumbel_argmax(self, weights: Tensor, keys: Tensor) -> Tensor:
        tokens = torch.arange(weights.shape[-1], device=weights.device)
        unit = self.uniform(_fold(keys[..., None], tokens))  # [..., V]
        times = weights.to(torch.float64) / -torch.log1p(-unit)  # unit = 0 gives w / 0 = inf: it wins
        return torch.where(weights > 0, times, -1.0).argmax(-1)

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
    """Those that go with its passes: the kernels where they run these."""
    return KernelVocabOps() if runner.by_kernels else TORCH_VOCAB_OPS


def leading(keep: Tensor, lengths: Tensor) -> Tensor:
    """Length of the run of kept tokens at the start of each row; padding is never kept -> [B]."""
    return torch.minimum(keep.cumprod(1).sum(1), lengths)


# --- sums over a vocabulary ---------------------------------------------------------------------------


def least_in_nucleus(probs: Tensor, mass: Tensor) -> Tensor:
    """The least probability kept [B, T]: tokens with less than the mass [B, 1] ranked above them are."""
    ordered = probs.sort(-1, descending=True).values
    before = running(ordered) - ordered  # mass ranked above; the first is always kept
    # a mass too small for float32 keeps the first all the same, and NaN has no last at all
    last = ((before < mass[..., None]).sum(-1, keepdim=True) - 1).clamp_min(0)
    return ordered.gather(-1, last)[..., 0]


def total(x: Tensor) -> Tensor:
    """The sum over the vocabulary. A running sum adds in one order; `sum` splits a single long row over
    threads, and not several."""
    return running(x)[..., -1:]


def running(x: Tensor) -> Tensor:
    """The running sum over the vocabulary [B, T, V], in the same order for a row alone and among others: a
    GPU scans a row that is alone by another kernel, whose order is not fixed."""
    if x.is_cuda and x.shape[:-1].numel() == 1:
        return x.expand(2, -1, -1).cumsum(-1)[:1]
    return x.cumsum(-1)


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
