"""Sequence: one sample of a request, from its prompt ids to its finish reason.

All state here is host state and changes at commit only. Before each round `len(tokens) - 1` positions are in
the target's cache: the last token is pending, so the first token is no special case.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from foredraft.decode.constraint import Constraint, Guarded
from foredraft.decode.noise import seed_key
from foredraft.decode.params import SamplingParams
from foredraft.decode.prefix_cache import NOTHING, Prefix
from foredraft.decode.scores import Score
from foredraft.decode.stats import Round, RoundTrace
from foredraft.decode.text_buffer import TextBuffer
from foredraft.model.cache import KVCache, Span


class TokenCounts:
    """The distinct tokens of prompt and output, and their counts in the output, 0 after a rollback."""

    def __init__(self, prompt: Iterable[int]) -> None:
        self._place = {token: place for place, token in enumerate(dict.fromkeys(prompt))}
        size = len(self._place)
        self._ids = np.array(list(self._place), dtype=np.int64)
        self._counts = np.zeros(size, dtype=np.float32)
        self._prompted = np.ones(size, dtype=np.bool_)

    def __len__(self) -> int:
        return len(self._place)

    def count(self, token: int, times: int) -> None:
        """Add `times` to the count of a token; a rollback adds -1."""
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._ids):
            grown = max(64, 2 * place)
            for name in ("_ids", "_counts", "_prompted"):
                array = getattr(self, name)
                setattr(self, name, np.concatenate([array, np.zeros(grown - place, dtype=array.dtype)]))
        self._ids[place] = token
        self._counts[place] += times

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return ids int64, counts float32, and whether the prompt has the token, bool; [S] each."""
        return self._ids[: len(self)], self._counts[: len(self)], self._prompted[: len(self)]


class State(StrEnum):
    WAITING = "waiting"  # has no row: not yet, or not now
    PREFILLING = "prefilling"  # has a row; its prompt is being read
    RUNNING = "running"  # in the round
    FINISHED = "finished"


class Finish(StrEnum):
    EOS = "eos"  # or a stop token
    STOP = "stop"  # a stop string
    LENGTH = "length"
    CONSTRAINT = "constraint"  # no token was allowed, or too many were taken back
    CANCELLED = "cancelled"
    ERROR = "error"


class TokenOrigin(StrEnum):
    DRAFTER = "drafter"  # drafted and accepted
    TARGET = "target"  # a plain step, or the correction after a rejection
    BONUS = "bonus"  # the target's token after a draft that was accepted whole


