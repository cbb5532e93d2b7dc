"""SamplingParams: the options of one request. Every value is checked when the object is made.

The names are those of `transformers` and of the OpenAI API where these agree. An option that either has and
this one lacks is refused with the reason, never ignored.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias, TypedDict, Unpack, get_args

from foredraft.arguments import check_fields, declare, spelled_elsewhere
from foredraft.arguments.values import (
    MAX_WHOLE,
    Choice,
    Flag,
    Ids,
    Name,
    Number,
    Strings,
    Unfit,
    Value,
    Whole,
    Words,
    is_number,
    is_text,
    is_whole,
)
from foredraft.errors import Option, RequestError, did_you_mean

__all__ = ["ELSEWHERE", "GRAMMARS", "SamplingKeywords", "SamplingParams", "is_number", "is_whole"]

# options that give the text's grammar
GRAMMARS = ("regex", "choices", "json_schema", "json_object", "grammar")
# characters that have a meaning in a regular expression
# (https://docs.rs/regex-syntax/latest/regex_syntax/fn.is_meta_character.html)
META = re.compile(r"[\\.+*?()|\[\]{}^$#&~-]")
MAX_LOGPROBS = 1000  # alternatives at each position, at most
MAX_ROLLBACKS = 10_000  # of a ban, at most: each costs a step of the model at least
ROLLBACK = 5.0  # nats; the default of BiLD's published code
RuleName: TypeAlias = Literal["speculative", "block", "coupled", "bild"]
RULES = get_args(RuleName)


class Schema(Value):
    """A JSON schema, kept as JSON."""

    def read(self, given: Any) -> str:
        # of pydantic, which is no dependency:
        # https://docs.pydantic.dev/latest/api/base_model/#pydantic.BaseModel.model_json_schema
        if isinstance(given, type) and hasattr(given, "model_json_schema"):
            try:
                given = given.model_json_schema()
            except Exception as error:  # a class of the user's, whose types may have no schema
                raise Unfit("give the schema itself", f"has no schema ({error})") from error
        if isinstance(given, str):
            try:
                given = json.loads(given)
            except (ValueError, RecursionError) as error:
                raise Unfit("correct it", f"is not JSON ({error})") from None
        if not (isinstance(given, Mapping) or given is True):
            raise Unfit(self.remedy(given), value=given)
        try:
            return json.dumps(dict(given) if isinstance(given, Mapping) else {})
        except (TypeError, ValueError, RecursionError) as error:
            raise Unfit("correct it", f"is not JSON ({error})") from None


class Biases(Value):
    """A table of token ids and numbers, kept as a table of its own; an empty one is none."""

    def read(self, given: Any) -> dict[int, float] | None:
        if not isinstance(given, Mapping):
            raise Unfit("give a table of token ids and numbers")
        for token, bias in given.items():
            if not is_whole(token, 0, MAX_WHOLE):
                raise Unfit("give whole token ids as its keys")
            if not is_number(bias) or not -100 <= bias <= 100:
                raise Unfit("give numbers from -100 to 100")
        return dict(given) or None


class TextOrIds(Value):
    """Text or token ids, kept as text or a tuple of ids; an empty one is none."""

    def read(self, given: Any) -> str | tuple[int, ...] | None:
        if isinstance(given, tuple | list) and all(is_whole(token, 0, MAX_WHOLE) for token in given):
            return tuple(given) or None
        if not is_text(given):
            raise Unfit(self.remedy(given))
        return str(given) or None


COUNT = Whole("a whole number from 0 on")
SCORES = Whole(f"a whole number from 0 to {MAX_LOGPROBS}, or leave it out", most=MAX_LOGPROBS)
SHARE = Number("above 0 and at most 1 (off)", most=1.0, above=True)
PENALTY = Number("from -2 to 2; 0 is off", least=-2.0, most=2.0)


class SamplingKeywords(TypedDict, total=False):
    """The fields of `SamplingParams` as keywords, for type checkers and editors; a test compares the two."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | None
    min_new_tokens: int
    max_new_tokens: int
    ignore_eos: bool
    stop: str | tuple[str, ...] | list[str]
    stop_token_ids: tuple[int, ...] | list[int]
    include_stop: bool
    seed: int | None
    logprobs: int | None
    prompt_logprobs: int | None
    acceptance: RuleName | None
    rollback: float | None
    allowed_token_ids: tuple[int, ...] | list[int] | None
    ban: str | tuple[str, ...] | list[str]
    ban_mode: Literal["mask", "rollback"]
    ban_ignore_case: bool
    ban_whole_words: bool
    ban_prompt: bool
    ban_rollbacks: int
    regex: str | None
    choices: str | tuple[str, ...] | list[str] | None
    json_schema: str | Mapping[str, Any] | type | None
    json_object: bool
    grammar: str | None
    prediction: str | tuple[int, ...] | list[int] | None
    drafter: str | None
    policy: str | None
    max_draft: int | None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The options of one request.

    Args:
        temperature: Divides the logits; 0 is greedy: truncation and `seed` then have no effect.
        top_k: Keep the k likeliest tokens; 0 is off.
        top_p: Keep the likeliest tokens that together have this probability; 1 is off, 0 is greedy.
        min_p: Drop tokens less likely than this share of the likeliest one; 0 is off.
        typical_p: Keep the tokens whose surprise is nearest to the entropy, up to this probability; 1 is off.
        repetition_penalty: Logits of tokens in prompt or output are divided by it if positive, else
            multiplied; 1 is off.
        presence_penalty: Subtracted from the logits of tokens in the output, from -2 to 2; 0 is off.
        frequency_penalty: Subtracted once for each time that the token occurs in the output, from -2 to 2; 0
            is off.
        logit_bias: Token id -> number added to its logit, from -100 to 100.
        min_new_tokens: Up to this length, no end-of-text token is drawn, and no stop string ends the text.
        max_new_tokens: Longest text, in new tokens; 0 only scores the prompt (`prompt_logprobs`).
        ignore_eos: Treat end-of-text tokens like any other.
        stop: A string or several; the text ends before the first one that is complete.
        stop_token_ids: Token ids that end the text, beside the model's own.
        include_stop: Keep the stop string, or the text of the stop token, at the end of the text.
        seed: Random seed, for reproducible text. Default: a fresh one, which the output reports.
        logprobs: Score every new token, each with this many of the likeliest tokens. Default: off.
        prompt_logprobs: Score the prompt's tokens in the same way. Default: off.
        acceptance: "speculative" accepts more; "block" judges a sampled draft as a whole, and accepts at
            least as many tokens; "coupled" gives the same text for the same seed whatever the drafter, the
            draft length and the load. "bild" is *not lossless*: it keeps the drafter's tokens unless they
            surprise the target. Default: "coupled" with a seed, else "speculative".
        rollback: With acceptance rule "bild", a draft is cut at the first token whose surprise -log p under
            the target exceeds this many nats. 0 gives plain decoding's text at temperature 0, and keeps only
            tokens of probability 1 above it. Default: 5.
        allowed_token_ids: The only token ids that may be drawn; an end of the text must be among them, or the
            text ends at its longest length. Default: all.
        ban: A string or several that the text must not contain, however they are cut into tokens.
        ban_mode: "mask" gives a token that would complete banned text probability 0. "rollback" takes back
            text that turned out to be banned, and draws again without the token that began it.
        ban_ignore_case: Ban every spelling by upper and lower case.
        ban_whole_words: Ban only where no letter, digit or underscore stands directly before or behind.
        ban_prompt: Banned text that begins in the prompt counts, too.
        ban_rollbacks: With ban mode "rollback", the times that text is taken back before the text ends.
        regex: A regular expression of the whole text, in Rust's syntax: no look-around, no back references.
        choices: The strings of which the whole text is one.
        json_schema: A JSON schema of the text: a mapping, JSON, or a model class of pydantic. A keyword that
            is not supported is refused by name.
        json_object: The text is a JSON object, whatever its members.
        grammar: A context-free grammar of the text, in llguidance's Lark dialect or in llama.cpp's GBNF.
        prediction: What the text will probably be, such as a file before an edit: text, or token ids. Drafts
            copy it where the output agrees with it; the output is the same without it.
        drafter: "none" for plain decoding, the name of a loaded drafter, or "auto" for the one that pays most
            (under policy "auto"). Default: the model's.
        policy: The policy of this request. Default: the loaded one.
        max_draft: Longest draft of this request, in tokens. Default: the policy decides.

    Raises:
        RequestError: An option is unknown, or its value out of range.

    Examples:
        >>> params = SamplingParams(temperature=0.8, top_p=0.95, seed=1)
        >>> params.replace(temperature=0).greedy
        True
    """

    temperature: float = declare(1.0, Number("0 (greedy) or more"), elsewhere="temp")
    top_k: int = declare(0, COUNT)
    top_p: float = declare(1.0, Number("0 (greedy) to 1 (off)", most=1.0))
    min_p: float = declare(0.0, Number("from 0 (off) to 1", most=1.0))
    typical_p: float = declare(1.0, SHARE, elsewhere="typical")
    repetition_penalty: float = declare(
        1.0, Number("from 0.01 to 100; 1 is off", least=0.01, most=100.0), elsewhere="repeat_penalty"
    )
    presence_penalty: float = declare(0.0, PENALTY)
    frequency_penalty: float = declare(0.0, PENALTY)
    logit_bias: Mapping[int, float] | None = declare(None, Biases(), hash=False)
    min_new_tokens: int = declare(0, COUNT)
    max_new_tokens: int = declare(128, COUNT, elsewhere="max_tokens n_predict predict -n")
    ignore_eos: bool = declare(False, Flag())
    stop: str | tuple[str, ...] | list[str] = declare((), Strings())
    stop_token_ids: tuple[int, ...] | list[int] = declare((), Ids())
    include_stop: bool = declare(False, Flag())
    seed: int | None = declare(
        None, Whole("-2**63 to 2**63 - 1", least=-(2**63), most=2**63 - 1), elsewhere="-s"
    )
    logprobs: int | None = declare(None, SCORES)
    prompt_logprobs: int | None = declare(None, SCORES)
    acceptance: RuleName | None = declare(
        None, Choice("'speculative', 'block', 'coupled', 'bild' (which is not lossless) or None", RULES)
    )
    rollback: float | None = declare(None, Number("0 nats or more, or leave it out", most=math.inf))
    allowed_token_ids: tuple[int, ...] | list[int] | None = declare(
        None, Ids("a list of whole token ids, 1 or more", least=1)
    )
    ban: str | tuple[str, ...] | list[str] = declare((), Strings(), elsewhere="bad_words banned_strings")
    ban_mode: Literal["mask", "rollback"] = declare(
        "mask", Choice("'mask' or 'rollback'", ("mask", "rollback"))
    )
    ban_ignore_case: bool = declare(False, Flag())
    ban_whole_words: bool = declare(False, Flag())
    ban_prompt: bool = declare(True, Flag())
    ban_rollbacks: int = declare(100, Whole(f"a whole number from 0 to {MAX_ROLLBACKS}", most=MAX_ROLLBACKS))
    regex: str | None = declare(None, Words(), elsewhere="guided_regex")
    choices: str | tuple[str, ...] | list[str] | None = declare(
        None, Strings(least=1), elsewhere="guided_choice"
    )
    json_schema: str | Mapping[str, Any] | type | None = declare(
        None, Schema("a JSON schema that allows some text"), elsewhere="guided_json", hash=False
    )
    json_object: bool = declare(False, Flag())
    grammar: str | None = declare(None, Words(), elsewhere="guided_grammar")
    prediction: str | tuple[int, ...] | list[int] | None = declare(
        None, TextOrIds("text or a list of token ids")
    )
    drafter: str | None = declare(
        None, Name("'none', the name of a drafter, or None"), elsewhere="speculation"
    )
    policy: str | None = declare(None, Name("a name or None"))
    max_draft: int | None = declare(None, Whole("1 token or more, or None", least=1))

    def __new__(cls, *values: Any, **options: Any) -> SamplingParams:
        """Refuse unknown options with a remedy, which the dataclass's own error lacks."""
        known = {each.name for each in fields(cls)}
        for name in options.keys() - known:
            names = sorted(known)
            remedy = ELSEWHERE.get(name, f"known options are {', '.join(names)}{did_you_mean(name, names)}")
            raise RequestError(f"unknown sampling option {name!r}", remedy=remedy)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        check_fields(self, RequestError)
        if self.rollback is not None and self.acceptance != "bild":
            raise RequestError(
                "which applies only to the lossy acceptance rule", option="rollback", value=self.rollback,
                remedy=("give ", Option("acceptance", "bild"), ", or leave it out"),
            )  # fmt: skip
        if self.min_new_tokens > self.max_new_tokens:
            raise RequestError(
                ("but ", Option("max_new_tokens"), f" is {self.max_new_tokens}"),
                option="min_new_tokens", value=self.min_new_tokens, remedy="lower the one or raise the other",
            )  # fmt: skip
        given = [name for name in GRAMMARS if getattr(self, name)]
        if len(given) > 1:
            raise RequestError(
                ("cannot hold together with ", Option(given[1])), option=given[0], remedy="give one of them"
            )
        if given and self.ignore_eos:
            raise RequestError(
                ("needs an end of the text, but ", Option("ignore_eos"), " is on"), option=given[0],
                remedy="leave out the one or the other",
            )  # fmt: skip

    @property
    def text_grammar(self) -> tuple[str, str] | None:
        """Return the option that gives the text's grammar, and its value; of choices a regular expression."""
        for name in GRAMMARS:
            value = getattr(self, name)
            if value is True:
                return name, '{"type": "object"}'
            if value:
                choices = (META.sub(r"\\\g<0>", choice) for choice in value)
                return name, "|".join(choices) if name == "choices" else value
        return None

    def replace(self, **options: Unpack[SamplingKeywords]) -> SamplingParams:
        """Return a copy with some options changed, checked as by the constructor.

        Where only one of min_new_tokens and max_new_tokens is given, the other one is adapted to it.
        """
        kept: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(self)}
        least, most = options.get("min_new_tokens"), options.get("max_new_tokens")
        if most is None and isinstance(least, int):
            kept["max_new_tokens"] = max(least, self.max_new_tokens)
        if least is None and isinstance(most, int):
            kept["min_new_tokens"] = max(0, min(most, self.min_new_tokens))
        return SamplingParams(**kept | dict(options))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0 or self.top_p == 0

    @property
    def rule(self) -> RuleName:
        return self.acceptance or ("speculative" if self.seed is None else "coupled")

    @property
    def bound(self) -> float | None:
        """Return the surprise in nats up to which a drafted token is kept; None under lossless rules."""
        if self.acceptance != "bild":
            return None
        return ROLLBACK if self.rollback is None else self.rollback

    @property
    def judged(self) -> SamplingParams:
        """Return the parameters that measure surprise under the lossy rule.

        At temperature 0 every token but one would be infinitely surprising: it is measured at 1, untruncated.
        """
        if self.bound is None or not self.greedy:
            return self
        return self.replace(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, typical_p=1.0)

    def ends(self, eos: frozenset[int]) -> frozenset[int]:
        """Return the ids that end the text, where those of the model are `eos`."""
        return (frozenset() if self.ignore_eos else eos) | frozenset(self.stop_token_ids)

    @property
    def penalised(self) -> bool:
        """Return whether emitted tokens change the next distribution."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


# What to do here instead of an option of another library; names that only differ stand with their options.
ELSEWHERE = {name: f"its name is {here}" for name, here in spelled_elsewhere(SamplingParams).items()} | {
    "bad_words_ids": "give the words as text, as ban",
    "best_of": "ask for n samples and rank them by their log-probabilities",
    "do_sample": "temperature 0 is greedy, any other temperature samples",
    "length_penalty": "leave it out; beam search is not supported",
    "max_length": "give max_new_tokens, the new tokens alone",
    "min_length": "give min_new_tokens, the new tokens alone",
    "min_tokens": "give min_new_tokens, the new tokens alone",
    "n": "give it to generate, beside the parameters",
    "num_beams": "leave it out; beam search is not supported: it does not sample",
    "skip_special_tokens": "give show_special to generate",
}
