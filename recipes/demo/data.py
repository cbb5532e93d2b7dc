"""Shuffled blocks of a token stream."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 1024  # tokens of one shuffled unit of the stream; also the longest sequence


class BlockStream:
    """Serve the blocks of a token stream in an order that depends on the seed alone."""

    def __init__(self, tokens: NDArray[np.uint16], seed: int) -> None:
        self.tokens = tokens
        self.order = np.random.default_rng(seed).permutation((len(tokens) - 1) // BLOCK)

    def take(self, first: int, count: int, length: int) -> tuple[Tensor, Tensor]:
        """Return inputs and labels [count * BLOCK / length, length] from a block of the shuffled order on.

        The order repeats from its end.
        """
        starts = [int(self.order[(first + i) % len(self.order)]) * BLOCK for i in range(count)]
        ids = np.stack([self.tokens[start : start + BLOCK + 1] for start in starts]).astype(np.int64)
        inputs, labels = torch.from_numpy(ids[:, :-1].copy()), torch.from_numpy(ids[:, 1:].copy())
        return inputs.view(-1, length), labels.view(-1, length)
