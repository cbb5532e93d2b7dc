"""Sampling: what a request asks for, and logits -> laws, each row of a batch by its own parameters.

Order of the transforms: constraint masks, temperature, top-k, top-p, min-p, as in `transformers`;
ties at a cut are kept. All in float32. Temperature 0 is argmax with ties to the smallest id, not a
division by a small number. The same code makes p and q, so a draft is judged by what it was drawn from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

from foredraft.decode.law import Law
from foredraft.errors import RequestError
from foredraft.model.device import upload

__all__ = ["SamplingParams", "SamplingTable", "law_of"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What one request asks for.

    temperature: 0 is greedy. top_k: 0 is off. top_p, min_p: 1 and 0 are off. seed: None draws a fresh
    one, which the output reports. acceptance: "speculative" accepts more; "coupled" gives the same text
    for the same seed whatever the drafter, the draft length and the load; None is "coupled" with a seed
    and "speculative" without. speculation: "none", the name of a drafter, or None for the default.

    Raises RequestError that names a value out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_new_tokens: int = 128
    seed: int | None = None
    ignore_eos: bool = False
    acceptance: Literal["speculative", "coupled"] | None = None
    speculation: str | None = None

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
                raise RequestError(f"{name} is {value!r}; give a number")
        for name in ("top_k", "max_new_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise RequestError(f"{name} is {value!r}; give a whole number")
        _within("temperature", self.temperature, 0 <= self.temperature < math.inf, "0 (greedy) or more")
        _within("top_k", self.top_k, self.top_k >= 0, "0 (off) or more")
        _within("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1 (off)")
        _within("min_p", self.min_p, 0 <= self.min_p <= 1, "from 0 (off) to 1")
        _within("max_new_tokens", self.max_new_tokens, self.max_new_tokens >= 1, "1 or more")
        if self.seed is not None:
            whole = isinstance(self.seed, int) and not isinstance(self.seed, bool)
            _within("seed", self.seed, whole and 0 <= self.seed < 2**63, "a whole number from 0 to 2**63 - 1")
        if self.acceptance not in (None, "speculative", "coupled"):
            raise RequestError(f"acceptance is {self.acceptance!r}; give 'speculative', 'coupled' or None")

    @classmethod
    def of(cls, **options: object) -> SamplingParams:
        """As the constructor, with an unknown option refused by name."""
        known = {field.name for field in fields(cls)}
        for name in options:
            if name not in known:
                raise RequestError(f"unknown sampling option {name!r}; known: {', '.join(sorted(known))}")
        return cls(**options)  # type: ignore[arg-type]

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def is_coupled(self) -> bool:
        return self.acceptance == "coupled" or (self.acceptance is None and self.seed is not None)


def _within(name: str, value: object, holds: bool, remedy: str) -> None:
    if not holds:
        raise RequestError(f"{name} is {value!r}; give {remedy}")


def _single(temperature: float) -> float:
    """The nearest that float32 has of it and of its inverse; the law is the same."""
    range_ = torch.finfo(torch.float32)
    return min(max(temperature, range_.tiny), range_.max)


@dataclass(frozen=True, slots=True)
class SamplingTable:
    """The parameters of a batch, a row per sequence; None where no row uses a transform."""

    greedy: Tensor | None  # [B] bool; None: none is
    all_greedy: bool
    temperature: Tensor  # [B] float32, 1 in greedy rows
    top_k: Tensor | None  # [B] int64
    top_k_most: int
    top_p: Tensor | None  # [B] float32
    min_p: Tensor | None  # [B] float32
    cut: Tensor | None  # [B] bool: rows with a top_p or a min_p

    @classmethod
    def of(cls, params: Seq[SamplingParams], device: torch.device) -> SamplingTable:
        def column(values: list[float], off: float, dtype: torch.dtype = torch.float32) -> Tensor | None:
            if all(v == off for v in values):
                return None
            return upload(values, device, dtype)

        greedy = [p.greedy for p in params]
        # greedy rows need no cuts: argmax survives every one of them
        top_k = [0 if p.greedy else p.top_k for p in params]
        cut = [not p.greedy and (p.top_p < 1 or p.min_p > 0) for p in params]
        return cls(
            greedy=upload(greedy, device) if any(greedy) else None,
            all_greedy=all(greedy),
            temperature=upload([_single(p.temperature or 1.0) for p in params], device),
            top_k=column(list(top_k), 0, torch.int64),
            top_k_most=max(top_k, default=0),
            top_p=column([1.0 if p.greedy else p.top_p for p in params], 1.0),
            min_p=column([0.0 if p.greedy else p.min_p for p in params], 0.0),
            cut=upload(cut, device) if any(cut) else None,
        )


def law_of(
    logits: Tensor, table: SamplingTable, masks: Tensor | None = None, *, argmax: bool = False
) -> tuple[Law, Tensor]:
    """logits [B, T, V] float32 -> the laws, and [B, T] bool: False where the logits are not finite.

    masks: [B, T, V] bool, True = allowed. argmax: one-hot laws in every row (a greedy drafter's).
    """
    if masks is not None:
        logits = logits.masked_fill(~masks, -math.inf)
    ids = logits.argmax(-1)  # ties to the smallest id
    top = logits.gather(-1, ids[..., None])[..., 0]
    finite = top.isfinite()  # NaN and +inf win an argmax, so one look at the top finds them
    if argmax or table.all_greedy:
        return Law(ids=ids), finite
    probs = _transformed(logits, top, table)
    if table.greedy is None:
        return Law(probs), finite
    return Law(probs, ids, table.greedy), finite


def _transformed(logits: Tensor, top: Tensor, table: SamplingTable) -> Tensor:
    """[B, T, V] -> probabilities after temperature and cuts."""
    # The largest logit is subtracted before the division: no temperature, however small, overflows.
    x = (logits - top[..., None]) / table.temperature[:, None, None]
    if table.top_k is not None:
        most = min(table.top_k_most, x.shape[-1])
        largest = x.topk(most, dim=-1).values  # [B, T, most]
        k = table.top_k.clamp(1, most)[:, None, None].expand(-1, x.shape[1], 1)
        cut = (table.top_k > 0)[:, None, None] & (x < largest.gather(-1, k - 1))
        x = x.masked_fill(cut, -math.inf)
    probs = x.softmax(-1)
    if table.top_p is not None:
        top_p = table.top_p[:, None, None]
        ordered = probs.sort(-1, descending=True).values
        before = ordered.cumsum(-1) - ordered  # mass ranked above; the first is always kept
        # a top_p too small for float32 keeps the first all the same, and NaN has no last at all
        last = ((before < top_p).sum(-1, keepdim=True) - 1).clamp_min(0)
        probs = probs.where((probs >= ordered.gather(-1, last)) | (top_p >= 1), 0.0)
    if table.min_p is not None:
        least = probs.amax(-1, keepdim=True) * table.min_p[:, None, None]
        probs = probs.where(probs >= least, 0.0)
    if table.cut is None:
        return probs
    # a running sum adds in one order; `sum` splits a single long row over threads, and not several
    total = probs.cumsum(-1)[..., -1:]
    # only rows that were cut: another row's parameters must not change the last bit of this one's
    return torch.where(table.cut[:, None, None], probs / total, probs)
