"""SamplingParams: the options of one request. Every value is checked when the object is made.

The names are those of `transformers` and of the OpenAI API where these agree. An option that either has and
this one lacks is refused with the reason, never ignored.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias, TypedDict, TypeGuard, Unpack, get_args

from foredraft.errors import Option, RequestError, did_you_mean
from foredraft.unicode import invalid_at

__all__ = ["ELSEWHERE", "SamplingKeywords", "SamplingParams", "is_number", "is_whole"]

# Options of other libraries -> what to do here.
ELSEWHERE = {
    "bad_words": "its name is ban",
    "bad_words_ids": "give the words as text, as ban",
    "best_of": "ask for n samples and rank them by their log-probabilities",
    "do_sample": "temperature 0 is greedy, any other temperature samples",
    "length_penalty": "leave it out; beam search is not supported",
    "max_length": "give max_new_tokens, the new tokens alone",
    "max_tokens": "its name is max_new_tokens",
    "min_length": "give min_new_tokens, the new tokens alone",
    "min_tokens": "its name is min_new_tokens",
    "n": "give it to generate, beside the parameters",
    "guided_choice": "its name is choices",
    "guided_grammar": "its name is grammar",
    "guided_json": "its name is json_schema",
    "guided_regex": "its name is regex",
    "num_beams": "leave it out; beam search is not supported: it does not sample",
    "skip_special_tokens": "give show_special to generate",
    "speculation": "its name is drafter",
}


FLAGS = ("ignore_eos", "include_stop", "ban_ignore_case", "ban_whole_words", "ban_prompt", "json_object")
# options that give the text's grammar
GRAMMARS = ("regex", "choices", "json_schema", "json_object", "grammar")
# characters that have a meaning in a regular expression
# (https://docs.rs/regex-syntax/latest/regex_syntax/fn.is_meta_character.html)
META = re.compile(r"[\\.+*?()|\[\]{}^$#&~-]")
MAX_LOGPROBS = 1000  # alternatives at each position, at most
MAX_ROLLBACKS = 10_000  # of a ban, at most: each costs a step of the model at least
ROLLBACK = 5.0  # nats; the default of BiLD's published code
RuleName: TypeAlias = Literal["speculative", "coupled", "bild"]
RULES = get_args(RuleName)


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
    include_stop: bool
    seed: int | None
    logprobs: int | None
    prompt_logprobs: int | None
    acceptance: RuleName | None
    rollback: float | None
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
        temperature: Divides the logits; 0 is greedy.
        top_k: Keep the k likeliest tokens; 0 is off.
        top_p: Keep the likeliest tokens that together have this probability; 1 is off.
        min_p: Drop tokens less likely than this share of the likeliest one; 0 is off.
        typical_p: Keep the tokens whose surprise is nearest to the entropy, up to this probability; 1 is off.
        repetition_penalty: Logits of tokens in prompt or output are divided by it if positive, else
            multiplied (Keskar et al. 2019, arXiv 1909.05858); 1 is off.
        presence_penalty: Subtracted from the logits of tokens in the output, from -2 to 2.
        frequency_penalty: Subtracted once for each time that the token occurs in the output, from -2 to 2.
        logit_bias: Token id -> number added to its logit, from -100 to 100.
        min_new_tokens: Up to this length, no end-of-text token is drawn, and no stop string ends the text.
        max_new_tokens: Longest text; 0 only scores the prompt.
        ignore_eos: Treat end-of-text tokens like any other.
        stop: A string or several; the text ends before the first one that is complete.
        include_stop: End the text after the stop string instead.
        seed: None draws a fresh one, which the output reports.
        logprobs: Score every new token, each with the n likeliest tokens; None is off.
        prompt_logprobs: Score the prompt's tokens in the same way.
        acceptance: "speculative" accepts more; "coupled" gives the same text for the same seed whatever the
            drafter, the draft length and the load. None is "coupled" with a seed and "speculative" without.
            "bild" is *not lossless*: it keeps the drafter's tokens unless they surprise the target.
        rollback: Under "bild", the surprise -log p, in nats, above which a drafted token is cut; None is 5.
        ban: A string or several that the text must not contain, however they are cut into tokens.
        ban_mode: "mask" gives a token that would complete banned text probability 0. "rollback" takes back
            text that turned out to be banned, and draws again without the token that began it.
        ban_ignore_case: Ban every spelling by upper and lower case.
        ban_whole_words: Ban only where no letter, digit or underscore stands directly before or behind.
        ban_prompt: Text that begins in the prompt counts, too.
        ban_rollbacks: Under "rollback", the times that text is taken back before the text ends.
        regex: A regular expression of the whole text (Rust's syntax).
        choices: The strings of which the whole text is one.
        json_schema: A JSON schema of the text: a mapping, JSON, or a model class of pydantic.
        json_object: The text is a JSON object, whatever its members.
        grammar: A context-free grammar of the text, in llguidance's Lark dialect.
        prediction: What the text will probably be, such as a file before an edit: text, or token ids. Drafts
            copy it where the output agrees with it; the output is the same without it.
        drafter: "none" for plain decoding, the name of a loaded drafter, "auto" for the one that pays most
            (under policy "auto"), or None for the model's default.
        policy: The policy of this request; None for the loaded one.
        max_draft: Longest draft of this request, in tokens; None leaves it to the policy.

    Raises:
        RequestError: An option is unknown, or its value out of range.

    Examples:
        >>> params = SamplingParams(temperature=0.8, top_p=0.95, seed=1)
        >>> params.replace(temperature=0).greedy
        True
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    min_new_tokens: int = 0
    max_new_tokens: int = 128
    ignore_eos: bool = False
    stop: str | tuple[str, ...] | list[str] = ()
    include_stop: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    acceptance: RuleName | None = None
    rollback: float | None = None
    ban: str | tuple[str, ...] | list[str] = ()
    ban_mode: Literal["mask", "rollback"] = "mask"
    ban_ignore_case: bool = False
    ban_whole_words: bool = False
    ban_prompt: bool = True
    ban_rollbacks: int = 100
    regex: str | None = None
    choices: str | tuple[str, ...] | list[str] | None = None
    json_schema: str | Mapping[str, Any] | type | None = field(default=None, hash=False)
    json_object: bool = False
    grammar: str | None = None
    prediction: str | tuple[int, ...] | list[int] | None = None
    drafter: str | None = None
    policy: str | None = None
    max_draft: int | None = None

    def __new__(cls, *values: Any, **options: Any) -> SamplingParams:
        """Refuse unknown options with a remedy, which the dataclass's own error lacks."""
        known = {each.name for each in fields(cls)}
        for name in options.keys() - known:
            names = sorted(known)
            remedy = ELSEWHERE.get(name, f"known options are {', '.join(names)}{did_you_mean(name, names)}")
            raise RequestError(f"unknown sampling option {name!r}", remedy=remedy)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        self._check_numbers()
        for name in FLAGS:
            _within(name, getattr(self, name), isinstance(getattr(self, name), bool), "True or False")
        _within("seed", self.seed, self.seed is None or is_whole(self.seed, 0, 2**63 - 1), "0 to 2**63 - 1")
        _within(
            "acceptance", self.acceptance, self.acceptance in (None, *RULES),
            "'speculative', 'coupled', 'bild' (which is not lossless) or None"
            + did_you_mean(self.acceptance, RULES),
        )  # fmt: skip
        if self.rollback is not None:
            fits = is_number(self.rollback) and self.rollback >= 0
            _within("rollback", self.rollback, fits, "0 nats or more, or leave it out")
            if self.acceptance != "bild":
                raise RequestError(
                    "which applies only to the lossy acceptance rule", option="rollback", value=self.rollback,
                    remedy=("give ", Option("acceptance", "bild"), ", or leave it out"),
                )  # fmt: skip
        for name, says in (
            ("drafter", "'none', the name of a drafter, or None"),
            ("policy", "a name or None"),
        ):
            value = getattr(self, name)
            _within(name, value, value is None or isinstance(value, str), says)
        fits = self.max_draft is None or is_whole(self.max_draft, 1, 2**31 - 1)
        _within("max_draft", self.max_draft, fits, "1 token or more, or None")
        object.__setattr__(self, "stop", _strings("stop", self.stop))
        object.__setattr__(self, "ban", _strings("ban", self.ban))
        if self.choices is not None:
            object.__setattr__(self, "choices", _strings("choices", self.choices))
            _within("choices", self.choices, bool(self.choices), "a string or several")
        object.__setattr__(self, "json_schema", _schema(self.json_schema))
        self._check_constraints()
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        object.__setattr__(self, "prediction", _prediction(self.prediction))

    def _check_numbers(self) -> None:
        for name, low, high, says in (
            ("temperature", 0.0, math.inf, "0 (greedy) or more"),
            ("top_p", 0.0, 1.0, "above 0 and at most 1 (off)"),
            ("min_p", 0.0, 1.0, "from 0 (off) to 1"),
            ("typical_p", 0.0, 1.0, "above 0 and at most 1 (off)"),
            ("repetition_penalty", 0.01, 100.0, "from 0.01 to 100; 1 is off"),
            ("presence_penalty", -2.0, 2.0, "from -2 to 2; 0 is off"),
            ("frequency_penalty", -2.0, 2.0, "from -2 to 2; 0 is off"),
        ):
            value = getattr(self, name)
            fits = is_number(value) and low <= value <= high and value != math.inf
            zero_fits = name not in ("top_p", "typical_p")
            _within(name, value, fits and (zero_fits or value > 0), says)
        for name, optional in (
            ("top_k", False), ("min_new_tokens", False), ("max_new_tokens", False),
            ("ban_rollbacks", False), ("logprobs", True), ("prompt_logprobs", True),
        ):  # fmt: skip
            value = getattr(self, name)
            most = MAX_LOGPROBS if optional else MAX_ROLLBACKS if name == "ban_rollbacks" else 2**31 - 1
            fits = (optional and value is None) or is_whole(value, 0, most)
            _within(
                name,
                value,
                fits,
                "a whole number from 0 "
                + (f"to {most}" if most < 2**31 - 1 else "on")
                + (", or leave it out" if optional else ""),
            )
        if self.min_new_tokens > self.max_new_tokens:
            raise RequestError(
                ("but ", Option("max_new_tokens"), f" is {self.max_new_tokens}"),
                option="min_new_tokens", value=self.min_new_tokens, remedy="lower the one or raise the other",
            )  # fmt: skip

    def _check_constraints(self) -> None:
        _within("ban_mode", self.ban_mode, self.ban_mode in ("mask", "rollback"), "'mask' or 'rollback'")
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            _within(name, value, value is None or _is_text(value), "text")
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
        """Return the option that gives the text's grammar, and its value; None without one.

        The value of choices is a regular expression.
        """
        for name in GRAMMARS:
            value = getattr(self, name)
            if value is True:
                return name, '{"type": "object"}'
            if value:
                return name, _one_of(value) if name == "choices" else value
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
        return self.temperature == 0

    @property
    def is_coupled(self) -> bool:
        return self.acceptance == "coupled" or (self.acceptance is None and self.seed is not None)

    @property
    def bound(self) -> float | None:
        """Return the surprise in nats up to which a drafted token is kept; None under lossless rules."""
        if self.acceptance != "bild":
            return None
        return ROLLBACK if self.rollback is None else self.rollback

    @property
    def judged(self) -> SamplingParams:
        """Return the parameters of the distribution that measures surprise under the lossy rule.

        They are these, but at temperature 0, where every token but one would be infinitely surprising, they
        have temperature 1 and no truncation.
        """
        if self.bound is None or not self.greedy:
            return self
        return self.replace(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, typical_p=1.0)

    @property
    def penalised(self) -> bool:
        """Return whether emitted tokens change the next distribution."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a user's value is a number that a float can hold; True and False are not."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, float) or abs(value) <= sys.float_info.max


def is_whole(value: object, low: int, high: float = math.inf) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _within(name: str, value: object, holds: bool, remedy: str) -> None:
    if not holds:
        raise RequestError(option=name, value=value, remedy=f"give {remedy}")


def _is_text(value: object) -> bool:
    return isinstance(value, str) and invalid_at(value) is None


def _strings(name: str, given: object) -> tuple[str, ...]:
    several = (given,) if isinstance(given, str) else given
    fits = isinstance(several, tuple | list) and all(_is_text(each) and each for each in several)
    _within(name, given, fits, "a string or several, none of them empty")
    assert isinstance(several, tuple | list)
    return tuple(dict.fromkeys(several))


def _one_of(choices: tuple[str, ...]) -> str:
    """Return a regular expression that only these strings match.

    Examples:
        >>> _one_of(("yes", "1.5"))
        'yes|1\\\\.5'
    """
    return "|".join(META.sub(r"\\\g<0>", choice) for choice in choices)


def _schema(given: object) -> str | None:
    """Return a JSON schema as JSON.

    A class with a method `model_json_schema` is a model of pydantic, which is no dependency
    (https://docs.pydantic.dev/latest/api/base_model/#pydantic.BaseModel.model_json_schema).
    """
    if given is None:
        return None
    if isinstance(given, type) and hasattr(given, "model_json_schema"):
        try:
            given = given.model_json_schema()
        except Exception as error:  # a class of the user's, whose types may have no schema
            raise RequestError(
                f"has no schema ({error})", option="json_schema", remedy="give the schema itself"
            ) from error
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"is not JSON ({error})", option="json_schema", remedy="correct it") from None
    fits = isinstance(given, Mapping) or given is True
    _within("json_schema", given, fits, "a JSON schema that allows some text")
    try:
        return json.dumps(dict(given) if isinstance(given, Mapping) else {})
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"is not JSON ({error})", option="json_schema", remedy="correct it") from None


def _prediction(given: object) -> str | tuple[int, ...] | None:
    """Return a prediction as text or as token ids; None where it is empty."""
    are_ids = isinstance(given, tuple | list) and all(is_whole(token, 0, 2**31 - 1) for token in given)
    fits = given is None or are_ids or _is_text(given)
    _within("prediction", given, fits, "text or a list of token ids")
    if isinstance(given, tuple | list):
        return tuple(given) or None
    return given or None  # type: ignore[return-value]  # checked above


def _biases(given: object) -> dict[int, float] | None:
    if given is None:
        return None
    _within("logit_bias", given, isinstance(given, Mapping), "a table of token ids and numbers")
    assert isinstance(given, Mapping)
    for token, bias in given.items():
        _within("logit_bias", given, is_whole(token, 0, 2**31 - 1), "whole token ids as its keys")
        _within("logit_bias", given, is_number(bias) and -100 <= bias <= 100, "numbers from -100 to 100")
    return dict(given) or None
