"""Vocabulary operations, a row at a time: argmax, softmax with truncation, residual, draws; the same bits in
any batch.

On CUDA the order of a row's sum may follow the batch: `softmax` depends on the row's address modulo 16 bytes
(SoftMax.cu), so rows are padded to a multiple of 4; `cumsum` and `sum` choose threads by the number of rows
(ScanUtils.cuh, Reduce.cuh), so these sums are taken over integers.
"""

from __future__ import annotations

import math
from typing import Final, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.kernels.vocab import KernelVocabOps, Truncation
from foredraft.model.runner import Runner

VECTOR: Final = 4  # float32 numbers that a CUDA kernel loads at once
# Units of 1 in a sum of integers: numbers of 2^-32 and more keep all bits, and sums up to 128 fit into 64
# bits. A softmax adds up to 1, and its entropy, in nats, to the logarithm of V at most.
UNITS: Final = 2.0**56


def softmax(x: Tensor) -> Tensor:
    padded = _padded(x)
    return x.softmax(-1) if padded is None else padded.softmax(-1)[..., : x.shape[-1]]


def log_softmax(x: Tensor) -> Tensor:
    padded = _padded(x)
    return x.log_softmax(-1) if padded is None else padded.log_softmax(-1)[..., : x.shape[-1]]


def running(x: Tensor) -> Tensor:
    """Return the running sum of rows [..., V] float32, whose sums lie between -128 and 128."""
    return _numbers(_units(x).cumsum_(-1)) if x.is_cuda else x.cumsum(-1)


def total(x: Tensor) -> Tensor:
    """Return the last running sum of rows [..., V], as [..., 1]."""
    return _numbers(_units(x).sum(-1, keepdim=True)) if x.is_cuda else x.cumsum(-1)[..., -1:]


def sums(x: Tensor) -> Tensor:
    """Return the sum of rows [..., V], as [...]; on a CPU it may differ from `total` in the last bits."""
    return total(x)[..., 0] if x.is_cuda else x.sum(-1)


def _units(x: Tensor) -> Tensor:
    """Return numbers as integers; the product is exact, and what is below a unit is cut off."""
    return (x * UNITS).long()


def _numbers(units: Tensor) -> Tensor:
    return units.to(torch.float32).mul_(1 / UNITS)


def _padded(x: Tensor) -> Tensor | None:
    """Return rows padded for CUDA's kernels; None where they need none."""
    missing = -x.shape[-1] % VECTOR if x.is_cuda else 0
    return F.pad(x, (0, missing), value=-math.inf) if missing else None


# Rows that a GPU draws for at a time: over a vocabulary of 128k each of a draw's tensors takes 33 MB.
PIECE = 32


class TorchVocabOps:
    """The definition, in PyTorch. A row's result is the same alone and in a batch."""

    def argmax(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the likeliest, then smallest, id of rows [..., V], and whether its logit is finite."""
        ids = x.argmax(-1)
        top = x.gather(-1, ids[..., None])[..., 0]
        return ids, top - top == 0  # NaN and +inf win

    def probs(self, x: Tensor, by: Truncation) -> tuple[Tensor, Tensor]:
        """Return softmax(x / temperature) of rows [B, T, V], truncated, and where x is finite, [B, T]."""
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
        """Return the largest probability of the raw softmax of rows [..., V]; NaN where not finite."""
        return softmax(x).amax(-1)

    def residual(self, p: Tensor, q: Tensor, where: Tensor) -> Tensor:
        """Return max(p - q, 0) in rows `where` any is positive, else p; q: [..., V], or one-hot ids [...]."""
        if q.dtype == torch.int64:
            q = torch.nn.functional.one_hot(q, p.shape[-1]).to(torch.float32)
        left = (p - q).clamp_min(0.0)
        usable = where[..., None] & (left.sum(-1, keepdim=True) > 0)
        return torch.where(usable, left, p)

    def excess(self, p: Tensor, q: Tensor, weights: Tensor) -> Tensor:
        """Return the sum of max(weight p - q, 0) over rows [..., V], by float32 weights [...]; float64."""
        return total((p * weights[..., None] - q).clamp_min(0.0))[..., 0].double()

    def match_prefix(self, drafted: Tensor, own: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return how many leading drafted tokens [B, K] equal own ones [B, K + 1], and the next own one."""
        found = leading(drafted == own[:, :-1], lengths)
        return found, own.gather(1, found[:, None])[:, 0]

    def gumbel_argmax(self, weights: Tensor, keys: Tensor) -> Tensor:
        """Draw from weights [..., V] by the exponential race with the noise of each row's key [...]."""
        if not weights.is_cuda or keys.numel() <= PIECE:
            return _race(self, weights, keys)
        pieces = (torch.split(weights.flatten(0, -2), PIECE), torch.split(keys.flatten(), PIECE))
        return torch.cat([_race(self, *pair) for pair in zip(*pieces, strict=True)]).view(keys.shape)

    def hash_keys(
        self, base: Tensor, rounds: Tensor | None, position: Tensor, attempt: Tensor | None, purpose: int
    ) -> Tensor:
        """Return the hash of keys, [B, T] int64, from base and rounds [B], position and attempt [B, T]."""
        key = _fold(base, purpose)
        if rounds is not None:
            key = _fold(key, rounds)
        key = _fold(key[:, None], position)
        return _fold(key, 0 if attempt is None else attempt)

    def uniform(self, keys: Tensor) -> Tensor:
        """Return uniform numbers in [0, 1) from 53 bits of each key, float64 of the same shape."""
        return ((keys >> 11) & ((1 << 53) - 1)).to(torch.float64) * 2.0**-53


VocabOps: TypeAlias = TorchVocabOps | KernelVocabOps
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
