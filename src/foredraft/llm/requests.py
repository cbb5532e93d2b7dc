"""Requests: checks prompts and parameters, makes sequences of them, and outputs of finished sequences."""

from __future__ import annotations

import operator
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeAlias

from foredraft.constraints import AllowedTokens, ConstraintFactory, mask_of
from foredraft.constraints.shared_cache import LRUCache
from foredraft.decode.constraint import Constraint
from foredraft.decode.drafter import AutoregressiveDrafter
from foredraft.decode.params import GRAMMARS, SamplingKeywords, SamplingParams
from foredraft.decode.prefix_cache import Prefix
from foredraft.decode.scores import Score
from foredraft.decode.sequence import Finish, Sequence
from foredraft.decode.stats import Stats
from foredraft.decode.text_buffer import StopAutomaton, TextBuffer
from foredraft.decode.thinking import ThinkingMarkers
from foredraft.errors import ContextLengthError, Option, RequestError, shortened
from foredraft.kinds.compatibility import is_lossless, select_drafters
from foredraft.kinds.tables import PREDICTION
from foredraft.llm.loaded import Loaded, RequestPolicies
from foredraft.llm.output import Output
from foredraft.model.tokenizer import GIVE_TOKENIZER, NO_TOKENIZER, check_unicode

SAMPLING_OPTIONS = tuple(each.name for each in fields(SamplingParams))


def with_keywords(
    params: SamplingParams | Seq[SamplingParams] | None, default: SamplingParams, options: SamplingKeywords
) -> SamplingParams | list[SamplingParams]:
    """Return the parameters with the options that were given by name in place of their own."""

    def one(what: str, params: Any) -> SamplingParams:
        if isinstance(params, SamplingParams):
            return params.replace(**options) if options else params
        remedy = "give a SamplingParams, or options as keywords, as in temperature=0"
        if isinstance(params, Mapping):
            remedy = "give its entries as keywords, as in generate(prompt, **options)"
        raise RequestError(option=what, value=params, remedy=remedy)

    if isinstance(params, list | tuple):
        return [one(f"params[{place}]", each) for place, each in enumerate(params)]
    return one("params", default if params is None else params)


Prompts: TypeAlias = str | Seq[str] | Seq[int] | Seq[Seq[int]]


@dataclass(frozen=True, slots=True)
class Submission:
    """What a request asks: a prompt, its parameters, and how its samples run and are shown."""

    prompt: str | Seq[int]
    params: SamplingParams
    n: int = 1  # samples
    truncate: Literal["left"] | None = None
    show_special: bool = False
    trace: bool = False
    client: str = ""  # has a share of the rows
    salts: tuple[str, ...] = ()  # only prompts of the same salts find each other in the prefix cache
    text_salts: tuple[str, ...] = ()  # and texts of the same salts in drafter "suffix"
    marks: tuple[str, ...] = ()  # special tokens whose text is shown all the same, if the tokenizer has them
    thinking: ThinkingMarkers | None = None  # stop strings and grammars hold behind them; None: it is text


