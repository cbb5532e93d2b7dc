"""Retokenize: a draft model with another tokenizer drafts text, which is encoded for the target.

Universal assisted generation (Korat et al. 2024; string-level exact match in Timor et al. 2025). The draft
model continues the text in its own tokens, greedily; an id of the target is proposed only if its bytes are
the drafted ones. A distribution over the draft's tokens has no known counterpart over the target's, so q is
one-hot.

`Translation` keeps the text of a growing sequence in the other tokenizer's tokens. The text is cut into
chunks, and each is encoded by itself. A cut depends on the text before it and one character behind it, so a
closed chunk never changes, and the result is the same in whatever pieces the text came.
"""

from __future__ import annotations

import codecs
import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from foredraft.decode.drafter import DraftPass, ModelFreeDrafter
from foredraft.decode.round_draft import pad_rows
from foredraft.decode.sequence import Sequence
from foredraft.errors import is_fault
from foredraft.model.byte_codec import ByteCodec, characters
from foredraft.model.memory import upload
from foredraft.model.runner import Runner, next_chunk
from foredraft.model.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


# Characters of a chunk: it ends before the first word after SHORT, or at LONG. Longer ones leave
# fewer cuts, shorter ones less to encode again.
SHORT, LONG = 64, 256


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    """The state after a chunk was closed, to roll back to."""

    tokens: int  # source tokens that were read
    ids: int  # reader ids of all closed chunks
    rest: str  # text of the open chunk
    held: bytes  # bytes of an incomplete character
    begun: bool  # whether there is text before the open chunk


class Translation:
    """Reads tokens of one tokenizer and gives the tokens of another one for the same text."""

    def __init__(self, source: ByteCodec, reader: ByteCodec) -> None:
        self._source, self._reader = source, reader
        shared = source.specials.keys() & reader.specials.keys()
        self._shared_specials = {source.specials[content]: reader.specials[content] for content in shared}
        self._closed: list[int] = list(reader.prefix)  # ids of the closed chunks
        self._checkpoints: list[_Checkpoint] = []
        self._count = 0  # source tokens that were read
        self._open = ""  # text of the open chunk
        self.held = b""  # bytes of an incomplete character at the end, which `tokens` does not cover
        self._begun = False

    def extend(self, tokens: Seq[int]) -> None:
        if not self._checkpoints:  # the reader has its own BOS
            prefix = self._source.prefix
            self._count = len(prefix) if list(tokens[: len(prefix)]) == prefix else 0
            self._save()
        data = bytearray()
        for token in tokens[self._count :]:
            self._count += 1
            part = self._source.of(token)
            if part is not None:
                data += part
                continue
            self._read(bytes(data))
            data.clear()
            # close the chunk, and add the reader's special token of the same name, if it has one
            self._close(self._open + self.held.decode(errors="replace"))
            self._open, self.held = "", b""
            if token in self._shared_specials:
                self._closed.append(self._shared_specials[token])
            self._save()
        self._read(bytes(data))

    def keep(self, count: int) -> None:
        """Roll back to the first `count` source tokens or a few fewer; `extend` reads those again."""
        if count >= self._count:
            return
        while len(self._checkpoints) > 1 and self._checkpoints[-1].tokens > count:
            self._checkpoints.pop()
        last = self._checkpoints[-1]
        del self._closed[last.ids :]
        self._count, self._open, self.held, self._begun = last.tokens, last.rest, last.held, last.begun

    def tokens(self) -> list[int]:
        """Return the reader's ids of the text so far, without the held bytes."""
        return self._closed + self._encoded(self._open)

    @property
    def closed(self) -> int:
        """How many of the reader's ids no longer text changes."""
        return len(self._closed)

    def _read(self, data: bytes) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._open += decoder.decode(self.held + data)
        self.held = decoder.getstate()[0]
        while (cut := _cut(self._open)) is not None:
            self._close(self._open[:cut])
            self._open = self._open[cut:]
            self._save()

    def _close(self, text: str) -> None:
        self._closed += self._encoded(text)
        self._begun = self._begun or bool(text)

    def _save(self) -> None:
        self._checkpoints.append(
            _Checkpoint(self._count, len(self._closed), self._open, self.held, self._begun)
        )

    def _encoded(self, text: str) -> list[int]:
        if not text:
            return []
        if not self._begun:  # a space that the source's tokenizer put in front does not belong to the text
            return self._reader.encode(text.removeprefix(" ") if self._source.pads else text)
        ids = self._reader.spell(text)
        return ids if self._reader.join(ids) == text.encode() else self._reader.encode(text)


