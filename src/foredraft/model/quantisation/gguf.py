"""The block formats of GGUF files: what the bytes of a row of blocks stand for.

A file says of every tensor in which format it is stored. `model.gguf` lists the quantised ones, the embedding
among them, in the config.json that it makes. In float32 an expanded weight has the bits of
`gguf.quants.dequantize`. In another dtype one of Q4_0, Q8_0 or Q6_K was rounded once. That of Q4_K is a
difference, which float32 rounds first.

Formats: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h and
https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/quants.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.model.config import ConfigReader
from foredraft.model.quantisation.codes import Codes, Coding
from foredraft.model.quantisation.scheme import Part, Quantisation, Rule, exactly, read_names

__all__ = ["BLOCKS", "METHOD", "TENSORS", "GGUFFormat", "read_gguf"]

PIECE = 2**19  # weights that are unpacked at a time: it bounds the memory
METHOD, TENSORS = "gguf", "tensors"  # its quant_method, and its key: modules by format


@dataclass(frozen=True, slots=True)
class GGUFFormat:
    """A block format; `kind` is a key of `BLOCKS`."""

    kind: str

    def __str__(self) -> str:
        return self.kind

    @property
    def coding(self) -> Coding | None:
        return CODINGS.get(self.kind)

    def parts(self, module: str, shape: tuple[int, int]) -> dict[str, Part]:
        return {"weight": Part(shape, (self.kind,))}

    def check(self, module: str, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> None:
        return None

    def codes(self, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> Codes:
        """Return the weight of which `tensors` has the bytes of each row, [M, bytes] uint8."""
        rows, columns = shape
        _, size, read = BLOCKS[self.kind]
        step = max(1, PIECE // columns)
        pieces = (tensors["weight"][first : first + step] for first in range(0, rows, step))
        return Codes.gathered(rows, (read(piece.reshape(-1, size), len(piece), columns) for piece in pieces))


def read_gguf(read: ConfigReader) -> Quantisation:
    """Return the scheme that `model.gguf` wrote.

    Raises:
        CheckpointError: A key has a value that it does not write.
    """
    listed = read.take(TENSORS)
    if not isinstance(listed, dict) or not listed.keys() <= BLOCKS.keys():
        raise read.error(TENSORS, f"it must be a JSON object of {', '.join(BLOCKS)}")
    modules = ConfigReader(listed, f"{read.where}, {TENSORS}")
    rules = [Rule(exactly(read_names(modules, kind)), GGUFFormat(kind)) for kind in listed]
    return Quantisation(METHOD, tuple(rules), embedding=True)


def _q8_0(blocks: Tensor, rows: int, columns: int) -> Codes:
    """Unpack d float16, 32 codes int8."""
    codes = blocks[:, 2:].contiguous().view(torch.int8)
    return Codes(codes.view(rows, columns), _float16(blocks[:, :2]).view(rows, -1), 32, CODINGS["Q8_0"])


def _q4_0(blocks: Tensor, rows: int, columns: int) -> Codes:
    """Unpack d float16, 16 bytes; their low halves are the first 16 codes, their high halves the others."""
    codes = torch.cat(_halves(blocks[:, 2:]), dim=1).to(torch.int8) - 8
    return Codes(codes.view(rows, columns), _float16(blocks[:, :2]).view(rows, -1), 32, CODINGS["Q4_0"])


def _q4_k(blocks: Tensor, rows: int, columns: int) -> Codes:
    """Unpack d and dmin float16, 8 scales and 8 minimums of 6 bits in 12 bytes, 128 bytes of codes.

    Each 32 bytes hold the codes of two groups: the low halves those of the first.
    """
    d, dmin = _float16(blocks[:, :2]), _float16(blocks[:, 2:4])
    scales, minimums = _six_bits(blocks[:, 4:16])
    codes = torch.stack(_halves(blocks[:, 16:].reshape(-1, 4, 32)), dim=2)
    return Codes(
        codes.view(rows, columns).view(torch.int8),
        scales.view(rows, -1).view(torch.int8),
        32,
        CODINGS["Q4_K"],
        steps=d.view(rows, -1),
        offsets=minimums.view(rows, -1).view(torch.int8),
        offset_steps=dmin.view(rows, -1),
    )


def _six_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the 8 scales and the 8 minimums [B, 8] that share 12 bytes [B, 12].

    The first four of each are the low 6 bits of a byte. The other four have their low 4 bits in the last four
    bytes, and their high 2 bits above those of the first four.
    """
    low, high, mixed = packed.reshape(-1, 3, 4).unbind(1)
    scales = torch.cat([low & 63, (mixed & 15) | ((low >> 6) << 4)], dim=1)
    return scales, torch.cat([high & 63, (mixed >> 4) | ((high >> 6) << 4)], dim=1)


def _q6_k(blocks: Tensor, rows: int, columns: int) -> Codes:
    """Unpack 128 bytes of low halves, 64 bytes of 2 high bits each, 16 scales int8, d float16.

    Each 64 low bytes and 32 high bytes make 128 codes: the low halves of 64 bytes, then their high halves.
    """
    low = torch.stack(_halves(blocks[:, :128].reshape(-1, 2, 64)), dim=2).view(-1, 2, 4, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(1, 1, 4, 1)
    codes = (low | (((high >> shifts) & 3) << 4)).to(torch.int8) - 32
    scales, d = blocks[:, 192:208].contiguous().view(torch.int8), _float16(blocks[:, 208:])
    return Codes(
        codes.view(rows, columns), scales.view(rows, -1), 16, CODINGS["Q6_K"], steps=d.view(rows, -1)
    )


def _halves(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the low and the high 4 bits of bytes."""
    return packed & 15, packed >> 4


def _float16(stored: Tensor) -> Tensor:
    """Return pairs of bytes [B, 2] as numbers [B, 1]."""
    return stored.contiguous().view(torch.float16)


CODINGS = {  # how the kernels keep them
    "Q4_0": Coding(4),
    "Q8_0": Coding(8),
    "Q4_K": Coding(4, nested=True, offsets=True),
    "Q6_K": Coding(6, nested=True),
}
# kind -> values of a block, its bytes, and function of (blocks [B, bytes], rows, columns)
BLOCKS: dict[str, tuple[int, int, Callable[[Tensor, int, int], Codes]]] = {
    "Q4_0": (32, 18, _q4_0),
    "Q8_0": (32, 34, _q8_0),
    "Q4_K": (256, 144, _q4_k),
    "Q6_K": (256, 210, _q6_k),
}
