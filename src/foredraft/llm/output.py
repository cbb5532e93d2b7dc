"""Output, Piece and Stream: the result of a request, the parts of a stream, and the iterator over them; and
requests, which show what the engine gave."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeAlias

from foredraft.decode.engine import Engine
from foredraft.decode.scores import Score
from foredraft.decode.sequence import Sequence, State
from foredraft.decode.stats import RoundTrace, Stats

if TYPE_CHECKING:
    from foredraft.llm.service import EngineThread


@dataclass(frozen=True, slots=True)
class Output:
    """The result of one sample of one prompt.

    Attributes:
        text: The new text; None without a tokenizer.
        token_ids: The new tokens, including those of a stop string.
        origins: The source of each new token: "drafter", "target" or "bonus".
        finish_reason: "eos", "stop", "length", "constraint", "cancelled" or "error".
        seed: The request's seed, or the fresh seed that it got.
        sample: The sample's index under that seed.
        prompt_tokens: Tokens of the prompt as it was read.
        stats: Times and counts.
        pieces: The text that each token completed; joined they are `text`.
        stopped_by: The stop string, where `finish_reason` is "stop"; the constraint, and why it ended the
            text, where it is "constraint".
        logprobs: Scores of each new token, if the request asks for them.
        prompt_logprobs: Scores of the prompt's tokens, if the request asks for them; None for the first one.
        trace: One record for each round, if the request asks for them.
        error: What failed, where `finish_reason` is "error".
        lossless: The text has the target's own distribution. Acceptance rule "bild" does not guarantee it.
        deterministic: In addition, its bits do not depend on the drafter and the batch.
        why_plain: Why nothing was drafted, where a drafter might have; None where it drafted.
        cached_tokens: Tokens of the prompt that were not read, because an earlier request had read them.

    Examples:
        >>> [output] = llm.generate("def add(a, b):", SamplingParams(max_new_tokens=8, ignore_eos=True))
        >>> output.finish_reason, len(output.token_ids), output.stats.tokens
        ('length', 8, 8)
        >>> "".join(output.pieces) == output.text
        True
    """

    text: str | None
    token_ids: list[int]
    origins: list[str]
    finish_reason: str
    seed: int
    sample: int
    prompt_tokens: int
    stats: Stats
    pieces: list[str] | None = None
    stopped_by: str | None = None
    logprobs: list[Score] | None = None
    prompt_logprobs: list[Score | None] | None = None
    trace: list[RoundTrace] | None = None
    error: str | None = None
    lossless: bool = True
    deterministic: bool = True
    why_plain: str | None = None
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """Some successive tokens of a stream.

    Attributes:
        text: The text that became final with these tokens. It may lag behind the tokens by an incomplete
            character or by a possible beginning of a stop string; None without a tokenizer.
        token_ids: The tokens.
        origins: The source of each token: "drafter", "target" or "bonus".
        parts: The text in parts, each with the index of the new token that completed it.
        logprobs: Scores of the tokens, if the request asks for them.
        prompt_logprobs: Scores of the prompt's tokens, on the first piece, if the request asks for them.
        trace: The rounds since the piece before, if the request asks for them.
        output: The whole result, on the last piece.

    Examples:
        >>> *pieces, last = llm.stream("def add(a, b):", SamplingParams(max_new_tokens=8))
        >>> all(piece.output is None for piece in pieces)
        True
        >>> "".join(piece.text for piece in [*pieces, last]) == last.output.text
        True
    """

    text: str | None
    token_ids: list[int]
    origins: list[str]
    parts: list[tuple[int, str]] | None = None
    logprobs: list[Score] | None = None
    prompt_logprobs: list[Score | None] | None = None
    trace: list[RoundTrace] | None = None
    output: Output | None = None


class TextStreamer:
    """Cuts one sequence into pieces, between two steps of its engine."""

    def __init__(self, sequence: Sequence, output: Callable[[Sequence], Output]) -> None:
        self.sequence, self._output = sequence, output
        self.over = False  # the last piece was given
        self._begun = False  # the first piece was given
        self._shown = 0  # new tokens that earlier pieces carried
        self._told = 0  # rounds that they carried

    def next(self) -> Piece | None:
        """Return a piece with the tokens since the last one; None where there are none."""
        sequence = self.sequence
        if self.over:
            return None
        settled = sequence.settled
        output = self._output(sequence) if sequence.state is State.FINISHED else None
        if output is None and settled <= self._shown:
            return None
        new, self._shown = slice(self._shown, settled), settled
        scores_prompt = sequence.params.prompt_logprobs is not None and not self._begun
        self._begun = True
        trace, self._told = sequence.trace[self._told :], len(sequence.trace)
        parts = None
        if sequence.text_buffer is not None:
            sequence.update_text()
            parts = sequence.text_buffer.release(settled)
        piece = Piece(
            text=None if parts is None else "".join(text for _, text in parts),
            token_ids=sequence.new_ids[new],
            origins=[str(origin) for origin in sequence.origins[new]],
            parts=parts,
            logprobs=None if sequence.params.logprobs is None else sequence.scores[new],
            prompt_logprobs=list(sequence.prompt_scores) if scores_prompt else None,
            trace=trace if sequence.traced else None,
            output=output,
        )
        self.over = output is not None
        return piece


AHEAD = 2  # unread pieces of a stream from which on the engine waits for its reader
Report: TypeAlias = Callable[[str, int, int], None]


def message_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


class Request:
    """Sequences that are submitted and cancelled together. Its caller alone reads its news."""

    def __init__(self, sequences: list[Sequence]) -> None:
        self.sequences = sequences  # in the order in which they start
        self.news = SimpleQueue[Any]()  # results, reports of progress to be called, or an error to be raised
        self.watch: object = None  # a reference to its owner; were that garbage, it would tell nothing

    @property
    def wants(self) -> bool:
        """Whether the engine has to step for it, unless it is over."""
        return True

    def show(self) -> bool:
        """Put into the news what the last step gave; return whether that is all."""
        raise NotImplementedError

    def report(self, progress: Report, done: int, total: int) -> None:
        """Report how far the prompt is read, in the caller's thread."""
        self.news.put(partial(progress, "prefill", done, total))

    def fail(self, engine: Engine, error: BaseException) -> bool:
        """End a request that cannot go on or be shown; return whether nothing is left to show."""
        try:
            for sequence in self.sequences:
                engine.fail(sequence, message_of(error))
        finally:
            self.news.put(error)
        return True


