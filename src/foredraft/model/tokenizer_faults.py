"""Faults of tokenizer files that the library does not refuse itself: rules that multiply text.

Contract: `check_rules` reads a `tokenizer.json` before the library does, because the library normalises added
tokens while it loads them. It bounds by how much the rules before the vocabulary, those of decoding and the
template of special tokens can lengthen a text, beyond what Unicode's own forms make of it (18 characters of
one at most). It judges by the rules and not by a text: a rule may wait for any character.

Formats: https://huggingface.co/docs/tokenizers/api/normalizers; of a table of characters
https://github.com/google/sentencepiece/blob/master/src/normalizer.cc.
"""

from __future__ import annotations

import base64
import json
import re
import struct
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

__all__ = ["check_rules"]

MAX_GROWTH = 64  # characters for one, of all rules together
MAX_RULES = 1_000  # of a normaliser with what follows it, or of a decoder
LONGEST_FORM = 18  # characters that a form of Unicode's makes of one at most
FORMS: dict[str, Callable[[str], str]] = {
    "Lowercase": str.lower,
    **{name: partial(unicodedata.normalize, name) for name in ("NFC", "NFD", "NFKC", "NFKD")},
}
MAX_VALUES = 16  # values of one key in a file; a second one can only be the token of a vocabulary
ESCAPED = re.compile(r"\\u00[2-7]", re.IGNORECASE)  # an ASCII character that is spelt by its number
DECODER = json.JSONDecoder()


def check_rules(text: str) -> None:
    """Check the rules of a `tokenizer.json`.

    Args:
        text: Its content.

    Raises:
        ValueError: A rule can lengthen a text too much, or merges would end the process.
    """
    for keys in (("normalizer", "pre_tokenizer"), ("decoder",)):
        rules = [rule for key in keys for value in _values(text, key) for rule in _rules(value, key)]
        if (factor := _growth(rules)) > MAX_GROWTH:
            raise ValueError(
                f"has a {' and '.join(keys)} that can make {factor:,.0f} characters of one, more than"
                f" {MAX_GROWTH}"
            )
    for value in _values(text, "post_processor"):
        if (copies := _copies(value)) > MAX_GROWTH:
            raise ValueError(f"has a post_processor that repeats a text {copies:,} times")
    if any(isinstance(prefix, str) and prefix for prefix in _values(text, "continuing_subword_prefix")):
        _check_merges(json.loads(text))


def _values(text: str, key: str) -> Iterator[Any]:
    """Yield the values of a key, wherever it is, without parsing all of a large file."""
    if ESCAPED.search(text):  # a key may be spelt by numbers
        yield from _values(json.dumps(json.loads(text), ensure_ascii=False), key)
        return
    for count, match in enumerate(re.finditer(rf'"{key}"\s*:\s*', text), 1):
        if count > MAX_VALUES:
            raise ValueError(f"has the key {key} more than {MAX_VALUES} times")
        yield DECODER.raw_decode(text, match.end())[0]


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule that can lengthen a text.

    Attributes:
        seeks: The text that it seeks; "" is anything.
        writes: The text that it writes; None is anything.
        factor: The characters that it makes of one.
        form: What a form of Unicode's makes of a character, which it does once: it leaves its own results as
            they are. So `factor` is 1, and only what other rules write can be lengthened again.
    """

    seeks: str
    writes: str | None
    factor: float
    form: Callable[[str], str] | None = None


def _rules(value: Any, key: str) -> Iterator[Rule]:
    """Yield the rules in the value of a key that can lengthen a text; some files name no types."""
    if not isinstance(value, dict):
        return
    for part in ("normalizers", "pretokenizers", "decoders"):
        for each in value.get(part) or ():
            yield from _rules(each, key)
    kind, prepended, content = value.get("type"), value.get("prepend"), value.get("content")
    if isinstance(prepended, str):
        # once for a text between two special tokens, which has one character or more
        yield Rule("", prepended, 1 + len(prepended))
    elif "pattern" in value and isinstance(content, str):
        pattern = value["pattern"]
        # an expression may match without a character
        yield _replacing(pattern.get("String", "") if isinstance(pattern, dict) else "", content)
    elif kind == "ByteLevel" and key != "decoder":
        yield Rule("", None, 2)  # each byte becomes a character of two bytes at most
    elif kind == "Precompiled":
        yield Rule("", None, _longest_in_table(value.get("precompiled_charsmap")))
    elif kind == "BertNormalizer":
        yield Rule("", None, 3)  # spaces around some characters
    elif kind == "WordPiece" and key == "decoder":
        yield Rule("", " ", 2)
    elif isinstance(kind, str) and kind in FORMS:
        yield Rule("", None, 1, FORMS[kind])
    for name in ("suffix", "word_delimiter_token") if key == "decoder" else ():
        if isinstance(value.get(name), str):
            yield _replacing(value[name], " ")


def _replacing(wanted: str, content: str) -> Rule:
    """Return the rule that writes a content wherever it finds a text; "" is found beside every character."""
    return Rule(wanted, content, max(1.0, len(content) / len(wanted)) if wanted else 1.0 + len(content))


def _longest_in_table(table: object) -> int:
    """Return the characters of the longest text that a table of SentencePiece writes for one character.

    The table holds the length of an index, the index, and the texts, each with a zero after it.
    """
    try:
        content = base64.b64decode(table if isinstance(table, str) else "")
        [length] = struct.unpack_from("<I", content)
    except (ValueError, struct.error):
        return 1  # the library refuses it
    texts = content[4 + length :].decode("utf-8", "replace").split("\0")
    return max(1, *map(len, texts))


def _growth(rules: list[Rule]) -> float:
    """Return how many characters rules can make of one, each in what others before it wrote."""
    if len(rules) > MAX_RULES:
        raise ValueError(f"has {len(rules):,} rules in a row; at most {MAX_RULES:,} are read")
    written = [None if rule.writes is None else {*rule.writes} for rule in rules]
    reached: list[float] = []
    for rule in rules:
        sought, most = {*rule.seeks}, rule.factor
        for before, characters, growth in zip(rules, written, reached, strict=False):
            if not sought or characters is None or not sought.isdisjoint(characters):
                most = max(most, growth * _factor_after(rule, before, characters))
        reached.append(most)
    return max(reached, default=1.0)


def _factor_after(rule: Rule, before: Rule, written: set[str] | None) -> float:
    """Return how many characters a rule makes of one that the rule before it wrote."""
    if rule.form is None or before.form is not None:
        return rule.factor
    return LONGEST_FORM if written is None else max((len(rule.form(each)) for each in written), default=1)


def _copies(value: Any) -> int:
    """Return how often a post-processor writes the text, in the worst of its templates."""
    if not isinstance(value, dict):
        return 1
    inner = [_copies(each) for each in value.get("processors") or ()]
    template = value.get("single")
    own = sum(isinstance(piece, dict) and "Sequence" in piece for piece in template or ())
    return max([1, own, *inner])


def _check_merges(content: Any) -> None:
    """Check the merges of BPE with a prefix: the library cuts it off each right part, present or not.

    Where that is within a character, the library ends the process.
    """
    model = content.get("model") if isinstance(content, dict) else None
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE":
        return
    prefix = model["continuing_subword_prefix"] or ""
    for merge in model.get("merges") or ():
        parts = merge.split(" ") if isinstance(merge, str) else merge
        if len(parts) != 2 or not str(parts[1]).startswith(prefix):
            raise ValueError(f"has the merge {merge!r}, whose second part lacks the prefix {prefix!r}")
