"""Local search as a sampler: the best plan so far with a few of its switches flipped.

Contract: a plan that nobody proposed yet; one flip away from the best while there is such a one, else two,
and so on. Which, is drawn, so that several processes that search one study seldom try the same.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations
from math import comb
from typing import Any

from foredraft.bench.optional import module

__all__ = ["FlipSampler"]

optuna = module("optuna", "the search")
MANY = 20_000  # sets that are not all looked at
DRAWS = 64  # of those

Sampler: Any = optuna.samplers.BaseSampler


class FlipSampler(Sampler):  # type: ignore[misc]
    """Begins where a random plan is the best, unless there were trials."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._first = optuna.samplers.RandomSampler(seed=seed)

    def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, Any]:
        space: dict[str, Any] = optuna.search_space.intersection_search_space(
            study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))
        )
        return space

    def sample_relative(self, study: Any, trial: Any, search_space: dict[str, Any]) -> dict[str, Any]:
        if not search_space:
            return {}
        names = list(search_space)
        best = study.best_trial.params
        tried = {
            frozenset(name for name in names if other.params[name] != best[name])
            for other in study.get_trials(deepcopy=False)
            if search_space.keys() <= other.params.keys()
        }
        for distance in range(1, len(names) + 1):
            if untried := self._flips(names, distance, tried):
                flipped = self._random.choice(untried)
                return {name: best[name] != (name in flipped) for name in names}
        return {}  # all was tried

    def _flips(self, names: list[str], distance: int, tried: set[frozenset[str]]) -> list[frozenset[str]]:
        """So many of the names, in sets that were not tried: all such sets, or some where they are many."""
        if comb(len(names), distance) <= MANY:
            sets: Iterator[frozenset[str]] = map(frozenset, combinations(names, distance))
        else:
            sets = (frozenset(self._random.sample(names, distance)) for _ in range(DRAWS))
        return [each for each in sets if each not in tried]

    def sample_independent(self, study: Any, trial: Any, name: str, distribution: Any) -> Any:
        return self._first.sample_independent(study, trial, name, distribution)