class WholeOutputs(Request):
    """A request whose caller waits until all is there."""

    def __init__(self, sequences: list[Sequence], output: Callable[[Sequence], Output]) -> None:
        super().__init__(sequences)
        self._output = output

    def show(self) -> bool:
        if any(each.state is not State.FINISHED for each in reversed(self.sequences)):
            return False
        self.news.put([self._output(each) for each in self.sequences])
        return True


class Pieces(Request):
    """A request whose caller reads piece after piece."""

    def __init__(self, sequence: Sequence, output: Callable[[Sequence], Output]) -> None:
        super().__init__([sequence])
        self._streamer = TextStreamer(sequence, output)

    @property
    def wants(self) -> bool:
        return self.news.qsize() < AHEAD

    def show(self) -> bool:
        if (piece := self._streamer.next()) is not None:
            self.news.put(piece)
        return self._streamer.over


class Stream(Iterator[Piece]):
    """An iterator over the pieces of one sample, one after every round; `LLM.stream` makes one.

    The request starts with the first `next`. `close` cancels it, and so does whatever `next` raises, an
    interrupt (Ctrl-C) too. A stream that is dropped before its end is cancelled after the round that runs.
    One thread at a time calls `next`.

    Examples:
        >>> stream = llm.stream("def add(a, b):", SamplingParams(max_new_tokens=64, ignore_eos=True))
        >>> len(next(stream).token_ids) > 0
        True
        >>> stream.close()
        >>> list(stream)
        []
    """

    def __init__(self, thread: EngineThread, request: Request) -> None:
        self._thread, self._request = thread, request
        self._begun = self._over = False

    def __next__(self) -> Piece:
        if self._over:
            raise StopIteration
        try:
            if not self._begun:
                self._begun = True
                self._thread.submit(self._request, self)
            piece: Piece = self._thread.wait(self._request)
            self._over = piece.output is not None
            return piece
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Cancel the request, without waiting for the step that runs; the iterator has no more pieces."""
        try:
            self._end()
        except BaseException:
            self._end()  # an interrupt came before the request was cancelled
            raise

    def _end(self) -> None:
        self._over = True
        self._thread.cancel(self._request)
