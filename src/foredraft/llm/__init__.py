"""LLM: prompts in, outputs or a stream of pieces out; safe to use from several threads.

Requests of all threads share one engine and one running batch, which a thread of their own steps (`service`).
A process that was forked from the one that loaded the model cannot use it (`foredraft.workers`).
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any, Literal, Unpack, cast

import torch

from foredraft.arguments import clear_calls
from foredraft.constraints import ConstraintFactory
from foredraft.constraints.shared_cache import KEPT_BYTES, KEPT_LISTS, LRUCache
from foredraft.decode.params import ELSEWHERE, SamplingKeywords, SamplingParams, is_whole
from foredraft.decode.sequence import Sequence
from foredraft.decode.text_buffer import StopAutomaton
from foredraft.errors import ConfigError, Option, RequestError
from foredraft.llm.loaded import Loaded, RequestPolicies
from foredraft.llm.output import Output, Piece, Pieces, Stream, WholeOutputs
from foredraft.llm.requests import SAMPLING_OPTIONS, Prompts, Requests, Submission, with_keywords
from foredraft.llm.service import EngineThread, closed
from foredraft.model.chat import Message
from foredraft.model.memory import dtype_name
from foredraft.model.tokenizer import GIVE_TOKENIZER, NO_TOKENIZER

__all__ = ["LLM", "Output", "Piece", "Prompts", "Stream"]

MAX_SAMPLES = 100_000  # of a prompt in one call; each takes a few kB from the start


class LLM:
    """A loaded model, safe to use from several threads; `foredraft.load` makes one.

    `close`, or leaving a `with` block, frees its memory.

    Attributes:
        model: The folder or hub id that was loaded; "demo" for the demo models.
        weights: How the target's weights are quantised, such as "int4"; None if they are not.
        tokenizer: The model's, with `encode`, `decode` and `encode_chat`; None where its folder has none.
        default_params: The parameters of requests without their own, from generation_config.json.
        default_drafter: The drafter of requests that do not give one; None is plain decoding.
        lora: The LoRAs that are merged into the target, in order.
        max_length: Prompt and new tokens of one request together, at most.
        deterministic: Whether the target's forwards keep to batch-invariant shapes.
        profile_seconds: What measuring the costs of this machine took while loading; 0 where they were known.
    """

    def __new__(cls, *values: Any, **options: Any) -> LLM:
        """Refuse a call with anything but a loaded model."""
        if not isinstance(next(iter(values), options.get("loaded")), Loaded):
            raise ConfigError(
                "an LLM is made by foredraft.load", remedy='call foredraft.load("path/to/checkpoint")'
            )
        return object.__new__(cls)

    def __init__(self, loaded: Loaded, progress: Callable[[str, int, int], None] | None = None) -> None:
        self.model, self.weights, self.tokenizer = loaded.model, loaded.weights, loaded.tokenizer
        self.default_drafter, self.default_params = loaded.default_drafter, loaded.default_params
        self.lora = loaded.lora
        self.max_length, self.deterministic = loaded.max_length, loaded.deterministic
        self.profile_seconds = loaded.profile_seconds
        self._ids, self._policies = itertools.count(), RequestPolicies()
        self._loaded: Loaded | None = loaded  # None once closed
        self._thread: EngineThread | None = EngineThread(loaded.engine, progress)
        self._stops = LRUCache[tuple[str, ...], StopAutomaton](KEPT_LISTS, KEPT_BYTES)
        self._constraints = None if loaded.tokenizer is None else ConstraintFactory(
            loaded.tokenizer, loaded.spec.vocab_size, frozenset(loaded.spec.eos_token_ids)
        )  # fmt: skip

    def __repr__(self) -> str:
        if self._loaded is None:
            return f"<LLM {self.model!r}: closed>"
        engine = self._loaded.engine
        names = " + ".join(map(repr, (self.model, *self.lora)))
        return (
            f"<LLM {names}: drafters {', '.join(engine.drafters) or 'none'}; policy"
            f" {engine.policy.name}; {self.weights or dtype_name(engine.cache.dtype)} on {engine.device}>"
        )

    def __enter__(self) -> LLM:
        self._open_thread()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def params(self, **options: Unpack[SamplingKeywords]) -> SamplingParams:
        """Return the model's default parameters with some options changed.

        `SamplingParams(...)` alone does not know the model's defaults.

        Raises:
            RequestError: An option is unknown, or its value out of range.

        Examples:
            >>> llm.params(temperature=0, max_new_tokens=8).max_new_tokens
            8
        """
        return self.default_params.replace(**options)

    @clear_calls(RequestError)
    def chat(
        self,
        messages: Seq[Message],
        params: SamplingParams | None = None,
        *,
        n: int = 1,
        truncate: Literal["left"] | None = None,
        show_special: bool = False,
        trace: bool = False,
        **options: Any,
    ) -> list[Output]:
        """Generate `n` replies to a conversation, formatted by the model's chat template.

        Args:
            messages: Mappings with a role and what else the template reads, usually a content.
            params: By default the model's own.
            n: Replies.
            truncate: As in `generate`.
            show_special: As in `generate`.
            trace: As in `generate`.
            **options: Sampling options, as in `generate`, and other variables of the template, such as
                `tools`, `documents` or `enable_thinking`.

        Returns:
            The replies.

        Raises:
            RequestError: There is no template, it refuses the messages or does not read a variable; or as in
                `generate`.

        Examples:
            >>> messages = [{"role": "user", "content": "Name a colour."}]
            >>> [reply] = llm.chat(messages, max_new_tokens=8, ignore_eos=True)
            >>> len(reply.token_ids), reply.finish_reason
            (8, 'length')
        """
        if self.tokenizer is None:
            raise RequestError(NO_TOKENIZER, remedy=(*GIVE_TOKENIZER, ", or token ids instead of messages"))
        sampling = {name: value for name, value in options.items() if name in SAMPLING_OPTIONS}
        variables = {name: value for name, value in options.items() if name not in sampling}
        ids = self.tokenizer.encode_chat(messages, **variables)
        return self.generate(
            [ids], params, n=n, truncate=truncate, show_special=show_special, trace=trace,
            **cast(SamplingKeywords, sampling),
        )  # fmt: skip

    @clear_calls(RequestError, ELSEWHERE, SAMPLING_OPTIONS)
    def generate(
        self,
        prompts: Prompts,
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        n: int = 1,
        truncate: Literal["left"] | None = None,
        show_special: bool = False,
        trace: bool = False,
        **options: Unpack[SamplingKeywords],
    ) -> list[Output]:
        """Generate `n` samples of each prompt.

        A request that fails while it runs (logits that are not finite, a forward that fails) is reported in
        its Output, and the others go on. A KeyboardInterrupt cancels the requests and is raised again; to
        keep what was generated, use `cancel_all` or `stream`.

        Args:
            prompts: Text, token ids, or a list of either.
            params: One for all prompts, or one for each; by default the model's own.
            n: Samples of each prompt.
            truncate: "left" drops the oldest tokens of a prompt that is too long, instead of refusing it.
            show_special: Include special tokens in the text.
            trace: Record every round in the outputs.
            **options: Sampling options by name; they replace those of `params`.

        Returns:
            All samples of the first prompt, then all of the second, and so on.

        Raises:
            RequestError: A prompt or an option cannot be served, or the process was forked from the one that
                loaded the model; nothing has run then.

        Examples:
            >>> outputs = llm.generate(["def add(a, b):", "import"], SamplingParams(max_new_tokens=4), n=2)
            >>> [output.sample for output in outputs]
            [0, 1, 0, 1]
            >>> greedy = SamplingParams(temperature=0, max_new_tokens=16)
            >>> [drafted] = llm.generate("def add(a, b):", greedy)
            >>> [plain] = llm.generate("def add(a, b):", greedy, drafter="none")
            >>> drafted.text == plain.text
            True
        """
        thread, requests = self._open_thread(), self.requests
        thread.check_process()
        chosen = with_keywords(params, self.default_params, options)
        for own in chosen if isinstance(chosen, list) else [chosen]:
            requests.drafters(own)  # refuses an unknown one before any work
        encoded = requests.encode(prompts)
        if not is_whole(n, 1, MAX_SAMPLES):
            raise RequestError(option="n", value=n, remedy=f"give a whole number from 1 to {MAX_SAMPLES:,}")
        each = chosen if isinstance(chosen, list) else [chosen] * len(encoded)
        if len(each) != len(encoded):
            raise RequestError(
                f"{len(each)} sampling parameters for {len(encoded)} prompts", remedy="give one or as many"
            )
        sequences: list[Sequence] = []
        for ids, own in zip(encoded, each, strict=True):
            sequences += requests.sequences(Submission(ids, own, n, truncate, show_special, trace))
        outputs: list[Output] = thread.run(WholeOutputs(sequences, requests.output))
        return outputs

    @clear_calls(RequestError, ELSEWHERE, SAMPLING_OPTIONS)
    def stream(
        self,
        prompt: str | Seq[int],
        params: SamplingParams | None = None,
        *,
        truncate: Literal["left"] | None = None,
        show_special: bool = False,
        trace: bool = False,
        **options: Unpack[SamplingKeywords],
    ) -> Stream:
        """Stream one sample, one piece after every round; closing or dropping it cancels the request.

        The request starts with the first `next`. The last piece carries the Output.

        Args:
            prompt: Text, or token ids.
            params: By default the model's own.
            truncate: As in `generate`.
            show_special: As in `generate`.
            trace: As in `generate`.
            **options: As in `generate`.

        Returns:
            An iterator of pieces, with `close`.

        Raises:
            RequestError: As in `generate`, at the call.

        Examples:
            >>> pieces = list(llm.stream("def add(a, b):", max_new_tokens=16))
            >>> "".join(piece.text for piece in pieces) == pieces[-1].output.text
            True
        """
        own = with_keywords(params, self.default_params, options)
        if isinstance(own, list):
            raise RequestError("stream takes one SamplingParams, not a list", remedy="give one")
        thread, requests = self._open_thread(), self.requests
        thread.check_process()
        asked = requests.encoded(Submission(prompt, own, 1, truncate, show_special, trace))
        [sequence] = requests.sequences(asked)
        return Stream(thread, Pieces(sequence, requests.output))

    def save_texts(self, file: str | Path | None = None) -> int:
        """Save the texts that drafter "suffix" keeps, and return how many there are.

        The file is written whole: whatever ends the process meanwhile, it has the texts of before or of now.

        Args:
            file: The file to write; by default the `texts_file` of `load`.

        Raises:
            ConfigError: The file cannot be written, or there is none.
            RequestError: The drafter is not loaded, or the model is closed.

        Examples:
            >>> with foredraft.load(drafter="suffix", recent_texts=8, max_length=512) as llm:
            ...     [output] = llm.generate("def add(a, b):", max_new_tokens=8)
            ...     llm.save_texts("texts.foredraft")
            1
        """
        from foredraft.drafters.recent_texts import Suffix

        suffix = self.loaded.engine.drafters.get(Suffix.name)
        if not isinstance(suffix, Suffix):
            raise RequestError(
                f"there are no texts, because drafter {Suffix.name} is not loaded",
                remedy=("load with ", Option("recent_texts")),
            )
        return suffix.save(None if file is None else Path(file))

    def cancel_all(self) -> None:
        """Cancel every request, running or waiting, after the current round; outputs keep what they have.

        A signal handler may call this.

        Raises:
            RequestError: The process was forked from the one that loaded the model.

        Examples:
            >>> stream = llm.stream("def add(a, b):", SamplingParams(max_new_tokens=64, ignore_eos=True))
            >>> first = next(stream)
            >>> llm.cancel_all()
            >>> list(stream)[-1].output.finish_reason
            'cancelled'
        """
        if (thread := self._thread) is not None:
            thread.cancel_all()

    def close(self) -> None:
        """Cancel every request and free the weights and the caches; repeating it does nothing.

        Calls that run in other threads return what they have, and so do open streams. Memory that they, or
        the caller's own references, still use is freed with them. Later requests raise RequestError.

        Examples:
            >>> with foredraft.load(drafter="lookup", max_length=512) as llm:
            ...     [output] = llm.generate("def add(a, b):", max_new_tokens=4)
            >>> llm
            <LLM 'demo': closed>
        """
        thread, self._thread, self._loaded = self._thread, None, None
        if thread is None:
            return
        thread.closed = True
        thread.stop()
        if thread.engine.prefix_cache is not None:
            thread.engine.prefix_cache.close()
        on_gpu = thread.engine.device.type == "cuda"
        del thread
        gc.collect()  # parts of an engine may refer to each other
        if on_gpu:
            torch.cuda.empty_cache()

    def _open_thread(self) -> EngineThread:
        """Return the engine's thread, or raise RequestError where the model is closed."""
        if self._thread is None:
            raise closed()
        return self._thread

    @property
    def loaded(self) -> Loaded:
        """The parts, for programs that measure, search, verify or serve; not of the public API."""
        if self._loaded is None:
            raise closed()
        return self._loaded

    def encode(self, prompts: Prompts) -> list[list[int]]:
        """Return the token ids of each prompt, in any form that `generate` takes.

        Raises:
            RequestError: A prompt is neither text nor token ids, or is empty or invalid text.

        Examples:
            >>> [ids] = llm.encode("def add(a, b):")
            >>> llm.encode([ids, ids]) == [ids, ids]
            True
        """
        return self.requests.encode(prompts)

    @property
    def requests(self) -> Requests:
        """The checks and the defaults of requests, by the current values; not of the public API."""
        return Requests(
            self.loaded, self.default_drafter, self.max_length, self._ids, self._constraints, self._policies,
            self._stops,
        )  # fmt: skip
