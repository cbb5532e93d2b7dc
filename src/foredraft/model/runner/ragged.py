"""Gathered passes: products over the real columns of a batch only, [Σ counts], instead of [B, T].

Contract: the rows of a batch seldom have equally much to compute: drafts differ in length, and idle rows have
nothing. A gathered pass leaves the padding out of embedding, norms, products and head, and writes no keys
for it; attention still sees every row's own query bucket, so the bits are those of the padded pass.

The rule: scattering queries and gathering outputs costs each layer a fixed amount, and up to some row count
a product costs what reading its weight costs. So a pass is gathered where the product rows that it saves
beyond that count are worth more than the moves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from foredraft.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Gathering:
    """When a pass is gathered."""

    free_rows: int  # products of up to so many rows cost about the same
    least: int  # product rows beyond these that must be saved

    @classmethod
    def of(cls, spec: ModelSpec, device: torch.device) -> Gathering:
        free_rows, moves = COSTS[device.type]
        heads = 2 * (spec.heads + spec.kv_heads) * spec.head_dim
        weights = spec.hidden_size * (heads + 3 * spec.intermediate_size)  # of a layer's products
        return cls(free_rows, moves // weights + 1)

    def pays(self, padded: int, real: int) -> bool:
        """Whether to gather so many real rows out of so many padded ones."""
        return padded - max(real, self.free_rows) >= self.least

    def __str__(self) -> str:
        return f"batches of more than {self.free_rows} rows gathered where that saves {self.least}"


# Free rows, and what the moves cost a layer in multiply-adds of its products. CPU: timed on one core with
# bfloat16 dot products, where the moves take 14 µs and a multiply-add 4 ps; doubled, for products use all
# cores and moves do not. CUDA: three launches of 5 µs on a device of 350e12 multiply-adds a second that is
# bound by memory below some 256 rows; arithmetic, not timed.
COSTS = {"cpu": (8, 2**23), "cuda": (256, 2**32)}
