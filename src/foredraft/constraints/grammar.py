"""Grammar: text of a regular expression, a JSON schema or a grammar, by the library llguidance, and within
its time.

https://github.com/guidance-ai/llguidance (MIT) hardly bounds a mask's time, and a mask cannot be broken off:
another thread computes it, and the caller does not wait for long. The library never sees a token that its
mask forbids, which would break its matcher for good. It hides its errors in masks of an end, so each call
looks for one.
"""

from __future__ import annotations

import json
import queue
import re
import threading
import time
from collections.abc import Callable
from functools import cached_property
from itertools import count
from typing import TypeAlias, TypeVar

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from torch import Tensor

from foredraft.constraints.gbnf import is_gbnf, lark_of
from foredraft.decode.constraint import SIMPLER, Constraint, ConstraintError
from foredraft.errors import RequestError
from foredraft.model.byte_codec import ByteCodec

# Seconds. All rows wait for a mask. Most masks take 0.02 to 3 ms; those of a schema with 1,000 optional
# properties take 4 ms on average and 80 ms at most, at a vocabulary of 262,144.
OVERDUE = 0.3  # by the clock: the longest mask
SECONDS_PER_MASK = 0.02  # of a processor: what each mask may take
PATIENCE = 0.5  # of a processor: by how much the masks of a request may exceed that together
MAX_OVERDUE = 2  # masks that run for no use, from which on no further grammar is taken

Mask: TypeAlias = tuple[bytes, float]  # with the seconds of a processor that it took
Task: TypeAlias = Callable[[], Mask | None]


def computed(matcher: LLMatcher) -> Mask:
    began = time.thread_time()
    mask: bytes = matcher.compute_bitmask()
    return mask, time.thread_time() - began


class MaskThreads:
    """Threads that compute masks. Safe from several threads."""

    def __init__(self) -> None:
        self._idle = queue.SimpleQueue[_Thread]()
        self._lock = threading.Lock()
        self.overdue = 0  # masks that run for no use

    def compute(self, matcher: LLMatcher) -> Mask:
        try:
            thread = self._idle.get_nowait()
        except queue.Empty:
            thread = _Thread()
        thread.tasks.put(lambda: computed(matcher))
        try:
            answer = thread.answers.get(timeout=OVERDUE)
        except queue.Empty:
            self._count(1)
            thread.tasks.put(lambda: self._count(-1))
            raise TimeoutError from None
        self._idle.put(thread)
        if isinstance(answer, BaseException):
            raise answer
        assert answer is not None, "a mask was asked for"
        return answer

    def _count(self, more: int) -> None:
        with self._lock:
            self.overdue += more


class _Thread:
    """A thread that does tasks in order until this object is garbage. The process may end before it."""

    def __init__(self) -> None:
        self.tasks = tasks = queue.SimpleQueue[Task | None]()
        self.answers = answers = queue.SimpleQueue[Mask | BaseException | None]()

        def serve() -> None:
            while (task := tasks.get()) is not None:
                try:
                    answers.put(task())
                except BaseException as error:  # the caller raises it
                    answers.put(error)
                del task  # an idle thread keeps no grammar alive

        threading.Thread(target=serve, name="foredraft-masks", daemon=True).start()

    def __del__(self) -> None:
        self.tasks.put(None)


class Pace:
    """The time of one request's grammar. Its samples share it, as they share the grammar's states."""

    def __init__(self, threads: MaskThreads, *, small: bool = False) -> None:
        self._compute = computed if small else threads.compute
        self._behind = 0.0  # seconds by which the masks exceed what they may take
        self._error: str | None = None

    def mask(self, matcher: LLMatcher) -> bytes:
        if self._error is not None:
            raise TimeoutError(self._error)
        try:
            mask, seconds = self._compute(matcher)
        except TimeoutError:
            raise self._too_slow(f"a mask took more than {OVERDUE} s") from None
        self._behind = max(0.0, self._behind - SECONDS_PER_MASK)
        self.count(seconds)
        return mask

    def count(self, seconds: float) -> None:
        """Count seconds of a processor that the grammar took."""
        self._behind += seconds
        if self._behind > PATIENCE:
            raise self._too_slow(
                f"its masks took {self._behind:.1f} s of a processor more than"
                f" {SECONDS_PER_MASK * 1000:.0f} ms each"
            )

    def _too_slow(self, measured: str) -> TimeoutError:
        self._error = f"is too slow for this machine: {measured}"
        return TimeoutError(self._error)


