"""Strings that are not text: Python can hold half of a surrogate pair, which no encoding has."""

from __future__ import annotations

__all__ = ["invalid_at"]


def invalid_at(text: str) -> int | None:
    """Return the index of the first character that UTF-8 cannot encode; None where it can encode all."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None
