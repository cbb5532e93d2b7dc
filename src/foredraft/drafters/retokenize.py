"""Retokenize: a draft model with another tokenizer guesses, and its text is encoded for the target.

Universal assisted generation (Korat et al. 2024, "Universal Assisted Generation: Faster Decoding with Any
Assistant Model"; string-level exact match in Timor et al. 2025, "Accelerating LLM Inference with Lossless
Speculative Decoding Algorithms for Heterogeneous Vocabularies"). The text so far is kept in the draft's own
tokens, from which it goes on greedily in its own cache. What it says is spelled in the target's ids, byte by
byte: an id is proposed only if its bytes are what the draft said next. What a law over the draft's tokens
would be over the target's is not known, so the draft is a guess, and its q one-hot.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.decode.sequence import Sequence
from foredraft.drafters.spelling import Spelling, characters
from foredraft.drafters.translation import Translation
from foredraft.model.cache import KVCache
from foredraft.model.device import upload
from foredraft.model.runner import Runner, next_chunk
from foredraft.model.tokenizer import Tokenizer

__all__ = ["Retokenize"]

logger = logging.getLogger(__name__)

WINDOW = 8  # of the target's last tokens are encoded again with what follows, for it may join them
LONGEST = 4  # so many draft tokens for one of the target's at most


@dataclass(slots=True)
class _Seat:
    """A sequence's place in the draft's cache, which has rows and lengths of its own."""

    row: int
    translation: Translation
    faults: int = 0


class Retokenize:
    """A Guesser over a Runner of its own.

    rows: sequences at a time. positions: of the draft's own tokens; a text beyond them gets no more drafts.
    """

    name = "retokenize"
    taps: tuple[int, ...] = ()
    max_length: int | None = None  # its limit is in its own tokens
    caches: tuple[KVCache, ...] = ()  # none whose rows follow the batch's: its lengths are others

    def __init__(
        self, runner: Runner, rows: int, positions: int, target: Tokenizer, draft: Tokenizer
    ) -> None:
        self.runner = runner
        self.positions = min(positions, runner.decoder.spec.max_positions)
        self.cache = runner.new_cache(rows, self.positions)
        self._target, self._draft = Spelling(target), Spelling(draft)
        self._rows: list[list[int]] = [[] for _ in range(rows)]  # the draft's tokens that each row holds
        self._free = list(reversed(range(rows)))
        self._seats: dict[int, _Seat] = {}  # by the sequence's id

    def join(self, sequence: Sequence) -> None:
        self._seats[sequence.id] = _Seat(self._free.pop(), Translation(self._target, self._draft))

    def propose(self, sequence: Sequence, budget: int) -> list[int]:
        seat = self._seats[sequence.id]
        if seat.faults > 1:
            return []
        seat.translation.extend(sequence.tokens)
        tokens, held = seat.translation.tokens(), seat.translation.held
        fineness = min(len(tokens) / len(sequence.tokens), LONGEST)
        # one more, for where the draft stops the target's last token may be incomplete
        count = min(math.ceil(budget * fineness) + 1, self.positions - len(tokens))
        if not tokens or count <= 0:
            return []
        said = self._draft.join(self._continue(sequence, seat, tokens, count))
        if not said.startswith(held):
            return []
        return self._spelled(sequence.tokens, said[len(held) :])[:budget]

    def observe(self, sequence: Sequence, start: int, states: Mapping[int, Tensor]) -> None:
        return None

    def rewind(self, sequence: Sequence) -> None:
        """What its row of the cache has too much is seen at the next draft, token by token."""
        self._seats[sequence.id].translation.keep(len(sequence.tokens))

    def leave(self, sequence: Sequence) -> None:
        """The row keeps what was read: the next sequence may begin with the same text."""
        seat = self._seats.pop(sequence.id, None)
        if seat is None:
            return
        if seat.faults or not sequence.proven:
            self._empty(seat.row)
        self._free.append(seat.row)

    def _continue(self, sequence: Sequence, seat: _Seat, tokens: list[int], count: int) -> list[int]:
        """The `count` most probable tokens after `tokens`, each after the one before; none after a fault."""
        read = self._rows[seat.row]
        start = self._catch_up(seat.row, tokens)
        column = upload([tokens[start:]], self.runner.decoder.device, torch.int64)  # [1, T]
        drawn: list[Tensor] = []
        finite: list[Tensor] = []
        for _ in range(count):
            width = column.shape[1]
            at = upload([width - 1], column.device)
            forward = self.runner.forward(self.cache, column, [start], first_row=seat.row, at=at, exact=False)
            assert forward.logits is not None
            top, column = forward.logits[:, 0].max(-1, keepdim=True)  # [1, 1] each
            drawn.append(column)
            finite.append(top.isfinite())
            start += width
        said, sound = torch.cat([torch.cat(drawn, 1), torch.cat(finite, 1).long()]).tolist()
        if not all(sound):
            self._fault(sequence, seat)
            return []
        read += [*tokens[len(read) :], *said[:-1]]
        return [int(token) for token in said]

    def _catch_up(self, row: int, tokens: list[int]) -> int:
        """Roll the row back to what it has in common with `tokens`, and read ahead where it is far behind;
        returns from where on to read. The last one is always read, for its logits."""
        read = self._rows[row]
        shared = min(len(read), len(tokens) - 1)
        start = next((at for at in range(shared) if read[at] != tokens[at]), shared)
        del read[start:]
        while len(tokens) - start > self.runner.max_queries:
            end = next_chunk(start, len(tokens) - 1, self.runner.chunk)
            self.runner.prefill(self.cache, row, tokens[start:end], start)
            read += tokens[start:end]
            start = end
        return start

    def _spelled(self, tokens: list[int], said: bytes) -> list[int]:
        """The target's ids of what was said after `tokens`."""
        window = self._window(tokens)
        ids = self._target.spell(characters(window + said))
        place = at = 0
        while place < len(window) and at < len(ids):
            place += len(self._target.of(ids[at]) or b"")
            at += 1
        if place == len(window):
            return ids[at:]
        return self._target.spell(characters(said))  # a token would join what is said already, and that stays

    def _window(self, tokens: list[int]) -> bytes:
        """The bytes of the last few tokens, from a whole character on."""
        parts: list[bytes] = []
        for token in reversed(tokens[-WINDOW:]):
            part = self._target.of(token)
            if part is None:
                break
            parts.append(part)
        return b"".join(reversed(parts)).lstrip(bytes(range(0x80, 0xC0)))

    def _fault(self, sequence: Sequence, seat: _Seat) -> None:
        """Logits that are not finite: the row starts anew, and the second time the sequence gets no more."""
        self._empty(seat.row)
        seat.faults += 1
        if seat.faults > 1:
            logger.warning("request %d goes on without %s: its logits are not finite", sequence.id, self.name)

    def _empty(self, row: int) -> None:
        self.cache.zero_row(row)
        self._rows[row].clear()
