"""What heads share: their weights as layers beside a target's, passes, and the drafters over them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import torch
from torch import Tensor

from foredraft.decode.drafter import DraftPass
from foredraft.drafters.asset import Found, Parts
from foredraft.drafters.heads.record import HeadRecord, Record, map_of, target_rows
from foredraft.drafters.heads.settings import described_head, with_settings
from foredraft.drafters.heads.tensors import EMBEDDING, HEAD, HeadFiles
from foredraft.drafters.states import WaitingReader
from foredraft.model.attention import ForwardContext, PassShape, build_context, rope_tables
from foredraft.model.cache import CacheLayers, KVCache
from foredraft.model.checkpoint import Checkpoint, Shapes
from foredraft.model.decoder import MLP, Attention, Decoder, Layer
from foredraft.model.layers import Product, RMSNorm
from foredraft.model.memory import upload
from foredraft.model.rope import Rope
from foredraft.model.runner import DraftInputs, Forward, FusedDraft, Runner
from foredraft.model.runner.compiled import pack
from foredraft.model.runner.native.products import fits, pack_native
from foredraft.model.spec import ModelSpec, Plan

Head = TypeVar("Head")

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
class HeadBuilder:
    """Builds a head of its tensors: of a file to decode with, or of parameters to train."""

    record: HeadRecord  # the head
    shapes: Shapes  # the shape of each of its tensors, by name
    load_joined: Callable[
        [Shapes], Tensor
    ]  # gives them, those of one call joined along their first dimension
    target: Decoder  # the target's decoder
    product: Callable[[Tensor, Tensor | None], Product]  # makes a linear layer of weight [M, K] and bias [M]
    draft_vocab: Tensor | None  # the target's ids that it can draft, [draft_vocab]; None: all
    # joins q, k and v; None: in one
    projections: Callable[[HeadBuilder, Sequence[str]], Product] | None = None

    def load(self, names: Sequence[str]) -> Tensor:
        return self.load_joined({name: self.shapes[name] for name in names})

    def norm(self, name: str) -> RMSNorm:
        return RMSNorm(self.load([f"{name}.weight"]), self.record.spec.norm_eps)

    def norm_if_there(self, name: str) -> RMSNorm | None:
        return self.norm(name) if f"{name}.weight" in self.shapes else None

    def linear(self, *names: str) -> Product:
        """Return one linear layer, joined from the named ones."""
        weight = self.load([f"{name}.weight" for name in names])
        has_bias = f"{names[0]}.bias" in self.shapes
        return self.product(weight, self.load([f"{name}.bias" for name in names]) if has_bias else None)

    def layers(self) -> tuple[Layer, ...]:
        return tuple(self._layer(self.record.layer_name(index)) for index in range(self.record.spec.layers))

    def _layer(self, name: str) -> Layer:
        attention, mlp = f"{name}.self_attn", f"{name}.mlp"
        norm, state_norm = (
            self.norm_if_there(f"{name}.{each}") for each in ("input_layernorm", "hidden_norm")
        )
        if norm is not None and state_norm is not None:
            norm = cast(RMSNorm, PairNorm(norm, state_norm))
        projections = [f"{attention}.{each}_proj" for each in "qkv"]
        return Layer(
            Attention(
                norm=cast(RMSNorm, norm),
                qkv=self.projections(self, projections) if self.projections else self.linear(*projections),
                output=self.linear(f"{attention}.o_proj"),
                q_norm=self.norm_if_there(f"{attention}.q_norm"),
                k_norm=self.norm_if_there(f"{attention}.k_norm"),
            ),
            MLP(
                norm=self.norm(f"{name}.post_attention_layernorm"),
                gate_up=self.linear(f"{mlp}.gate_proj", f"{mlp}.up_proj"),
                down=self.linear(f"{mlp}.down_proj"),
            ),
        )

    def output(self) -> Product:
        """Return the head: its own, or the target's rows of its draft vocabulary."""
        if self.record.own_head:
            return self.linear(HEAD.removesuffix(".weight"))
        if self.draft_vocab is None:
            return self.target.output
        return self.product(target_rows(self.target, self.draft_vocab), None)

    def embedding(self) -> Tensor | None:
        """Return its own embedding; None where that is the target's, to the bit, or is not there."""
        if not self.record.own_embedding:
            return None
        own, decoder = self.load([EMBEDDING]), self.target
        if own.shape[1] != decoder.spec.hidden_size:
            return own
        ids = torch.arange(len(own), device=own.device)
        same = all(torch.equal(decoder.embedding_rows(part), own[part]) for part in torch.split(ids, 4096))
        return None if same else own


def packed_product(target: Runner, weight: Tensor, bias: Tensor | None = None) -> Product:
    """Return a weight [out, in] as a product by the kernels where they run the target, else by operators."""
    if target.by_kernels and fits(weight.dtype, weight.shape[1]):
        return pack_native(weight, bias)
    return pack(weight, bias)


def load_head(files: HeadFiles[Record], target: Runner, build: Callable[[HeadBuilder], Head]) -> Head:
    """Return a head that is built of its files, whose weights are read in the target's dtype."""
    decoder = target.decoder
    with ExitStack() as stack:
        tensors = files.open(stack, decoder.device, decoder.dtype)
        product, draft_vocab = partial(packed_product, target), files.draft_vocab(tensors)
        return build(HeadBuilder(files.record, files.shapes, tensors.load, decoder, product, draft_vocab))