def _cut(text: str) -> int | None:
    """Return where the first chunk of `text` ends; None while that is not certain."""
    for at in range(SHORT, min(len(text) - 1, LONG)):
        if text[at] == " " and not text[at - 1].isspace() and not text[at + 1].isspace():
            return at
    return LONG if len(text) > LONG else None


WINDOW = 8  # last tokens of the target that are encoded again with the draft, because a token may span both
LONGEST = 4  # draft tokens for one of the target's, at most
NEAR = 8  # unread tokens up to which rows catch up in one padded pass; a row with more reads ahead by itself


@dataclass(slots=True)
class _Seat:
    """A sequence's place in the draft's cache, which has rows and lengths of its own."""

    sequence: Sequence  # the sequence
    row: int  # of the draft's cache
    translation: Translation  # its text in the draft's tokens
    faults: int = 0  # rounds in which the draft's logits were not finite
    dropped: bool = False  # the sequence gets no further drafts
    read: int = 0  # the sequence's tokens that the cache covers, those of the last draft included


@dataclass(frozen=True, slots=True)
class _Turn:
    """One seat's work in a round: continue `tokens` by `count` of the draft's tokens, perhaps 0."""

    seat: _Seat
    budget: int
    tokens: list[int]
    count: int
    closed: int  # the first ones, which will not change


class Retokenize(ModelFreeDrafter):
    """Drafts by a runner with another tokenizer; its cache's rows do not follow the batch's."""

    name = "retokenize"
    whole_model = True
    draft_pass: DraftPass

    def __init__(
        self, runner: Runner, rows: int, positions: int, target: Tokenizer, draft: Tokenizer
    ) -> None:
        self.draft_pass = DraftPass(runner)
        self.positions = min(positions, runner.decoder.spec.max_positions)  # of the draft's own tokens
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
        def translated() -> list[int]:
            seat.translation.extend(seat.sequence.tokens)
            return seat.translation.tokens()

        tokens = self._ask(seat, translated)
        closed, count, states = seat.translation.closed, 0, self.cache.recurrent
        if tokens:
            most = self.positions if states is None else min(self.positions, closed + states.reach)
            count = min(self._steps(budget, seat.sequence.tokens, tokens), most - len(tokens))
        return _Turn(seat, budget, tokens, count, closed)

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
        """Return how many draft tokens `budget` tokens of the target take, by the text so far in both."""
        own = len(text) - len(self._target.prefix)
        read = len(tokens) - len(self._draft.prefix)
        fineness = min(read / own, LONGEST) if own > 0 else 1.0
        return max(1, round(budget * fineness))

    def _continue(self, turns: dict[int, _Turn]) -> dict[int, list[int]]:
        """Return each row's greedy continuation, one forward a step; none of a row with non-finite logits."""
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
        """Return each row's unread tokens [B, T], padded, their first positions, and their counts."""
        starts, behind = [0] * len(rows), [[0] for _ in rows]
        for at, row in enumerate(rows):
            if row in turns:
                starts[at] = self._catch_up(row, turns[row].tokens, turns[row].closed)
                behind[at] = turns[row].tokens[starts[at] :]
        counts = [len(tokens) for tokens in behind]
        return upload(pad_rows(behind), self.draft_pass.runner.decoder.device, torch.int64), starts, counts

    def _catch_up(self, row: int, tokens: list[int], closed: int) -> int:
        """Roll a row back to what it shares with `tokens`, and read ahead; return where to go on.

        The states of recurrent layers follow what is closed, and begin anew where other text was.
        """
        read, states, stop = self._rows[row], self.cache.recurrent, len(tokens) - 1
        shared = min(len(read), stop)
        start = next((at for at in range(shared) if read[at] != tokens[at]), shared)
        if states is not None:
            self.cache.lengths[row], stop = closed, min(closed, stop)
            start = 0 if start < int(states.at[:, row].max()) else start
        del read[start:]
        while start < stop and len(tokens) - start > NEAR:
            end = next_chunk(start, stop, self.draft_pass.runner.chunk)
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
        seat.read, seat.faults = 0, seat.faults + 1
        if seat.faults > 1:
            self._drop(seat, "its logits are not finite")

    def _drop(self, seat: _Seat, reason: str) -> None:
        seat.dropped = True
        logger.warning("request %d continues without %s: %s", seat.sequence.id, self.name, reason)

    def _empty(self, row: int) -> None:
        self.cache.zero_row(row)
        self._rows[row].clear()
