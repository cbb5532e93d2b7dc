"""Prompts and parameters -> sequences: nothing is submitted unless all of it can be served."""

from __future__ import annotations

import operator
import secrets
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Literal

from foredraft.decode.drafter import Stepper
from foredraft.decode.engine import Engine
from foredraft.decode.params import SamplingParams
from foredraft.decode.scores import Score
from foredraft.decode.sequence import Sequence
from foredraft.decode.text_buffer import TextBuffer
from foredraft.errors import RequestError
from foredraft.kinds.compatibility import PolicyTraits, select_drafters
from foredraft.model.spec import ModelSpec
from foredraft.model.tokenizer import Tokenizer

__all__ = ["Prompts", "Requests"]

Prompts = str | Seq[str] | Seq[int] | Seq[Seq[int]]


@dataclass(frozen=True, slots=True)
class Requests:
    """To a model, checked; raises RequestError that names what cannot be served. ids: of sequences."""

    engine: Engine
    spec: ModelSpec
    tokenizer: Tokenizer | None
    default_drafter: str | None
    max_length: int
    ids: Iterator[int]

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

    def sequences(
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
        drafters = self.drafters(params.drafter)
        if params.max_new_tokens == 0:
            drafters = ()  # which need not read the prompt either
        seed = secrets.randbits(53) if params.seed is None else params.seed
        ids = [next(self.ids) for _ in range(n)]
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
                drafters,
                group=group,
                text_buffer=self._text_buffer(prompt, params, show_special),
                traced=trace,
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

    def _text_buffer(
        self, prompt: list[int], params: SamplingParams, show_special: bool
    ) -> TextBuffer | None:
        tokenizer = self.tokenizer
        if tokenizer is None:
            return None
        ends = {tokenizer.special_id(stop): stop for stop in params.stop} if not show_special else {}
        return TextBuffer(
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

    def drafters(self, drafter: str | None) -> tuple[str, ...]:
        """Return the drafters of a request that names `drafter`; the policy chooses among several."""
        engine = self.engine
        policy = PolicyTraits(engine.policy.name, engine.policy.uses_costs, engine.policy.stops_by_content)
        has_probs = {name: isinstance(each, Stepper) for name, each in engine.drafters.items()}
        return select_drafters(drafter or self.default_drafter or "none", has_probs, policy)


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