@dataclass(frozen=True, slots=True)
class HeadCache:
    """A head's cache and its rotary tables."""

    kv: KVCache
    tables: dict[Rope, Tensor]

    @classmethod
    def of(cls, spec: ModelSpec, kv: KVCache) -> Self:
        return cls(kv, rope_tables(spec, kv.stored, kv.device, kv.dtype))

    def attended(self, end: int) -> int:
        """Return the length to which a pass attends that ends at a position."""
        return min(self.kv.stored, math.ceil(end / ATTENDED) * ATTENDED)

    def context(
        self, spec: ModelSpec, width: int, length: int, starts: Sequence[int], counts: Sequence[int],
        first_row: int = 0,
    ) -> ForwardContext:  # fmt: skip
        """Return what the layers of a pass share: `width` columns a row, of which `counts` [B] are real."""
        batch, kv = len(starts), self.kv
        places = [start if count else kv.scratch for start, count in zip(starts, counts, strict=True)]
        columns = [row * width + column for row, count in enumerate(counts) for column in range(count)]
        real = None if len(columns) == batch * width else upload(columns, kv.device)
        shape = PassShape(
            first_row=first_row, batch=batch, columns=width, queries=width, length=length, span=None,
            apart=False, plan=Plan.full(spec.layers), start=0, stop=spec.layers,
        )  # fmt: skip
        return build_context(spec, self.tables, kv, shape, upload(places, kv.device), real)


@dataclass(frozen=True, slots=True)
class TimedPass(DraftPass):
    """A draft step over states that mean nothing, to be timed, perhaps with a cache of its own."""

    name: str = field(kw_only=True)  # as `DraftPass.described`
    step: Callable[[Any, Tensor, list[int]], Tensor] = field(kw_only=True)  # gives the logits [B, V]
    draft: Callable[[Any, DraftInputs], FusedDraft | None] = field(default=lambda *_: None, kw_only=True)
    # makes a cache beside the given one, which `step` and `draft` get in its place
    beside: Callable[[CacheLayers], Any] | None = field(default=None, kw_only=True)
    # the last such cache, by the rows and the positions that are timed
    scratch: dict[tuple[int, int], Any] = field(default_factory=dict, kw_only=True, repr=False)

    @property
    def described(self) -> str:
        return self.name

    @torch.inference_mode()
    def __call__(self, cache: CacheLayers, tokens: Tensor, starts: list[int], **more: Any) -> Forward:
        logits = self.step(self._own(cache), tokens, starts)
        return Forward(logits[:, None], logits, {})

    @torch.inference_mode()
    def fused(self, cache: CacheLayers, inputs: DraftInputs) -> FusedDraft | None:
        return self.draft(self._own(cache), inputs)

    def _own(self, cache: CacheLayers) -> Any:
        key = cache.rows, cache.positions
        if self.beside is not None and key not in self.scratch:
            self.scratch.clear()
            self.scratch[key] = self.beside(cache)
        return self.scratch.get(key, cache)


class HeadDrafter(WaitingReader):
    """An autoregressive drafter over a head with caches of its own, and the target's states."""

    read_folder: Callable[[Path], HeadFiles[Any]]  # reads the head of a folder
    load: Callable[[HeadFiles[Any], Runner], Any]  # reads its weights
    files: HeadFiles[Any]  # the head's, without what the doctor set

    def __init__(
        self, target: Runner, cache: KVCache, head: Any, planned: int | None, *, blocked: bool = False
    ) -> None:
        record = head.record
        assert record.aux_layers is not None, "a record that was checked for a target has its layers"
        super().__init__(record.aux_layers)
        self.head, self.planned, self.vocabulary = head, planned, map_of(head.draft_vocab, target.decoder)
        first, *others = self.specs(record)
        self.cache = cache.aligned(first, blocked=blocked)
        self.caches = self.own = (self.cache, *(cache.aligned(spec) for spec in others))
        self._own = HeadCache.of(first, self.cache)
        self.draft_pass = TimedPass(
            target, name=repr(record), step=head.timed_step, draft=head.timed_draft,
            beside=lambda cache: HeadCache.of(first, cache.aligned(first, blocked=blocked)),
        )  # fmt: skip

    @classmethod
    def specs(cls, record: HeadRecord) -> tuple[ModelSpec, ...]:
        """Return the specs of its caches; the first is that of its layers."""
        return (record.spec,)

    @classmethod
    def read_files(cls, place: Path) -> HeadFiles[Any]:
        """Return the head in a folder or in a GGUF file."""
        if place.is_dir():
            return cls.read_folder(place)
        from foredraft.drafters.heads.gguf_files import read_gguf

        return read_gguf(place)

    @classmethod
    def files_for(cls, place: Path, target: Checkpoint) -> HeadFiles[Any]:
        """Return the head in a place, with what the target tells of it."""
        return cls.read_files(place)

    @classmethod
    def found(cls, place: Path, target: Checkpoint) -> Found:
        own = cls.files_for(place, target)
        files, settings = with_settings(own, target.spec)
        record = files.record

        def build(parts: Parts) -> HeadDrafter:
            head = cls.load(files, parts.target)
            drafter = cls(parts.target, parts.cache, head, record.planned)
            drafter.files = own
            return drafter

        return Found(
            bytes=files.parameters * target.dtype.itemsize, planned=record.planned,
            longest_draft=record.drafts or 0, about=described_head(files, settings),
            specs=cls.specs(record), dtype=target.dtype, build=build,
        )  # fmt: skip
