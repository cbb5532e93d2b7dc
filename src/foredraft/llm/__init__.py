"""LLM: prompts in, outputs or a stream of pieces out; safe to use from several threads.

Requests of all threads share one engine and one running batch (`driver`). An interrupt (Ctrl-C) waits for
the round to end, so no state is left half-written (`interrupts`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from typing import Any, Literal

from foredraft.decode.engine import Engine
from foredraft.decode.params import SamplingParams, is_whole
from foredraft.decode.sequence import Sequence, State
from foredraft.decode.stats import Stats
from foredraft.errors import RequestError
from foredraft.kinds.compatibility import is_lossless
from foredraft.llm.driver import Driver
from foredraft.llm.output import Output, Piece
from foredraft.llm.requests import Prompts, Requests
from foredraft.model.chat import Message
from foredraft.model.spec import ModelSpec
from foredraft.model.tokenizer import Tokenizer

__all__ = ["LLM", "Output", "Piece", "Prompts"]


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
        deterministic: bool = True,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        self.engine, self.spec, self.tokenizer = engine, spec, tokenizer
        self.default_drafter, self.max_length = default_drafter, max_length
        self.default_params = default_params or SamplingParams()
        self.deterministic = deterministic
        self._ids = itertools.count()
        self._driver = Driver(engine, progress)

    def params(self, **options: Any) -> SamplingParams:
        """The model's default parameters with these options changed.

        `SamplingParams(...)` by itself knows nothing of the model. Raises RequestError as it does.
        """
        return self.default_params.replace(**options)

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
        if not is_whole(n, 1):
            raise RequestError(f"n is {n!r}; give a whole number, 1 or more")
        each = list(params) if isinstance(params, Seq) else [params or self.default_params] * len(encoded)
        if len(each) != len(encoded):
            raise RequestError(
                f"{len(each)} sampling parameters for {len(encoded)} prompts; give one or as many"
            )
        sequences: list[Sequence] = []
        for ids, own in zip(encoded, each, strict=True):
            sequences += self._requests.sequences(ids, own, n, truncate, show_special, trace)

        def outputs() -> list[Output] | None:
            if any(s.state is not State.FINISHED for s in reversed(sequences)):
                return None
            return [self._output(s) for s in sequences]

        try:
            self._driver.submit(sequences)
            return self._driver.drive(outputs)
        except BaseException:
            # those that wait go first: a row that a sibling leaves would pass to them
            self._driver.tell(self.engine.cancel, sequences[::-1])
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
        (sequence,) = self._requests.sequences(encoded[0], own, 1, truncate, show_special, trace)
        return self._pieces(sequence)

    def cancel_all(self) -> None:
        """End every request, running or waiting, after the round in progress; each keeps what it has."""
        self._driver.cancel_all()

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
            if sequence.text_buffer is not None:
                sequence.update_text()
                parts = sequence.text_buffer.release(settled)
            return Piece(
                text=None if parts is None else "".join(text for _, text in parts),
                token_ids=sequence.new_ids[new],
                origins=[str(origin) for origin in sequence.origins[new]],
                parts=parts,
                logprobs=None if sequence.params.logprobs is None else sequence.scores[new],
                output=output,
            )

        try:
            self._driver.submit([sequence])
            while True:
                piece = self._driver.drive(news)
                yield piece
                if piece.output is not None:
                    return
        finally:
            # no waiting here: an iterator that was dropped may be closed in the middle of a step
            self._driver.tell(self.engine.cancel, [sequence])

    def encode(self, prompts: Prompts) -> list[list[int]]:
        """Prompts in any form that `generate` takes -> the ids of each; raises RequestError as it does."""
        return self._requests.encode(prompts)

    def fitting(self, prompt: list[int], new: int, truncate: str | None) -> list[int]:
        """A prompt that leaves room for so many new tokens, as `generate` would read it."""
        return self._requests.fitting(prompt, new, truncate)

    @property
    def _requests(self) -> Requests:
        """As the attributes are now."""
        return Requests(
            self.engine, self.spec, self.tokenizer, self.default_drafter, self.max_length, self._ids
        )

    def _output(self, sequence: Sequence) -> Output:
        assert sequence.finish is not None
        text_buffer, params = sequence.text_buffer, sequence.params
        lossless = is_lossless(params.acceptance, self._requests.drafters(params.drafter))
        if text_buffer is not None:
            sequence.update_text()
            text_buffer.finish()
        return Output(
            text=None if text_buffer is None else text_buffer.text,
            token_ids=sequence.new_ids,
            origins=[str(origin) for origin in sequence.origins],
            pieces=None if text_buffer is None else text_buffer.pieces,
            stopped_by=None if text_buffer is None else text_buffer.stopped_by,
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
