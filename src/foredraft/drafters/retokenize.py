"""Retokenize: a draft model with another tokenizer guesses, and its text is encoded for the target.

Universal assisted generation (Korat et al. 2024, "Universal Assisted Generation: Faster Decoding with Any
Assistant Model"; string-level exact match in Timor et al. 2025, "Accelerating LLM Inference with Lossless
Speculative Decoding Algorithms for Heterogeneous Vocabularies"). The text so far is kept in the draft's own
tokens, from which it goes on greedily in its own cache, all texts of a round side by side. What it says is
spelled in the target's ids, byte by byte: an id is proposed only if its bytes are what the draft said next.
What a law over the draft's tokens would be over the target's is not known, so the draft is a guess, and its q
one-hot.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.decode.draft_pass import DraftPass
from foredraft.decode.sequence import Sequence
from foredraft.drafters.byte_codec import ByteCodec, characters
from foredraft.drafters.translation import Translation
from foredraft.model.cache import KVCache
from foredraft.model.device import upload
from foredraft.model.runner import Runner, next_chunk
from foredraft.model.tokenizer import Tokenizer

__all__ = ["Retokenize"]

logger = logging.getLogger(__name__)

WINDOW = 8  # of the target's last tokens are encoded again with what follows, for it may join them
LONGEST = 4  # so many draft tokens for one of the target's at most
NEAR = 8  # so many tokens at most are read together with other rows, all padded to the one furthest behind


@dataclass(slots=True)
class _Seat:
    """A sequence's place in the draft's cache, which has rows and lengths of its own. read: how many of the
    sequence's tokens that cache covers, those of the last draft included."""

    sequence: Sequence
    row: int
    translation: Translation
    faults: int = 0
    read: int = 0


