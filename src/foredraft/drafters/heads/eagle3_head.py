"""The forward of an EAGLE head (Li et al., arXiv:2401.15077, 2406.16858, 2503.01840), with its own cache.

The head reads pairs: a state of the target at a position, and the embedding of the token after it. The state
of EAGLE-3 is the joined taps through `fc`, or what the head itself gave for the pair before. The first layer
attends with both side by side; its residual is the state alone. What leaves the last layer recurs, and gives
logits through the last norm and the head.

The state of EAGLE-1 and 2 is the target's last one, after its final norm. `fc` joins it with the embedding;
the layer attends with that, and it is the residual, too. What leaves the last layer recurs, and gives logits
through the target's head.

A pair lies in the cache at the position of its token, so what it holds depends on no later token. Position 0
has no state before it: its slot is empty, and masked. Rotary positions are those of the tokens; attention
reads differences of positions alone.
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
from foredraft.drafters.heads.eagle_kernels import EagleKernels, HeadWeights
from foredraft.drafters.heads.products import packed_beside
from foredraft.drafters.heads.record import HeadRecord
from foredraft.drafters.heads.words import draft_words
from foredraft.model.attention import attend
from foredraft.model.cache import KVCache
from foredraft.model.checkpoint import Shapes
from foredraft.model.decoder import MLP, Attention, Decoder, Layer, finish, project
from foredraft.model.forward_context import ForwardContext, PassShape, at_columns, build_context
from foredraft.model.layers import Product, RMSNorm
from foredraft.model.pair_inputs import PairInputs
from foredraft.model.plan import Plan
from foredraft.model.rope import Rope
from foredraft.model.runner import Runner
from foredraft.model.runner.native import is_native
from foredraft.model.spec import ModelSpec
from foredraft.model.transfers import upload

__all__ = ["Eagle3Head", "HeadBuilder", "cache_spec", "load_eagle3", "map_of"]

ATTENDED = 64  # attended lengths are multiples of it, so that operators see few shapes


@dataclass(frozen=True, slots=True)
class PairNorm:
    """The norms that enter the first layer: of the embedding and of the state, side by side."""

    embedding: RMSNorm
    state: RMSNorm

    def __call__(self, x: Tensor) -> Tensor:
        """Return normed pairs [N, 2 * d]."""
        embedding, state = x.chunk(2, -1)
        return torch.cat([self.embedding(embedding), self.state(state)], -1)


@dataclass(frozen=True, slots=True)
class Eagle3Head:
    """The weights of a head, beside its target's.

    Attributes:
        record: What it is.
        target: The target's decoder.
        tap_norms: The norms before `fc`: none, one over all taps, or one for each.
        fc: Joins the taps, or pairs.
        layers: Its layers; the first one reads pairs.
        norm: Before the head; None where there is none.
        output: The head over its own words.
        words: The target's id of each of its words, [words]; None where they are the target's.
        embedding: Its own embedding [V, d]; None: the target's.
        kernels: Run its layers; None: PyTorch's operators do.
    """

    record: HeadRecord
    target: Decoder
    tap_norms: tuple[RMSNorm, ...]
    fc: Product
    layers: tuple[Layer, ...]
    norm: RMSNorm | None
    output: Product
    words: Tensor | None
    embedding: Tensor | None
    kernels: EagleKernels | None = None

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
        return replace(self, kernels=EagleKernels.of(weights, pairs, self.words))

    def read_as(self, record: HeadRecord) -> Eagle3Head:
        """Return the head with the same weights under another record."""
        changed = replace(self, record=record, kernels=None)
        return changed if self.kernels is None else changed.by_kernels()

    def joined(self, taps: Tensor) -> Tensor:
        """Return the states [N, d] of the target's joined taps [N, taps * d_target]."""
        if self.record.final_norm:
            taps = self.target.norm(taps)
        if self.record.pair_fc:
            return taps
        if self.record.norm_before_fc:
            taps = self.tap_norms[0](taps)
        elif self.tap_norms:
            parts = taps.chunk(len(self.tap_norms), -1)
            taps = torch.cat([norm(part) for norm, part in zip(self.tap_norms, parts, strict=True)], -1)
        return self.fc(taps)

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
        """Run the layers over pairs.

        Args:
            cache: Of `cache_spec`, with keys in blocks for the kernels; its lengths stay as they are.
            tables: The rotary tables of `rope_tables`.
            tokens: The token of each pair, [B, T], padded on the right.
            states: The state of each pair, [B, T, d].
            starts: Position of each row's first token, 1 or more.
            counts: The real columns of each row; 0: the row is idle, and touches no sequence.
            first_row: Cache row of row 0.

        Returns:
            The states [B, T, d] that leave the last layer; those of padding mean nothing.
        """
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
        """Return logits [N, words] float32 of states that left the last layer, [N, d]."""
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
        """Return what the layers of a pass share."""
        spec, batch = self.record.spec, len(starts)
        places = [start if count else cache.scratch for start, count in zip(starts, counts, strict=True)]
        end = max(start + count for start, count in zip(starts, counts, strict=True) if count)
        length = min(cache.stored, math.ceil(end / ATTENDED) * ATTENDED)
        columns = [row * width + column for row, count in enumerate(counts) for column in range(count)]
        real = None if len(columns) == batch * width else upload(columns, cache.device)
        shape = PassShape(
            first_row=first_row, batch=batch, columns=width, queries=width, length=length, span=None,
            apart=False, plan=Plan.full(spec.layers), start=0, stop=spec.layers,
        )  # fmt: skip
        context = build_context(spec, tables, cache, shape, upload(places, cache.device), real)
        masks = {window: mask.clone() for window, mask in context.masks.items()}
        for mask in masks.values():
            mask[..., 0] = -math.inf  # no pair lies there
        return replace(context, masks=masks)


