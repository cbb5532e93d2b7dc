"""The tensors of a model with LoRAs merged into them, as an open file gives them.

Contract: a merged tensor is W + Σ s·B·A, in the order of the LoRAs, computed in float32 and rounded once, to
the dtype that the model is loaded in. Values of a LoRA are read when its tensor is, and must be finite.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from foredraft.errors import shortened
from foredraft.model.lora.finding import ChangedTensor
from foredraft.model.lora.lora_tensors import LoraTensors, Product, Replacement, Shift
from foredraft.model.transfers import dtype_name

__all__ = ["MergedTensors"]

PIECE = 2**18  # values that are merged at a time: 1 MiB, which stays in a core's cache
NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64"}  # as safetensors has them


class MergedTensors:
    """The changed tensors of a model.

    Args:
        tensors: Them, by the names that the loaded model gives them.
        dtype: The dtype that the model is loaded in.
    """

    def __init__(self, tensors: Mapping[str, ChangedTensor], dtype: torch.dtype) -> None:
        self.tensors, self.dtype = tensors, dtype

    def keys(self) -> list[str]:
        """Return the names of the tensors."""
        return [*self.tensors]

    def get_slice(self, name: str) -> MergedSlice:
        """Return a tensor whose values are not read yet."""
        return MergedSlice(self, name)

    def get_tensor(self, name: str) -> Tensor:
        """Return a merged tensor.

        Raises:
            CheckpointError: A LoRA has values that are not finite.
        """
        tensor = self.tensors[name]
        read = _Values()
        merged = torch.empty(tensor.shape, dtype=self.dtype)
        rows = max(1, PIECE // max(1, math.prod(tensor.shape[1:])))
        stored = tensor.file.get_slice(tensor.name)
        for first in range(0, tensor.shape[0], rows):
            piece = slice(first, min(first + rows, tensor.shape[0]))
            values = stored[piece].to(torch.float32, copy=True)
            for lora, change in tensor.changes:
                values = changed(values, lora, change.what, piece, read, transposed=tensor.transposed)
            merged[piece].copy_(values)
        return merged


class MergedSlice:
    """A merged tensor; asking for rows of it merges it."""

    def __init__(self, tensors: MergedTensors, name: str) -> None:
        self.tensors, self.name = tensors, name

    def get_dtype(self) -> str:
        """Return the dtype of the merged tensor, as safetensors names it."""
        return NAMES[dtype_name(self.tensors.dtype)]

    def get_shape(self) -> list[int]:
        """Return the shape of the tensor."""
        return [*self.tensors.tensors[self.name].shape]

    def __getitem__(self, rows: slice) -> Tensor:
        return self.tensors.get_tensor(self.name)[rows]


class _Values:
    """Reads tensors of LoRAs in float32, and checks them."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, str], Tensor] = {}

    def of(self, lora: LoraTensors, name: str) -> Tensor:
        """Return a tensor."""
        key = id(lora), name
        if key not in self.known:
            self.known[key] = self._checked(lora, name, lora.file.get_tensor(name))
        return self.known[key]

    def rows(self, lora: LoraTensors, name: str, rows: slice) -> Tensor:
        """Return some rows of a tensor, in memory of their own."""
        return self._checked(lora, name, lora.file.get_slice(name)[rows])

    def _checked(self, lora: LoraTensors, name: str, values: Tensor) -> Tensor:
        values = values.to(torch.float32, copy=True)
        if not torch.isfinite(values).all():
            problem = f"has {shortened(name)} with values that are not finite"
            raise lora.error(problem, "train it again, or download it again")
        return values


def changed(
    values: Tensor,
    lora: LoraTensors,
    what: Product | Shift | Replacement,
    piece: slice,
    read: _Values,
    *,
    transposed: bool,
) -> Tensor:
    """Return some rows of a tensor with one change.

    Args:
        values: The rows before, in float32; they may be overwritten.
        lora: Makes the change.
        what: The change.
        piece: Which rows they are.
        read: Reads the LoRA's tensors.
        transposed: The tensor has a row for each input.
    """
    if isinstance(what, Replacement):
        return read.rows(lora, what.name, piece)
    if isinstance(what, Shift):
        return values.add_(read.of(lora, what.name)[piece] * what.scale)
    a, b = read.of(lora, what.a), read.of(lora, what.b)
    added = (b @ a[:, piece]).T if transposed else b[piece] @ a
    return values.add_(added * what.scale)
