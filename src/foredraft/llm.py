"""LLM: prompts in, outputs or a stream of pieces out; safe to use from several threads.

Requests of all threads share one engine and one running batch. Whichever thread finds nobody stepping
the engine steps it, for everyone; the others wait for their own request. What a thread wants to see of
its request is looked at between two steps only, by whoever took the last one. An interrupt (Ctrl-C)
waits for the round to end, so no state is left half-written.
"""

from __future__ import annotations

import itertools
import logging
import operator
import secrets
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from types import FrameType
from typing import Any, Generic, Literal, TypeVar

from foredraft.decode.engine import Engine
from foredraft.decode.params import SamplingParams
from foredraft.decode.scores import Score
from foredraft.decode.sequence import Sequence, State
from foredraft.decode.stats import Stats
from foredraft.decode.trace import RoundTrace
from foredraft.decode.transcript import Transcript
from foredraft.errors import RequestError
from foredraft.model.chat import Message
from foredraft.model.spec import ModelSpec
from foredraft.model.tokenizer import Tokenizer

__all__ = ["LLM", "Output", "Piece", "Prompts"]

Prompts = str | Seq[str] | Seq[int] | Seq[Seq[int]]
T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Output:
    """What one sample of one prompt became.

    Attributes:
        text: The new text; None without a tokenizer.
        token_ids: The new tokens only, the one that completed a stop string included.
        origins: Who wrote each token: "drafter", "target" or "bonus".
        finish_reason: "eos", "stop", "length", "cancelled" or "error".
        seed: The request's seed, or the fresh one that it got.
        sample: The sample's index under that seed.
        prompt_tokens: Tokens of the prompt, as it was read.
        stats: What it took.
        pieces: The text that each token completed; they join to `text`.
        stopped_by: The stop string, where the reason is "stop".
        logprobs: Scores of each new token, where asked for.
        prompt_logprobs: Scores of the prompt's tokens, where asked for; None in the first one's place.
        trace: What happened in each round, where asked for.
        error: What happened, where the reason is "error".
        lossless: The text has the model's own law; not where acceptance "bild" judged drafts.
        deterministic: And its bits do not depend on who drafts and who shares the batch.
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


@dataclass(frozen=True, slots=True)
class Piece:
    """Some successive tokens of a stream.

    Attributes:
        text: What is certain now and was not before. It may lag behind the ids, by an incomplete character
            or by what may be the beginning of a stop string; None without a tokenizer.
        token_ids: The tokens.
        origins: Who wrote each: "drafter", "target" or "bonus".
        parts: The text again, each part with the index among the new tokens of the one that completed it.
        logprobs: Scores of the tokens, where asked for.
        output: On the last piece: all of it.
    """

    text: str | None
    token_ids: list[int]
    origins: list[str]
    parts: list[tuple[int, str]] | None = None
    logprobs: list[Score] | None = None
    output: Output | None = None


class LLM:
    """A loaded model, safe to use from several threads; `foredraft.load` makes one.

    Attributes:
        tokenizer: The model's, with `encode`, `decode` and `encode_chat`; None where its folder has none.
        default_params: Those of requests that come without, from the checkpoint's generation_config.json.
        default_drafter: Who drafts for requests that name none; None is plain decoding.
        max_length: Prompt and new tokens together that a request may take.
        deterministic: Whether the target's passes keep to exact shapes.
    """

    def __init__(
        self,
        engine: Engine,
        spec: ModelSpec,
        tokenizer: Tokenizer | None,
        *,
        default_drafter: str | None,
        max_length: int,
        default_params: SamplingParams | None = None,
        lossless: Mapping[str, bool] | None = None,
        deterministic: bool = True,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        self.engine, self.spec, self.tokenizer = engine, spec, tokenizer
        self.default_drafter, self.max_length = default_drafter, max_length
        self.default_params = default_params or SamplingParams()
        self._lossless, self.deterministic = dict(lossless or {}), deterministic
        self._progress = progress
        self._ids = itertools.count()
        self._turn = threading.Condition()
        self._stepping = False
        self._inbox: list[tuple[Callable[[Sequence], None], Sequence]] = []
        self._waiting: list[_Wish[Any]] = []

    def params(self, **options: Any) -> SamplingParams:
        """The model's default parameters with these options changed.

        `SamplingParams(...)` by itself knows nothing of the model. Raises RequestError as it does.
        """
        return self.default_params.but(**options)

    def chat(
        self,
        messages: Seq[Message],
        params: SamplingParams | None = None,
        *,
        n: int = 1,
        truncate: Literal["left"] | None = None,
        show_special: bool = False,
        trace: bool = False,
        **variables: Any,
    ) -> list[Output]:
        """Generate `n` replies to a conversation, put into the model's chat template.

        Args:
            messages: Mappings with a role, and with what else the template asks for, mostly a content.
            params: The model's own defaults unless given.
            n: Replies.
            truncate: As in `generate`.
            show_special: As in `generate`.
            trace: As in `generate`.
            **variables: What the template reads besides, as `tools`, `documents` or `enable_thinking`.

        Raises:
            RequestError: There is no template, it refuses the messages or does not read a variable, or as in
                `generate`.
        """
        if self.tokenizer is None:
            raise RequestError("this model's folder has no tokenizer.json; give token ids, not messages")
        ids = self.tokenizer.encode_chat(messages, **variables)
        return self.generate(ids, params, n=n, truncate=truncate, show_special=show_special, trace=trace)

    def generate(
        self,
        prompts: Prompts,
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        n: int = 1,
        truncate: Literal["left"] | None = None,
        show_special: bool = False,
        trace: bool = False,
    ) -> list[Output]:
        """Generate `n` samples of each prompt: first all of the first prompt, then all of the second.

        A request that fails while running (logits that are not finite, a pass that broke off) is reported in
        its Output; the others go on. A KeyboardInterrupt ends the requests and is raised again; `cancel_all`
        and `stream` are the ways to keep what was generated.

        Args:
            prompts: Text, token ids, or a list of either.
            params: One for all, or one per prompt; without, the model's own defaults.
            n: Samples of each prompt.
            truncate: "left" drops the oldest tokens of a prompt that is too long, instead of refusing it.
            show_special: Special tokens are part of the text.
            trace: Outputs tell of each round.

        Raises:
            RequestError: A prompt or an option cannot be served; nothing has run then.
        """
        encoded = self.encode(prompts)
        if n < 1:
            raise RequestError(f"n is {n}; give 1 or more")
        each = list(params) if isinstance(params, Seq) else [params or self.default_params] * len(encoded)
        if len(each) != len(encoded):
            raise RequestError(
                f"{len(each)} sampling parameters for {len(encoded)} prompts; give one or as many"
            )
        sequences: list[Sequence] = []
        for ids, own in zip(encoded, each, strict=True):
            sequences += self._sequences(ids, own, n, truncate, show_special, trace)

        def outputs() -> list[Output] | None:
            if any(s.state is not State.FINISHED for s in reversed(sequences)):
                return None
            return [self._output(s) for s in sequences]

        try:
            self._submit(sequences)
            return self._drive(outputs)
        except BaseException:
            # those that wait go first: a row that a sibling leaves would pass to them
            self._tell(self.engine.cancel, sequences[::-1])
            raise

    def stream(
        self,
        prompt: str | Seq[int],
        params: SamplingParams | None = None,
        *,
        truncate: Literal["left"] | None = None,
        show_special: bool = False,
        trace: bool = False,
    ) -> Iterator[Piece]:
        """Stream one sample, piece by piece as rounds end; closing the iterator cancels the request.

        The last piece carries the Output. The request begins with the first `next`.

        Args:
            prompt: Text, or token ids.
            params: The model's own defaults unless given.
            truncate: As in `generate`.
            show_special: As in `generate`.
            trace: As in `generate`.

        Raises:
            RequestError: As in `generate`, at the call.
        """
        encoded = self.encode(prompt)
        if len(encoded) != 1:
            raise RequestError(f"stream takes one prompt, not {len(encoded)}; use generate for several")
        own = params or self.default_params
        (sequence,) = self._sequences(encoded[0], own, 1, truncate, show_special, trace)
        return self._pieces(sequence)

    def cancel_all(self) -> None:
        """End every request, running or waiting, after the round in progress; each keeps what it has."""
        engine = self.engine
        with self._turn:
            coming = [sequence for _, sequence in self._inbox]
            self._tell(engine.cancel, [*coming, *engine.scheduler.waiting, *engine.rows.sequences])

    def _pieces(self, sequence: Sequence) -> Iterator[Piece]:
        shown = 0

        def news() -> Piece | None:
            nonlocal shown
            settled = sequence.settled
            output = self._output(sequence) if sequence.state is State.FINISHED else None
            if output is None and settled <= shown:
                return None
            new, shown = slice(shown, settled), settled
            parts = None
            if sequence.transcript is not None:
                sequence.write_up()
                parts = sequence.transcript.release(settled)
            return Piece(
                text=None if parts is None else "".join(text for _, text in parts),
                token_ids=sequence.new_ids[new],
                origins=[str(origin) for origin in sequence.origins[new]],
                parts=parts,
                logprobs=None if sequence.params.logprobs is None else sequence.scores[new],
                output=output,
            )

        try:
            self._submit([sequence])
            while True:
                piece = self._drive(news)
                yield piece
                if piece.output is not None:
                    return
        finally:
            # no waiting here: an iterator that was dropped may be closed in the middle of a step
            self._tell(self.engine.cancel, [sequence])

    def encode(self, prompts: Prompts) -> list[list[int]]:
        """Prompts in any form that `generate` takes -> the ids of each; raises RequestError as it does."""
        if isinstance(prompts, str):
            return [self._encode_text(prompts)]
        if not isinstance(prompts, Iterable):
            raise RequestError(f"the prompt is {prompts!r}; give text, token ids, or a list of either")
        items: list[Any] = list(prompts)
        if all(_token_id(item) is not None for item in items):
            return [_token_ids(items)]
        encoded = []
        for item in items:
            if not isinstance(item, str | Iterable):
                raise RequestError(f"a prompt in the list is {item!r}; give text or a list of token ids")
            encoded.append(self._encode_text(item) if isinstance(item, str) else _token_ids(item))
        return encoded

    def _encode_text(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise RequestError("this model's folder has no tokenizer.json; give token ids, not text")
        if not text:
            raise RequestError("the prompt is empty; give at least one character")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the prompt is not valid Unicode at character {error.start}; give it as UTF-8"
            ) from None
        return self.tokenizer.encode(text)

    def _sequences(
        self,
        prompt: list[int],
        params: SamplingParams,
        n: int,
        truncate: Literal["left"] | None,
        show_special: bool,
        trace: bool,
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
        self._check(params, n)
        prompt = self.fitting(prompt, params.max_new_tokens, truncate)
        drafters = self._drafters(params.speculation)
        if params.max_new_tokens == 0:
            drafters = ()  # which need not read the prompt either
        seed = secrets.randbits(53) if params.seed is None else params.seed
        ids = [next(self._ids) for _ in range(n)]
        group = ids[0] if n > 1 else None
        eos = frozenset(self.spec.eos_token_ids)
        scores: list[Score | None] = [None]  # nothing comes before the first token to hold it against
        return [
            Sequence(
                i,
                prompt,
                params,
                seed,
                sample,
                eos,
                drafters[0] if len(drafters) == 1 else None,
                group=group,
                transcript=self._transcript(prompt, params, show_special),
                traced=trace,
                drafters=drafters,
                prompt_scores=scores,
            )
            for sample, i in enumerate(ids)
        ]

    def _check(self, params: SamplingParams, n: int) -> None:
        """What the parameters alone cannot know."""
        size = self.spec.vocab_size
        for token in params.logit_bias or {}:
            if token >= size:
                raise RequestError(f"logit_bias names token {token}; the vocabulary ends at {size - 1}")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(params, name)
            if value is not None and value > size:
                raise RequestError(f"{name} is {value}, but the vocabulary has {size} tokens; give fewer")
        if params.stop and self.tokenizer is None:
            raise RequestError("stop needs text, but this model's folder has no tokenizer.json; leave it out")
        if params.max_new_tokens == 0 and n > 1:
            raise RequestError(f"max_new_tokens is 0, so there is nothing to sample {n} times; give n=1")

    def _transcript(self, prompt: list[int], params: SamplingParams, show_special: bool) -> Transcript | None:
        tokenizer = self.tokenizer
        if tokenizer is None:
            return None
        ends = {tokenizer.special_id(stop): stop for stop in params.stop} if not show_special else {}
        return Transcript(
            lambda: tokenizer.detokenizer(after=prompt, skip_special=not show_special),
            params.stop,
            ends={token: stop for token, stop in ends.items() if token is not None},
            include=params.include_stop,
            least=params.min_new_tokens,
        )

    def fitting(self, prompt: list[int], new: int, truncate: str | None) -> list[int]:
        """A prompt that leaves room for so many new tokens: itself, or cut on the left if asked for; a
        leading BOS stays, since models fail without. Raises RequestError where there is no room."""
        room = self.max_length - new
        kept = prompt[:1] if prompt[0] == self.spec.bos_token_id else []
        if len(prompt) <= room:
            return prompt
        if truncate == "left" and room > len(kept):
            return [*kept, *prompt[len(prompt) - room + len(kept) :]]
        ways = ["lower max_new_tokens"]
        if room > len(kept):
            ways = ["shorten the prompt", *ways, *(["truncate='left'"] if truncate is None else [])]
        if self.max_length < self.spec.max_positions:
            ways.append(f"raise max_length up to the model's {self.spec.max_positions}")
        raise RequestError(
            f"the prompt's {len(prompt)} tokens and max_new_tokens {new} exceed the {self.max_length}"
            f" positions there is room for; {', or '.join(ways)}"
        )

    def _drafters(self, speculation: str | None) -> tuple[str, ...]:
        """All that may draft for a request: the policy chooses among several."""
        name = speculation or self.default_drafter or "none"
        loaded = self.engine.drafters
        if name == "none":
            return ()
        if name == "auto" and self.engine.policy.weighs:
            return tuple(loaded)
        if name not in loaded:
            known = ["none", *(["auto"] if self.engine.policy.weighs else []), *loaded]
            raise RequestError(f"speculation names {name!r}, which is not loaded; loaded: {', '.join(known)}")
        return (name,)

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

    def _submit(self, sequences: list[Sequence]) -> None:
        with _Interrupts():
            self._tell(self.engine.submit, sequences)

    def _drive(self, look: Callable[[], T | None]) -> T:
        """Step the engine, or wait while another thread does, until `look` finds something.

        `look` is called between two steps only, by whichever thread took the last one.
        """
        wish = _Wish(look)
        with self._turn:
            self._waiting.append(wish)
        try:
            with _Interrupts() as interrupts:
                while True:
                    interrupts.deliver()
                    with self._turn:
                        while self._stepping and wish.open:
                            interrupts.wait(self._turn)
                        if not self._stepping:
                            wish.see()
                        if wish.error is not None:
                            raise wish.error
                        if wish.found is not None:
                            return wish.found
                        self._stepping = True
                    self._step()
        finally:
            with self._turn:
                self._waiting.remove(wish)

    def _step(self) -> None:
        """One step for everyone; then everyone's news."""
        reading = None if self._progress is None else self.engine.scheduler.prefilling
        try:
            self.engine.step()
        except Exception as error:
            # The batch cannot go on (out of memory, a broken operator): its requests fail by name.
            if not self.engine.rows.sequences:
                raise
            logger.exception("a pass broke off; the requests in it end with an error")
            self.engine.fail_batch(f"{type(error).__name__}: {error}")
        finally:
            with self._turn:
                self._stepping = False
                try:
                    self._read_inbox()
                    for wish in self._waiting:
                        wish.see()
                finally:
                    self._turn.notify_all()
        if self._progress is None:
            return
        reading = reading or self.engine.scheduler.prefilling
        if reading is not None:
            total = len(reading.prompt) - 1
            done = self.engine.cache.lengths[reading.row] if reading.state is State.PREFILLING else total
            self._progress("prefill", done, total)

    def _output(self, sequence: Sequence) -> Output:
        assert sequence.finish is not None
        transcript, params = sequence.transcript, sequence.params
        lossless = self._is_lossless(params)
        if transcript is not None:
            sequence.write_up()
            transcript.finish()
        return Output(
            text=None if transcript is None else transcript.text,
            token_ids=sequence.new_ids,
            origins=[str(origin) for origin in sequence.origins],
            pieces=None if transcript is None else transcript.pieces,
            stopped_by=None if transcript is None else transcript.stopped_by,
            logprobs=None if params.logprobs is None else list(sequence.scores),
            prompt_logprobs=None if params.prompt_logprobs is None else list(sequence.prompt_scores),
            trace=sequence.trace if sequence.traced else None,
            finish_reason=str(sequence.finish),
            seed=sequence.seed,
            sample=sequence.sample,
            prompt_tokens=len(sequence.prompt),
            stats=Stats.of(sequence.rounds, max(0.0, sequence.ended - sequence.started)),
            error=sequence.error,
            lossless=lossless,
            deterministic=self.deterministic and lossless,
        )

    def _is_lossless(self, params: SamplingParams) -> bool:
        drafters = self._drafters(params.speculation)
        if not drafters:
            return True  # whatever the rule, there is nothing that it could let stand
        return params.bound is None and all(self._lossless.get(name, True) for name in drafters)


