"""Plans as a tree: a branch is a stretch of layers that several plans have in common.

Contract: every plan is on one way from the root to an end, whose branches cover all layers without a gap. No
two forks of a branch run the same sub-layers in the layer in which they begin, so nothing is computed twice
that is the same from the first layer on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from foredraft.model.decoder import Plan

__all__ = ["Branch", "branches"]


@dataclass(frozen=True, slots=True)
class Branch:
    """Layers from `start` on, before `stop`, as `plan` runs them, for the plans of these numbers. forks: what
    they do after that, the ends of the tree have none."""

    start: int
    stop: int
    plan: Plan
    plans: tuple[int, ...]
    forks: tuple[Branch, ...]


def branches(plans: Sequence[Plan]) -> Branch:
    """The root. plans: one or more, of the same model."""
    return _branch(plans, range(len(plans)), 0)


def _branch(plans: Sequence[Plan], numbers: Iterable[int], start: int) -> Branch:
    """Of plans that are alike below `start`, and in it, if it is not the first layer."""
    own = tuple(numbers)
    layers, stop = len(plans[own[0]].attention), start
    while stop < layers and len(_by_layer(plans, own, stop)) == 1:
        stop += 1
    forks = _by_layer(plans, own, stop).values() if stop < layers else ()
    return Branch(start, stop, plans[own[0]], own, tuple(_branch(plans, fork, stop) for fork in forks))


def _by_layer(
    plans: Sequence[Plan], numbers: Iterable[int], layer: int
) -> dict[tuple[bool, bool], list[int]]:
    """Numbers of plans, by what they run of a layer."""
    found: dict[tuple[bool, bool], list[int]] = {}
    for number in numbers:
        found.setdefault((plans[number].attention[layer], plans[number].mlp[layer]), []).append(number)
    return found
