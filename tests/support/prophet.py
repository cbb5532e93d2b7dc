"""Runners for drafters with another tokenizer, whose logits depend on the ids in the cache: a stale row is noticed."""

from __future__ import annotations

import math
import random
from collections import Counter
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from foredraft.decode.params import SamplingParams
from foredraft.decode.sequence import Sequence
from foredraft.model.byte_codec import ByteCodec
from foredraft.model.runner import Forward
from tests.support.checkpoints import TEXT

TRUTH = TEXT + "A second look, and  a third: großer 🙂 Deich."
SIZE = 700  # ids of the vocabulary
PADDING = -1  # marks cache positions that hold the padding of a ragged batch


def sequence_of(id: int, tokens: list[int]) -> Sequence:
    made = Sequence(id, list(tokens), SamplingParams(max_new_tokens=999), seed=1, drafters=("retokenize",))
    made.cache_finite = True
    return made


class Prophet:
    """A runner that continues the text in its cache row by the next token of `truth`."""

    def __init__(self, codec: ByteCodec, truth: str = TRUTH, *, positions: int = 10_000) -> None:
        self.codec, self.truth = codec, truth.encode()
        spec = SimpleNamespace(max_positions=positions, vocab_size=SIZE)
        self.decoder = SimpleNamespace(device=torch.device("cpu"), spec=spec)
        self.chunk, self.max_queries, self.by_kernels = 32, 8, False
        self.forwarded = self.passes = 0  # tokens read, and forwards made
        self.broken: Counter[int] = Counter()  # row -> coming forwards whose logits are NaN
        self.zeroed: list[int] = []  # rows, in order

    def new_cache(self, rows: int, positions: int) -> Any:
        self.rows: list[list[int]] = [[] for _ in range(rows)]
        self.positions = positions
        return SimpleNamespace(zero_row=self.zero_row, recurrent=None)

    def zero_row(self, row: int) -> None:
        self.rows[row].clear()
        self.zeroed.append(row)

    def prefill(self, cache: Any, row: int, tokens: list[int], start: int) -> None:
        assert start // self.chunk == (start + len(tokens) - 1) // self.chunk
        self.write(row, tokens, start)

    def write(self, row: int, tokens: list[int], start: int, padding: int = 0) -> None:
        assert PADDING not in self.rows[row][:start], "a position was skipped"
        assert start <= len(self.rows[row]), "a position was skipped"
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
        **options: Any,
    ) -> Forward:
        assert options == {"plan": None, "aux_layers": (), "invariant": False}
        assert not all(idle)
        assert first_row + len(tokens) <= len(self.rows)
        self.passes += 1
        logits = torch.zeros(len(tokens), 1, SIZE)
        for b, ids in enumerate(tokens.tolist()):
            if idle[b]:  # logits that must not be read
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
        assert PADDING not in ids, "padding was read"
        text = b"".join(self.codec.of(id) or b"" for id in ids)
        text = text[1:] if self.codec.pads else text
        if not self.truth.startswith(text) or text == self.truth:
            return 2
        start = len(text)
        while self.truth[start] & 0xC0 == 0x80:  # within a character
            start -= 1
        for id in self.codec.spell(self.truth[start:].decode()):
            if start == len(text):
                return id
            start += len(self.codec.of(id) or b"")
        return 2


class Babbler(Prophet):
    @cached_property
    def words(self) -> list[int]:
        return self.codec.spell(TRUTH)

    def next(self, ids: list[int]) -> int:
        assert PADDING not in ids, "padding was read"
        return random.Random(str(ids)).choice(self.words)
