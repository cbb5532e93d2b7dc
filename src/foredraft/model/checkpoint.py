"""A checkpoint before its weights are read, and its tensors by name, of safetensors files or a GGUF file.

Row i of the product, and value i of its bias, is row `order[i]` of the stored ones. The decoder computes
whole queries, then keys, then values, and rotates the halves of a head's first channels together.

Reading is strict: a tensor must be present in the wanted shape and dtype, and `reject_unused` allows no
others, except a few that carry no information. A tensor's range of its file is mapped while it is read; what
outlives it is copied. On the device "meta" the headers alone are read, and of quantised weights what their
checks need. A quantised weight is read as codes where the kernels keep it so (`code_format_of`), and
otherwise expanded, one module at a time.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.errors import CheckpointError
from foredraft.model.config import broken, mismatch
from foredraft.model.memory import dtype_name
from foredraft.model.quantisation.codes import BITS, CodeFormat, Codes
from foredraft.model.quantisation.scheme import ActivationFormat, Quantisation, WeightFormat, pieces
from foredraft.model.recurrent_sizes import RecurrentSizes
from foredraft.model.safetensors_file import StoredTensor
from foredraft.model.source import ModelSource, source_of
from foredraft.model.spec import ModelSpec
from foredraft.model.tensor_names import (
    AS_STORED,
    EMBEDDING,
    HEAD,
    LINEAR,
    POSITIONS,
    Naming,
    predicts_further,
)
from foredraft.model.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


def qkv_order(spec: ModelSpec) -> Tensor | None:
    """Return the order of queries, keys and values side by side; None: they are stored in it."""
    heads, kv_heads, dim = spec.heads, spec.kv_heads, spec.head_dim
    rows = torch.arange((heads + 2 * kv_heads) * dim)
    if spec.grouped_qkv:
        rows = grouped_rows(heads, kv_heads, dim)
    channels = channel_order(spec)
    if channels is not None:
        by_head = rows.view(-1, dim)
        rotated = heads + kv_heads
        rows = torch.cat([by_head[:rotated, channels], by_head[rotated:]]).flatten()
    if spec.gated_attention and not spec.gates_apart:  # stored with a gate behind each query
        pairs = torch.arange(2 * heads * dim).view(heads, 2, dim)
        others = torch.arange(2 * heads * dim, 2 * (heads + kv_heads) * dim)
        return torch.cat([pairs[:, 0].flatten(), others, pairs[:, 1].flatten()])
    return rows if spec.grouped_qkv or channels is not None else None


def grouped_rows(heads: int, kv_heads: int, head_dim: int) -> Tensor:
    """Return the order of a weight that stores the queries, the key and the value of each key head together.

    Examples:
        >>> grouped_rows(heads=4, kv_heads=2, head_dim=1).tolist()  # stored: q0 q1 k0 v0 q2 q3 k1 v1
        [0, 1, 4, 5, 2, 6, 3, 7]
    """
    groups = heads // kv_heads
    stored = torch.arange((heads + 2 * kv_heads) * head_dim).view(kv_heads, groups + 2, head_dim)
    parts = stored[:, :groups], stored[:, groups], stored[:, groups + 1]
    return torch.cat([part.flatten() for part in parts])


def delta_order(sizes: RecurrentSizes, *of_key: int) -> Tensor | None:
    """Return the order of parts that have so many rows of each key head; None: they are stored in it.

    Examples:
        >>> delta_order(RecurrentSizes("delta", 2, 4, 1, 1, 4, by_key=True), 2, 2).tolist()  # b b a a b b a a
        [0, 1, 4, 5, 2, 3, 6, 7]
    """
    if not sizes.by_key:
        return None
    stored = torch.arange(sizes.key_heads * sum(of_key)).view(sizes.key_heads, -1)
    return torch.cat([part.flatten() for part in stored.split_with_sizes([*of_key], 1)])


def channel_order(spec: ModelSpec) -> Tensor | None:
    """Return the order of a head's channels, the even ones first where neighbours rotate together."""
    if not spec.interleaved:
        return None
    rotated = spec.rope.rotated(spec.head_dim)
    pairs = torch.arange(rotated).view(-1, 2)
    return torch.cat([pairs.T.flatten(), torch.arange(rotated, spec.head_dim)])


