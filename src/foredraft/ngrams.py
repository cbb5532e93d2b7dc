"""Repetition: how much of a text occurred in it before. Drafting is easy where a text repeats itself."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["repeated"]


def repeated(ids: Sequence[int], size: int = 4) -> float:
    """Share of n-grams that occurred before in the same text."""
    grams = [tuple(ids[i : i + size]) for i in range(len(ids) - size + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
