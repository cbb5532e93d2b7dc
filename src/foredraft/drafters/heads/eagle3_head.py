"""The forward of an EAGLE head (Li et al., arXiv:2401.15077, 2406.16858, 2503.01840), with its own cache.

It reads pairs: a state of the target, and the embedding of the token after it. EAGLE-3's state is the joined
auxiliary states through `fc`, and the residual; EAGLE-1 and 2 join the target's last, normed state and the
embedding by `fc`. What leaves the last layer recurs, and gives logits. A pair lies at its token's position;
slot 0 is empty, and masked. The bits of a pair's state depend on no other pair of the pass, so a fused draft
draws what single steps draw.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.drafters.heads.head_files import HeadFiles
from foredraft.drafters.heads.layers import ATTENDED, HeadBuilder, PairNorm, head_context, load_head
from foredraft.drafters.heads.record import HeadRecord
from foredraft.model.attention import ForwardContext, at_columns, attend
from foredraft.model.cache import CacheLayers, KVCache
from foredraft.model.decoder import Decoder, Layer, finish, project
from foredraft.model.layer_geometry import Plan
from foredraft.model.layers import LayerInputs, Norm, PairInputs, Product, RMSNorm, RowSource
from foredraft.model.memory import upload
from foredraft.model.rope import Rope
from foredraft.model.runner import DraftInputs, DraftVocab, FusedDraft, Runner
from foredraft.model.runner.native import NativeBackend, PairDraft, unserved_because
from foredraft.model.spec import ModelSpec


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
        self.backend.forward(ids, x, cache, groups, self.plan, 0, len(self.plan.attention))
        return at_columns(x, real, batch * width).view(batch, width, -1)

    def draft(
        self, cache: CacheLayers, tables: dict[Rope, Tensor], inputs: DraftInputs, states: Tensor
    ) -> tuple[FusedDraft, Tensor]:
        """Take all steps of a draft in one call, from the states [N, d] of its first pairs."""
        left = states.new_zeros(len(inputs.lengths), states.shape[1])
        self.backend.use_rotary_tables(tables)
        pairs, inputs = PairDraft(states.contiguous(), left), replace(inputs, draft_vocab=self.draft_vocab)
        return self.backend.draft(cache, inputs, self.plan, None, pairs), left


@dataclass(frozen=True, slots=True)
class Eagle3Head:
    """The weights of a head, beside its target's."""

    record: HeadRecord  # what it is
    target: Decoder  # the target's decoder
    aux_norms: tuple[RMSNorm, ...]  # the norms before `fc`: none, one over all states, or one for each
    fc: Product  # joins the auxiliary states, or pairs
    layers: tuple[Layer, ...]  # its layers; the first one reads pairs
    norm: RMSNorm | None  # before the head; None where there is none
    output: Product  # the head over its draft vocabulary
    draft_vocab: Tensor | None  # the ids that it can draft, [draft_vocab]; None where it can draft all
    embedding: Tensor | None  # its own embedding [V, d]; None: the target's
    kernels: EagleKernels | None = None  # run its layers; None: PyTorch's operators do

    @classmethod
    def of(cls, builder: HeadBuilder) -> Self:
        record = builder.record
        count = len(record.aux_layers or ()) if record.fc_norm else 0
        names = ["input_norm"] if record.norm_before_fc else [f"fc_norm.{at}" for at in range(count)]
        return cls(
            record=record, target=builder.target, aux_norms=tuple(map(builder.norm, names)),
            fc=builder.linear("fc"), layers=builder.layers(), norm=builder.norm_if_there("norm"),
            output=builder.output(), draft_vocab=builder.draft_vocab, embedding=builder.embedding(),
        )  # fmt: skip

    def by_kernels(self) -> Eagle3Head:
        """Return the head run by the C kernels where they run its target and have its weights."""
        first, pair_norm = self.layers[0], self.layers[0].attention.norm
        norms = (pair_norm.embedding, pair_norm.state) if isinstance(pair_norm, PairNorm) else (None, None)
        weights = HeadWeights(
            spec=self.record.spec,
            dtype=self.target.dtype,
            embedding=self.target.embedding if self.embedding is None else self.embedding,
            layers=(replace(first, attention=replace(first.attention, norm=None)), *self.layers[1:]),
            norm=self.norm,
            output=self.output,
        )
        pairs = PairInputs(
            *norms,
            join=self.fc if self.record.pair_fc else None,
            normed_residual=self.record.norm_before_residual,
            normed_output=self.record.norm_output and self.norm is not None,
        )
        return replace(self, kernels=EagleKernels.of(weights, pairs, self.draft_vocab))

    def read_as(self, record: HeadRecord) -> Eagle3Head:
        """Return the head with the same weights under another record."""
        changed = replace(self, record=record, kernels=None)
        return changed if self.kernels is None else changed.by_kernels()

    def joined(self, aux_states: Tensor) -> Tensor:
        """Return the states [N, d] of the target's joined auxiliary states [N, layers * d_target]."""
        if self.record.final_norm:
            aux_states = self.target.norm(aux_states)
        if self.record.pair_fc:
            return aux_states
        if self.record.norm_before_fc:
            aux_states = self.aux_norms[0](aux_states)
        elif self.aux_norms:
            parts = aux_states.chunk(len(self.aux_norms), -1)
            aux_states = torch.cat([norm(part) for norm, part in zip(self.aux_norms, parts, strict=True)], -1)
        return self.fc(aux_states)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the embeddings [..., d] of the target's token ids, without a factor: they are normed."""
        if self.embedding is not None:
            return F.embedding(tokens, self.embedding)
        return self.target.embedding_rows(tokens)

    def run(
        self,
        cache: KVCache,
        tables: dict[Rope, Tensor],
        tokens: Tensor,
        states: Tensor,
        starts: Sequence[int],
        counts: Sequence[int],
        first_row: int = 0,
    ) -> Tensor:
        """Run the layers over pairs of tokens [B, T] and states [B, T, d] -> states [B, T, d]."""
        if self.kernels is not None:
            return self.kernels.run(cache, tables, tokens, states, starts, counts, first_row)
        spec, (batch, width) = self.record.spec, tokens.shape
        context = self._context(cache, tables, width, starts, counts, first_row)
        real = context.real
        state = states.reshape(batch * width, -1)
        state = state if real is None else state[real]
        ids = tokens.flatten() if real is None else tokens.flatten()[real]
        x = torch.cat([self.embed(ids), state], -1)
        x = self.fc(x) if self.record.pair_fc else x
        first = self.layers[0]
        attended = attend(spec, 0, project(spec, first.attention, x, None), context)
        x = finish(spec, first, x if self.record.pair_fc else self.residual(state), attended, True, None)
        for index, layer in enumerate(self.layers[1:], 1):
            attended = attend(spec, index, project(spec, layer.attention, x, None), context)
            x = finish(spec, layer, x, attended, True, None)
        return at_columns(x, real, batch * width).view(batch, width, -1)

    def residual(self, state: Tensor) -> Tensor:
        """Return what the first layer adds its attention to, for states [N, d]."""
        if not self.record.norm_before_residual:
            return state
        return cast(PairNorm, self.layers[0].attention.norm).state(state)

    def logits(self, left: Tensor) -> Tensor:
        """Return logits [N, draft_vocab] float32 of states that left the last layer, [N, d]."""
        if self.kernels is not None:
            return self.kernels.backend.head(left.contiguous())
        return self.output(left if self.norm is None else self.norm(left)).float()

    def recurring(self, left: Tensor) -> Tensor:
        """Return the states of the next pairs, from those that left the last layer."""
        if not self.record.norm_output or self.norm is None:
            return left
        return self.norm(left) if self.kernels is None else self.kernels.backend.normed(left.contiguous())

    def _context(
        self,
        cache: KVCache,
        tables: dict[Rope, Tensor],
        width: int,
        starts: Sequence[int],
        counts: Sequence[int],
        first_row: int,
    ) -> ForwardContext:
        end = max(start + count for start, count in zip(starts, counts, strict=True) if count)
        length = min(cache.stored, math.ceil(end / ATTENDED) * ATTENDED)
        context = head_context(self.record.spec, cache, tables, width, length, starts, counts, first_row)
        masks = {window: mask.clone() for window, mask in context.masks.items()}
        for mask in masks.values():
            mask[..., 0] = -math.inf  # no pair lies there
        return replace(context, masks=masks)


def load_eagle3(files: HeadFiles[HeadRecord], target: Runner) -> Eagle3Head:
    """Read the weights of a head, in the target's dtype."""
    head = load_head(files, target, Eagle3Head.of)
    return head.by_kernels() if target.by_kernels else head
