"""Load a decoder from the tensors of a checkpoint, which have Hugging Face's names.

Loading is strict. The decoder keeps no view of a mapped file, so a checkpoint may be replaced under a running
model. Each weight is copied from the map to its place on the device, fused (q, k, v and gate, up) and
converted on the way; linear layers that are packed pass through one temporary buffer. Quantised weights stay
coded where the kernels have a format for their codes, and are otherwise expanded, one module at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from foredraft.model.checkpoint import (
    CheckpointTensors,
    Shapes,
    code_format_of,
    format_of,
    joined_shape,
)
from foredraft.model.decoder import Decoder, Layer
from foredraft.model.kept_weights import KeptWeights
from foredraft.model.layer_weights import LayerBuilder, TensorSource
from foredraft.model.layers import (
    Norm,
    Product,
)
from foredraft.model.quantisation.codes import CodeFormat
from foredraft.model.runner.native.products import (
    coded_bytes,
)
from foredraft.model.source import ModelSource, source_of
from foredraft.model.spec import ModelSpec
from foredraft.model.tensor_names import EMBEDDING, HEAD, LAST_NORM, LAYERS

META = torch.device("meta")  # where nothing is packed


def load_decoder(
    place: ModelSource | Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    *,
    native: bool = False,
    bits: int | None = None,
    length: int | None = None,
) -> Decoder:
    source = source_of(place)
    spec = source.spec.at_length(length)
    chosen: torch.dtype = dtype or getattr(torch, spec.dtype)
    with ExitStack() as stack:
        there = torch.device(device)
        tensors = CheckpointTensors(source, stack, there, chosen, spec.quantisation, spec.naming)
        packs_here = native and tensors.device.type == "cpu"
        kept = KeptWeights(source, chosen, bits, tensors.used) if packs_here else None
        decoder = build_decoder(spec, tensors, native, bits, kept)
        if spec.embedding_copies:
            tensors.used.add(f"{EMBEDDING}.weight")  # the head may give its rows
        tensors.reject_unused(spec)
        tensors.report()
        if kept is not None and not tensors.disordered:  # of which every load warns
            kept.keep()
    return decoder


def load_layer(
    folder: Path,
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
    *,
    mlp: bool,
    native: bool = False,
    besides: Collection[str] = (),
) -> tuple[Layer, Norm]:
    """Return the one layer, and the norm after it, of a folder that holds nothing else: an adapter's."""
    with ExitStack() as stack:
        tensors = CheckpointTensors(folder, stack, device, dtype)
        builder = LayerBuilder(spec, tensors, native)
        layer, norm = builder.layer(0, mlp=mlp), builder.norm(LAST_NORM)
        tensors.used.update(besides)
        tensors.reject_unused(spec)
    return layer, norm


@lru_cache(maxsize=32)
def weight_bytes(
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
    *,
    native: bool = False,
    bits: int | None = None,
) -> int:
    """Return the memory of a model's weights on the device after `load_decoder`, in bytes."""
    counter = _counted(spec, device, dtype, native, bits)
    whole = counter.values * dtype.itemsize
    if not native:
        return whole
    saved, scales = 0, getattr(torch, spec.dtype)  # scales are stored in the checkpoint's dtype, as a rule
    if spec.quantisation is not None and spec.quantisation.float32_scales:
        scales = torch.float32
    if spec.embedding_copies:
        saved += spec.vocab_size * spec.hidden_size * dtype.itemsize
    for shapes in counter.products:
        rows, columns = joined_shape(shapes)
        if (code_format := code_format_of(shapes, spec.quantisation)) is not None:
            saved += rows * columns * dtype.itemsize - coded_bytes(rows, columns, code_format, scales)
        elif bits is not None and CodeFormat(bits).holds(columns):
            saved += rows * columns * dtype.itemsize - coded_bytes(rows, columns, CodeFormat(bits))
    return whole - saved


def expanded_bytes(
    spec: ModelSpec, device: torch.device, dtype: torch.dtype, *, native: bool = False
) -> dict[str, int]:
    """Return the memory of quantised weights for which the kernels keep no codes, by their formats."""
    found = dict[str, int]()
    for shapes in _counted(spec, device, dtype, native).products:
        if native and code_format_of(shapes, spec.quantisation) is not None:
            continue
        for name, shape in shapes.items():
            if (format := format_of(name, spec.quantisation)) is not None:
                found[str(format)] = found.get(str(format), 0) + math.prod(shape) * dtype.itemsize
    return found


def coded_copy_bytes(spec: ModelSpec, bits: int) -> int:
    decoder = build_decoder(spec, SizeCounter())
    shapes = [product.shape for product in decoder.products]
    whole = [shape for shape in shapes if CodeFormat(bits).holds(shape[1])]
    return sum(coded_bytes(*shape, CodeFormat(bits)) for shape in whole)


def parameter_count(spec: ModelSpec) -> int:
    """Return the number of a model's weights; a head that is the embedding, or a coded copy, counts once."""
    return _counted(spec).values - (spec.vocab_size * spec.hidden_size if spec.head_copies else 0)


