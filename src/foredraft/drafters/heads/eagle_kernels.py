"""An EAGLE head by the C kernels: its passes over pairs, and drafts whose steps all run in one call.

The bits of a pair's state depend on no other pair of the pass, so a fused draft draws what single steps draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from foredraft.model.cache import CacheLayers
from foredraft.model.decoder import Layer
from foredraft.model.forward_context import at_columns
from foredraft.model.layer_inputs import LayerInputs
from foredraft.model.layers import Norm, Product, RowSource
from foredraft.model.pair_inputs import PairInputs
from foredraft.model.plan import Plan
from foredraft.model.rope import Rope
from foredraft.model.runner import DraftInputs, FusedDraft, HeadWords
from foredraft.model.runner.native import NativeBackend, PairDraft, unserved_because
from foredraft.model.spec import ModelSpec
from foredraft.model.transfers import upload

__all__ = ["EagleKernels", "HeadWeights"]


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """The weights of a head, as the kernels take a decoder's."""

    spec: ModelSpec
    dtype: torch.dtype
    embedding: Tensor | RowSource
    layers: tuple[Layer, ...]
    norm: Norm | None
    output: Product
    embedding_scale: None = None
    learned_positions: None = None
    inputs: LayerInputs | None = None

    @property
    def products(self) -> list[Product]:
        """Its linear layers."""
        return [*(product for layer in self.layers for product in layer.products), self.output]


@dataclass(frozen=True, slots=True)
class EagleKernels:
    """Runs a head by the kernels.

    Attributes:
        backend: Runs it.
        plan: All of its sub-layers.
        words: Its words; None where they are the target's.
    """

    backend: NativeBackend
    plan: Plan
    words: HeadWords | None

    @classmethod
    def of(cls, weights: HeadWeights, pairs: PairInputs, words: Tensor | None) -> Self | None:
        """Return what runs a head of some words [words] or all; None where operators have to."""
        if unserved_because(weights.spec, torch.device("cpu"), weights.dtype) is not None:
            return None
        backend = NativeBackend.of(weights, pairs)
        if backend is None:
            return None
        own = None if words is None else HeadWords(words, weights.spec.vocab_size)
        return cls(backend, Plan.full(weights.spec.layers), own)

    def run(
        self,
        cache: CacheLayers,
        tables: dict[Rope, Tensor],
        tokens: Tensor,
        states: Tensor,
        starts: Sequence[int],
        counts: Sequence[int],
        first_row: int,
    ) -> Tensor:
        """Run the layers over pairs; arguments and result as `Eagle3Head.run`. Keys lie in blocks."""
        (batch, width), rows = tokens.shape, enumerate(zip(starts, counts, strict=True), first_row)
        groups = [(row, start, count, start) for row, (start, count) in rows if count]
        columns = [row * width + column for row, count in enumerate(counts) for column in range(count)]
        real = None if len(columns) == batch * width else upload(columns, cache.device)
        ids, x = tokens.flatten(), states.reshape(batch * width, -1)
        ids, x = (ids.contiguous(), x.clone()) if real is None else (ids[real], x[real])
        self.backend.use_rotary_tables(tables)
        self.backend.forward(ids, x, cache, groups, self.plan, 0, len(self.plan.attention))
        return at_columns(x, real, batch * width).view(batch, width, -1)

    def draft(
        self, cache: CacheLayers, tables: dict[Rope, Tensor], inputs: DraftInputs, states: Tensor
    ) -> tuple[FusedDraft, Tensor]:
        """Take all steps of a draft in one call.

        Args:
            cache: As for `run`.
            tables: Likewise.
            inputs: What each row reads first, and drafts.
            states: The states of the pairs that are read first, those of all rows that draft, [N, d].

        Returns:
            The draft, and the state of the pair that would follow in each row, [B, d].
        """
        left = states.new_zeros(len(inputs.lengths), states.shape[1])
        self.backend.use_rotary_tables(tables)
        pairs, inputs = PairDraft(states.contiguous(), left), replace(inputs, words=self.words)
        return self.backend.draft(cache, inputs, self.plan, None, pairs), left
