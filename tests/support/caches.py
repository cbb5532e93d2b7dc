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
    """Return a copy of the first positions of a row, [layers, 2, H, length, D]; with several shapes of heads, flat."""
    if len(cache.planes) == 1:
        return _held(cache, row, 1, length)[:, :, 0]
    layers = range(len(cache._layers))
    return torch.cat([part.flatten() for layer in layers for part in cache.read(layer, row, 1, length)])


def _held(cache: KVCache, first_row: int, count: int, length: int) -> Tensor:
    layers = range(len(cache._layers))
    return torch.stack([torch.stack(cache.read(layer, first_row, count, length)) for layer in layers])


def poison(cache: KVCache, row: int, position: int) -> None:
    for layer, (_, _, heads, _, dim) in enumerate(own.shape for own in cache._layers):
        broken = torch.full((heads, 1, dim), math.nan)
        cache.write(layer, row, position, broken, broken)