def cache_spec(record: HeadRecord) -> ModelSpec:
    """Return the spec of the cache of a head's own keys and values."""
    return record.spec


def load_eagle3(files: Eagle3Files, target: Runner) -> Eagle3Head:
    """Read the weights of a head, in the target's dtype.

    Raises:
        CheckpointError: They are broken, or the head's words are none of the target's.
    """
    decoder, record = target.decoder, files.record

    with ExitStack() as stack:
        tensors = files.open(stack, decoder.device, decoder.dtype)
        maps = {name: map_of(files, tensors, name) for name in (D2T, T2D)}
        words = draft_words(
            str(files.folder), record.words, record.spec.vocab_size, maps[D2T], maps[T2D],
            absolute=record.absolute_words,
        )  # fmt: skip
        product = partial(packed_beside, target)
        head = HeadBuilder(record, files.shapes, tensors, decoder, product).head(words)
    return head.by_kernels() if target.by_kernels else head


def map_of(files: Eagle3Files, tensors: HeadSource, name: str) -> Tensor | None:
    """Return one of the maps between vocabularies, in whole numbers; None where it is not there."""
    if name not in files.shapes:
        return None
    return tensors.view(name, files.shapes[name], ("I64", "I32", "BOOL", "U8")).long().clone()


@dataclass(frozen=True, slots=True)
class HeadBuilder:
    """Builds a head of its tensors: of a file to decode with, or of parameters to train.

    Attributes:
        record: The head.
        shapes: The shape of each of its tensors, by name.
        tensors: Gives them.
        target: The target's decoder.
        product: Makes a linear layer of a weight [M, K] and a bias [M].
    """

    record: HeadRecord
    shapes: Shapes
    tensors: HeadTensors
    target: Decoder
    product: Callable[[Tensor, Tensor | None], Product]

    def head(self, words: Tensor | None) -> Eagle3Head:
        """Return the head over the target's ids `words`; None: over all."""
        return Eagle3Head(
            record=self.record,
            target=self.target,
            tap_norms=self.tap_norms(),
            fc=self.linear({"fc": self.record.spec.hidden_size}, "fc.bias" in self.shapes),
            layers=tuple(self.layer(index) for index in range(self.record.spec.layers)),
            norm=None if self.record.pair_fc else self.norm("norm"),
            output=self.output(words),
            words=words,
            embedding=self.embedding(),
        )

    def norm(self, name: str) -> RMSNorm:
        weight = f"{name}.weight"
        return RMSNorm(self.tensors.load({weight: self.shapes[weight]}), self.record.spec.norm_eps)

    def tap_norms(self) -> tuple[RMSNorm, ...]:
        if self.record.norm_before_fc:
            return (self.norm("input_norm"),)
        taps = self.record.taps or ()
        return tuple(self.norm(f"fc_norm.{tap}") for tap in range(len(taps))) if self.record.fc_norm else ()

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
        """Return the projections to queries, keys and values, as `linear`."""
        return self.linear(names, self.record.spec.qkv_bias)

    def output(self, words: Tensor | None) -> Product:
        """Return the head: its own, or the target's rows of its words."""
        if self.record.own_head:
            return self.linear({HEAD.removesuffix(".weight"): self.record.words})
        decoder = self.target
        head = decoder.output
        if words is None:
            return head
        if is_native(head):
            return self.product(head.rows(words), None)
        return self.product(decoder.embedding_rows(words) if decoder.spec.tied else head.dense()[words], None)

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