@dataclass(eq=False, slots=True)
class Sequence:
    """One sample of a request: what the request gives, then the text so far and the state in the engine."""

    id: int  # of this sequence alone, in its process
    prompt: list[int]  # ids
    params: SamplingParams
    seed: int  # the request's, or a fresh one
    sample: int = 0  # index among the samples of the prompt; part of the noise key
    eos: frozenset[int] = frozenset()  # ids that end the text, unless the request ignores them
    drafters: tuple[str, ...] = ()  # names of those that may draft for it; in each round the policy takes one
    constraint: Constraint | None = None  # on the text; None where the request gives none
    group: int | None = None  # sequences of one group share a prompt and may copy its cache rows
    client: str = ""  # whose share of rows and passes it counts in
    text_scope: bytes = b""  # a draft copies from texts of the same scope alone
    text_buffer: TextBuffer | None = None  # the text of the new ids; None without a tokenizer
    traced: bool = False  # rounds are recorded in `trace`
    prediction: tuple[int, ...] = ()  # tokens that the request expects
    cached: int = 0  # tokens of the prompt that the prefix cache had
    prefix: Prefix = NOTHING  # what the prefix cache knows of the prompt; at first its salt alone
    prompt_scores: list[Score | None] = field(default_factory=list)  # if asked for; choices share the list

    ends: frozenset[int] = field(init=False)  # ids that end the text, by the model or by the request
    tokens: list[int] = field(default_factory=list)  # prompt and new ids
    origins: list[TokenOrigin] = field(default_factory=list)  # of the new ids
    scores: list[Score] = field(default_factory=list)  # of the new ids, where the request gives `logprobs`
    token_counts: TokenCounts | None = None  # of prompt and output, where a penalty needs them
    trace: list[RoundTrace] = field(default_factory=list)  # a record of each round, if `traced`
    state: State = State.WAITING
    finish: Finish | None = None  # why the text ended; None before
    error: str | None = None  # what failed, where `finish` is ERROR
    row: int = -1  # owned by rows.py
    parked: dict[KVCache, Span] | None = None  # what its row held, while it has none between two rounds
    snapshots: dict[KVCache, list[Span]] = field(default_factory=dict)  # states to which its row may go back
    paused_at: float | None = None  # monotonic clock: since when it takes no part in rounds
    rounds: list[Round] = field(default_factory=list)
    round_count: int = 0  # part of the noise key; never goes back
    attempts: dict[int, int] = field(default_factory=dict)  # position -> rollbacks of a ban that crossed it
    cache_finite: bool = False  # the last round showed that its cache rows hold finite values only
    skip_draft: bool = False  # its last draft led to non-finite values, so the next step is plain
    drafter_faults: int = 0  # rounds in which a drafter's logits were not finite
    policy: Any = None  # the `Policy` that its request names; None is the engine's
    policy_state: Any = None  # opaque to all but the policy
    started: float = 0.0  # monotonic clock in seconds: begin of the first round, and the end
    ended: float = 0.0

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self.ends = self.params.ends(self.eos)
        if not isinstance(self.constraint, Guarded | None):
            self.constraint = Guarded(self.constraint)
        if self.params.penalised:
            self.token_counts = TokenCounts(self.prompt)

    @property
    def key(self) -> int:
        return seed_key(self.seed, self.sample)

    @property
    def active(self) -> bool:
        return self.state is State.RUNNING and self.paused_at is None

    @property
    def decoding(self) -> bool:
        """Return whether its first round has begun, or may at once, and its last one has not ended."""
        return self.state is not State.FINISHED and self.started > 0

    @property
    def new_ids(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def remaining(self) -> int:
        return self.params.max_new_tokens - (len(self.tokens) - len(self.prompt))

    @property
    def takes_back(self) -> bool:
        return self.constraint is not None and self.constraint.takes_back

    @property
    def failure(self) -> str | None:
        """Return the error that broke the constraint or the text; None while they work."""
        parts = (self.constraint, self.text_buffer)
        return next((part.failed for part in parts if part is not None and part.failed is not None), None)

    @property
    def settled(self) -> int:
        """Return how many new tokens no rollback can take back; a stream may show them."""
        if self.constraint is None or self.state is State.FINISHED:
            return len(self.tokens) - len(self.prompt)
        return self.constraint.settled()

    def extend(self, tokens: list[int], origins: list[TokenOrigin], scores: Seq[Score] = ()) -> int:
        """Append tokens up to the first EOS, stop string, limit or ban's rollback; return how many were read.

        The sequence may end up *shorter* than before, because a constraint may take back earlier tokens.
        """
        for index, (token, origin) in enumerate(zip(tokens, origins, strict=True)):
            self.tokens.append(token)
            self.origins.append(origin)
            self.scores += scores[index : index + 1]
            if self.token_counts is not None:
                self.token_counts.count(token, 1)
            if self.constraint is not None:
                kept = self.constraint.advance(token)
                if kept < len(self.tokens) - len(self.prompt):
                    self._take_back(kept, self.constraint)
                    return index + 1
            self.finish = self._end(token)
            if self.finish is not None:
                return index + 1
        return len(tokens)

    def cut_off(self) -> None:
        """Take back the tokens with which the text must not end."""
        if self.constraint is not None and self.decoding:
            kept = self.constraint.may_be_cut()
            self.constraint.rewind(kept)
            self._roll_back(kept)

    def leave_dead_end(self) -> None:
        """Roll back from where the constraint allows no token, or end the text there."""
        assert self.constraint is not None
        kept = self.constraint.retreat()
        if kept is None:
            self._end_by(self.constraint)
        else:
            self._take_back(kept, self.constraint)

    def _take_back(self, kept: int, constraint: Constraint) -> None:
        """Roll back to `kept` new tokens, as the constraint asks; the text may end there."""
        constraint.roll_back(kept)
        self._roll_back(kept)
        if constraint.ended_by is not None:
            self._end_by(constraint)

    def _end_by(self, constraint: Constraint) -> None:
        self.finish = Finish.CONSTRAINT if constraint.failed is None else Finish.ERROR

    def _end(self, token: int) -> Finish | None:
        """Return why the text ends with the token just appended; None where it goes on."""
        ended = token in self.ends
        if self.params.stop:
            self.update_text(ended)
            if self.text_buffer is not None and self.text_buffer.stopped_by is not None:
                return Finish.STOP
        if ended:
            return Finish.EOS
        return Finish.LENGTH if self.remaining == 0 else None

    def update_text(self, ended: bool = False) -> None:
        """Push new tokens into the text buffer; ended: the last one ends the text."""
        if self.text_buffer is not None:
            new = self.tokens[len(self.prompt) + len(self.text_buffer.tokens) :]
            self.text_buffer.push(new, ended=ended)

    def finish_text(self) -> None:
        """Push the last tokens and finish the text; where that fails, the sequence ended with this error."""
        if self.text_buffer is not None:
            self.update_text()
            self.text_buffer.finish()
            if self.text_buffer.failed is not None and self.finish is not Finish.ERROR:
                self.finish, self.error = Finish.ERROR, self.text_buffer.failed

    def _roll_back(self, kept: int) -> None:
        """Roll back to `kept` new tokens; the noise of every crossed position is never used again."""
        length = len(self.prompt) + kept
        for position in range(length, len(self.tokens)):
            self.attempts[position] = self.attempts.get(position, 0) + 1
            if self.token_counts is not None:
                self.token_counts.count(self.tokens[position], -1)
        del self.tokens[length:]
        del self.origins[kept:]
        del self.scores[kept:]
        if self.text_buffer is not None:
            self.text_buffer.rewind(kept)
