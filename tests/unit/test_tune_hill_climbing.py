"""Hill climbing: the order in which the sampler proposes plans."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from foredraft.tune.samplers import HillClimbingSampler
from foredraft.tune.study import optuna

NAMES = [f"mlp.{layer}" for layer in range(6)]


def propose(trials: int, seed: int = 0, best: tuple[bool, ...] = (True, False) * 3) -> list[tuple[bool, ...]]:
    """Proposals in a study whose objective counts the sub-layers that agree with the best plan."""
    study = optuna.create_study(direction="maximize", sampler=HillClimbingSampler(seed))

    def objective(trial: Any) -> float:
        plan = [trial.suggest_categorical(name, [False, True]) for name in NAMES]
        return sum(a == b for a, b in zip(plan, best, strict=True))

    study.optimize(objective, n_trials=trials)
    return [tuple(trial.params[name] for name in NAMES) for trial in study.trials]


def distance(a: tuple[bool, ...], b: tuple[bool, ...]) -> int:
    return sum(x != y for x, y in zip(a, b, strict=True))


def test_every_plan_is_proposed_exactly_once() -> None:
    plans = propose(2 ** len(NAMES))
    assert len(set(plans)) == len(plans)


def test_the_best_plan_is_reached_by_single_flips() -> None:
    """With 6 sub-layers and one optimum, each improvement takes at most 6 trials."""
    best = (True, False) * 3
    plans = propose(49, best=best)
    top = plans.index(best)
    assert top <= 36
    assert all(distance(plan, best) == 1 for plan in plans[top + 1 : top + 4])


def test_plans_are_proposed_by_their_distance_from_the_best_one() -> None:
    best = (True, False) * 3
    plans = propose(2 ** len(NAMES), best=best)
    top = plans.index(best)
    after = [distance(plan, best) for plan in plans[top + 1 :]]
    assert all(a <= b for a, b in pairwise(after))
    assert sum(distance(plan, best) == 1 for plan in plans) == 6


def test_proposals_depend_on_the_seed_only() -> None:
    assert propose(12, seed=1) != propose(12, seed=2) and propose(12, seed=1) == propose(12, seed=1)
