"""Panics of a library in Rust, as it raises them: their type can be had in no other way."""

from __future__ import annotations

from typing import Any

from tokenizers import decoders

__all__ = ["panic", "stripping"]


def stripping(letter: str) -> dict[str, Any]:
    """Return a decoder that panics on the token that is this letter alone, and leaves all others as they are."""
    return {"type": "Strip", "content": letter, "start": 0, "stop": 2}


def panic() -> BaseException:
    """Return a panic."""
    try:
        decoders.Strip("a", 0, 2).decode(["a"])
    except BaseException as error:
        return error
    raise AssertionError("the library did not panic")