WHITE_SPACE = r"[\x20\x0A\x0D\x09]{0,20}"  # between the parts of a JSON text; never without an end
# how the library's messages point at a place in a regular expression
POINTED = re.compile(r"regex parse error:\n    (?P<text>.*)\n    (?P<before> *)\^+\nerror: (?P<error>.*)")
# Bounds of a matcher's memory; what exceeds them is an error of its own request. Time is bounded by `Pace`.
# A JSON schema of 1,000 optional properties needs 8,789 symbols, 4,000 items in a row and, at a vocabulary of
# 262,144, between 200,000 and 400,000 items of a mask; one of 500 tagged objects needs 18,750 symbols.
LIMITS = LLParserLimits(
    max_grammar_size=25_000,  # symbols
    max_items_in_row=10_000,
    step_max_items=400_000,  # of a mask
    max_lexer_states=65_536,  # 0.3 to 2 kB each, for all samples of a request
    verbose_errors=False,  # a message says what was exceeded, not the whole state
)
SUPPORTED = "correct it, or leave out what is not supported"
DEAD_ENDS = ("NoExtension", "NoExtensionBias")  # reasons of the library to stop that are no failures
SPELLED = 512  # characters of forced text that are cut into tokens: all of a long one took 0.1 s a mask
SILENT = b"\xff"  # begins the name of a token that adds no text; no text contains this byte