def layer_parameters(spec: ModelSpec, *, mlp: bool) -> int:
    counter = SizeCounter()
    builder = LayerBuilder(spec, counter)
    builder.layer(0, mlp=mlp)
    builder.norm(LAST_NORM)
    return counter.values


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that a decoder needs, by name."""
    return _counted(spec).shapes


def read_tensors(place: ModelSource | Path, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    source = source_of(place)
    spec = source.spec
    with ExitStack() as stack:
        dtype: torch.dtype = getattr(torch, spec.dtype)
        tensors = CheckpointTensors(source, stack, torch.device("cpu"), dtype, spec.quantisation, spec.naming)
        return {
            name: tensors.tensor(name, shape).clone(memory_format=torch.contiguous_format)
            for name, shape in tensor_shapes(spec).items()
            if wanted(name)
        }


def layer_tensors(place: ModelSource | Path, layer: int) -> dict[str, Tensor]:
    """Return a layer and the last norm of a model, as `read_tensors` does, by the names of `load_layer`."""
    own = f"{LAYERS}.{layer}."
    found = read_tensors(place, lambda name: name.startswith((own, f"{LAST_NORM}.")))
    return {name.replace(own, f"{LAYERS}.0."): tensor for name, tensor in found.items()}


def build_decoder(
    spec: ModelSpec,
    tensors: TensorSource,
    native: bool = False,
    bits: int | None = None,
    kept: KeptWeights | None = None,
) -> Decoder:
    builder = LayerBuilder(spec, tensors, native, bits)
    builder.kept = kept
    hidden = spec.hidden_size
    head = builder.linear({EMBEDDING if spec.tied else HEAD: spec.vocab_size}, hidden, spec.head_bias)
    layers = tuple(builder.layer(index) for index in range(spec.layers))
    inputs = builder.inputs()
    tensors.free_temporary()
    embedding = builder.embedding(head)  # loaded last, it can take the memory that the temporary buffer had
    parts = builder.norm(LAST_NORM), head, builder.learned_positions(), inputs
    return Decoder(spec, embedding, layers, *parts)


JOIN, TOKEN_NORM, STATE_NORM = "fc", "token_norm", "state_norm"  # of a pair of a token and a state


@dataclass(frozen=True, slots=True)
class FurtherLayer:
    """What predicts the token after a pair of a token and the state before it."""

    token_norm: Norm  # of the embedding
    state_norm: Norm
    join: Product  # makes of both, the embedding first, what enters the layer
    layer: Layer
    norm: Norm  # before the head


def build_further(
    spec: ModelSpec,
    tensors: TensorSource,
    native: bool = False,
    bits: int | None = None,
    *,
    pack: bool = True,
) -> FurtherLayer:
    builder = LayerBuilder(spec, tensors, native, bits, pack=pack)
    return FurtherLayer(
        token_norm=builder.norm(TOKEN_NORM), state_norm=builder.norm(STATE_NORM),
        join=builder.linear({JOIN: spec.hidden_size}, 2 * spec.hidden_size), layer=builder.layer(0),
        norm=builder.norm(LAST_NORM),
    )  # fmt: skip


def further_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that `build_further` loads, by name."""
    counter = SizeCounter()
    build_further(spec, counter)
    return counter.shapes


def build_layer(spec: ModelSpec, tensors: TensorSource, index: int = 0, *, mlp: bool = True) -> Layer:
    """Return a layer whose linear layers are the source's tensors themselves: one to be trained."""
    return LayerBuilder(spec, tensors, pack=False).layer(index, mlp=mlp)


def build_linear(
    spec: ModelSpec, tensors: TensorSource, name: str, shape: tuple[int, int], *, native: bool = False
) -> Product:
    rows, columns = shape
    return LayerBuilder(spec, tensors, native).linear({name: rows}, columns)


def build_norm(spec: ModelSpec, tensors: TensorSource) -> Norm:
    return LayerBuilder(spec, tensors, pack=False).norm(LAST_NORM)


class SizeCounter:
    """A source that notes shapes, counts the values kept, copies included, and allocates nothing."""

    def __init__(self, device: torch.device = META, dtype: torch.dtype = torch.float32) -> None:
        self.device, self.dtype = device, dtype
        self.values = 0
        self.shapes: dict[str, tuple[int, ...]] = {}  # tensor name -> its shape
        self.products: list[Shapes] = []  # the weights of each linear layer that is packed

    def load(self, shapes: Shapes) -> Tensor:
        self.shapes.update(shapes)
        self.values += sum(math.prod(shape) for shape in shapes.values())
        return torch.empty(joined_shape(shapes), device="meta", dtype=self.dtype)

    def load_temporary(self, shapes: Shapes) -> Tensor:
        self.products.append(shapes)
        return self.load(shapes)

    def free_temporary(self) -> None:
        return None


def _counted(
    spec: ModelSpec,
    device: torch.device = META,
    dtype: torch.dtype = torch.float32,
    native: bool = False,
    bits: int | None = None,
) -> SizeCounter:
    counter = SizeCounter(device, dtype)
    build_decoder(spec, counter, native, bits)
    return counter
