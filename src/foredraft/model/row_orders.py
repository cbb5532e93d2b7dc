"""Row orders: where the rows of a layer's product lie in the weight that a checkpoint stores.

Contract: row i of the product is row `order[i]` of the stored weight, and so is value i of its bias. The
decoder computes with whole queries, then keys, then values, and rotates the halves of a head's first channels
together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foredraft.model.spec import ModelSpec

__all__ = ["channel_order", "grouped_rows", "qkv_order"]


def qkv_order(spec: ModelSpec) -> Tensor | None:
    """Return the order of queries, keys and values side by side; None: they are stored in it."""
    heads, kv_heads, dim = spec.heads, spec.kv_heads, spec.head_dim
    rows = torch.arange((heads + 2 * kv_heads) * dim)
    if spec.grouped_qkv:
        rows = grouped_rows(heads, kv_heads, dim)
    channels = channel_order(spec)
    if channels is not None:
        by_head = rows.view(-1, dim)
        rotated = heads + kv_heads
        rows = torch.cat([by_head[:rotated, channels], by_head[rotated:]]).flatten()
    return rows if spec.grouped_qkv or channels is not None else None


def grouped_rows(heads: int, kv_heads: int, head_dim: int) -> Tensor:
    """Return the order of a weight that stores the queries, the key and the value of each key head together.

    Examples:
        >>> grouped_rows(heads=4, kv_heads=2, head_dim=1).tolist()  # stored: q0 q1 k0 v0 q2 q3 k1 v1
        [0, 1, 4, 5, 2, 6, 3, 7]
    """
    groups = heads // kv_heads
    stored = torch.arange((heads + 2 * kv_heads) * head_dim).view(kv_heads, groups + 2, head_dim)
    parts = stored[:, :groups], stored[:, groups], stored[:, groups + 1]
    return torch.cat([part.flatten() for part in parts])


def channel_order(spec: ModelSpec) -> Tensor | None:
    """Return the order of a head's channels; None: they are stored in it.

    Where channels 2i and 2i + 1 rotate together, the first half is the even ones.
    """
    if not spec.interleaved:
        return None
    rotated = spec.rope.rotated(spec.head_dim)
    pairs = torch.arange(rotated).view(-1, 2)
    return torch.cat([pairs.T.flatten(), torch.arange(rotated, spec.head_dim)])
