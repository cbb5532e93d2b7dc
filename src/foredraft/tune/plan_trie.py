"""A trie of plans, so that layers which several plans share from the first layer on are computed once.

Every plan is one path from the root to a leaf, and the nodes on the path cover all layers without a gap.
Any two children of a node run different sub-layers in their first layer, so no shared prefix is computed
twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from foredraft.model.plan import Plan

__all__ = ["TrieNode", "build_trie"]


@dataclass(frozen=True, slots=True)
class TrieNode:
    """Layers `start` to `stop` - 1, which all plans of the node run alike.

    Attributes:
        start: First layer of the node.
        stop: Layer after the last one of the node.
        plan: One of the node's plans.
        indices: Indices of the node's plans in the list that the trie was built from.
        children: Nodes that begin at layer `stop`; a leaf has none.
    """

    start: int
    stop: int
    plan: Plan
    indices: tuple[int, ...]
    children: tuple[TrieNode, ...]


def build_trie(plans: Sequence[Plan]) -> TrieNode:
    """Return the root of the trie of one or more plans of the same model."""
    return _node(plans, range(len(plans)), 0)


def _node(plans: Sequence[Plan], members: Iterable[int], start: int) -> TrieNode:
    """Return the node at layer `start` of plans that agree below it and, unless it is layer 0, in it."""
    indices = tuple(members)
    layers, stop = len(plans[indices[0]].attention), start
    while stop < layers and len(_group_by_layer(plans, indices, stop)) == 1:
        stop += 1
    groups = _group_by_layer(plans, indices, stop).values() if stop < layers else ()
    children = tuple(_node(plans, group, stop) for group in groups)
    return TrieNode(start, stop, plans[indices[0]], indices, children)


def _group_by_layer(
    plans: Sequence[Plan], indices: Iterable[int], layer: int
) -> dict[tuple[bool, bool], list[int]]:
    """Group plan indices by the sub-layers (attention, MLP) that the plans run in one layer."""
    groups: dict[tuple[bool, bool], list[int]] = {}
    for index in indices:
        groups.setdefault((plans[index].attention[layer], plans[index].mlp[layer]), []).append(index)
    return groups