@dataclass(slots=True, eq=False)
class _Wish(Generic[T]):
    """What a thread waits for."""

    look: Callable[[], T | None]
    found: T | None = None
    error: Exception | None = None  # of `look`: its own thread's to raise, whoever looked

    @property
    def open(self) -> bool:
        return self.found is None and self.error is None

    def see(self) -> None:
        if self.open:
            try:
                self.found = self.look()
            except Exception as error:
                self.error = error


def _token_id(item: Any) -> int | None:
    """An integer of any library as an int; None for anything else, bool included."""
    if isinstance(item, bool | str):
        return None
    try:
        return operator.index(item)
    except TypeError:
        return None


def _token_ids(items: Iterable[Any]) -> list[int]:
    ids: list[int] = []
    for item in items:
        token = _token_id(item)
        if token is None:
            raise RequestError(f"token id {item!r} is not a whole number; give integers")
        ids.append(token)
    return ids


class _Interrupts:
    """SIGINT waits within, but for `deliver` and `wait`; only the main thread ever gets one.

    Each one that comes is handed on, once, to the handler that was there before, and that is back whatever it
    raises: what comes while the two change places is handed on afterwards.
    """

    def __init__(self) -> None:
        self.holding = True
        self.noted: tuple[int, FrameType | None] | None = None
        self.previous: Callable[[int, FrameType | None], Any] | None = None

    def __enter__(self) -> _Interrupts:
        previous = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread() and callable(previous):
            self.previous = previous
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self.previous is not None:
            signal.signal(signal.SIGINT, self.previous)
        self.deliver()

    def deliver(self) -> None:
        """Hand on what was held back."""
        while self.noted is not None and self.previous is not None:
            noted, self.noted = self.noted, None
            self.previous(*noted)

    def wait(self, condition: threading.Condition) -> None:
        """Until it is notified; interrupts are handed on as they come."""
        try:
            self._let_in()
            condition.wait()
        finally:
            self.holding = True

    def _let_in(self) -> None:
        while True:
            self.deliver()
            self.holding = False
            if self.noted is None:
                return
            self.holding = True  # it came between the two

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.noted = number, frame
        if not self.holding:
            self.holding = True  # until the handler has returned; if it raises, to the end
            self._let_in()