class _Vocabulary:
    """A tokenizer as llguidance wants it."""

    bos_token_id = None

    def __init__(self, codec: ByteCodec, vocabulary: int, ends: frozenset[int]) -> None:
        self._codec = codec
        self.tokens = [text or SILENT + b"[%d]" % id for id, text in enumerate(codec.table(vocabulary))]
        self.special_token_ids = [id for id, text in enumerate(self.tokens) if text.startswith(SILENT)]
        # the library wants one; without one, any id that shows no text serves, because `Grammar` decides
        self.eos_token_id = min(ends, default=next(iter(self.special_token_ids), vocabulary - 1))

    def __call__(self, text: bytes | str) -> list[int]:
        """Return the tokens of a text that a grammar forces, of a long one those that it begins with."""
        text = text if isinstance(text, str) else text.decode("utf-8", "ignore")
        ids = self._codec.spell(text[:SPELLED])
        if len(text) <= SPELLED:
            return ids
        return ids[: len(ids) - len(ids) // 4]  # what follows the cut may change the tokens before it


def compile_grammar(option: str, text: str, tokenizer: LLTokenizer, pace: Pace) -> LLMatcher:
    """Return a matcher at the beginning of a text, with its first mask computed."""
    matcher = LLMatcher(tokenizer, _source(option, text), log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise _refused(option, matcher.get_error())
    try:
        pace.mask(matcher)  # so that the text it forces is known to all copies
    except TimeoutError as error:
        raise RequestError(str(error), option=option, remedy=SIMPLER) from error
    if matcher.is_error() and matcher.stop_reason() not in DEAD_ENDS:
        raise _refused(option, matcher.get_error(), SIMPLER)
    return matcher


def check_grammar(option: str, text: str) -> None:
    """Check what can be checked before there is a tokenizer; arguments and errors as `compile_grammar`."""
    is_error, messages = LLMatcher.validate_grammar_with_warnings(_source(option, text), limits=LIMITS)
    if is_error:
        raise _refused(option, messages[0])


def _source(option: str, text: str) -> str:
    if option in ("regex", "choices"):
        return LLMatcher.grammar_from_regex(text)
    if option == "grammar":
        return LLMatcher.grammar_from_lark(lark_of(option, text) if is_gbnf(text) else text)
    try:
        schema = json.loads(text)
        return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": WHITE_SPACE})
    except ValueError as error:
        reason = f"a number beyond 64 bits, or text that UTF-8 cannot hold ({error})"
        raise _refused(option, reason) from error


def _refused(option: str, message: str, remedy: str = SUPPORTED) -> RequestError:
    """Return an error with a message of the library on one line, and the place in a regular expression."""
    said = " ".join(message.split())
    if (place := POINTED.search(message)) is not None:
        said = f"{place['error']}, at character {len(place['before']) + 1} of {place['text']!r}"
    elif said.startswith("oneOf constraints are not supported"):  # it goes on with a setting of the library
        said = "oneOf is supported only where its parts exclude each other; anyOf always"
    return RequestError(f"is refused: {said}", option=option, remedy=remedy)


SMALL = 2048  # characters of a schema or a regular expression; a mask of 50 recursive lists takes 0.04 s
# Requests with a grammar before slices are made for them: a process most often has only one, and slices would
# double its wait for the first token.
WITHOUT_SLICES = 1


class Grammars:
    """Makes the grammars of requests to one model."""

    def __init__(self, codec: ByteCodec, vocabulary: int, ends: frozenset[int]) -> None:
        self.vocabulary, self.ends = vocabulary, ends
        wrapped = TokenizerWrapper(_Vocabulary(codec, vocabulary, ends))
        self._plain = LLTokenizer(wrapped, n_vocab=vocabulary, slices=[])
        self.end = self._plain.eos_token  # the library needs one; perhaps none of `ends`
        self._used = count()
        self.threads = MaskThreads()

    @cached_property
    def _sliced(self) -> LLTokenizer:
        """The tables with slices, which states may allow whole: 0.1 ms a mask in JSON strings, not 3."""
        return self._plain.with_slices(LLTokenizer.general_slices())

    def maker(self, option: str, text: str) -> Callable[[], Grammar]:
        """Return a function that makes the grammar of each sequence; what they share is made here."""
        if self.threads.overdue >= MAX_OVERDUE:
            raise RequestError(
                f"cannot be used now: {MAX_OVERDUE} masks of other requests, which were too slow, still run",
                option=option, remedy="try again later",
            )  # fmt: skip
        tokenizer = self._sliced if next(self._used) >= WITHOUT_SLICES else self._plain
        pace = Pace(self.threads, small=option != "grammar" and len(text) <= SMALL)
        matcher = compile_grammar(option, text, tokenizer, pace)
        return lambda: Grammar(matcher.deep_copy(), self, option, pace)


KEPT = 64  # latest lengths whose masks are kept, for drafts that are rewound; V bytes each
UNSAID = "<non-verbose/>"  # stands in the library's messages where they do not show its state

T = TypeVar("T")


class Grammar(Constraint):
    """Allows the tokens with which the text can still become one of the grammar."""

    def __init__(self, matcher: LLMatcher, grammars: Grammars, option: str, pace: Pace) -> None:
        self._matcher = matcher  # this sequence's own, at the beginning of a text
        self._pace = pace  # the request's
        self._vocabulary, self._ends, self._end = grammars.vocabulary, grammars.ends, grammars.end
        self.option = option
        self._tokens: list[int] = []  # read now and, behind `_length`, on the way that was last rewound
        self._length = 0
        self._ended_at: int | None = None  # the length with the first end; a draft may go on behind it
        self._masks: dict[int, Tensor] = {}  # length -> mask along `_tokens`

    @property
    def length(self) -> int:
        return self._length

    def mask(self) -> Tensor | None:
        if self._ended_at is not None:
            return None
        mask = self._masks.get(self._length)
        if mask is None:
            packed = np.frombuffer(self._ask(lambda: self._pace.mask(self._matcher)), dtype=np.uint8)
            bits = np.unpackbits(packed, bitorder="little")[: self._vocabulary].astype(bool)
            bits[self._end] = False
            bits[list(self._ends)] = self._matcher.is_accepting()
            mask = torch.from_numpy(bits)
            self._masks = {at: kept for at, kept in self._masks.items() if at > self._length - KEPT}
            self._masks[self._length] = mask
        return mask

    def _ask(self, ask: Callable[[], T]) -> T:
        began = time.thread_time()
        try:
            answer = ask()
            self._pace.count(time.thread_time() - began)
        except TimeoutError as error:
            raise ConstraintError(f"{self.option} {error}; {SIMPLER}") from error
        if self._matcher.is_error() and self._matcher.stop_reason() not in DEAD_ENDS:
            message = " ".join(self._matcher.get_error().replace(UNSAID, "").split())
            raise ConstraintError(f"{self.option} failed: {message}; {SIMPLER}")
        return answer

    def advance(self, token: int) -> int:
        if self._ended_at is None and token in self._ends:
            self._ended_at = self._length + 1
        elif self._ended_at is None:
            read = self._ask(lambda: self._matcher.try_consume_tokens([token]))
            assert read == 1, f"the grammar forbids token {token}"
        if self._tokens[self._length : self._length + 1] != [token]:  # another way than the last one
            del self._tokens[self._length :]
            self._tokens.append(token)
            self._masks = {at: mask for at, mask in self._masks.items() if at <= self._length}
        self._length += 1
        return self._length

    def rewind(self, length: int) -> None:
        read = self._length if self._ended_at is None else self._ended_at - 1  # by the library
        if read > length:
            self._ask(lambda: self._matcher.rollback(read - length))
        if self._ended_at is not None and length < self._ended_at:
            self._ended_at = None
        self._length = length

    def retreat(self) -> int | None:
        is_whole = self._matcher.is_accepting()
        whole, stuck = "the text is complete, and no end-of-text token is allowed", "no token can continue it"
        self.ended_by = f"{self.option}: {whole if is_whole else stuck}"
        return None

    def forced(self, most: int) -> list[int]:
        if self._ended_at is not None or self._matcher.is_stopped():
            return []
        return self._ask(self._matcher.compute_ff_tokens)[:most]