@dataclass(frozen=True, slots=True)
class Requests:
    """Checks requests to one model and makes sequences of them; makes outputs of finished sequences."""

    loaded: Loaded  # the model
    default_drafter: str | None  # the drafter of requests that do not give one; None is plain decoding
    max_length: int  # prompt and new tokens together, at most
    ids: Iterator[int]  # fresh ids of sequences
    constraints: ConstraintFactory | None  # makes constraints; None without a tokenizer
    policies: RequestPolicies  # that requests name
    stops: LRUCache[tuple[str, ...], StopAutomaton]  # that all prompts and samples of a request share

    def encode(self, prompts: Prompts) -> list[list[int]]:
        """Return the token ids of each prompt."""
        if isinstance(prompts, str):
            return [self._encode_text(prompts)]
        _check_kind("the prompt", prompts, "give text, token ids, or a list of either")
        items: list[Any] = list(prompts)
        if items and all(_token_id(item) is not None for item in items):
            return [_token_ids(items)]
        encoded = []  # a prompt without tokens stands in a list: [[]]
        for item in items:
            _check_kind("a prompt in the list", item, "give text or a list of token ids")
            encoded.append(self._encode_text(item) if isinstance(item, str) else _token_ids(item))
        return encoded

    def _encode_text(self, text: str) -> list[int]:
        if self.loaded.tokenizer is None:
            raise RequestError(NO_TOKENIZER, remedy=(*GIVE_TOKENIZER, ", or token ids instead of text"))
        if not text:
            raise RequestError("the prompt is empty", remedy="give at least one character")
        check_unicode(text, "the prompt")
        return self.loaded.tokenizer.encode(text)

    def encoded(self, asked: Submission) -> Submission:
        """Return a submission whose prompt may be text with the ids of that one prompt."""
        self.drafters(asked.params)  # refuses an unknown one before any work
        encoded = self.encode(asked.prompt)
        if (count := len(encoded)) != 1:
            raise RequestError(f"stream takes one prompt, not {count}", remedy="use generate for several")
        return replace(asked, prompt=encoded[0])

    def sequences(self, asked: Submission) -> list[Sequence]:
        """Return the sequences of a submission whose prompt is token ids; they are not yet submitted."""
        assert not isinstance(asked.prompt, str)
        prompt, params = list(asked.prompt), asked.params
        self._check_prompt(prompt, asked.truncate)
        self._check_params(params, asked.n)
        prompt = self.truncated(prompt, params.max_new_tokens, asked.truncate)
        named = self.drafters(params)
        drafters = named if params.max_new_tokens else ()  # so that no drafter reads the prompt for nothing
        seed = secrets.randbits(53) if params.seed is None else params.seed
        ids = [next(self.ids) for _ in range(asked.n)]
        constraint = self._constraint(prompt, asked)
        prediction = self._prediction(params.prediction)
        strings = tuple(params.stop)
        size = sum(len(string.encode()) for string in strings)
        stops = self.stops.get(strings, size, lambda: StopAutomaton(strings))
        prompt_scores: list[Score | None] = [None]  # the first token has no context to be scored by
        return [
            Sequence(
                id, prompt, params, seed, sample, frozenset(self.loaded.spec.eos_token_ids), drafters,
                constraint(), ids[0] if asked.n > 1 else None, asked.client,
                text_scope=Prefix.salted(*asked.text_salts).digest, prefix=Prefix.salted(*asked.salts),
                text_buffer=self._text_buffer(prompt, asked, stops),
                prediction=prediction, policy=self.policies.of(params, self.loaded.engine),
                traced=asked.trace, prompt_scores=prompt_scores,
            )
            for sample, id in enumerate(ids)
        ]  # fmt: skip

    def _check_prompt(self, prompt: list[int], truncate: object) -> None:
        size = self.loaded.spec.vocab_size
        if not prompt:
            raise RequestError("the prompt is empty", remedy="give at least one token")
        for token in prompt:
            if not 0 <= token < size:
                raise RequestError(
                    f"token id {shortened(token)} is outside the model's vocabulary of {size}",
                    remedy=f"give ids from 0 to {size - 1}",
                )
        self._check_media(prompt)
        if truncate not in (None, "left"):
            raise RequestError(option="truncate", value=truncate, remedy="give 'left' or None")

    def _check_media(self, prompt: list[int]) -> None:
        """Refuse the tokens of a multimodal checkpoint that stand for images and sounds."""
        spec = self.loaded.spec
        present = set(prompt) if spec.media_tokens else set()
        for key, token in spec.media_tokens:
            if token in present:
                raise RequestError(
                    f"the prompt holds token {token}, the {key} of the model, and only its text model runs",
                    remedy="give a prompt without images, videos or sounds",
                )

    def _check_params(self, params: SamplingParams, n: int) -> None:
        """Check what depends on the model or on `n`; SamplingParams checks the rest."""
        size = self.loaded.spec.vocab_size
        for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
            for token in getattr(params, name) or ():
                if token >= size:
                    raise RequestError(
                        f"names token {token}", option=name, remedy=f"give ids from 0 to {size - 1}"
                    )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(params, name)
            if value is not None and value > size:
                raise RequestError(
                    f"but the vocabulary has {size} tokens", option=name, value=value, remedy="give fewer"
                )
        for name in ("stop", "ban", *GRAMMARS, "prediction"):
            is_text = name != "prediction" or isinstance(params.prediction, str)
            if getattr(params, name) and is_text and self.loaded.tokenizer is None:
                raise RequestError(
                    f"needs text, but {NO_TOKENIZER}", option=name,
                    remedy=(*GIVE_TOKENIZER, ", or leave it out"),
                )  # fmt: skip
        if params.max_new_tokens == 0 and n > 1:
            raise RequestError(
                f"so there is nothing to sample {n} times", option="max_new_tokens", value=0,
                remedy=("give ", Option("n", 1)),
            )  # fmt: skip

    def _constraint(self, prompt: list[int], asked: Submission) -> Callable[[], Constraint | None]:
        """Return a function that makes each sequence's constraint, None where the request asks for none."""
        params = asked.params
        if self.constraints is not None:
            special = asked.show_special
            return self.constraints.maker(prompt, params, show_special=special, thinking=asked.thinking)
        if params.allowed_token_ids is None:
            return lambda: None
        mask = mask_of(params.allowed_token_ids, self.loaded.spec.vocab_size)
        return lambda: AllowedTokens(mask)

    def _text_buffer(self, prompt: list[int], asked: Submission, stops: StopAutomaton) -> TextBuffer | None:
        tokenizer, params, thinking = self.loaded.tokenizer, asked.params, asked.thinking
        markers = () if thinking is None else (*thinking.markers, *thinking.answer)
        if tokenizer is None:
            return None
        return TextBuffer(
            lambda: tokenizer.detokenizer(after=prompt, skip_special=not asked.show_special),
            stops,
            ends={} if asked.show_special else tokenizer.special_ids(params.stop),
            silent=() if params.include_stop else params.stop_token_ids,
            include=params.include_stop,
            least=params.min_new_tokens,
            thinking=thinking,
            marks={} if asked.show_special else tokenizer.special_within([*markers, *asked.marks]),
        )

    def truncated(self, prompt: list[int], new: int, truncate: str | None) -> list[int]:
        """Return a prompt that leaves room for `new` tokens, cut behind BOS only if `truncate` is "left"."""
        room, spec = self.max_length - new, self.loaded.spec
        kept = prompt[:1] if prompt[0] == spec.bos_token_id else []
        if len(prompt) <= room:
            return prompt
        if truncate == "left" and room > len(kept):
            return [*kept, *prompt[len(prompt) - room + len(kept) :]]
        remedy: list[str | Option] = ["lower ", Option("max_new_tokens")]
        if room > len(kept):
            remedy = ["shorten the prompt, or ", *remedy]
            remedy += [", or give ", Option("truncate", "left")] if truncate is None else []
        if self.max_length < spec.max_positions:
            remedy += [", or raise ", Option("max_length"), f" up to the model's {spec.max_positions}"]
        raise ContextLengthError(
            (
                f"the prompt's {len(prompt)} tokens and ", Option("max_new_tokens", new),
                f" exceed the {self.max_length} positions there is room for",
            ),
            remedy=tuple(remedy), prompt=len(prompt), new=new, most=self.max_length, reach=spec.max_positions,
        )  # fmt: skip

    def drafters(self, params: SamplingParams) -> tuple[str, ...]:
        """Return the drafters of a request; its policy chooses among several."""
        named = params.drafter or self.default_drafter or "none"
        drafters = self._drafters(named, params)
        if params.prediction is None:
            return tuple(name for name in drafters if name != PREDICTION)
        if PREDICTION in drafters or params.drafter == "none":
            return drafters
        if params.drafter is not None:
            raise RequestError(
                ("has no effect with ", Option("drafter", params.drafter)), option="prediction",
                remedy=("give ", Option("drafter", PREDICTION), ", or leave the drafter out"),
            )  # fmt: skip
        return self._drafters(PREDICTION, params)

    def _drafters(self, drafter: str, params: SamplingParams) -> tuple[str, ...]:
        """Return the drafters that a name stands for under the request's policy."""
        engine = self.loaded.engine
        has_probs = {name: isinstance(each, AutoregressiveDrafter) for name, each in engine.drafters.items()}
        return select_drafters(drafter, has_probs, self.policies.of(params, engine) or engine.policy)

    def _prediction(self, given: str | Seq[int] | None) -> tuple[int, ...]:
        """Return a prediction as token ids, as many as a text can have."""
        if isinstance(given, str):
            assert self.loaded.tokenizer is not None  # `_check_params` refuses a text without one
            given = self.loaded.tokenizer.encode(given, False)
        ids, size = tuple(given or ())[: self.max_length], self.loaded.spec.vocab_size
        if ids and max(ids) >= size:
            raise RequestError(
                f"names token {max(ids)}", option="prediction", remedy=f"give ids from 0 to {size - 1}"
            )
        return ids

    def output(self, sequence: Sequence) -> Output:
        """Return the result of a finished sequence."""
        assert sequence.finish is not None
        sequence.finish_text()
        text_buffer, params, constraint = sequence.text_buffer, sequence.params, sequence.constraint
        stopped_by = None if text_buffer is None else text_buffer.stopped_by
        if sequence.finish is Finish.CONSTRAINT:
            stopped_by = None if constraint is None else constraint.ended_by
        plain = sequence.drafters and not any(outcome.drafted for outcome in sequence.rounds)
        lossless = is_lossless(params.acceptance, self.drafters(params))
        return Output(
            text=None if text_buffer is None else text_buffer.text,
            token_ids=sequence.new_ids,
            origins=[str(origin) for origin in sequence.origins],
            pieces=None if text_buffer is None else text_buffer.pieces,
            stopped_by=stopped_by,
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
            deterministic=self.loaded.deterministic and lossless,
            why_plain=self.loaded.engine.policy_of(sequence).why_plain(sequence) if plain else None,
            cached_tokens=sequence.cached,
        )


