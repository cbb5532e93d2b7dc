"""Read a safetensors file: its header, and tensors or rows of them. Write one.

Opening a file reads its header alone, which must give every byte behind it to exactly one tensor of a known
dtype. A tensor is a view of a map of its own range, so a file may be larger than the memory. Format:
https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import errno
import math
import os
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from foredraft.errors import CheckpointError, shortened
from foredraft.files import NO_FILE, is_no_file
from foredraft.model.config import broken, parse_json
from foredraft.model.memory import mapped_bytes

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"  # of a checkpoint
LENGTH = 8  # bytes of the header's length
MOST = 100_000_000  # bytes of a header, as the format's own library allows
MAX_DIMENSIONS = 8  # of a tensor; weights have at most 4
MAX_SIZE = 2**63  # values of a dimension: what PyTorch counts with
METADATA = "__metadata__"  # the key of the header that is no tensor
ERRNO = re.compile(r"\(os error (\d+)\)")  # how the format's own library quotes an error of the system
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    name: str  # its name in the file
    dtype: str  # a key of `DTYPES`, or in a GGUF file of `gguf.file.BLOCKS`
    shape: tuple[int, ...]  # as PyTorch counts: rows that lie one after the other last
    start: int  # its first byte in the file
    size: int  # its bytes


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of an open file, whose values are read when they are asked for."""

    dtype: str  # how it is stored: a key of `DTYPES`, or of `gguf.file.BLOCKS`
    shape: tuple[int, ...]
    read: Callable[[slice | None], Tensor]  # rows of it; None: the whole
    name: str  # as it is stored
    file: str  # the name of its file
    columns: Tensor | None = None  # of codes, [K] int32: column j is column columns[j] of the weight

    def __getitem__(self, rows: slice) -> Tensor:
        return self.read(rows)

    def whole(self) -> Tensor:
        return self.read(None)


class SafetensorsFile:
    """An open safetensors file, to be used in a `with` statement."""

    def __init__(self, path: Path) -> None:
        self.path = path  # the file
        try:
            if is_no_file(path):
                raise OSError(errno.EINVAL, NO_FILE)
            with ExitStack() as opened:
                self._file = opened.enter_context(path.open("rb"))
                self.size = os.fstat(self._file.fileno()).st_size
                self.tensors = self._tensors(self._header())
                opened.pop_all()  # the file stays open
        except OSError as error:
            raise broken(f"{self.path} cannot be read ({error.strerror})") from error

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def keys(self) -> list[str]:
        return [*self.tensors]

    @property
    def stored(self) -> dict[str, StoredTensor]:
        return {
            name: StoredTensor(info.dtype, info.shape, partial(self._rows, info), name, self.path.name)
            for name, info in self.tensors.items()
        }

    def get_tensor(self, name: str) -> Tensor:
        return self._rows(self.tensors[name], None)

    def _rows(self, info: TensorInfo, rows: slice | None) -> Tensor:
        shape, offset, dtype = info.shape, 0, DTYPES[info.dtype]
        if rows is not None:
            first, last, _ = rows.indices(shape[0])
            offset = first * (info.size // max(1, shape[0]))  # bytes
            shape = max(0, last - first), *shape[1:]
        try:
            values = mapped_bytes(self._file, info.start + offset, math.prod(shape) * dtype.itemsize)
        except OSError as error:
            raise self._error(f"has tensor {info.name}, which cannot be read ({error.strerror})") from error
        if values.data_ptr() % dtype.itemsize:  # the header may have any length
            values = values.clone()
        return values.view(dtype).view(shape)

    def _header(self) -> dict[str, Any]:
        if self.size < LENGTH:
            raise self._error(f"has {self.size} bytes, too few for a header")
        length = int.from_bytes(self._file.read(LENGTH), "little")
        if length > self.size - LENGTH:
            raise self._error(f"ends within its header of {length} bytes")
        if length > MOST:
            raise self._error(f"has a header of {length} bytes, more than {MOST}")
        self._data = LENGTH + length
        try:
            header = parse_json(self._file.read(length).decode("utf-8"))
        except ValueError as error:
            raise self._error(f"has a header that is not JSON ({error})") from error
        if not isinstance(header, dict):
            raise self._error("has a header that is not a JSON object")
        return header

    def _tensors(self, header: dict[str, Any]) -> dict[str, TensorInfo]:
        found = {name: self._tensor(name, entry) for name, entry in header.items() if name != METADATA}
        end = self._data
        for info in sorted(found.values(), key=lambda info: (info.start, info.size)):
            if info.start != end:
                relation = "begins within the tensor" if info.start < end else "leaves a gap to the tensor"
                raise self._error(f"has tensor {shortened(info.name)}, which {relation} before it")
            end += info.size
        if end != self.size:
            raise self._error(f"has {self.size - end} bytes behind its last tensor")
        return found

    def _tensor(self, name: str, entry: Any) -> TensorInfo:
        given, shown = entry if isinstance(entry, dict) else {}, shortened(name)
        dtype, shape, offsets = (given.get(key) for key in ("dtype", "shape", "data_offsets"))
        if not isinstance(dtype, str) or not _is_counts(shape) or not _is_counts(offsets):
            raise self._error(f"has a header without dtype, shape and data_offsets of {shown}")
        if dtype not in DTYPES:
            problem = f"{self.path} has tensor {shown} of dtype {shortened(dtype)}, which is not known"
            raise CheckpointError(problem, remedy=f"take a file with {', '.join(DTYPES)}")
        if len(shape) > MAX_DIMENSIONS or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise self._error(f"has tensor {shown} of shape {shortened(shape)} at {shortened(offsets)}")
        size, needed = offsets[1] - offsets[0], math.prod(shape) * DTYPES[dtype].itemsize
        if size != needed:
            takes = f"{dtype} of shape {shortened(shape)} takes {needed}"
            raise self._error(f"has tensor {shown} in {size} bytes, but {takes}")
        if offsets[1] > self.size - self._data:
            raise self._error(f"ends within tensor {shown}")
        return TensorInfo(name, dtype, tuple(shape), self._data + offsets[0], size)

    def _error(self, problem: str) -> CheckpointError:
        return broken(f"{self.path} {problem}, so it is broken or incomplete")


def write_tensors(file: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    try:
        save_file(dict(tensors), file, dict(metadata))
    except SafetensorError as error:
        number = ERRNO.search(str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(file)) from error


def _is_counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(each) is int and 0 <= each < MAX_SIZE for each in value)
