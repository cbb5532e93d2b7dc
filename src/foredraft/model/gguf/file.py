"""Read the container of a GGUF file: its metadata, and the kind, shape and place of each tensor.

Reading is strict: what leads beyond the file, a name that is there twice, and an unknown block format are
errors that name the file. Opening a file reads what lies before the tensors. A tensor is a view of a map of
its own range, so a file may be larger than the memory. Format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import errno
import math
import os
import struct
import weakref
from collections import deque
from pathlib import Path
from typing import Any

from torch import Tensor

from foredraft.errors import CheckpointError, shortened
from foredraft.files import NO_FILE, is_no_file
from foredraft.model.config import DOWNLOAD_AGAIN
from foredraft.model.memory import mapped_bytes
from foredraft.model.quantisation import blocks
from foredraft.model.safetensors_file import DTYPES, TensorInfo

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # version 1, of 2023, counts in 32 bits
ALIGNMENT = 32  # bytes, where the file does not say
MAX_DIMENSIONS = 4  # of a tensor, in ggml
MAX_DEPTH = 4  # arrays within each other; files have one
# Far more than any file has: of a file with holes, which can be larger than the disk, no more may be read.
MAX_VALUES = 2**24  # values of an array: as many as a vocabulary may have tokens
MAX_TEXT = 2**24  # bytes of a text
BUFFER = 2**20  # bytes that are read at a time
LENGTH = struct.Struct("<Q")  # of a text, in front of it
# a text under this key, as the file has it up to its length
ARCHITECTURE = b"general.architecture" + struct.pack("<I", 8)
FIRST_BYTES = 4096  # in which the key stands: it is the first one, or one of the first
UNQUANTISED = ("F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64")  # kinds of plain numbers
BLOCKS: dict[str, tuple[int, int]] = {  # kind of a tensor -> values in a block, bytes of a block
    **{kind: (1, DTYPES[kind].itemsize) for kind in UNQUANTISED},
    **{kind: (block.values, block.size) for kind, block in blocks.BLOCKS.items()},
}
# every kind of ggml (`ggml_type` in https://github.com/ggml-org/ggml/blob/master/include/ggml.h)
KINDS: dict[int, str] = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K",
    11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
    19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32",
    27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
    41: "Q1_0", 42: "Q2_0",
}  # fmt: skip
# type of a metadata value -> its format for `struct`
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
BOOL, STRING, ARRAY = 7, 8, 9


def is_gguf(path: Path) -> bool:
    if path.suffix == ".gguf":
        return True
    if is_no_file(path):
        return False
    try:
        with path.open("rb") as opened:
            return opened.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def architecture_of(path: Path) -> str | None:
    """Return the architecture that a GGUF file names among its first values, as writers put it, if any."""
    if not path.is_file() or not is_gguf(path):
        return None
    try:
        with path.open("rb") as opened:
            begin = opened.read(FIRST_BYTES)
    except OSError:
        return None
    at = begin.find(ARCHITECTURE) + len(ARCHITECTURE)
    if at < len(ARCHITECTURE) or len(begin) < at + LENGTH.size:
        return None
    [size] = LENGTH.unpack_from(begin, at)
    return begin[at + LENGTH.size :][:size].decode("utf-8", "replace")


class GGUFFile:
    def __init__(self, path: Path, *, lists: bool = True) -> None:
        self.path, self._lists = path, lists
        if is_no_file(path):
            raise self._unreadable(OSError(errno.EINVAL, NO_FILE))
        try:
            self._file = path.open("rb", buffering=BUFFER)
        except OSError as error:
            raise self._unreadable(error) from error
        weakref.finalize(self, self._file.close)
        self.size = os.fstat(self._file.fileno()).st_size  # its bytes
        if not self.size:
            raise self.error("is empty", DOWNLOAD_AGAIN)
        self._at = 0
        try:
            tensors, values = self._header()
            self.metadata: dict[str, Any] = {}
            for _ in range(values):
                key = self._text()
                if key in self.metadata:
                    raise self.error(f"has {shortened(key)} twice", DOWNLOAD_AGAIN)
                self.metadata[key] = self._value(self._number("I"))
            self.tensors = self._tensors(tensors)
        except OSError as error:
            raise self._unreadable(error) from error
        except IndexError:
            raise self.error("ends too early", DOWNLOAD_AGAIN) from None
        except UnicodeDecodeError:
            raise self.error("has a text that is not UTF-8", DOWNLOAD_AGAIN) from None

    def error(self, problem: str, remedy: str) -> CheckpointError:
        return CheckpointError(f"{self.path} {problem}", remedy=remedy)

    def _unreadable(self, error: OSError) -> CheckpointError:
        return self.error(f"cannot be read ({error.strerror})", "give a file that can be read")

    def bytes_of(self, info: TensorInfo) -> Tensor:
        try:
            return mapped_bytes(self._file, info.start, info.size)
        except OSError as error:
            problem = f"has tensor {info.name}, which cannot be read ({error.strerror})"
            raise self.error(problem, DOWNLOAD_AGAIN) from error

    def _header(self) -> tuple[int, int]:
        if self.size < len(MAGIC) or self._take(len(MAGIC)) != MAGIC:
            raise self.error("is not a GGUF file", "give a checkpoint folder, or a GGUF file")
        version = self._number("I")
        if not version & 0xFFFF:  # a number below 65536 with its bytes reversed
            raise self.error("is a big-endian GGUF file", "convert it to little-endian")
        if version not in VERSIONS:
            problem = f"is a GGUF file of version {version}"
            raise self.error(problem, f"supported are {' and '.join(map(str, VERSIONS))}")
        return self._number("Q"), self._number("Q")

    def _tensors(self, tensors: int) -> dict[str, TensorInfo]:
        heads: list[tuple[str, tuple[int, ...], int, int]] = []
        for _ in range(tensors):
            name, dimensions = self._text(), self._number("I")
            if not 1 <= dimensions <= MAX_DIMENSIONS:
                raise self.error(f"has tensor {shortened(name)} with {dimensions} dimensions", DOWNLOAD_AGAIN)
            shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]
            if not all(shape):
                raise self.error(f"has tensor {shortened(name)} of shape {[*shape]}", DOWNLOAD_AGAIN)
            heads.append((name, shape, self._number("I"), self._number("Q")))
        alignment = self.metadata.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or isinstance(alignment, bool) or alignment < 1 or alignment % 8:
            raise self.error(f"has the alignment {shortened(alignment)}", "it must be a multiple of 8")
        first = -(-self._at // alignment) * alignment
        found: dict[str, TensorInfo] = {}
        for name, shape, number, offset in heads:
            if name in found:
                raise self.error(f"has tensor {shortened(name)} twice", DOWNLOAD_AGAIN)
            found[name] = self._tensor(name, shape, number, first + offset)
            if offset % alignment:
                raise self.error(f"has tensor {name} at an offset that is not aligned", DOWNLOAD_AGAIN)
        return found

    def _tensor(self, name: str, shape: tuple[int, ...], number: int, start: int) -> TensorInfo:
        kind = KINDS.get(number, f"number {number}")
        if kind not in BLOCKS:
            problem = f"has tensor {name} of type {kind}, which is not supported"
            raise self.error(problem, f"take a file with {', '.join(BLOCKS)}")
        values, size = BLOCKS[kind]
        if shape[-1] % values:
            problem = f"has tensor {name} with rows of {shape[-1]} values, but {kind} has blocks of {values}"
            raise self.error(problem, DOWNLOAD_AGAIN)
        size *= math.prod(shape) // values
        if start + size > self.size:
            raise self.error(f"ends within tensor {name}, so it is incomplete", DOWNLOAD_AGAIN)
        return TensorInfo(name, kind, shape, start, size)

    def _number(self, format: str) -> Any:
        [value] = struct.unpack(f"<{format}", self._take(struct.calcsize(f"<{format}")))
        return value

    def _take(self, size: int) -> bytes:
        """Return the next bytes of the file; IndexError where it ends before them."""
        if size > self.size - self._at or len(taken := self._file.read(size)) < size:
            raise IndexError
        self._at += size
        return taken

    def _text(self) -> str:
        size: int = self._number("Q")
        self._check_text(size)
        return self._take(size).decode("utf-8")

    def _check_text(self, size: int, read: int = 0) -> None:
        """Check the length of a text, of whose bytes and of what follows it `read` bytes were read."""
        if size > self.size - self._at + read:
            raise IndexError
        if size > MAX_TEXT:
            raise self.error(f"has a text of {size} bytes, more than any model has", DOWNLOAD_AGAIN)

    def _texts(self, count: int) -> list[str]:
        """Return the next texts, cut out of large blocks, or none where lists are not kept."""
        texts, block, at = list[str](), b"", 0
        for _ in range(count):
            if len(block) - at < LENGTH.size:
                block, at = self._more(block[at:], LENGTH.size), 0
            [size] = LENGTH.unpack_from(block, at)
            at += LENGTH.size
            if size > min(len(block) - at, MAX_TEXT):
                self._check_text(size, len(block) - at)
                block, at = self._more(block[at:], size), 0
            if self._lists:
                texts.append(str(block[at : at + size], "utf-8"))
            at += size
        self._at -= len(block) - at
        self._file.seek(self._at)
        return texts

    def _more(self, block: bytes, least: int) -> bytes:
        """Return a block with further bytes of the file, `least` in all; IndexError where it ends before."""
        further = self._file.read(max(least, BUFFER))
        self._at += len(further)
        if len(block) + len(further) < least:
            raise IndexError
        return block + further

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind in NUMBERS:
            return self._number(NUMBERS[kind])
        if kind == BOOL:
            return bool(self._number("B"))
        if kind == STRING:
            return self._text()
        if kind != ARRAY or depth >= MAX_DEPTH:
            raise self.error(f"has a metadata value of type {kind}, which is not known", DOWNLOAD_AGAIN)
        kind, count = self._number("I"), self._number("Q")
        if count > self.size - self._at:  # a value takes a byte or more
            raise IndexError
        if count > MAX_VALUES:
            raise self.error(f"has {count} values in an array, more than any model has", DOWNLOAD_AGAIN)
        if kind in NUMBERS:
            format = f"<{count}{NUMBERS[kind]}"
            taken = self._take(struct.calcsize(format))
            return list(struct.unpack(format, taken)) if self._lists else []
        if kind == STRING:
            return self._texts(count)
        values = (self._value(kind, depth + 1) for _ in range(count))
        return list(values) if self._lists else list(deque(values, maxlen=0))
