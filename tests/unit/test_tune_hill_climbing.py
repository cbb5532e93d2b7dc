"""Flips: what a local search proposes next to what was tried."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from foredraft.tune.hill_climbing import FlipSampler
from foredraft.tune.study import optuna

NAMES = [f"mlp.{layer}" for layer in range(6)]


def proposed(
    trials: int, seed: int = 0, best: tuple[bool, ...] = (True, False) * 3
) -> list[tuple[bool, ...]]:
    """By a study whose objective is how many switches are as in the best plan."""
    study = optuna.create_study(direction="maximize", sampler=FlipSampler(seed))

    def objective(trial: Any) -> float:
        plan = [trial.suggest_categorical(name, [False, True]) for name in NAMES]
        return sum(a == b for a, b in zip(plan, best, strict=True))

    study.optimize(objective, n_trials=trials)
    return [tuple(trial.params[name] for name in NAMES) for trial in study.trials]


def distance(a: tuple[bool, ...], b: tuple[bool, ...]) -> int:
    return sum(x != y for x, y in zip(a, b, strict=True))


def test_no_plan_is_proposed_twice_and_all_are_in_the_end() -> None:
    plans = proposed(2 ** len(NAMES))
    assert len(set(plans)) == len(plans)


def test_it_climbs_by_single_flips() -> None:
    """Of 6 switches with a single top, no more than 6 for each step up and 6 that show that it is the top."""
    best = (True, False) * 3
    plans = proposed(49, best=best)
    top = plans.index(best)
    assert top <= 36
    assert all(distance(plan, best) == 1 for plan in plans[top + 1 : top + 4])


def test_all_that_is_one_flip_away_comes_before_what_is_two() -> None:
    best = (True, False) * 3
    plans = proposed(2 ** len(NAMES), best=best)
    top = plans.index(best)
    after = [distance(plan, best) for plan in plans[top + 1 :]]
    assert all(a <= b for a, b in pairwise(after))
    assert sum(distance(plan, best) == 1 for plan in plans) == 6


def test_two_processes_try_other_plans() -> None:
    assert proposed(12, seed=1) != proposed(12, seed=2) and proposed(12, seed=1) == proposed(12, seed=1)
