"""Faults of tokenizer files that the library does not refuse itself: rules that multiply text.

Contract: `check_rules` reads a `tokenizer.json` before the library does, because the library normalises added
tokens while it loads them. It bounds by how much normalisation, decoding and the template of special tokens
can lengthen a text. It judges by the rules and not by a text: a rule may wait for any character.

Format: https://huggingface.co/docs/tokenizers/api/normalizers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

__all__ = ["check_rules"]

MAX_GROWTH = 64  # characters for one, of all rules together
MAX_RULES = 1_000  # of a normaliser or a decoder
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
    for key in ("normalizer", "decoder"):
        for value in _values(text, key):
            if (factor := _growth([*_rules(value)])) > MAX_GROWTH:
                raise ValueError(
                    f"has a {key} that can make {factor:,.0f} characters of one, more than {MAX_GROWTH}"
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


def _rules(value: Any) -> Iterator[tuple[str, str, float]]:
    """Yield what a rule seeks ("" is anything), what it writes, and how many characters it makes of one."""
    if not isinstance(value, dict):
        return
    for part in ("normalizers", "decoders"):
        for each in value.get(part) or ():
            yield from _rules(each)
    kind, pattern, content = value.get("type"), value.get("pattern"), value.get("content")
    if kind == "Prepend" and isinstance(value.get("prepend"), str):
        # once for a text between two special tokens, which has one character or more
        yield "", value["prepend"], 1 + len(value["prepend"])
    elif kind == "Replace" and isinstance(content, str):
        wanted = pattern.get("String", "") if isinstance(pattern, dict) else ""
        # an expression may match without a character; then it adds to what is there
        yield wanted, content, max(1.0, len(content) / len(wanted) if wanted else float(len(content)))


def _growth(rules: list[tuple[str, str, float]]) -> float:
    """Return how many characters rules can make of one, each in what others before it wrote."""
    if len(rules) > MAX_RULES:
        raise ValueError(f"has {len(rules):,} rules in a row; at most {MAX_RULES:,} are read")
    reached: list[float] = []
    for at, (wanted, _, factor) in enumerate(rules):
        before = (
            reached[earlier]
            for earlier in range(at)
            if not wanted or not set(wanted).isdisjoint(rules[earlier][1])
        )
        reached.append(factor * max(before, default=1.0))
    return max(reached, default=1.0)


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
