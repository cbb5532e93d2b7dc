"""Hill climbing as an Optuna sampler: propose the best plan so far with a few sub-layers flipped.

A flip turns one sub-layer from run to skipped, or back. The sampler proposes an untried plan at the
smallest distance, in flips, from the best one. It draws among the plans at that distance, so processes that
share a study seldom try the same plan.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations
from math import comb
from typing import Any

from foredraft.bench.optional import module

__all__ = ["HillClimbingSampler"]

optuna = module("optuna", "the search")

# The sampler lists all sets of flips up to this number (all pairs of 200 sub-layers), and random sets
# beyond it.
MAX_LISTED = 20_000
RANDOM_SETS = 64  # random sets of flips to choose from; among so many sets, few were tried before

BaseSampler: Any = optuna.samplers.BaseSampler


class HillClimbingSampler(BaseSampler):  # type: ignore[misc]
    """Sampler over Boolean parameters. The first trial of an empty study is random."""

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
            if untried := self._untried_flips(names, distance, tried):
                flipped = self._random.choice(untried)
                return {name: best[name] != (name in flipped) for name in names}
        return {}  # every plan was tried

    def _untried_flips(
        self, names: list[str], distance: int, tried: set[frozenset[str]]
    ) -> list[frozenset[str]]:
        """Return untried sets of `distance` names: all of them, or a random part where there are too many."""
        if comb(len(names), distance) <= MAX_LISTED:
            sets: Iterator[frozenset[str]] = map(frozenset, combinations(names, distance))
        else:
            sets = (frozenset(self._random.sample(names, distance)) for _ in range(RANDOM_SETS))
        return [flips for flips in sets if flips not in tried]

    def sample_independent(self, study: Any, trial: Any, name: str, distribution: Any) -> Any:
        return self._first.sample_independent(study, trial, name, distribution)
