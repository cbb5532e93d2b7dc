"""Samplers: what a search proposes next, first the seed plans and then what the sampler proposes.

- `every_other`: skip every second layer.
- `greedy`: rank sub-layers by how little skipping each one alone changes the states before the head.
- `clasp`: the dynamic programme of CLaSp (Chen et al. 2025, arXiv:2505.24196) over columns of a few drafts:

      D(i, j) = max(cos(h_i, g(i-1, j-1)),  cos(h_i, f_i(g(i-1, j))))

where j of the first i sub-layers are skipped, g(i, j) are the states of the better choice, f_i is the i-th
sub-layer, and h_i is the target's state there. It runs once, with the mean cosine over all columns.

Sub-layers are numbered as they run: 2i is the attention of layer i, and 2i + 1 its MLP. A plan counts as
tried once a trial of it is complete; a plan whose trial still runs, or died, comes after all others.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations
from math import comb
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.drafters.skips import Skips
from foredraft.model.runner import Resume
from foredraft.model.spec import Plan
from foredraft.tune.study import optuna
from foredraft.tune.teacher_forced import TeacherForced
from foredraft.tune.tune_settings import SamplerName

MAX_COLUMNS = 256  # columns that a ranking compares; bounds its time

OnRun = Callable[[int], None]  # receives the number of sub-layers that the columns went through


def _ignore(count: int) -> None:
    return None


def skips_of(sub_layers: Iterable[int]) -> Skips:
    """Convert numbers of sub-layers to skips."""
    chosen = sorted(sub_layers)
    return Skips(tuple(i // 2 for i in chosen if i % 2 == 0), tuple(i // 2 for i in chosen if i % 2))


def every_other(layers: int) -> Skips:
    """Return skips of layers 1, 3, 5, ..., attention and MLP."""
    odd = tuple(range(1, layers, 2))
    return Skips(odd, odd)


def count_sub_layer_runs(layers: int, max_skipped: int) -> int:
    """Return how many sub-layers `greedy` and `clasp` together run, for their progress."""
    numbers = range(2 * layers)
    in_greedy = 2 * layers * (1 + len(numbers))
    return in_greedy + sum(1 + min(number + 1, max_skipped + 1) for number in numbers)


@torch.inference_mode()
def greedy(teacher_forced: TeacherForced, on_run: OnRun = _ignore) -> list[int]:
    """Return the numbers of all sub-layers, ordered by how little skipping each changes the final states."""
    sample = _Sample(teacher_forced)
    layers = sample.layers
    full = sample.run(sample.embedded, 0, layers, Plan.full(layers))
    on_run(2 * layers)
    change = []
    for number in range(2 * layers):
        plan = skips_of([number]).plan(layers)
        change.append(1 - sample.cosine(full, sample.run(sample.embedded, 0, layers, plan)))
        on_run(2 * layers)
    return sorted(range(2 * layers), key=change.__getitem__)


@torch.inference_mode()
def clasp(teacher_forced: TeacherForced, max_skipped: int, on_run: OnRun = _ignore) -> list[tuple[int, ...]]:
    """Return CLaSp's choice of sub-layers to skip, for 0, 1, ..., `max_skipped` of them."""
    sample = _Sample(teacher_forced)
    target = sample.embedded  # h_i
    states = [target]  # g(i, j) by j
    skipped: list[tuple[int, ...]] = [()]  # the choices that lead to them
    for number in range(2 * sample.layers):
        target = sample.run_sub_layer(target, number)
        ran = [sample.run_sub_layer(state, number) for state in states]
        next_states: list[Tensor] = []
        next_skipped: list[tuple[int, ...]] = []
        for count in range(min(len(states) + 1, max_skipped + 1)):
            if_run = sample.cosine(target, ran[count]) if count < len(states) else -2.0
            if_skipped = sample.cosine(target, states[count - 1]) if count else -2.0
            skip = if_skipped > if_run
            next_states.append(states[count - 1] if skip else ran[count])
            next_skipped.append((*skipped[count - 1], number) if skip else skipped[count])
        on_run(1 + len(states))
        states, skipped = next_states, next_skipped
    return skipped


class _Sample:
    """One draft of each of the first texts, and forwards of them through a range of layers."""

    def __init__(self, teacher_forced: TeacherForced) -> None:
        self.runner, self.cache = teacher_forced.drafting, teacher_forced.cache
        self.layers = self.runner.decoder.spec.layers
        rows = max(1, min(len(teacher_forced.texts), MAX_COLUMNS // teacher_forced.max_draft))
        of_each_text = teacher_forced.blocks([0] * len(teacher_forced.texts))[:rows]
        blocks = [drafts[len(drafts) // 2] for drafts in of_each_text]  # away from both ends of the text
        self.tokens, self.starts = teacher_forced.inputs(blocks)
        self.counts = [block.columns for block in blocks]
        width = self.tokens.shape[1]
        device = self.tokens.device
        self.real = torch.arange(width, device=device) < torch.tensor(self.counts, device=device)[:, None]
        positions = torch.tensor(self.starts, device=device)[:, None] + torch.arange(width, device=device)
        self.embedded = self.runner.decoder.embed(self.tokens, positions)  # [B, T, D]
        teacher_forced.restore()

    def run(self, hidden: Tensor, start: int, stop: int, plan: Plan) -> Tensor:
        """Run layers `start` to `stop` - 1 on states [B, T, D]."""
        known = [self.tokens.shape[1]] * len(self.starts)
        return self.runner.forward(
            self.cache, self.tokens, self.starts, counts=self.counts, plan=plan, stop=stop,
            resume=Resume(start, hidden, known), want_logits=False, invariant=False,
        ).hidden  # fmt: skip

    def run_sub_layer(self, hidden: Tensor, number: int) -> Tensor:
        """Run one sub-layer on states [B, T, D]."""
        layer, is_mlp = divmod(number, 2)
        only = tuple(index == layer for index in range(self.layers))
        none = (False,) * self.layers
        return self.run(hidden, layer, layer + 1, Plan(none, only) if is_mlp else Plan(only, none))

    def cosine(self, a: Tensor, b: Tensor) -> float:
        """Return the mean cosine similarity over all columns."""
        return float(F.cosine_similarity(a[self.real].float(), b[self.real].float(), dim=-1).mean())


MAX_LISTED = 20_000  # sets of flips (all pairs of 200 sub-layers); beyond it, the sampler takes random sets
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
    """Proposes the seed plans in their order, and then what another sampler proposes."""

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
    """Proposes an untried plan at the smallest distance, in flips of sub-layers, from the best one so far."""

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
