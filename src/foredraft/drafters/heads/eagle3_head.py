"""The forward of an EAGLE head (Li et al., arXiv:2401.15077, 2406.16858, 2503.01840), with its own cache.

It reads pairs: a state of the target, and the embedding of the token after it. EAGLE-3's state is the joined
auxiliary states through `fc`, and the residual; EAGLE-1 and 2 join the target's last, normed state and the
embedding by `fc`. What leaves the last layer recurs, and gives logits. A pair lies at its token's position;
slot 0 is empty, and masked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.drafters.heads.eagle3_files import (
    D2T,
    EMBEDDING,
    HEAD,
    T2D,
    Eagle3Files,
    HeadSource,
    HeadTensors,
    layer_name,
)
from foredraft.drafters.heads.products import EagleKernels, HeadWeights, head_context, packed_product
from foredraft.drafters.heads.record import HeadRecord, draft_ids
from foredraft.model.attention import ForwardContext, at_columns, attend
from foredraft.model.cache import KVCache
from foredraft.model.checkpoint import Shapes
from foredraft.model.decoder import MLP, Attention, Decoder, Layer, finish, project
from foredraft.model.layers import PairInputs, Product, RMSNorm
from foredraft.model.rope import Rope
from foredraft.model.runner import Runner
from foredraft.model.runner.native import is_native
from foredraft.model.spec import ModelSpec

ATTENDED = 64  # attended lengths are multiples of it, so that operators see few shapes


@dataclass(frozen=True, slots=True)
class PairNorm:
    """The norms that enter the first layer: of the embedding and of the state, side by side."""

    embedding: RMSNorm
    state: RMSNorm

    def __call__(self, x: Tensor) -> Tensor:
        embedding, state = x.chunk(2, -1)
        return torch.cat([self.embedding(embedding), self.state(state)], -1)


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


def cache_spec(record: HeadRecord) -> ModelSpec:
    return record.spec


def load_eagle3(files: Eagle3Files, target: Runner) -> Eagle3Head:
    """Read the weights of a head, in the target's dtype."""
    decoder = target.decoder
    with ExitStack() as stack:
        tensors = files.open(stack, decoder.device, decoder.dtype)
        product = partial(packed_product, target)
        builder = HeadBuilder(files.record, files.shapes, tensors, decoder, product)
        head = builder.head(draft_vocab_of(files, tensors))
    return head.by_kernels() if target.by_kernels else head


def draft_vocab_of(files: Eagle3Files, tensors: HeadSource) -> Tensor | None:
    """Return the target's ids that a head can draft, [draft_vocab]; None where output i is id i."""
    record, dtypes = files.record, ("I64", "I32", "BOOL", "U8")
    d2t, t2d = (
        tensors.view(name, files.shapes[name], dtypes).long().clone() if name in files.shapes else None
        for name in (D2T, T2D)
    )
    return draft_ids(
        str(files.folder), record.draft_vocab_size, record.spec.vocab_size, d2t, t2d,
        absolute=record.absolute_d2t,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class HeadBuilder:
    """Builds a head of its tensors: of a file to decode with, or of parameters to train."""

    record: HeadRecord  # the head
    shapes: Shapes  # the shape of each of its tensors, by name
    tensors: HeadTensors  # gives them
    target: Decoder  # the target's decoder
    product: Callable[[Tensor, Tensor | None], Product]  # makes a linear layer of weight [M, K] and bias [M]

    def head(self, draft_vocab: Tensor | None) -> Eagle3Head:
        return Eagle3Head(
            record=self.record,
            target=self.target,
            aux_norms=self.aux_norms(),
            fc=self.linear({"fc": self.record.spec.hidden_size}, "fc.bias" in self.shapes),
            layers=tuple(self.layer(index) for index in range(self.record.spec.layers)),
            norm=None if self.record.pair_fc else self.norm("norm"),
            output=self.output(draft_vocab),
            draft_vocab=draft_vocab,
            embedding=self.embedding(),
        )

    def norm(self, name: str) -> RMSNorm:
        weight = f"{name}.weight"
        return RMSNorm(self.tensors.load({weight: self.shapes[weight]}), self.record.spec.norm_eps)

    def aux_norms(self) -> tuple[RMSNorm, ...]:
        if self.record.norm_before_fc:
            return (self.norm("input_norm"),)
        aux_layers = self.record.aux_layers or ()
        return tuple(self.norm(f"fc_norm.{i}") for i in range(len(aux_layers))) if self.record.fc_norm else ()

    def linear(self, names: dict[str, int], bias: bool = False) -> Product:
        """Return one linear layer, joined from the named ones with their numbers of rows."""
        shapes = {f"{name}.weight": self.shapes[f"{name}.weight"] for name in names}
        weight = self.tensors.load(shapes)
        biases = {f"{name}.bias": (rows,) for name, rows in names.items()}
        return self.product(weight, self.tensors.load(biases) if bias else None)

    def layer(self, index: int) -> Layer:
        spec, name = self.record.spec, layer_name(self.record, index)
        attention, mlp = f"{name}.self_attn", f"{name}.mlp"
        keys = spec.kv_heads * spec.head_dim
        norm: Callable[[Tensor], Tensor] | None = None
        if index or not self.record.pair_fc:
            norm = self.norm(f"{name}.input_layernorm")
        if norm is not None and f"{name}.hidden_norm.weight" in self.shapes:
            norm = PairNorm(cast(RMSNorm, norm), self.norm(f"{name}.hidden_norm"))
        rows = {"q_proj": spec.heads * spec.head_dim, "k_proj": keys, "v_proj": keys}
        return Layer(
            Attention(
                norm=cast(RMSNorm, norm),
                qkv=self.projections({f"{attention}.{each}": count for each, count in rows.items()}),
                output=self.linear({f"{attention}.o_proj": spec.hidden_size}, spec.output_bias),
                q_norm=self.norm(f"{attention}.q_norm") if spec.head_norms else None,
                k_norm=self.norm(f"{attention}.k_norm") if spec.head_norms else None,
            ),
            MLP(
                norm=self.norm(f"{name}.post_attention_layernorm"),
                gate_up=self.linear(
                    {f"{mlp}.{each}_proj": spec.intermediate_size for each in ("gate", "up")}, spec.mlp_bias
                ),
                down=self.linear({f"{mlp}.down_proj": spec.hidden_size}, spec.mlp_bias),
            ),
        )

    def projections(self, names: dict[str, int]) -> Product:
        return self.linear(names, self.record.spec.qkv_bias)

    def output(self, ids: Tensor | None) -> Product:
        """Return the head: its own, or the target's rows of its draft vocabulary."""
        if self.record.own_head:
            return self.linear({HEAD.removesuffix(".weight"): self.record.draft_vocab_size})
        decoder = self.target
        head = decoder.output
        if ids is None:
            return head
        if is_native(head):
            return self.product(head.rows(ids), None)
        return self.product(decoder.embedding_rows(ids) if decoder.spec.tied else head.dense()[ids], None)

    def embedding(self) -> Tensor | None:
        """Return its own embedding; None where that is the target's, to the bit, or is not there."""
        if not self.record.own_embedding:
            return None
        own = self.tensors.load({EMBEDDING: self.shapes[EMBEDDING]})
        decoder = self.target
        if own.shape[1] != decoder.spec.hidden_size:
            return own
        ids = torch.arange(len(own), device=own.device)
        same = all(torch.equal(decoder.embedding_rows(part), own[part]) for part in torch.split(ids, 4096))
        return None if same else own