@dataclass(frozen=True, slots=True)
class _Turn:
    """What a seat is to do in a round: after `tokens`, go on for `count` more; both are the draft's."""

    seat: _Seat
    budget: int  # of the target's tokens
    tokens: list[int]
    count: int  # 0: it says nothing this time


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
        self.draft_pass = DraftPass(runner)
        self.positions = min(positions, runner.decoder.spec.max_positions)
        self.cache = runner.new_cache(rows, self.positions)
        self._target, self._draft = ByteCodec(target), ByteCodec(draft)
        self._rows: list[list[int]] = [[] for _ in range(rows)]  # the draft's tokens that each row holds
        self._free = list(range(rows))
        self._seats: dict[int, _Seat] = {}  # by the sequence's id

    def join(self, sequence: Sequence) -> None:
        row = min(self._free)  # low ones, since a pass spans all rows between those that draft
        self._free.remove(row)
        self._seats[sequence.id] = _Seat(sequence, row, Translation(self._target, self._draft))

    def propose(self, requests: list[tuple[Sequence, int]]) -> list[list[int]]:
        turns = [self._turn(self._seats[sequence.id], budget) for sequence, budget in requests]
        said = self._continue({turn.seat.row: turn for turn in turns if turn.count > 0})
        guesses = [self._guess(turn, said.get(turn.seat.row, [])) for turn in turns]
        for turn, guess in zip(turns, guesses, strict=True):
            if turn.seat.row in said:
                turn.seat.read = len(turn.seat.sequence.tokens) + len(guess)
        return guesses

    def length(self, sequence: Sequence) -> int:
        return min(self._seats[sequence.id].read, len(sequence.tokens) - 1)

    def observe(self, sequence: Sequence, start: int, states: Mapping[int, Tensor]) -> None:
        return None

    def rewind(self, sequence: Sequence) -> None:
        """What its row of the cache has too much is seen at the next draft, token by token."""
        seat = self._seats[sequence.id]
        seat.translation.keep(len(sequence.tokens))
        seat.read = min(seat.read, len(sequence.tokens) - 1)

    def leave(self, sequence: Sequence) -> None:
        """The row keeps what was read: the next sequence may begin with the same text."""
        seat = self._seats.pop(sequence.id, None)
        if seat is None:
            return
        if seat.faults or not sequence.cache_finite:
            self._empty(seat.row)
        self._free.append(seat.row)

    def _turn(self, seat: _Seat, budget: int) -> _Turn:
        tokens: list[int] = []
        count = 0
        if seat.faults <= 1:
            seat.translation.extend(seat.sequence.tokens)
            tokens = seat.translation.tokens()
        if tokens:
            fineness = min(len(tokens) / len(seat.sequence.tokens), LONGEST)
            # one more, for where the draft stops the target's last token may be incomplete
            count = min(math.ceil(budget * fineness) + 1, self.positions - len(tokens))
        return _Turn(seat, budget, tokens, count)

    def _continue(self, turns: dict[int, _Turn]) -> dict[int, list[int]]:
        """By row, the `count` most probable tokens after `tokens`, each after the one before; none after a
        fault. All rows take a step in one forward, and the host reads once, at the end."""
        if not turns:
            return {}
        rows = range(min(turns), max(turns) + 1)  # those in between are idle, as is who has said enough
        steps = [turns[row].count if row in turns else 0 for row in rows]
        tokens, starts, counts = self._behind(turns, rows)
        drawn: list[Tensor] = []
        finite: list[Tensor] = []
        for step in range(max(steps)):
            forward = self.draft_pass(
                self.cache, tokens, starts, first_row=rows.start, idle=[step >= n for n in steps],
                counts=counts, at=upload([n - 1 for n in counts], tokens.device),
            )  # fmt: skip
            assert forward.logits is not None
            top, tokens = forward.logits[:, 0].max(-1, keepdim=True)  # [B, 1] each
            drawn.append(tokens)
            finite.append(top.isfinite())
            starts = [start + count for start, count in zip(starts, counts, strict=True)]
            counts = [1] * len(rows)
        ids, sound = torch.stack([torch.cat(drawn, 1), torch.cat(finite, 1).long()]).tolist()  # [2, B, K]
        said: dict[int, list[int]] = {}
        for row, turn in turns.items():
            at = row - rows.start
            if not all(sound[at][: turn.count]):
                self._fault(turn.seat)
                continue
            said[row] = ids[at][: turn.count]
            self._rows[row] += [*turn.tokens[len(self._rows[row]) :], *said[row][:-1]]
        return said

    def _behind(self, turns: dict[int, _Turn], rows: range) -> tuple[Tensor, list[int], list[int]]:
        """What each row has to read first, padded to [B, T], from where on, and how much of it is real. The
        padding, which may lie in the cache's slack, is overwritten before any position after it is read."""
        starts = [self._catch_up(row, turns[row].tokens) if row in turns else 0 for row in rows]
        behind = [
            turns[row].tokens[start:] if row in turns else [0]
            for row, start in zip(rows, starts, strict=True)
        ]
        counts = [len(tokens) for tokens in behind]
        padded = [tokens + [0] * (max(counts) - len(tokens)) for tokens in behind]
        return upload(padded, self.draft_pass.runner.decoder.device, torch.int64), starts, counts

    def _catch_up(self, row: int, tokens: list[int]) -> int:
        """Roll the row back to what it has in common with `tokens`, and read ahead where it is far behind;
        returns from where on to read. The last one is always read, for its logits."""
        read = self._rows[row]
        shared = min(len(read), len(tokens) - 1)
        start = next((at for at in range(shared) if read[at] != tokens[at]), shared)
        del read[start:]
        while len(tokens) - start > NEAR:
            end = next_chunk(start, len(tokens) - 1, self.draft_pass.runner.chunk)
            self.draft_pass.runner.prefill(self.cache, row, tokens[start:end], start)
            read += tokens[start:end]
            start = end
        return start

    def _guess(self, turn: _Turn, ids: list[int]) -> list[int]:
        """The target's ids of what the draft said; none if that does not begin with what is held."""
        said, held = self._draft.join(ids), turn.seat.translation.held
        if not said or not said.startswith(held):
            return []
        return self._spelled(turn.seat.sequence.tokens, said[len(held) :])[: turn.budget]

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

    def _fault(self, seat: _Seat) -> None:
        """Logits that are not finite: the row starts anew, and the second time the sequence gets no more."""
        self._empty(seat.row)
        seat.read = 0
        seat.faults += 1
        if seat.faults > 1:
            logger.warning(
                "request %d goes on without %s: its logits are not finite", seat.sequence.id, self.name
            )

    def _empty(self, row: int) -> None:
        self.cache.zero_row(row)
        self._rows[row].clear()
