"""Retokenize: a draft model with another tokenizer drafts text, which is encoded for the target.

Universal assisted generation (Korat et al. 2024, "Universal Assisted Generation: Faster Decoding with Any
Assistant Model"; string-level exact match in Timor et al. 2025, "Accelerating LLM Inference with Lossless
Speculative Decoding Algorithms for Heterogeneous Vocabularies"). The text so far is kept in the draft's own
tokens, which it continues greedily in its own cache, all rows of a round side by side. The drafted text is
encoded in the target's ids, byte by byte: an id is proposed only if its bytes are the drafted ones. A
distribution over the draft's tokens has no known counterpart over the target's, so the draft is a guess and
its q is one-hot.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from foredraft.decode.drafter import DraftPass, Guesser
from foredraft.decode.sequence import Sequence
from foredraft.drafters.asset import Parts
from foredraft.drafters.draft_checkpoint import DraftCheckpoint, FoundModel
from foredraft.drafters.translation import Translation
from foredraft.errors import is_fault
from foredraft.model.byte_codec import ByteCodec, characters
from foredraft.model.runner import Runner, next_chunk
from foredraft.model.tokenizer import Tokenizer
from foredraft.model.transfers import upload

__all__ = ["ASSET", "Retokenize"]

logger = logging.getLogger(__name__)

WINDOW = 8  # last tokens of the target that are encoded again with the draft, because a token may span both
LONGEST = 4  # draft tokens for one of the target's, at most
# Draft tokens for each token of the target that the cache has room for. Few vocabularies split text into more
# than twice as many tokens as another one.
STRETCH = 2
NEAR = 8  # unread tokens up to which rows catch up in one padded pass; a row with more reads ahead by itself


@dataclass(slots=True)
class _Seat:
    """A sequence's place in the draft's cache, which has rows and lengths of its own.

    Attributes:
        sequence: The sequence.
        row: Of the draft's cache.
        translation: Its text in the draft's tokens.
        faults: Rounds in which the draft's logits were not finite.
        dropped: The sequence gets no further drafts.
        read: The sequence's tokens that the cache covers, those of the last draft included.
    """

    sequence: Sequence
    row: int
    translation: Translation
    faults: int = 0
    dropped: bool = False
    read: int = 0


@dataclass(frozen=True, slots=True)
class _Turn:
    """One seat's work in a round: continue `tokens` by `count` tokens, both of the draft's.

    `budget` counts the target's tokens; a `count` of 0 proposes nothing this time.
    """

    seat: _Seat
    budget: int
    tokens: list[int]
    count: int


class Retokenize(Guesser):
    """A guesser over a runner of its own, with another tokenizer than the target.

    Its limit of positions counts its own tokens, so `max_length` is None; and the rows of its cache do not
    follow the batch's, because their lengths differ, so `caches` is empty.

    Args:
        runner: Of the draft model.
        rows: Sequences at a time.
        positions: Of the draft's own tokens; a text beyond them gets no more drafts.
        target: The target's tokenizer.
        draft: The draft's tokenizer.
    """

    name = "retokenize"
    whole_model = True
    draft_pass: DraftPass

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
        guesses = [
            self._ask(turn.seat, partial(self._guess, turn, said.get(turn.seat.row, []))) for turn in turns
        ]
        for turn, guess in zip(turns, guesses, strict=True):
            if turn.seat.row in said:
                turn.seat.read = len(turn.seat.sequence.tokens) + len(guess)
        return guesses

    def unread(self, sequence: Sequence) -> int:
        last = len(sequence.tokens) - 1
        return last - min(self._seats[sequence.id].read, last)

    def rewind(self, sequence: Sequence) -> None:
        # The next draft compares the cache row with the text, token by token.
        seat = self._seats[sequence.id]
        if seat.dropped:  # its translation may have stopped anywhere
            return
        seat.translation.keep(len(sequence.tokens))
        seat.read = min(seat.read, len(sequence.tokens) - 1)

    def leave(self, sequence: Sequence) -> None:
        # The row keeps what it read: the next sequence may begin with the same text.
        seat = self._seats.pop(sequence.id, None)
        if seat is None:
            return
        if seat.faults or not sequence.cache_finite:
            self._empty(seat.row)
        self._free.append(seat.row)

    def _turn(self, seat: _Seat, budget: int) -> _Turn:
        tokens = self._ask(seat, partial(self._translated, seat))
        count = 0
        if tokens:
            count = min(self._steps(budget, seat.sequence.tokens, tokens), self.positions - len(tokens))
        return _Turn(seat, budget, tokens, count)

    def _translated(self, seat: _Seat) -> list[int]:
        """Return the text of a seat's sequence in the draft's tokens."""
        seat.translation.extend(seat.sequence.tokens)
        return seat.translation.tokens()

    def _ask(self, seat: _Seat, ask: Callable[[], list[int]]) -> list[int]:
        """Return tokens that the tokenizers give for a seat; none, now and later, once they fail for it."""
        if seat.dropped:
            return []
        try:
            return ask()
        except BaseException as error:  # a panic of a library in Rust is no Exception
            if not is_fault(error):
                raise
            self._drop(seat, f"a tokenizer failed ({type(error).__name__}: {error})")
            return []

    def _steps(self, budget: int, text: list[int], tokens: list[int]) -> int:
        """Return how many draft tokens `budget` tokens of the target take, by the text so far in both.

        The tokens before a text (BOS) count nowhere: of a short text they are a large part. A step beyond
        this estimate costs as much as any other, and seldom changes the guess: only where a token of the
        target spans the place at which the draft stops.

        Args:
            budget: Of the target's tokens.
            text: The sequence in the target's tokens.
            tokens: The same text in the draft's.
        """
        own = len(text) - len(self._target.prefix)
        read = len(tokens) - len(self._draft.prefix)
        fineness = min(read / own, LONGEST) if own > 0 else 1.0
        return max(1, round(budget * fineness))

    def _continue(self, turns: dict[int, _Turn]) -> dict[int, list[int]]:
        """Return each row's greedy continuation of `count` tokens; no entry for a row with non-finite logits.

        All rows take a step in one forward, and the host reads the device once, at the end.
        """
        if not turns:
            return {}
        rows = range(min(turns), max(turns) + 1)  # rows in between are idle, and so are rows that are done
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
        """Return each row's unread tokens, padded to [B, T], their first positions, and their counts.

        A later step overwrites the padding before it attends there; the padding may lie in the cache's slack.
        """
        starts = [self._catch_up(row, turns[row].tokens) if row in turns else 0 for row in rows]
        behind = [
            turns[row].tokens[start:] if row in turns else [0]
            for row, start in zip(rows, starts, strict=True)
        ]
        counts = [len(tokens) for tokens in behind]
        padded = [tokens + [0] * (max(counts) - len(tokens)) for tokens in behind]
        return upload(padded, self.draft_pass.runner.decoder.device, torch.int64), starts, counts

    def _catch_up(self, row: int, tokens: list[int]) -> int:
        """Roll the row back to its common prefix with `tokens`, and read ahead where it is far behind.

        Returns the position from which to read. The last token is always read, for its logits.
        """
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
        """Return the target's ids of the drafted text; none if it does not begin with the bytes held back."""
        said, held = self._draft.join(ids), turn.seat.translation.held
        if not said or not said.startswith(held):
            return []
        return self._spelled(turn.seat.sequence.tokens, said[len(held) :])[: turn.budget]

    def _spelled(self, tokens: list[int], said: bytes) -> list[int]:
        """Return the target's ids of the bytes `said`, which follow `tokens`."""
        window = self._window(tokens)
        ids = self._target.spell(characters(window + said))
        place = at = 0
        while place < len(window) and at < len(ids):
            place += len(self._target.of(ids[at]) or b"")
            at += 1
        if place == len(window):
            return ids[at:]
        return self._target.spell(characters(said))  # a token would span committed text, which cannot change

    def _window(self, tokens: list[int]) -> bytes:
        """Return the bytes of the last few tokens, from the first whole character on."""
        parts: list[bytes] = []
        for token in reversed(tokens[-WINDOW:]):
            part = self._target.of(token)
            if part is None:
                break
            parts.append(part)
        return b"".join(reversed(parts)).lstrip(bytes(range(0x80, 0xC0)))

    def _fault(self, seat: _Seat) -> None:
        """Handle non-finite logits: the row starts anew; after a second fault the sequence gets no drafts."""
        self._empty(seat.row)
        seat.read = 0
        seat.faults += 1
        if seat.faults > 1:
            self._drop(seat, "its logits are not finite")

    def _drop(self, seat: _Seat, reason: str) -> None:
        """Give a sequence no further drafts."""
        seat.dropped = True
        logger.warning("request %d continues without %s: %s", seat.sequence.id, self.name, reason)

    def _empty(self, row: int) -> None:
        self.cache.zero_row(row)
        self._rows[row].clear()


def _build(parts: Parts, found: FoundModel) -> Retokenize:
    [runner] = parts.models
    assert parts.tokenizer is not None and found.draft.tokenizer is not None  # they were compared
    return Retokenize(runner, parts.rows, STRETCH * parts.positions, parts.tokenizer, found.draft.tokenizer)


ASSET = DraftCheckpoint(_build, other_tokenizer=True, stretch=STRETCH)
