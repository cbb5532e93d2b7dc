"""Scores: log-probabilities of tokens, by the model and by the distribution that a token was drawn from.

They are made on the device beside the round's other results and travel with them, as the bits of float32
in int64, so that asking for them costs no further synchronisation.

The n likeliest tokens are a function of the row alone: ties go to the smallest id, and the n likeliest are
the first n of any larger number. So a request's alternatives do not depend on the others in its batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foredraft.decode.distribution import Distribution
from foredraft.decode.vocab_ops import log_softmax
from foredraft.model.memory import bits

Integers = NDArray[np.int64]

PIECE = 32  # rows that are ranked at a time: over a vocabulary of 128k their sort keys take 33 MB


@dataclass(frozen=True, slots=True)
class Score:
    """One token's log-probabilities, in nats.

    Attributes:
        token_id: The token.
        logprob: By the model's own logits.
        processed: By the distribution that it was drawn from, after bias, masks, penalties, temperature and
            truncation; -inf where a prompt's token, or one that the lossy rule kept, could not have been
            drawn.
        top: The likeliest tokens by the model's own logits, best first, and their log-probabilities. Of equal
            logits the smallest id comes first.
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
    """Return the scores of tokens [B, T], and the `top` likeliest, on the device: [B, T, 2 + 4 * top] int64.

    `logits` are the model's own, p their distributions.
    """
    own, probs = log_softmax(logits), p.dense(logits.shape[-1])
    processed = probs.log()
    figures = [bits(x.gather(-1, tokens[..., None])).long() for x in (own, processed)]
    # Ranked before the logarithm, which may round different numbers to equal ones.
    for ranked, logprobs in ((logits, own), (probs, processed)):
        ids = likeliest(ranked, top)
        figures += [ids, bits(logprobs.gather(-1, ids)).long()]
    return torch.cat(figures, -1)


def likeliest(x: Tensor, count: int) -> Tensor:
    """Return the ids of the `count` largest numbers in rows [B, T, V] float32, best first -> [B, T, count].

    Of equal numbers the smallest id comes first, whatever the count and the batch.
    """
    rows = x.reshape(-1, x.shape[-1])
    found = [_likeliest(rows[at : at + PIECE], count) for at in range(0, len(rows), PIECE)]
    return torch.cat(found).view(*x.shape[:-1], count)


def _likeliest(x: Tensor, count: int) -> Tensor:
    """Return the ids for rows [N, V].

    `topk` leaves the order of equal keys open, so every key is made different: above the order of the number,
    below the descending id.
    """
    order = (x + 0.0).view(torch.int32)  # adding turns -0.0 into 0.0, which it equals
    order ^= (order >> 31) & 0x7FFFFFFF  # the bits of negative numbers, read as integers, descend
    keys = order.long()
    keys <<= 32
    keys += torch.arange(x.shape[-1] - 1, -1, -1, device=x.device)
    best = keys.topk(count, dim=-1).values
    return x.shape[-1] - 1 - (best & 0xFFFFFFFF)


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
