"""The tensors of a checkpoint by name: safetensors files of a folder, or a GGUF file.

The folder of a GGUF file (`model.gguf`) gives its tensors under Hugging Face's names. A family that names or
arranges its tensors unlike Llama has a layout (`tensor_layouts.py`), which is undone here.

Contract: reading is strict. A tensor must be present in the wanted shape and dtype, and `reject_unused`
allows no others, except a few that are known to carry no information. An error names the tensor or the file.

A tensor's range of its file is memory-mapped while it is read; what outlives it is copied. On the device
"meta" the headers alone are read, and of quantised weights what their checks need. A quantised weight is read
as codes where the kernels keep it so (`coding_of`), and otherwise expanded, one module at a time.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.errors import CheckpointError, shortened
from foredraft.model.config import DOWNLOAD_AGAIN, is_file_name, read_json
from foredraft.model.further_tokens import predicts_further
from foredraft.model.gguf.tensors import RECORD, open_tensors, source_of
from foredraft.model.lora.opening import merge_loras
from foredraft.model.lora.record import RECORD as LORAS
from foredraft.model.lora.record import base_of
from foredraft.model.quantisation import ActivationFormat, Codes, Coding, Quantisation, WeightFormat, pieces
from foredraft.model.safetensors_file import INDEX, SINGLE, SafetensorsFile
from foredraft.model.spec import ModelSpec
from foredraft.model.tensor_layouts import EMBEDDING, HEAD, POSITIONS
from foredraft.model.tensor_names import AS_STORED, LINEAR, Naming
from foredraft.model.transfers import dtype_name

__all__ = [
    "EMBEDDING",
    "HEAD",
    "IGNORED",
    "INDEX",
    "SINGLE",
    "CheckpointTensors",
    "Shapes",
    "coding_of",
    "first_values",
    "format_of",
    "inputs_of",
    "joined_shape",
    "weight_headers",
]

logger = logging.getLogger(__name__)

Shapes = Mapping[str, tuple[int, ...]]  # tensor name -> the shape it must have
TABLES = (EMBEDDING, POSITIONS)  # no linear layers, which the rules of most schemes are about
FLOATS = ("BF16", "F16", "F32", "F64")  # the dtypes of unquantised weights, as safetensors names them
PIECE = 2**24  # values that are compared at a time
# buffers that old versions of transformers saved; the decoder computes them from the spec
IGNORED = re.compile(r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


def weight_headers(folder: Path, naming: Naming | None = None) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the stored dtype and shape of every tensor of a checkpoint by name, without reading values.

    Args:
        folder: The folder of the checkpoint.
        naming: How its tensors are named; None: as its config says, which is a supported model's.

    Raises:
        CheckpointError: The files of the checkpoint are broken or incomplete.
    """
    with ExitStack() as stack:
        files = _named_tensors(folder, stack, naming)
        slices = {name: file.get_slice(name) for name, file in files.items()}
        return {name: (found.get_dtype(), tuple(found.get_shape())) for name, found in slices.items()}


def _named_tensors(folder: Path, stack: ExitStack, naming: Naming | None = None) -> dict[str, Any]:
    """Return the open files of a model's tensors by the decoder's names."""
    naming = naming or ModelSpec.from_folder(folder).naming
    return CheckpointTensors(folder, stack, torch.device("cpu"), torch.float32, naming=naming).files


