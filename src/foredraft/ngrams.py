"""Measure how much a text repeats itself; repetitive text is easy to draft, so it flatters a benchmark."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["repeated"]


def repeated(ids: Sequence[int], size: int = 4) -> float:
    """Return the share of n-grams that occurred earlier in the same text.

    Args:
        ids: The token ids of the text.
        size: Tokens per n-gram.

    Returns:
        A share from 0 to 1; 0 for a text shorter than one n-gram.
    """
    ngrams = [tuple(ids[i : i + size]) for i in range(len(ids) - size + 1)]
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0