Shapes = Mapping[str, tuple[int, ...]]  # tensor name -> the shape it must have
TABLES = (EMBEDDING, POSITIONS)  # no linear layers, which the rules of most schemes are about
FLOATS = ("BF16", "F16", "F32", "F64")  # the dtypes of unquantised weights, as safetensors names them
PIECE = 2**24  # values that are compared at a time
# buffers that old versions of transformers saved; the decoder computes them from the spec
IGNORED = re.compile(r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


def weight_headers(
    place: ModelSource | Path, naming: Naming | None = None
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the stored dtype and shape of every tensor of a checkpoint by name, without reading values."""
    with ExitStack() as stack:
        stored = named_tensors(place, stack, naming)
        return {name: (found.dtype, found.shape) for name, found in stored.items()}


def named_tensors(
    place: ModelSource | Path, stack: ExitStack, naming: Naming | None = None
) -> dict[str, StoredTensor]:
    """Return every tensor, unread, by the decoder's names."""
    source = source_of(place)
    naming = naming or source.spec.naming
    return CheckpointTensors(source, stack, torch.device("cpu"), torch.float32, naming=naming).files


def first_values(place: ModelSource | Path) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the first row of every tensor of a checkpoint, as stored, in the order of names."""
    with ExitStack() as stack:
        for name, found in sorted(named_tensors(place, stack).items()):
            first = (found[:1] if found.shape else found.whole()).contiguous().flatten()
            yield name, first.view(torch.uint8).numpy().tobytes()


class CheckpointTensors:
    """A source that reads the files of a checkpoint: safetensors, or a GGUF file and its parts."""

    def __init__(
        self,
        place: ModelSource | Path,
        stack: ExitStack,
        device: torch.device,
        dtype: torch.dtype,
        quantisation: Quantisation | None = None,
        naming: Naming = AS_STORED,
    ) -> None:
        self.device, self.dtype, self.quantisation = device, dtype, quantisation
        self.used: set[str] = set()  # tensor names that were read
        self.buffer = torch.empty(0)  # of `load_temporary`
        self.further: list[str] = []  # unread tensors that predict further tokens
        self.disordered: list[Shapes] = []  # weights that `codes` leaves to be expanded
        source = source_of(place)
        self.naming = AS_STORED if source.renamed else naming
        self.files = self.naming.opened(source.open(stack, device, dtype))  # by the decoder's names

    def load(self, shapes: Shapes) -> Tensor:
        return self._fill(shapes, torch.empty(joined_shape(shapes), device=self.device, dtype=self.dtype))

    def load_temporary(self, shapes: Shapes) -> Tensor:
        """Return a view of the mapped file, a new tensor, or the buffer that the next call overwrites."""
        if len(shapes) == 1:
            [(name, shape)] = shapes.items()
            if (found := self.tensor(name, shape)).dtype == self.dtype:
                return found
        values = sum(math.prod(shape) for shape in shapes.values())
        if self.buffer.numel() < values:
            self.buffer = torch.empty(0)  # free the old buffer before a larger one is allocated
            self.buffer = torch.empty(values, device=self.device, dtype=self.dtype)
        columns = next(iter(shapes.values()))[1:]
        return self._fill(shapes, self.buffer[:values].view(-1, *columns))

    def codes(self, shapes: Shapes) -> Iterator[Codes] | None:
        """Return the joined weights coded, in pieces; None to expand them, as parts of unlike orders are."""
        if code_format_of(shapes, self.quantisation) is None or self.device.type == "meta":
            return None
        parts = [self._pieces(name, (shape[0], shape[1])) for name, shape in shapes.items()]
        if len(parts) == 1:
            joins: Iterator[list[Codes]] = ([piece] for piece in parts[0])
        else:
            rows = [shape[0] for shape in shapes.values()]
            joins = iter([[Codes.gathered(*each) for each in zip(rows, parts, strict=True)]])
        first = next(joins)
        if not Codes.can_join(first):
            self.disordered.append(shapes)
            return None
        return (Codes.joined(each) for each in chain([first], joins))

    def report(self) -> None:
        """Say in a line each which weights are expanded though they have a format, and what stays unread."""
        if self.further and self.device.type != "meta":
            shown = len(self.further), self.further[0]
            logger.info("%d tensors that predict further tokens are left to drafters (the first: %s)", *shown)
        if self.disordered:
            size = self.dtype.itemsize * sum(math.prod(joined_shape(shapes)) for shapes in self.disordered)
            first = ", ".join(name.removesuffix(".weight") for name in self.disordered[0])
            logger.warning(
                "%d linear layers are expanded to %s, %.3f GB: their parts share inputs and order them"
                " differently (the first: %s)",
                len(self.disordered), dtype_name(self.dtype), size / 1e9, first,
            )  # fmt: skip

    def free_temporary(self) -> None:
        self.buffer = torch.empty(0)

    def _fill(self, shapes: Shapes, joined: Tensor) -> Tensor:
        row = 0
        for name, shape in shapes.items():
            joined[row : row + shape[0]].copy_(self.tensor(name, shape))
            row += shape[0]
        return joined

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor as a view of the mapped file, or a quantised weight expanded to `dtype`."""
        format = format_of(name, self.quantisation) if len(shape) == 2 else None
        if format is None and self.device.type != "meta":
            return self.view(name, shape)
        expanded = torch.empty(shape, device=self.device, dtype=self.dtype)
        if format is None:
            self._checked(name, shape, FLOATS)
            return expanded
        first = 0
        for piece in self._pieces(name, (shape[0], shape[1])):
            piece.expand_into(expanded[first : first + len(piece.codes)])
            first += len(piece.codes)
        return expanded

    def _pieces(self, name: str, shape: tuple[int, int]) -> Iterator[Codes]:
        """Return a quantised weight in pieces; on "meta" there are none, its tensors are only checked."""
        module, tensors = name.removesuffix(".weight"), dict[str, Tensor]()
        format = format_of(name, self.quantisation)
        assert format is not None
        parts = format.parts(module, shape)
        if "weight" in parts and self.naming.layer_class(module) != LINEAR:
            stored = self.naming.stored_module(module)
            problem = f"{stored} is stored transposed, and no program defines {format} of such a weight"
            remedy = "give the 16-bit model that it was made from, or a checkpoint in GPTQ's format"
            raise CheckpointError(problem, remedy=remedy)
        for suffix, part in parts.items():
            if not part.optional or f"{module}.{suffix}" in self.files:
                tensors[suffix] = self.view(f"{module}.{suffix}", part.shape, part.dtypes)
        format.check(module, shape, tensors)
        if self.device.type == "meta":
            return iter(())
        weight = self.files.get(f"{module}.weight")
        order = None if weight is None else weight.columns
        found = pieces(format, shape, tensors)
        return found if order is None else (replace(piece, order=order) for piece in found)

    def view(self, name: str, shape: tuple[int, ...], dtypes: Collection[str] = FLOATS) -> Tensor:
        """Return a tensor in its stored dtype, as a view of the mapped file; the caller must not keep it."""
        self._checked(name, shape, dtypes)
        return self.files[name].whole()

    def _checked(self, name: str, shape: tuple[int, ...], dtypes: Collection[str]) -> StoredTensor:
        """Return a tensor whose values are not read yet, after checking its shape and its stored dtype."""
        if name not in self.files:
            raise broken(f"tensor {self.naming.stored_name(name)} is missing from the checkpoint")
        found = self.files[name]
        if (stored := [*found.shape]) != [*shape]:
            raise mismatch(f"tensor {name} has shape {stored}, but config.json implies {[*shape]}")
        if (dtype := found.dtype) not in dtypes:
            wanted = " or ".join(dtypes)
            raise mismatch(f"tensor {name} is stored as {dtype}, but config.json implies {wanted}")
        self.used.add(name)
        return found

    def reject_unused(self, spec: ModelSpec) -> None:
        for name in sorted(set(self.files) - self.used):
            if IGNORED.fullmatch(name):
                continue
            of_codes = name.endswith(".bias") and format_of(name, self.quantisation) is not None
            if of_codes and not self.files[name].whole().float().any():
                continue  # a zero bias, as old AutoGPTQ saves it
            if spec.leaves_unread(name):
                if predicts_further(name, spec.layers, spec.further_layers):
                    self.further.append(name)
                continue
            if name != f"{HEAD}.weight" or not spec.tied:
                stored, model = self.files[name], spec.wrapper or spec.architecture
                problem = f"tensor {stored.name} in {stored.file} is not part of a {model}"
                raise CheckpointError(problem, remedy="use a checkpoint without it")
            shape = (spec.vocab_size, spec.hidden_size)
            one, other = (self._checked(each, shape, FLOATS) for each in (name, f"{EMBEDDING}.weight"))
            rows = max(1, PIECE // shape[1])  # a piece of both is in memory at a time
            pieces = (slice(first, first + rows) for first in range(0, shape[0], rows))
            if not all(torch.equal(one[piece].to((own := other[piece]).dtype), own) for piece in pieces):
                problem = f"tensor {name} differs from {EMBEDDING}.weight, but config.json ties them"
                raise CheckpointError(problem, remedy="correct tie_word_embeddings")


def format_of(name: str, quantisation: Quantisation | None) -> WeightFormat | None:
    module = name.rpartition(".")[0]
    if quantisation is None or (module in TABLES and not quantisation.embedding):
        return None
    return quantisation.format_of(module)


def inputs_of(
    names: Collection[str], columns: int, quantisation: Quantisation | None
) -> ActivationFormat | None:
    """Return the format of the inputs that the named linear layers share; None if they stay as they are."""
    if quantisation is None:
        return None
    formats = {name: None if name == EMBEDDING else quantisation.inputs_of(name) for name in names}
    found = set(formats.values())
    if len(found) > 1:
        shown = ", ".join(f"{name}: {format or 'none'}" for name, format in formats.items())
        problem = f"layers that share their inputs quantise them differently ({shown})"
        raise CheckpointError(problem, remedy="use a checkpoint that quantises them alike")
    shared = found.pop()
    if shared is not None and not shared.holds(columns):
        problem = f"{', '.join(names)}: inputs of {columns} columns have no whole groups ({shared})"
        raise CheckpointError(problem, remedy="use a checkpoint that leaves these layers unquantised")
    return shared


def code_format_of(shapes: Shapes, quantisation: Quantisation | None) -> CodeFormat | None:
    formats = [format_of(name, quantisation) for name in shapes]
    code_format = CodeFormat.of_all(None if format is None else format.code_format for format in formats)
    [columns] = {shape[1] for shape in shapes.values()}
    return code_format if code_format is not None and code_format.holds(columns) else None


def joined_shape(shapes: Shapes) -> tuple[int, ...]:
    parts = list(shapes.values())
    return sum(shape[0] for shape in parts), *parts[0][1:]


def identity(place: ModelSource | Path) -> dict[str, Any]:
    """Return a model's config.json, the names, dtypes and shapes of its tensors, and its LoRAs' digests."""
    source = source_of(place)
    known = {"config": source.base.config, "tensors": weight_headers(source.base)}
    if not source.loras:
        return known
    from foredraft.model.lora.adapter import lora_digest

    return known | {"loras": [lora_digest(folder) for _, folder in source.loras]}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    source: ModelSource  # its files
    spec: ModelSpec  # the model's shape, from config.json
    tokenizer: Tokenizer | None  # None where the folder has none
    dtype: torch.dtype  # the dtype to run it in
    bits: int | None = None  # of the codes that its weights are quantised to; None leaves them as they are
    length: int | None = None  # the positions of the longest text to come; None: as many as the model takes

    @property
    def coded_bits(self) -> int | None:
        """Bits of the codes that its weights have in memory; None where they are not codes."""
        stored = self.spec.quantisation
        return stored.bits if self.bits is None and stored is not None else self.bits

    @property
    def weights(self) -> str | None:
        """How its weights are quantised, as people say it: "int4", or "gptq, 4 bits in groups of 128"."""
        if self.bits is not None:
            return next(name for name, bits in BITS.items() if bits == self.bits)
        return None if self.spec.quantisation is None else self.spec.quantisation.described
