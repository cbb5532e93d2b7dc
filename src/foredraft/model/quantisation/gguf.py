"""GGUF files as a quantisation method: every quantised tensor has a block format of `blocks`.

A file says of every tensor in which format it is stored. `model.gguf` lists the quantised ones, the embedding
among them, in the config.json that it makes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from foredraft.model.config import ConfigReader
from foredraft.model.quantisation.blocks import BLOCKS
from foredraft.model.quantisation.codes import Codes, Coding
from foredraft.model.quantisation.scheme import Part, Quantisation, SchemeRule, exactly, read_names
from foredraft.model.tensor_names import Naming

__all__ = ["METHOD", "TENSORS", "GGUFFormat", "read_gguf"]

METHOD, TENSORS = "gguf", "tensors"  # its quant_method, and its key: modules by format


@dataclass(frozen=True, slots=True)
class GGUFFormat:
    """A block format; `kind` is a key of `BLOCKS`."""

    kind: str
    by_rows: ClassVar[bool] = True

    def __str__(self) -> str:
        return self.kind

    @property
    def coding(self) -> Coding | None:
        return BLOCKS[self.kind].coding

    def parts(self, module: str, shape: tuple[int, int]) -> dict[str, Part]:
        return {"weight": Part(shape, (self.kind,))}

    def check(self, module: str, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> None:
        return None

    def codes(self, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> Codes:
        """Return the weight of which `tensors` has the bytes of each row, [M, bytes] uint8."""
        block = BLOCKS[self.kind]
        return block.unpack(tensors["weight"].reshape(-1, block.size), *shape)


def read_gguf(read: ConfigReader, _: Naming) -> Quantisation:
    """Return the scheme that `model.gguf` wrote.

    Raises:
        CheckpointError: A key has a value that it does not write.
    """
    listed = read.take(TENSORS)
    if not isinstance(listed, dict) or not listed.keys() <= BLOCKS.keys():
        raise read.error(TENSORS, f"it must be a JSON object of {', '.join(BLOCKS)}")
    modules = ConfigReader(listed, f"{read.where}, {TENSORS}")
    rules = [SchemeRule(exactly(read_names(modules, kind)), GGUFFormat(kind)) for kind in listed]
    return Quantisation(METHOD, tuple(rules), embedding=True)
