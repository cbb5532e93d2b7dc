"""LLM: prompts in, outputs or a stream of pieces out; safe to use from several threads.

Requests of all threads share one engine and one running batch. Whichever thread finds nobody stepping
the engine steps it, for everyone; the others wait for their own request. An interrupt (Ctrl-C) waits
for the round to end, so no state is left half-written.
"""

from __future__ import annotations

import itertools
import secrets
import signal
import threading
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Literal

from foredraft.decode.engine import Engine
from foredraft.decode.sampling import SamplingParams
from foredraft.decode.sequence import Sequence, State
from foredraft.decode.stats import Stats
from foredraft.errors import RequestError
from foredraft.model.spec import ModelSpec
from foredraft.model.tokenizer import Tokenizer

__all__ = ["LLM", "Output", "Piece", "Prompts"]

Prompts = str | Seq[str] | Seq[int] | Seq[Seq[int]]


@dataclass(frozen=True, slots=True)
class Output:
    """What one sample of one prompt became.

    text: None without a tokenizer. token_ids: the new ones only; origins: who wrote each.
    finish_reason: "eos", "length", "cancelled" or "error", and then `error` says what happened.
    seed: the request's, or the fresh one that it got; `sample` is the sample's index under that seed.
    """

    text: str | None
    token_ids: list[int]
    origins: list[str]
    finish_reason: str
    seed: int
    sample: int
    prompt_tokens: int
    stats: Stats
    error: str | None = None
    lossless: bool = True


@dataclass(frozen=True, slots=True)
class Piece:
    """Some successive tokens of a stream. text may lag behind the ids by an incomplete character."""

    text: str | None
    token_ids: list[int]
    origins: list[str]
    output: Output | None = None  # on the last piece


