"""Who runs when: prompts into groups, contenders into turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from foredraft.bench.figures import Group

__all__ = ["groups_of", "turns"]

T = TypeVar("T")


def groups_of(counted: Sequence[bool], batch: int) -> list[Group]:
    """Prompts in groups of `batch`; counted: of each prompt, whether it counts.

    Those that count and those that do not never share a group. A last one that is not full is filled up from
    the first on: a batch of another size would be another measurement.
    """
    groups: list[Group] = []
    for kind in (True, False):
        prompts = [index for index, counts in enumerate(counted) if counts is kind]
        for start in range(0, len(prompts), batch):
            members = [prompts[(start + i) % len(prompts)] for i in range(batch)]
            groups.append(Group(tuple(members), kind))
    return groups


def turns(contenders: Sequence[T], repeat: int) -> Sequence[T]:
    """The order of a repeat: forwards and backwards in turn, so that nobody always runs after the same one
    and a machine that slows down burdens all alike."""
    return contenders[:: -1 if repeat % 2 else 1]
