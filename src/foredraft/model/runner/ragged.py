"""Ragged passes: products over the real columns [N] of a batch instead of the padded [B, T].

Contract: the rows of a batch have different numbers of real columns, because drafts differ in length and idle
rows have none. A ragged pass gathers the real columns, so embedding, norms, products and head skip the
padding, and no keys are written for it. Attention still sees the query bucket of every row, so a real column
has the bits of the padded pass.

The rule: gathering costs each layer a fixed time (queries are scattered, outputs gathered), and up to some
row count a product costs what reading its weight costs. So a pass gathers where the rows that it saves beyond
that count are worth more than the moves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from foredraft.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class RaggedRule:
    """The rule that decides whether a pass gathers its real columns.

    Attributes:
        free_rows: Products of up to so many rows cost about the same.
        min_saved: The rows beyond `free_rows` that a ragged pass must save.
    """

    free_rows: int
    min_saved: int

    @classmethod
    def of(cls, spec: ModelSpec, device: torch.device) -> RaggedRule:
        """Return the rule of a model on a device."""
        free_rows, moves = COSTS[device.type]
        heads = 2 * (spec.heads + spec.kv_heads) * spec.head_dim
        weights = spec.hidden_size * (heads + 3 * spec.intermediate_size)  # of the products of a layer
        return cls(free_rows, moves // weights + 1)

    def pays(self, padded: int, real: int) -> bool:
        """Return whether to gather `real` columns out of `padded` ones."""
        return padded - max(real, self.free_rows) >= self.min_saved

    def __str__(self) -> str:
        return f"ragged passes where they save {self.min_saved} rows beyond {self.free_rows}"


# By device: the free rows, and the cost of a layer's moves in multiply-adds of its products. CPU: timed on
# one core with bfloat16 dot products, where the moves take 14 µs and a multiply-add 4 ps; doubled, because
# products use all cores and moves do not. CUDA: computed, not timed: three launches of 5 µs on a device of
# 350e12 multiply-adds per second that is bound by memory below some 256 rows.
COSTS = {"cpu": (8, 2**23), "cuda": (256, 2**32)}
