"""Local search as a sampler: the best plan so far with a few of its switches flipped.

Contract: a plan that nobody proposed yet; one flip away from the best while there is such a one, else two,
and so on. Which, is drawn, so that several processes that search one study seldom try the same.
"""

from __future__ import annotations

import random
from math import comb
from typing import Any

from foredraft.bench.optional import module

__all__ = ["FlipSampler"]

optuna = module("optuna", "the search")
DRAWS = 64  # at each distance, before the next one

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
            tuple(other.params[name] for name in names)
            for other in study.get_trials(deepcopy=False)
            if search_space.keys() <= other.params.keys()
        }
        for distance in range(1, len(names) + 1):
            for _ in range(min(DRAWS, 4 * comb(len(names), distance))):
                flipped = set(self._random.sample(names, distance))
                plan = {name: best[name] != (name in flipped) for name in names}
                if tuple(plan.values()) not in tried:
                    return plan
        return {}  # nearly all was tried

    def sample_independent(self, study: Any, trial: Any, name: str, distribution: Any) -> Any:
        return self._first.sample_independent(study, trial, name, distribution)
