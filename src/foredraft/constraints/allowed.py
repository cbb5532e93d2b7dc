"""Allowed tokens: only some ids of the vocabulary may be drawn, the same at every place of a text."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from foredraft.decode.constraint import Constraint

__all__ = ["AllowedTokens", "mask_of"]


class AllowedTokens(Constraint):
    """Forbids all tokens but some.

    Args:
        mask: Which tokens are allowed, [V] bool; sequences share it.
    """

    option = "allowed_token_ids"

    def __init__(self, mask: Tensor) -> None:
        self._mask, self._length = mask, 0

    @property
    def length(self) -> int:
        return self._length

    def mask(self) -> Tensor | None:
        return self._mask

    def advance(self, token: int) -> int:
        self._length += 1
        return self._length

    def rewind(self, length: int) -> None:
        self._length = length


def mask_of(ids: Collection[int], vocabulary: int) -> Tensor:
    """Return which tokens are allowed, [V] bool."""
    mask = torch.zeros(vocabulary, dtype=torch.bool)
    mask[list(ids)] = True
    return mask
