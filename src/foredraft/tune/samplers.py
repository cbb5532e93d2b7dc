"""Samplers: what a search proposes next. The seed plans come first, then what the chosen sampler proposes.

A plan counts as tried once one of its trials is complete. A plan whose trial still runs, in another process
or in one that died, comes after all others of its kind: so processes that share a study seldom try the same
plan, and no plan is lost with a process.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator, Sequence
from itertools import combinations
from math import comb
from typing import Any, TypeVar

from foredraft.tune.study import optuna
from foredraft.tune.tune_settings import SamplerName

__all__ = ["HillClimbingSampler", "SeedsFirst", "make_sampler"]

# The sampler lists all sets of flips up to this number (all pairs of 200 sub-layers), and random sets
# beyond it.
MAX_LISTED = 20_000
RANDOM_SETS = 64  # random sets of flips to choose from; among so many sets, few were tried before

P = TypeVar("P")
BaseSampler: Any = optuna.samplers.BaseSampler
State: Any = optuna.trial.TrialState


def make_sampler(name: SamplerName, seed: int) -> Any:
    """Return an Optuna sampler."""
    if name == "hill-climbing":
        return HillClimbingSampler(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.samplers.GPSampler(seed=seed, deterministic_objective=True)


class SeedsFirst(BaseSampler):  # type: ignore[misc]
    """Proposes the seed plans in their order, and then what another sampler proposes.

    Args:
        names: Names of all parameters, which are Boolean.
        seeds: The seed plans, as values by name.
        then: The other sampler.
    """

    def __init__(self, names: Sequence[str], seeds: Sequence[dict[str, bool]], then: Any) -> None:
        boolean = optuna.distributions.CategoricalDistribution([False, True])
        self._space = dict.fromkeys(names, boolean)
        self._seeds, self._then = seeds, then

    def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, Any]:
        return self._space

    def sample_relative(self, study: Any, trial: Any, search_space: dict[str, Any]) -> dict[str, Any]:
        complete, running = ([one.params for one in _trials(study, state)] for state in _TRIED)
        seeds = _untried(self._seeds, complete, running)
        if seeds:
            return seeds[0]
        found: dict[str, Any] = self._then.sample_relative(study, trial, search_space)
        return found

    def sample_independent(self, study: Any, trial: Any, name: str, distribution: Any) -> Any:
        return self._then.sample_independent(study, trial, name, distribution)


class HillClimbingSampler(BaseSampler):  # type: ignore[misc]
    """Proposes the best plan so far with a few sub-layers flipped; the first plan of all is random.

    A flip turns one sub-layer from run to skipped, or back. The sampler draws among the untried plans at the
    smallest distance, in flips, from the best one.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._first = optuna.samplers.RandomSampler(seed=seed)

    def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, Any]:
        space: dict[str, Any] = optuna.search_space.intersection_search_space(_trials(study, State.COMPLETE))
        return space

    def sample_relative(self, study: Any, trial: Any, search_space: dict[str, Any]) -> dict[str, Any]:
        if not search_space or not _trials(study, State.COMPLETE):
            return {}
        names, best = list(search_space), study.best_trial.params
        complete, running = (
            {
                frozenset(name for name in names if other.params[name] != best[name])
                for other in _trials(study, state)
                if search_space.keys() <= other.params.keys()
            }
            for state in _TRIED
        )
        for distance in range(1, len(names) + 1):
            if untried := _untried(list(self._flips(names, distance)), complete, running):
                flipped = self._random.choice(untried)
                return {name: best[name] != (name in flipped) for name in names}
        return {}  # every plan was tried

    def _flips(self, names: list[str], distance: int) -> Iterator[frozenset[str]]:
        """Yield all sets of `distance` names, or a random part where there are too many."""
        if comb(len(names), distance) <= MAX_LISTED:
            return map(frozenset, combinations(names, distance))
        return (frozenset(self._random.sample(names, distance)) for _ in range(RANDOM_SETS))

    def sample_independent(self, study: Any, trial: Any, name: str, distribution: Any) -> Any:
        return self._first.sample_independent(study, trial, name, distribution)


_TRIED = (State.COMPLETE, State.RUNNING)


def _trials(study: Any, state: Any) -> list[Any]:
    found: list[Any] = study.get_trials(deepcopy=False, states=(state,))
    return found


def _untried(plans: Sequence[P], complete: Any, running: Any) -> list[P]:
    """Return the plans that are not complete; those that run are left out too, unless only they are left."""
    left = [plan for plan in plans if plan not in complete]
    return [plan for plan in left if plan not in running] or left