class LLM:
    """A loaded model; `foredraft.load` makes one.

    default_drafter: who drafts for requests that name none; None = plain decoding.
    max_length: prompt and new tokens together that a request may take.
    """

    def __init__(
        self,
        engine: Engine,
        spec: ModelSpec,
        tokenizer: Tokenizer | None,
        *,
        default_drafter: str | None,
        max_length: int,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        self.engine, self.spec, self.tokenizer = engine, spec, tokenizer
        self.default_drafter, self.max_length = default_drafter, max_length
        self._progress = progress
        self._ids = itertools.count()
        self._turn = threading.Condition()
        self._stepping = False
        self._inbox: list[tuple[Callable[[Sequence], None], Sequence]] = []

    def generate(
        self,
        prompts: Prompts,
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        n: int = 1,
        truncate: Literal["left"] | None = None,
    ) -> list[Output]:
        """`n` samples of each prompt, prompt-major.

        prompts: text, token ids, or a list of either. params: one for all, or one per prompt.
        truncate: "left" drops the oldest tokens of a prompt that is too long, instead of refusing it.
        Raises RequestError before anything runs if a prompt or an option cannot be served. A request that
        fails while running (logits that are not finite) is reported in its Output; the others go on.
        """
        encoded = self._encode(prompts)
        if n < 1:
            raise RequestError(f"n is {n}; give 1 or more")
        each = [params or SamplingParams()] * len(encoded) if not isinstance(params, Seq) else list(params)
        if len(each) != len(encoded):
            raise RequestError(
                f"{len(each)} sampling parameters for {len(encoded)} prompts; give one or as many"
            )
        sequences: list[Sequence] = []
        for ids, own in zip(encoded, each, strict=True):
            sequences += self._sequences(ids, own, n, truncate)
        self._tell(self.engine.submit, sequences)
        try:
            self._drive(lambda: all(s.state is State.FINISHED for s in sequences))
        except BaseException:
            self._tell(self.engine.cancel, [s for s in sequences if s.state is not State.FINISHED])
            raise
        return [self._output(s) for s in sequences]

    def stream(
        self,
        prompt: str | Seq[int],
        params: SamplingParams | None = None,
        *,
        truncate: Literal["left"] | None = None,
    ) -> Iterator[Piece]:
        """One sample, piece by piece as rounds end; closing the iterator cancels the request.

        The last piece carries the Output. Raises as `generate` does, at the call; the request itself
        begins with the first `next`.
        """
        (sequence,) = self._sequences(self._encode(prompt)[0], params or SamplingParams(), 1, truncate)
        return self._pieces(sequence)

    def cancel_all(self) -> None:
        """End every request, running or waiting, after the round in progress; each keeps what it has."""
        engine = self.engine
        with self._turn:
            coming = [sequence for _, sequence in self._inbox]
            self._tell(engine.cancel, [*coming, *engine.scheduler.waiting, *engine.rows.sequences])

    def _pieces(self, sequence: Sequence) -> Iterator[Piece]:
        detokenizer = None if self.tokenizer is None else self.tokenizer.detokenizer()
        shown = 0
        self._tell(self.engine.submit, [sequence])
        try:
            while True:

                def news(shown: int = shown) -> bool:
                    return sequence.state is State.FINISHED or sequence.settled > shown

                self._drive(news)
                over = sequence.state is State.FINISHED
                settled = sequence.settled
                ids, origins = sequence.new_ids[shown:settled], sequence.origins[shown:settled]
                shown = settled
                text = None
                if detokenizer is not None:
                    text = detokenizer.push(ids) + (detokenizer.flush() if over else "")
                yield Piece(text, ids, [str(o) for o in origins], self._output(sequence) if over else None)
                if over:
                    return
        finally:
            if sequence.state is not State.FINISHED:
                self._tell(self.engine.cancel, [sequence])
                self._drive(lambda: sequence.state is State.FINISHED)

    def _encode(self, prompts: Prompts) -> list[list[int]]:
        """Any accepted form -> ids of each prompt."""
        if isinstance(prompts, str):
            texts: list[str | list[int]] = [prompts]
        elif all(isinstance(p, int) for p in prompts):
            texts = [list(prompts)]  # type: ignore[arg-type]
        else:
            texts = [p if isinstance(p, str) else list(p) for p in prompts]  # type: ignore[arg-type]
        encoded: list[list[int]] = []
        for text in texts:
            if isinstance(text, str):
                if self.tokenizer is None:
                    raise RequestError("this model's folder has no tokenizer.json; give token ids, not text")
                if not text:
                    raise RequestError("the prompt is empty; give at least one character")
                encoded.append(self.tokenizer.encode(text))
            else:
                encoded.append(text)
        return encoded

    def _sequences(
        self, prompt: list[int], params: SamplingParams, n: int, truncate: Literal["left"] | None
    ) -> list[Sequence]:
        """n siblings, checked: nothing is submitted unless all of it can be served."""
        if not prompt:
            raise RequestError("the prompt is empty; give at least one token")
        for token in prompt:
            if not 0 <= token < self.spec.vocab_size:
                raise RequestError(
                    f"token id {token} is outside the model's vocabulary of {self.spec.vocab_size}"
                )
        if truncate not in (None, "left"):
            raise RequestError(f"truncate is {truncate!r}; give 'left' or None")
        room = self.max_length - params.max_new_tokens
        if len(prompt) > room and truncate == "left" and room >= 1:
            prompt = prompt[-room:]
        if len(prompt) > room:
            raise RequestError(
                f"the prompt's {len(prompt)} tokens and max_new_tokens {params.max_new_tokens} exceed the"
                f" {self.max_length} positions there is room for; shorten one, raise max_length up to the"
                f" model's {self.spec.max_positions}, or truncate='left'"
            )
        drafter = self._drafter(params.speculation)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        ids = [next(self._ids) for _ in range(n)]
        group = ids[0] if n > 1 else None
        eos = frozenset(self.spec.eos_token_ids)
        return [
            Sequence(i, prompt, params, seed, sample, eos, drafter, group=group)
            for sample, i in enumerate(ids)
        ]

    def _drafter(self, speculation: str | None) -> str | None:
        if speculation is None:
            return self.default_drafter
        if speculation == "none":
            return None
        if speculation not in self.engine.drafters:
            known = ", ".join(["none", *self.engine.drafters])
            raise RequestError(f"speculation names {speculation!r}, which is not loaded; loaded: {known}")
        return speculation

    def _tell(self, what: Callable[[Sequence], None], sequences: list[Sequence]) -> None:
        """Have the engine told between two steps, whoever takes them."""
        with self._turn:
            self._inbox += [(what, sequence) for sequence in sequences]
            if not self._stepping:
                self._read_inbox()

    def _read_inbox(self) -> None:
        inbox, self._inbox = self._inbox, []
        for what, sequence in inbox:
            what(sequence)

    def _drive(self, done: Callable[[], bool]) -> None:
        """Step the engine, or wait while another thread does, until `done`."""
        while True:
            with self._turn:
                while not done() and self._stepping:
                    self._turn.wait()
                if done():
                    return
                self._stepping = True
            try:
                with _interrupts_held():
                    self._step()
            finally:
                with self._turn:
                    self._stepping = False
                    self._read_inbox()
                    self._turn.notify_all()

    def _step(self) -> None:
        reading = self.engine.scheduler.prefilling
        try:
            self.engine.step()
        except Exception as error:
            # The batch cannot go on (out of memory, a broken operator): its requests fail by name.
            for sequence in list(self.engine.rows.sequences):
                self.engine.fail(sequence, f"{type(error).__name__}: {error}")
            raise
        reading = reading or self.engine.scheduler.prefilling
        if self._progress is not None and reading is not None:
            total = len(reading.prompt) - 1
            done = self.engine.cache.lengths[reading.row] if reading.state is State.PREFILLING else total
            self._progress("prefill", done, total)

    def _output(self, sequence: Sequence) -> Output:
        ids = sequence.new_ids
        assert sequence.finish is not None
        return Output(
            text=None if self.tokenizer is None else self.tokenizer.decode(ids),
            token_ids=ids,
            origins=[str(origin) for origin in sequence.origins],
            finish_reason=str(sequence.finish),
            seed=sequence.seed,
            sample=sequence.sample,
            prompt_tokens=len(sequence.prompt),
            stats=Stats.of(sequence.rounds, max(0.0, sequence.ended - sequence.started)),
            error=sequence.error,
        )


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """SIGINT waits until the block ends; only the main thread ever gets one."""
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield
        return
    noted: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: noted.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if noted:
            previous(*noted[0])
