"""The schedule: prompts into groups, contenders into an alternating order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from foredraft.bench.figures import Group

__all__ = ["groups_of", "turns"]

T = TypeVar("T")


def groups_of(counted: Sequence[bool], batch: int) -> list[Group]:
    """Divide the prompts into groups of `batch`.

    A group holds only prompts that count, or only prompts that do not. The last group of each kind is filled
    up with the kind's first prompts, because a smaller batch would be a different measurement.

    Args:
        counted: For each prompt of the workload, whether it counts.
        batch: Prompts per group.
    """
    groups: list[Group] = []
    for kind in (True, False):
        prompts = [index for index, counts in enumerate(counted) if counts is kind]
        for start in range(0, len(prompts), batch):
            members = [prompts[(start + i) % len(prompts)] for i in range(batch)]
            groups.append(Group(tuple(members), kind))
    return groups


def turns(contenders: Sequence[T], repeat: int) -> Sequence[T]:
    """Return the contenders in the order of a repeat: forwards in even repeats, backwards in odd ones.

    No contender always follows the same other one, and a machine that slows down slows all of them alike.
    """
    return contenders[:: -1 if repeat % 2 else 1]
