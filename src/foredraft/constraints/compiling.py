"""Compiling: regular expressions, JSON schemas and grammars to matchers of llguidance, strictly.

An invalid text is refused with the place that the library names, and a schema keyword that it does not
implement by its name; nothing is ignored that the schema demands.
"""

from __future__ import annotations

import json
import re

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from foredraft.constraints.gbnf import is_gbnf, lark_of
from foredraft.constraints.pace import Pace
from foredraft.errors import RequestError
from foredraft.model.byte_codec import ByteCodec

__all__ = ["DEAD_ENDS", "SIMPLER", "check_grammar", "compile_grammar", "grammar_tokenizer", "with_slices"]

# White space between the parts of a JSON text: as people and models write it, but never without an end.
WHITE_SPACE = r"[\x20\x0A\x0D\x09]{0,20}"
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
SIMPLER = "give a simpler one"
DEAD_ENDS = ("NoExtension", "NoExtensionBias")  # reasons of the library to stop that are no failures
# Characters of forced text that are cut into tokens at a time. A round drafts some 16 tokens at most, and to
# spell all of a long text took 0.1 s of each mask.
SPELLED = 512
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


def grammar_tokenizer(codec: ByteCodec, vocabulary: int, ends: frozenset[int]) -> LLTokenizer:
    """Return the tables of a tokenizer for llguidance."""
    wrapped = _Vocabulary(codec, vocabulary, ends)
    return LLTokenizer(TokenizerWrapper(wrapped), n_vocab=vocabulary, slices=[])


def with_slices(tokenizer: LLTokenizer) -> LLTokenizer:
    """Return the tables with slices: parts of the vocabulary that some states of a grammar allow as a whole.

    A mask within a string of a JSON text then takes 0.1 ms instead of 3 ms, of 262,144 ids, and is the same.
    Making the slices takes as long as all other tables.
    """
    return tokenizer.with_slices(LLTokenizer.general_slices())


def compile_grammar(option: str, text: str, tokenizer: LLTokenizer, pace: Pace) -> LLMatcher:
    """Return a matcher at the beginning of a text, with its first mask computed.

    Args:
        option: "regex", "choices", "json_schema", "json_object" or "grammar".
        text: The regular expression, which choices are, too; the schema as JSON; or the grammar in
            llguidance's Lark dialect or in GBNF.
        tokenizer: Of the target.
        pace: Of the request.

    Raises:
        RequestError: The text is invalid or not supported, or takes too long.
    """
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
    """Return a text as the library's own kind of grammar."""
    if option in ("regex", "choices"):
        return LLMatcher.grammar_from_regex(text)
    if option == "grammar":
        return LLMatcher.grammar_from_lark(lark_of(option, text) if is_gbnf(text) else text)
    try:
        return LLMatcher.grammar_from_json_schema(
            json.loads(text), overrides={"whitespace_pattern": WHITE_SPACE}
        )
    except ValueError as error:
        raise _refused(
            option, f"a number beyond 64 bits, or text that UTF-8 cannot hold ({error})"
        ) from error


def _refused(
    option: str, message: str, remedy: str = "correct it, or leave out what is not supported"
) -> RequestError:
    return RequestError(f"is refused: {_one_line(message)}", option=option, remedy=remedy)


def _one_line(message: str) -> str:
    """Return a message of the library on one line, with the place of an error in a regular expression."""
    place = POINTED.search(message)
    if place is not None:
        return f"{place['error']}, at character {len(place['before']) + 1} of {place['text']!r}"
    # the message of the library goes on with a setting that no option here reaches
    if message.startswith("oneOf constraints are not supported"):
        return "oneOf is supported only where its parts exclude each other; anyOf always"
    return " ".join(message.split())
