"""Trees of tensors: what a captured graph fixes of its inputs, and copies into and out of its memory.

A tree is a tensor, a dataclass, a tuple, list or dict of trees, or any other hashable value. Its tensors come
in the order of its fields. Its *structure* is all else: the types, the values of the host, and the shapes and
dtypes of its tensors. So a graph that is kept by the structure of its inputs has no host value of another one
baked in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

__all__ = ["copied", "fill", "flattened", "rebuilt"]

T = TypeVar("T")


def flattened(tree: object) -> tuple[list[Tensor], tuple[object, ...]]:
    """Return the tensors of a tree, and its structure, which is hashable where its other values are."""
    tensors: list[Tensor] = []
    structure: list[object] = []
    _flatten(tree, tensors, structure)
    return tensors, tuple(structure)


def copied(tree: T) -> T:
    """Return a tree with tensors of its own."""
    tensors, _ = flattened(tree)
    fresh = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors]
    fill(fresh, tensors)
    return rebuilt(tree, fresh)


def rebuilt(tree: T, tensors: Sequence[Tensor]) -> T:
    """Return a tree of the same structure with these tensors, in new objects.

    So what an object of the tree has kept of an earlier computation is gone.
    """
    found: T = _rebuilt(tree, iter(tensors).__next__)
    return found


def fill(into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy tensors into others of the same shapes and dtypes, by one launch for each dtype on a GPU."""
    by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for mine, theirs in zip(into, values, strict=True):
        if mine.numel():
            to, source = by_dtype.setdefault(mine.dtype, ([], []))
            to.append(mine)
            source.append(theirs)
    for to, source in by_dtype.values():
        torch._foreach_copy_(to, source, non_blocking=True)


def _flatten(tree: object, tensors: list[Tensor], structure: list[object]) -> None:
    if isinstance(tree, Tensor):
        tensors.append(tree)
        structure.append((tree.shape, tree.dtype))
        return
    names = _names(type(tree))  # type: ignore[arg-type]
    if names is not None:
        structure.append(type(tree))
        for name in names:
            _flatten(getattr(tree, name), tensors, structure)
    elif isinstance(tree, dict):
        structure.append(tuple(tree))
        for value in tree.values():
            _flatten(value, tensors, structure)
    elif isinstance(tree, (tuple, list)):
        structure.append(len(tree))
        for value in tree:
            _flatten(value, tensors, structure)
    else:
        structure.append(tree)


def _rebuilt(tree: Any, next_tensor: Callable[[], Tensor]) -> Any:
    """Return a tree of the same structure with other tensors."""
    if isinstance(tree, Tensor):
        return next_tensor()
    names = _names(type(tree))  # type: ignore[arg-type]
    if names is not None:
        return type(tree)(**{name: _rebuilt(getattr(tree, name), next_tensor) for name in names})
    if isinstance(tree, dict):
        return {key: _rebuilt(value, next_tensor) for key, value in tree.items()}
    if isinstance(tree, (tuple, list)):
        return type(tree)(_rebuilt(value, next_tensor) for value in tree)
    return tree


@cache
def _names(kind: type) -> tuple[str, ...] | None:
    """Return the fields that make a dataclass; None for any other type."""
    return tuple(field.name for field in fields(kind) if field.init) if is_dataclass(kind) else None
