"""Scores: log-probabilities of tokens, by the model and by the distribution that a token was drawn from.

They are made on the device beside the round's other results and travel with them, as the bits of float32
in int64, so that asking for them costs no further synchronisation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foredraft.decode.distribution import Distribution
from foredraft.model.device import bits

__all__ = ["Score", "score", "scores_in"]

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Score:
    """One token's log-probabilities, in nats.

    Attributes:
        token_id: The token.
        logprob: By the model's own logits.
        processed: By the distribution that it was drawn from, after bias, masks, penalties, temperature and
            truncation; -inf where a prompt's token, or one that the lossy rule kept, could not have been
            drawn.
        top: The likeliest tokens by the model's own logits, best first, and their log-probabilities.
        processed_top: The likeliest tokens by that distribution; tokens that cannot be drawn are left out.

    Examples:
        >>> greedy = SamplingParams(temperature=0, max_new_tokens=4, logprobs=3)
        >>> [output] = llm.generate("def add(a, b):", greedy)
        >>> first = output.logprobs[0]
        >>> first.top[0] == (first.token_id, first.logprob), first.processed, len(first.top)
        (True, 0.0, 3)
    """

    token_id: int
    logprob: float
    processed: float
    top: list[tuple[int, float]]
    processed_top: list[tuple[int, float]]


def score(logits: Tensor, p: Distribution, tokens: Tensor, top: int) -> Tensor:
    """Return the scores of tokens [B, T] on the device, [B, T, 2 + 4 * top] int64.

    Args:
        logits: [B, T, V], the model's own.
        p: Their distributions.
        tokens: [B, T].
        top: Likeliest tokens to score, at most V.
    """
    own = logits.log_softmax(-1)
    processed = p.dense(logits.shape[-1]).log()
    figures = [bits(x.gather(-1, tokens[..., None])).long() for x in (own, processed)]
    for x in (own, processed):
        best = x.topk(top, dim=-1)
        figures += [best.indices, bits(best.values).long()]
    return torch.cat(figures, -1)


def scores_in(figures: Integers, tokens: list[int], top: int, shown: int) -> list[Score]:
    """Return one row's scores from figures [T, 2 + 4 * top] of `score`, with `shown` likeliest tokens."""
    own, processed = _numbers(figures[:, :2]).T.tolist()
    ids, values, p_ids, p_values = (figures[:, 2 + i * top : 2 + i * top + shown] for i in range(4))

    def pairs(ids: Integers, values: Integers) -> list[list[tuple[int, float]]]:
        rows = zip(ids.tolist(), _numbers(values).tolist(), strict=True)
        return [[(i, v) for i, v in zip(*row, strict=True) if v > -math.inf] for row in rows]

    columns = zip(tokens, own, processed, pairs(ids, values), pairs(p_ids, p_values), strict=False)
    return [Score(*column) for column in columns]


def _numbers(x: Integers) -> NDArray[np.float32]:
    """Return the float32 numbers whose bits are in x."""
    return x.astype(np.int32).view(np.float32)
