"""What heads share: linear layers laid out as the target's, contexts of passes, passes to be timed, and the C
kernels.

The bits of a pair's state depend on no other pair of the pass, so a fused draft draws what single steps draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from foredraft.decode.drafter import DraftPass
from foredraft.model.attention import ForwardContext, PassShape, at_columns, build_context, rope_tables
from foredraft.model.cache import CacheLayers, KVCache
from foredraft.model.decoder import Layer
from foredraft.model.layers import LayerInputs, Norm, PairInputs, Product, RowSource
from foredraft.model.memory import upload
from foredraft.model.rope import Rope
from foredraft.model.runner import DraftInputs, DraftVocab, FusedDraft, Runner
from foredraft.model.runner.compiled import pack
from foredraft.model.runner.native import NativeBackend, PairDraft, fits, pack_native, unserved_because
from foredraft.model.spec import ModelSpec, Plan


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
        return [*(product for layer in self.layers for product in layer.products), self.output]


@dataclass(frozen=True, slots=True)
class EagleKernels:
    backend: NativeBackend  # runs it
    plan: Plan  # all of its sub-layers
    draft_vocab: DraftVocab | None  # None where it can draft all ids of the target

    @classmethod
    def of(cls, weights: HeadWeights, pairs: PairInputs, draft_vocab: Tensor | None) -> Self | None:
        """Return what runs a head over the ids `draft_vocab`, or over all; None where operators have to."""
        if unserved_because(weights.spec, torch.device("cpu"), weights.dtype) is not None:
            return None
        backend = NativeBackend.of(weights, pairs)
        if backend is None:
            return None
        own = None if draft_vocab is None else DraftVocab(draft_vocab, weights.spec.vocab_size)
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
        self.backend.forward(ids, x, cache, groups, (self.plan, 0, len(self.plan.attention)))
        return at_columns(x, real, batch * width).view(batch, width, -1)

    def draft(
        self, cache: CacheLayers, tables: dict[Rope, Tensor], inputs: DraftInputs, states: Tensor
    ) -> tuple[FusedDraft, Tensor]:
        """Take all steps of a draft in one call, from the states [N, d] of its first pairs."""
        left = states.new_zeros(len(inputs.lengths), states.shape[1])
        self.backend.use_rotary_tables(tables)
        pairs, inputs = PairDraft(states.contiguous(), left), replace(inputs, draft_vocab=self.draft_vocab)
        return self.backend.draft(cache, inputs, self.plan, None, pairs), left


def packed_product(target: Runner, weight: Tensor, bias: Tensor | None = None) -> Product:
    """Return a weight [out, in] as a product by the kernels where they run the target, else by operators."""
    if target.by_kernels and fits(weight.dtype, weight.shape[1]):
        return pack_native(weight, bias)
    return pack(weight, bias)


def head_context(
    spec: ModelSpec,
    cache: KVCache,
    tables: dict[Rope, Tensor],
    width: int,
    length: int,
    starts: Sequence[int],
    counts: Sequence[int],
    first_row: int = 0,
) -> ForwardContext:
    """Return what the layers of a pass share: `width` columns a row, of which `counts` [B] are real."""
    batch = len(starts)
    places = [start if count else cache.scratch for start, count in zip(starts, counts, strict=True)]
    columns = [row * width + column for row, count in enumerate(counts) for column in range(count)]
    real = None if len(columns) == batch * width else upload(columns, cache.device)
    shape = PassShape(
        first_row=first_row, batch=batch, columns=width, queries=width, length=length, span=None,
        apart=False, plan=Plan.full(spec.layers), start=0, stop=spec.layers,
    )  # fmt: skip
    return build_context(spec, tables, cache, shape, upload(places, cache.device), real)


@dataclass(frozen=True, slots=True)
class TimedPass(DraftPass):
    """A pass that has a cache of its own."""

    # that cache and its rotary tables, by the rows and the positions that are timed
    scratch: dict[tuple[int, int], tuple[KVCache, dict[Rope, Tensor]]] = field(
        default_factory=dict, kw_only=True, repr=False
    )

    def scratch_of(
        self, cache: CacheLayers, spec: ModelSpec, *, blocked: bool = False
    ) -> tuple[KVCache, dict[Rope, Tensor]]:
        """Return a cache beside the given one, and its rotary tables; the last ones are kept."""
        key = cache.rows, cache.positions
        if key not in self.scratch:
            self.scratch.clear()
            made = cache.aligned(spec, blocked=blocked)
            self.scratch[key] = made, rope_tables(spec, made.stored, made.device, made.dtype)
        return self.scratch[key]