def _check_kind(what: str, prompt: object, remedy: str) -> None:
    """Refuse what is neither text nor a sequence of tokens, though Python may iterate over it."""
    if isinstance(prompt, bytes | bytearray | memoryview):
        raise RequestError(f"{what} is bytes", remedy='decode it: prompt.decode("utf-8")')
    if isinstance(prompt, Mapping):
        remedy = 'give its token ids: encoding["input_ids"]' if "input_ids" in prompt else remedy
        raise RequestError(f"{what} is a mapping, of which only the keys would be read", remedy=remedy)
    if isinstance(prompt, Set):
        raise RequestError(f"{what} is a set, which has no order", remedy=remedy)
    if not isinstance(prompt, Iterable) or getattr(prompt, "ndim", 1) == 0:
        raise RequestError(f"{what} is {shortened(prompt)}", remedy=remedy)


def _token_id(item: Any) -> int | None:
    """Return an integer of any library as an int; None for all else, tensors with dimensions too."""
    dimensions, dtype = getattr(item, "ndim", 0), str(getattr(item, "dtype", ""))
    if isinstance(item, bool | str) or dimensions or "bool" in dtype:
        return None
    try:
        return operator.index(item)
    except TypeError:
        return None


def _token_ids(items: Iterable[Any]) -> list[int]:
    ids: list[int] = []
    for item in items:
        if (token := _token_id(item)) is None:
            raise RequestError(f"token id {shortened(item)} is not a whole number", remedy="give integers")
        ids.append(token)
    return ids