def first_values(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the first row of every tensor of a checkpoint, as stored, in the order of names.

    Raises:
        CheckpointError: The files of the checkpoint are broken or incomplete.
    """
    with ExitStack() as stack:
        files = _named_tensors(folder, stack)
        for name in sorted(files):
            found = files[name].get_slice(name)
            first = (found[:1] if found.get_shape() else files[name].get_tensor(name)).contiguous().flatten()
            yield name, first.view(torch.uint8).numpy().tobytes()


class CheckpointTensors:
    """A source that reads the files of a checkpoint: safetensors, or a GGUF file and its parts."""

    def __init__(
        self,
        folder: Path,
        stack: ExitStack,
        device: torch.device,
        dtype: torch.dtype,
        quantisation: Quantisation | None = None,
        naming: Naming = AS_STORED,
    ) -> None:
        self.device, self.dtype, self.quantisation = device, dtype, quantisation
        self.files: dict[str, Any] = {}  # tensor name -> open file
        self.used: set[str] = set()  # tensor names that were read
        self.shards: dict[str, str] = {}  # tensor name -> file name
        self.buffer = torch.empty(0)  # of `load_temporary`
        self.further: list[str] = []  # unread tensors that predict further tokens
        self.disordered: list[Shapes] = []  # weights that `codes` leaves to be expanded
        base = base_of(folder)
        self._open(base, stack)
        if base != folder:  # with LoRAs, which are merged while tensors are read
            merged = merge_loras(folder, self.files, stack, dtype, str(source_of(base)))
            for name in merged.keys():  # noqa: SIM118 - no mapping
                self.files[name], self.shards[name] = merged, self.shards.get(name, LORAS)
        in_gguf = (base / RECORD).is_file() and not (base / SINGLE).is_file()
        self._rename(AS_STORED if in_gguf else naming)  # a GGUF file's tensors have the decoder's names

    def _rename(self, naming: Naming) -> None:
        """Give the open tensors the decoder's names."""
        self.naming = naming
        files, shards, plain = self.files, self.shards, naming.plain(self.files)
        self.files = naming.combined(
            {name: naming.opened(files[stored], stored, name) for stored, name in plain.items()}
        )
        self.shards = {name: shards[stored] for stored, name in plain.items()}

    def _open(self, folder: Path, stack: ExitStack) -> None:
        """Open the files of a folder."""
        index = folder / INDEX
        if (folder / SINGLE).is_file():
            file = stack.enter_context(SafetensorsFile(folder / SINGLE))
            for name in file.keys():  # noqa: SIM118 - no mapping
                self.files[name], self.shards[name] = file, SINGLE
        elif index.is_file():
            self._open_shards(folder, index, stack)
        elif (folder / RECORD).is_file():
            source = open_tensors(folder, self.device)
            for name, info in source.infos.items():
                self.files[name], self.shards[name] = source, source.model.holder(info).path.name
        else:
            raise CheckpointError(
                f"{folder} has neither {SINGLE} nor {INDEX}", remedy="give a checkpoint in safetensors format"
            )

    def _open_shards(self, folder: Path, index: Path, stack: ExitStack) -> None:
        """Open the files that the index lists, and check that they hold exactly the tensors it lists."""
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise CheckpointError(
                f"{index} has no weight_map from tensor names to files", remedy=DOWNLOAD_AGAIN
            )
        for shard in sorted(set(weight_map.values())):
            if not is_file_name(shard):
                raise CheckpointError(
                    f"{index} lists {shortened(shard)}, which is not a file in its folder",
                    remedy=DOWNLOAD_AGAIN,
                )
            if not (folder / shard).is_file():
                raise CheckpointError(
                    f"{folder / shard} is missing, though {INDEX} lists it", remedy=DOWNLOAD_AGAIN
                )
            file = stack.enter_context(SafetensorsFile(folder / shard))
            for name in file.keys():  # noqa: SIM118 - no mapping
                if weight_map.get(name) != shard:
                    raise CheckpointError(
                        f"{folder / shard} holds {name}, which {INDEX} does not list there",
                        remedy=DOWNLOAD_AGAIN,
                    )
                self.files[name], self.shards[name] = file, shard
        for name, shard in weight_map.items():
            if name not in self.files:
                raise CheckpointError(
                    f"{folder / shard} lacks {name}, which {INDEX} lists there", remedy=DOWNLOAD_AGAIN
                )

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
        """Return the joined weights as the kernels keep them coded; None where they are to be expanded.

        A weight by itself comes in pieces (`quantisation.pieces`), which bounds the memory that a head takes.
        Weights are expanded that order their columns differently: they share their inputs.
        """
        if coding_of(shapes, self.quantisation) is None or self.device.type == "meta":
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
        """Say in a line each which weights are expanded though they have a coding, and what stays unread."""
        if self.further and self.device.type != "meta":
            logger.info(
                "%d tensors that predict further tokens stay unread (the first: %s)",
                len(self.further), self.further[0],
            )  # fmt: skip
        if self.disordered:
            values = sum(math.prod(joined_shape(shapes)) for shapes in self.disordered)
            logger.warning(
                "%d linear layers are expanded to %s, %.3f GB: their parts share inputs and order them"
                " differently (the first: %s)",
                len(self.disordered),
                dtype_name(self.dtype),
                values * self.dtype.itemsize / 1e9,
                ", ".join(name.removesuffix(".weight") for name in self.disordered[0]),
            )

    def free_temporary(self) -> None:
        self.buffer = torch.empty(0)

    def _fill(self, shapes: Shapes, joined: Tensor) -> Tensor:
        """Copy the tensors into `joined`, one after the other."""
        row = 0
        for name, shape in shapes.items():
            joined[row : row + shape[0]].copy_(self.tensor(name, shape))
            row += shape[0]
        return joined

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor as a view of the mapped file, or a quantised weight expanded to `dtype`."""
        format = self._format(name) if len(shape) == 2 else None
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
        module, tensors, format = name.removesuffix(".weight"), dict[str, Tensor](), self._format(name)
        assert format is not None
        parts = format.parts(module, shape)
        if "weight" in parts and self.naming.layer_class(module) != LINEAR:
            raise CheckpointError(
                f"{self.naming.stored_module(module)} is stored transposed, and no program defines"
                f" {format} of such a weight",
                remedy="give the 16-bit model that it was made from, or a checkpoint in GPTQ's format",
            )
        for suffix, part in parts.items():
            if not part.optional or f"{module}.{suffix}" in self.files:
                tensors[suffix] = self.view(f"{module}.{suffix}", part.shape, part.dtypes)
        format.check(module, shape, tensors)
        return iter(()) if self.device.type == "meta" else pieces(format, shape, tensors)

    def _format(self, name: str) -> WeightFormat | None:
        return format_of(name, self.quantisation)

    def view(self, name: str, shape: tuple[int, ...], dtypes: Collection[str] = FLOATS) -> Tensor:
        """Return a tensor in its stored dtype, as a view of the mapped file; the caller must not keep it."""
        self._checked(name, shape, dtypes)
        tensor: Tensor = self.files[name].get_tensor(name)
        return tensor

    def _checked(self, name: str, shape: tuple[int, ...], dtypes: Collection[str]) -> Any:
        """Return a tensor whose values are not read yet, after checking its shape and its stored dtype."""
        if name not in self.files:
            stored = self.naming.stored_name(name)
            raise CheckpointError(f"tensor {stored} is missing from the checkpoint", remedy=DOWNLOAD_AGAIN)
        found = self.files[name].get_slice(name)
        if tuple(found.get_shape()) != shape:
            raise CheckpointError(
                f"tensor {name} has shape {list(found.get_shape())}, but config.json implies {list(shape)}",
                remedy="take both files from one checkpoint",
            )
        if found.get_dtype() not in dtypes:
            raise CheckpointError(
                f"tensor {name} is stored as {found.get_dtype()}, but config.json implies"
                f" {' or '.join(dtypes)}",
                remedy="take both files from one checkpoint",
            )
        self.used.add(name)
        return found

    def _is_zero_bias(self, name: str) -> bool:
        """Return whether a tensor is a quantised module's bias and zero, as old AutoGPTQ saves it."""
        if not name.endswith(".bias") or self._format(name) is None:
            return False
        return not self.files[name].get_tensor(name).float().any()

    def reject_unused(self, spec: ModelSpec) -> None:
        """Check that every tensor was used, or is known to carry no information.

        Raises:
            CheckpointError: A tensor is not part of the model, or differs from the one it duplicates.
        """
        for name in sorted(set(self.files) - self.used):
            if IGNORED.fullmatch(name) or self._is_zero_bias(name):
                continue
            if spec.leaves_unread(name):
                if predicts_further(name, spec.layers, spec.further_layers):
                    self.further.append(name)
                continue
            if name != f"{HEAD}.weight" or not spec.tied:
                stored, model = getattr(self.files[name], "stored", name), spec.wrapper or spec.architecture
                raise CheckpointError(
                    f"tensor {stored} in {self.shards[name]} is not part of a {model}",
                    remedy="use a checkpoint without it",
                )
            if not self._equals_embedding(name, (spec.vocab_size, spec.hidden_size)):
                raise CheckpointError(
                    f"tensor {name} differs from {EMBEDDING}.weight, but config.json ties them",
                    remedy="correct tie_word_embeddings",
                )

    def _equals_embedding(self, name: str, shape: tuple[int, int]) -> bool:
        """Return whether a tensor has the values of the embedding; a piece of both is in memory at a time."""
        one, other = (self._checked(each, shape, FLOATS) for each in (name, f"{EMBEDDING}.weight"))
        rows = max(1, PIECE // shape[1])
        pieces = (slice(first, first + rows) for first in range(0, shape[0], rows))
        return all(torch.equal(one[piece].to((own := other[piece]).dtype), own) for piece in pieces)


def format_of(name: str, quantisation: Quantisation | None) -> WeightFormat | None:
    """Return the format of the weight of a tensor's module; None if it is not quantised."""
    module = name.rpartition(".")[0]
    if quantisation is None or (module in TABLES and not quantisation.embedding):
        return None
    return quantisation.format_of(module)


def inputs_of(
    names: Collection[str], columns: int, quantisation: Quantisation | None
) -> ActivationFormat | None:
    """Return the format of the inputs that the named linear layers share; None if they stay as they are.

    Args:
        names: The layers.
        columns: Of their inputs.
        quantisation: The scheme of the checkpoint.

    Raises:
        CheckpointError: They have several, or it does not fit the columns.
    """
    if quantisation is None:
        return None
    formats = {name: None if name == EMBEDDING else quantisation.inputs_of(name) for name in names}
    found = set(formats.values())
    if len(found) > 1:
        shown = ", ".join(f"{name}: {format or 'none'}" for name, format in formats.items())
        raise CheckpointError(
            f"layers that share their inputs quantise them differently ({shown})",
            remedy="use a checkpoint that quantises them alike",
        )
    shared = found.pop()
    if shared is not None and not shared.holds(columns):
        raise CheckpointError(
            f"{', '.join(names)}: inputs of {columns} columns have no whole groups ({shared})",
            remedy="use a checkpoint that leaves these layers unquantised",
        )
    return shared


def coding_of(shapes: Shapes, quantisation: Quantisation | None) -> Coding | None:
    """Return how the kernels keep the joined weights coded; None where they do not."""
    formats = [format_of(name, quantisation) for name in shapes]
    coding = Coding.of_all(None if format is None else format.coding for format in formats)
    [columns] = {shape[1] for shape in shapes.values()}
    return coding if coding is not None and coding.holds(columns) else None


def joined_shape(shapes: Shapes) -> tuple[int, ...]:
    """Return the shape of the tensors joined along their first dimension."""
    parts = list(shapes.values())
    return sum(shape[0] for shape in parts), *parts[0][1:]
