"""Token counts: the tokens of a sequence and how often each occurs, for penalties.

Kept on the host as arrays that grow, so that a round only copies them.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

__all__ = ["TokenCounts"]


class TokenCounts:
    """The distinct tokens of prompt and output: ids, counts in the output, and whether the prompt has them.

    A token that a rollback took back keeps its place, with a count of 0.
    """

    def __init__(self, prompt: Iterable[int]) -> None:
        self._place = {token: place for place, token in enumerate(dict.fromkeys(prompt))}
        size = len(self._place)
        self._ids = np.array(list(self._place), dtype=np.int64)
        self._counts = np.zeros(size, dtype=np.float32)
        self._prompted = np.ones(size, dtype=np.bool_)

    def __len__(self) -> int:
        return len(self._place)

    def count(self, token: int, times: int) -> None:
        """Add `times` to the count of a token; a rollback adds -1."""
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._ids):
            grown = max(64, 2 * place)
            for name in ("_ids", "_counts", "_prompted"):
                array = getattr(self, name)
                setattr(self, name, np.concatenate([array, np.zeros(grown - place, dtype=array.dtype)]))
        self._ids[place] = token
        self._counts[place] += times

    @property
    def ids(self) -> np.ndarray:
        """[S] int64"""
        return self._ids[: len(self)]

    @property
    def counts(self) -> np.ndarray:
        """[S] float32"""
        return self._counts[: len(self)]

    @property
    def prompted(self) -> np.ndarray:
        """[S] bool"""
        return self._prompted[: len(self)]
