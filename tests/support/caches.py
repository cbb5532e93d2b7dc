"""Read the content of a KV cache in either layout of its keys."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from foredraft.model.cache import KVCache


def dense(cache: KVCache) -> Tensor:
    """Return a copy of all keys and values, [layers, 2, R, H, P, D]."""
    return _held(cache, 0, cache.rows, cache.stored)


def held(cache: KVCache, row: int, length: int) -> Tensor:
    """Return a copy of the first `length` positions of a row, [layers, 2, H, length, D]."""
    return _held(cache, row, 1, length)[:, :, 0]


def _held(cache: KVCache, first_row: int, count: int, length: int) -> Tensor:
    layers = range(len(cache.memory))
    return torch.stack([torch.stack(cache.read(layer, first_row, count, length)) for layer in layers])


def poison(cache: KVCache, row: int, position: int) -> None:
    """Set the keys and values of one position to NaN in every layer."""
    layers, _, _, heads, _, dim = cache.memory.shape
    broken = torch.full((heads, 1, dim), math.nan)
    for layer in range(layers):
        cache.write(layer, row, position, broken, broken)
