"""Runners for a drafter with another tokenizer: one that knows what comes, and one that babbles.

Their caches hold token ids, and what they say comes of what the cache holds: a stale row says something else.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from foredraft.drafters.byte_codec import ByteCodec
from foredraft.model.runner import Forward
from tests.support.checkpoints import TEXT

__all__ = ["TRUTH", "Babbler", "Prophet"]

TRUTH = TEXT + "A second look, and  a third: großer 🙂 Deich."
SIZE = 700  # of the vocabulary
PADDING = -1  # in a cache, where a pass wrote what is nobody's


class Prophet:
    """A runner that knows what comes: the next token of the truth after the text that its cache row holds.

    broken: by row, forwards with NaN to come.
    forwarded, passes: tokens read and forwards made so far.
    """

    def __init__(self, spelling: ByteCodec, truth: str = TRUTH, *, positions: int = 10_000) -> None:
        self.spelling, self.truth = spelling, truth.encode()
        self.decoder = SimpleNamespace(
            device=torch.device("cpu"), spec=SimpleNamespace(max_positions=positions, vocab_size=SIZE)
        )
        self.chunk, self.max_queries = 32, 8
        self.forwarded = self.passes = 0
        self.broken: Counter[int] = Counter()
        self.zeroed: list[int] = []

    def new_cache(self, rows: int, positions: int) -> Any:
        self.rows: list[list[int]] = [[] for _ in range(rows)]
        self.positions = positions
        return SimpleNamespace(zero_row=self.zero_row)

    def zero_row(self, row: int) -> None:
        self.rows[row].clear()
        self.zeroed.append(row)

    def prefill(self, cache: Any, row: int, tokens: list[int], start: int) -> None:
        assert start // self.chunk == (start + len(tokens) - 1) // self.chunk
        self.write(row, tokens, start)

    def write(self, row: int, tokens: list[int], start: int, padding: int = 0) -> None:
        assert PADDING not in self.rows[row][:start], "it skipped a position"
        assert start <= len(self.rows[row]), "it skipped a position"
        assert start + len(tokens) <= self.positions
        self.rows[row][start:] = tokens + [PADDING] * padding
        self.forwarded += len(tokens)

    def forward(
        self,
        cache: Any,
        tokens: Tensor,
        starts: list[int],
        *,
        first_row: int,
        idle: list[bool],
        counts: list[int],
        at: Tensor,
        plan: None,
        exact: bool,
    ) -> Forward:
        assert not exact
        assert not all(idle)
        assert first_row + len(tokens) <= len(self.rows)
        self.passes += 1
        logits = torch.zeros(len(tokens), 1, SIZE)
        for b, ids in enumerate(tokens.tolist()):
            if idle[b]:  # what comes of it nobody may look at
                logits[b] = math.nan if self.passes % 2 else torch.arange(SIZE) == 200 + self.passes % 99
                continue
            row = first_row + b
            self.write(row, ids[: counts[b]], starts[b], len(ids) - counts[b])
            logits[b, 0, self.next(self.rows[row][: starts[b] + int(at[b]) + 1])] = 9.0
            if self.broken[row]:
                self.broken[row] -= 1
                logits[b, 0, 5] = math.nan
        return Forward(logits, logits, {})

    def next(self, ids: list[int]) -> int:
        """Of ids in the cache; </s> where the truth does not go on from them."""
        assert PADDING not in ids, "it read what padding wrote"
        said = b"".join(self.spelling.of(id) or b"" for id in ids)
        said = said[1:] if self.spelling.pads else said
        if not self.truth.startswith(said) or said == self.truth:
            return 2
        start = len(said)
        while self.truth[start] & 0xC0 == 0x80:  # within a character
            start -= 1
        for id in self.spelling.spell(self.truth[start:].decode()):
            if start == len(said):
                return id
            start += len(self.spelling.of(id) or b"")
        return 2


class Babbler(Prophet):
    """It says any of the truth's tokens, depending on every token that it has read."""

    @cached_property
    def words(self) -> list[int]:
        return self.spelling.spell(TRUTH)

    def next(self, ids: list[int]) -> int:
        assert PADDING not in ids, "it read what padding wrote"
        return random.Random(str(ids)).choice(self.words)
