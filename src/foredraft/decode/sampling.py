"""Sampling: logits -> distributions, each row of a batch by its own parameters, and the tokens that penalties
depend on.

Order: logit bias, masks, penalties, temperature, top-k, top-p, min-p, typical-p, as in `transformers`; ties
at a cut are kept. The same code makes p and q, so a draft is judged by what it was drawn from. Typical-p:
Meister et al. 2022 (arXiv 2202.00666). Min-p: Nguyen et al. 2024 (arXiv 2407.01082). Repetition penalty:
Keskar et al. 2019 (arXiv 1909.05858), with the sign rule of `transformers`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from foredraft.decode.distribution import Distribution
from foredraft.decode.params import SamplingParams
from foredraft.decode.sequence import Sequence, TokenCounts
from foredraft.decode.vocab_ops import TORCH_VOCAB_OPS, VocabOps, running, total
from foredraft.model.memory import HOST, upload
from foredraft.model.runner import SamplingInputs


@dataclass(frozen=True, slots=True)
class PenaltyContext:
    """Tokens of B rows before the first column of a pass."""

    ids: Tensor | None  # [B, S] int64, the distinct tokens so far; shorter rows repeat their first one
    counts: Tensor | None  # [B, S] float32, how often each is in the output
    prompted: Tensor | None  # [B, S] bool, it is in the prompt. All three are None where no row has a penalty
    new: Tensor  # [B] int64, tokens of the output
    drafted: Tensor | None = None  # [B, K] int64; column t follows the first `ahead + t` of them
    ahead: int | Tensor = 0  # drafted tokens before the first column, of all rows or of each, [B] int64

    @classmethod
    def of(cls, sequences: Seq[Sequence], device: torch.device) -> PenaltyContext | None:
        """Return the context of a batch; None where no row's distribution depends on it."""
        if not any(s.params.penalised or s.params.min_new_tokens for s in sequences):
            return None
        new = upload([len(s.tokens) - len(s.prompt) for s in sequences], device)
        if not any(s.params.penalised for s in sequences):
            return cls(None, None, None, new)
        width = max(1, *(len(s.token_counts) for s in sequences if s.token_counts is not None))
        if device.type not in HOST:  # few widths, each of which a graph may be captured for
            width = 1 << (width - 1).bit_length()
        arrays = [np.zeros((len(sequences), width), dtype) for dtype in (np.int64, np.float32, np.bool_)]
        for row, sequence in enumerate(sequences):
            if sequence.token_counts is not None:
                for array, values in zip(arrays, sequence.token_counts.arrays(), strict=True):
                    array[row, : len(values)], array[row, len(values) :] = values, values[0]
        ids, counts, prompted = (upload(array, device) for array in arrays)
        return cls(ids, counts, prompted, new)

    @classmethod
    def after(cls, prompt: list[int], output: list[int], device: torch.device) -> PenaltyContext:
        """Return the context of the token after one prompt and what is committed of its output."""
        token_counts = TokenCounts(prompt)
        for token in output:
            token_counts.count(token, 1)
        ids, counts, prompted = (upload(array[None], device) for array in token_counts.arrays())
        return cls(ids, counts, prompted, upload([len(output)], device))

    def along(self, drafted: Tensor, ahead: int | Tensor = 0) -> PenaltyContext:
        return replace(self, drafted=drafted, ahead=ahead)

    def said(self, columns: int) -> Tensor:
        """Return the tokens of the output before each column, [B, T] int64."""
        return self.new[:, None] + self._drafted_before(columns)

    def _drafted_before(self, columns: int) -> Tensor:
        """Return how many drafted tokens each column follows, [1 or B, T] int64."""
        ahead = self.ahead[:, None] if isinstance(self.ahead, Tensor) else self.ahead
        return (ahead + torch.arange(columns, device=self.new.device)).view(-1, columns)

    def token_counts(self, columns: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return ids [B, N], and before each column [B, T, N] their counts in the output and whether seen."""
        assert self.ids is not None and self.counts is not None and self.prompted is not None
        drafted = self.ids[:, :0] if self.drafted is None else self.drafted
        ids = torch.cat([self.ids, drafted], 1)  # [B, N]
        known = self.ids[:, None] == drafted[:, :, None]  # [B, K, S]: what was said of a drafted token before
        counts = torch.cat([self.counts, (known * self.counts[:, None]).amax(-1)], 1)
        prompted = torch.cat([self.prompted, (known & self.prompted[:, None]).any(-1)], 1)
        steps = (ids[:, None] == drafted[:, :, None]).cumsum(1)  # [B, K, N]
        steps = torch.nn.functional.pad(steps, (0, 0, 1, 0))  # [B, K + 1, N]
        if isinstance(self.ahead, Tensor):
            along = steps.gather(1, self._drafted_before(columns)[..., None].expand(-1, -1, ids.shape[1]))
        else:
            along = steps[:, self.ahead : self.ahead + columns]
        counts = counts[:, None] + along  # [B, T, N]
        return ids, counts, prompted[:, None] | (counts > 0)


NO_CUTS = SamplingParams()


@dataclass(frozen=True, slots=True)
class Bias:
    """What logit_bias adds to logits."""

    ids: Tensor  # [B, N] int64, padded with 0
    values: Tensor  # [B, N] float32, padded with 0

    @classmethod
    def of(cls, params: Seq[SamplingParams], device: torch.device) -> Bias | None:
        biases = [p.logit_bias or {} for p in params]
        if not any(biases):
            return None
        width = max(map(len, biases))
        rows = [[*bias.items(), *[(0, 0.0)] * (width - len(bias))] for bias in biases]
        ids, values = ([[pair[part] for pair in row] for row in rows] for part in (0, 1))
        return cls(upload(ids, device), upload(values, device, torch.float32))


@dataclass(frozen=True, slots=True)
class Bar:
    """The end-of-text ids that min_new_tokens bars."""

    until: Tensor  # [B] int64: new tokens before which they are barred; 0 in rows that bar none
    ids: Tensor  # [B, E] int64, padded with the row's first

    @classmethod
    def of(
        cls, params: Seq[SamplingParams], ends: Seq[frozenset[int]] | None, device: torch.device
    ) -> Bar | None:
        if ends is None:
            return None
        barred = [
            sorted(p.ends(own)) if p.min_new_tokens else [] for p, own in zip(params, ends, strict=True)
        ]
        if not any(barred):
            return None
        until = [p.min_new_tokens if row else 0 for p, row in zip(params, barred, strict=True)]
        width = max(map(len, barred))
        ids = [row + (row[:1] or [0]) * (width - len(row)) for row in barred]
        return cls(upload(until, device), upload(ids, device))


@dataclass(frozen=True, slots=True)
class SamplingTable:
    """Sampling parameters of a batch, a row per sequence; None where no row uses a transform."""

    greedy: Tensor | None  # [B] bool; None where no row is
    all_greedy: bool
    temperature: Tensor  # [B] float32, 1 in greedy rows
    top_k: Tensor | None  # [B] int64
    max_top_k: int
    top_p: Tensor | None  # [B] float32
    min_p: Tensor | None  # [B] float32
    typical_p: Tensor | None  # [B] float32
    cut: Tensor | None  # [B] bool: rows with a top_p or a min_p
    penalties: Tensor | None  # [3, B] float32: repetition, presence, frequency
    bias: Bias | None
    bar: Bar | None
    bound: Tensor | None  # [B] float32: nats of surprise that `bild` accepts, NaN in rows of other rules
    bounded: bool  # all rows have a bound
    judge: SamplingTable | None  # parameters that measure surprise; None: these
    vocab_ops: VocabOps  # turns logits into distributions

    @classmethod
    def of(
        cls,
        params: Seq[SamplingParams],
        device: torch.device,
        ends: Seq[frozenset[int]] | None = None,
        vocab_ops: VocabOps = TORCH_VOCAB_OPS,
    ) -> SamplingTable:
        def column(values: list[float], off: float, dtype: torch.dtype = torch.float32) -> Tensor | None:
            return None if all(v == off for v in values) else upload(values, device, dtype)

        cuts = [NO_CUTS if p.greedy else p for p in params]  # argmax survives every cut
        judged, any_penalty = [p.judged for p in params], any(p.penalised for p in params)
        penalties = [[p.repetition_penalty, p.presence_penalty, p.frequency_penalty] for p in params]
        bounds = [math.nan if p.bound is None else p.bound for p in params]
        single = torch.finfo(torch.float32)  # which can hold the inverse, too
        temperatures = [min(max(p.temperature or 1.0, single.tiny), single.max) for p in params]
        is_judge = all(one is own for one, own in zip(judged, params, strict=True))
        return cls(
            greedy=column([p.greedy for p in params], False, torch.bool),
            all_greedy=all(p.greedy for p in params),
            temperature=upload(temperatures, device, torch.float32),
            top_k=column([p.top_k for p in cuts], 0, torch.int64),
            max_top_k=max((p.top_k for p in cuts), default=0),
            top_p=column([p.top_p for p in cuts], 1.0),
            min_p=column([p.min_p for p in cuts], 0.0),
            typical_p=column([p.typical_p for p in cuts], 1.0),
            cut=column([p.top_p < 1 or p.min_p > 0 for p in cuts], False, torch.bool),
            penalties=upload(penalties, device, torch.float32).T if any_penalty else None,
            bias=Bias.of(params, device),
            bar=Bar.of(params, ends, device),
            bound=upload(bounds, device, torch.float32) if not all(map(math.isnan, bounds)) else None,
            bounded=not any(map(math.isnan, bounds)),
            judge=None if is_judge else cls.of(judged, device, ends, vocab_ops),
            vocab_ops=vocab_ops,
        )

    def sampling_inputs(self, keys: Tensor) -> SamplingInputs | None:
        """Return what a fused draft draws by, with noise keys [B, K]; None where it cannot make q."""
        if self.edits_logits or self.greedy is not None or self.typical_p is not None:
            return None
        return SamplingInputs(
            self.temperature, self.top_k, self.top_p, self.min_p, self.cut, keys.contiguous()
        )

    @property
    def edits_logits(self) -> bool:
        return not (self.bias is None and self.bar is None and self.penalties is None)

    def of_prompt(self) -> SamplingTable:
        """Return the table without the transforms that depend on new tokens."""
        if self.penalties is None:
            return replace(self, bar=None)
        repetition = self.penalties * upload([[1.0], [0.0], [0.0]], self.penalties.device)
        return replace(self, penalties=repetition, bar=None)


def distribution_of(
    logits: Tensor,
    table: SamplingTable,
    masks: Tensor | None = None,
    penalty_context: PenaltyContext | None = None,
    *,
    argmax: bool = False,
) -> tuple[Distribution, Tensor]:
    """Return the distributions of logits [B, T, V] float32, and where these are finite [B, T] bool."""
    logits = _edited(logits, table, masks, penalty_context)
    if argmax or table.all_greedy:
        ids, finite = table.vocab_ops.argmax(logits)
        return Distribution(ids=ids, vocab_ops=table.vocab_ops), finite
    probs, finite = _transformed(logits, table)
    if table.greedy is None:
        return Distribution(probs, vocab_ops=table.vocab_ops), finite
    return Distribution(probs, table.vocab_ops.argmax(logits)[0], table.greedy, table.vocab_ops), finite


def _edited(
    logits: Tensor, table: SamplingTable, masks: Tensor | None, penalty_context: PenaltyContext | None
) -> Tensor:
    """Apply bias, masks and penalties. A row without any keeps every bit of its logits."""
    columns = logits.shape[1]

    def over(ids: Tensor) -> Tensor:
        return ids[:, None].expand(-1, columns, -1)  # [B, T, N]

    if table.bias is not None:
        logits = logits.scatter_add(2, over(table.bias.ids), over(table.bias.values))
    if masks is not None:
        logits = logits.masked_fill(~masks, -math.inf)
    if table.bar is not None:
        assert penalty_context is not None
        early = penalty_context.said(columns) < table.bar.until[:, None]  # [B, T]
        ends = over(table.bar.ids)
        bars = early[..., None].expand_as(ends)
        logits = logits.scatter(2, ends, logits.gather(2, ends).masked_fill(bars, -math.inf))
    if table.penalties is not None:
        assert penalty_context is not None
        repetition, presence, frequency = table.penalties[..., None, None]  # [B, 1, 1] each
        ids, counts, seen = penalty_context.token_counts(columns)
        x = logits.gather(2, over(ids))
        x = torch.where(seen, torch.where(x < 0, x * repetition, x / repetition), x)
        x = x - presence * (counts > 0) - frequency * counts
        logits = logits.scatter(2, over(ids), x)
    return logits


def _transformed(logits: Tensor, table: SamplingTable) -> tuple[Tensor, Tensor]:
    """Return the probabilities [B, T, V] after temperature and truncation, and where logits are finite."""
    probs, finite = table.vocab_ops.probs(logits, table)
    if table.typical_p is not None:
        probs = _typical(probs, table.typical_p[:, None, None])
    return probs, finite


def _typical(probs: Tensor, mass: Tensor) -> Tensor:
    """Keep the tokens whose surprise is nearest to the entropy, up to the mass [B, 1, 1] below 1."""
    surprise = -probs.log()
    entropy = total((probs * surprise).where(probs > 0, 0.0))
    distance = (surprise - entropy).abs().where(probs > 0, math.inf)
    # of equal distances the smallest id comes first on a GPU, too, whatever the batch
    ordered, at = distance.sort(stable=distance.is_cuda, dim=-1)
    last = (running(probs.gather(-1, at)) < mass).sum(-1, keepdim=True).clamp_max(probs.shape[-1] - 1)
    kept = probs.where(distance <= ordered.gather(-1, last), 0.0)
    return torch.where(mass < 1, kept / total(kept), probs)
