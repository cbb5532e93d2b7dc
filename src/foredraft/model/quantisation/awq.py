"""AWQ (arXiv:2306.00978), version "gemm": 4 bits with zero points, in groups along the columns of a weight.

A weight is s · (q - z). `qweight` holds q, packed along the *rows* of the weight: the eight numbers of a
word are the rows 0, 2, 4, 6, 1, 3, 5, 7 of eight, the lowest bits first. `qzeros` holds z in the same
order. The definition is AutoAWQ's (https://github.com/casper-hansen/AutoAWQ, `packing_utils.py`) in exact
arithmetic: AutoAWQ itself rounds the product to float16. AutoAWQ's scaling of the activations is part of
the other weights already.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from foredraft.errors import CheckpointError
from foredraft.model.config import ConfigReader
from foredraft.model.quantisation.codes import Codes, Coding
from foredraft.model.quantisation.packing import subtract_zeros, unpack
from foredraft.model.quantisation.scheme import (
    INT32,
    SCALES,
    Part,
    Quantisation,
    SchemeRule,
    check_auto_round,
    count_groups,
    exactly,
    read_group,
    read_names,
    shown_group,
)
from foredraft.model.tensor_names import HEAD, LINEAR, Naming

__all__ = ["HARMLESS", "AWQFormat", "read_awq"]

# Keys that say how the weights were found, or how a library runs them.
HARMLESS = frozenset("do_fuse exllama_config fuse_max_seq_len meta modules_to_fuse".split())
BITS, FACTOR = 4, 8  # bits of a number, numbers of a word
MIDDLE = 8  # the zero point of numbers that are symmetric about 0
PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # row of eight -> its place in a word
VERSION = "gemm"


@dataclass(frozen=True, slots=True)
class AWQFormat:
    """The format of AWQ weights.

    Attributes:
        group: Columns of a group; None if a row is one group.
        symmetric: Every zero point is 8.
    """

    group: int | None
    symmetric: bool
    by_rows: ClassVar[bool] = False

    def __str__(self) -> str:
        return f"{BITS} bits {shown_group(self.group)}"

    @property
    def coding(self) -> Coding | None:
        return Coding.of(BITS, self.group, symmetric=self.symmetric)

    def parts(self, module: str, shape: tuple[int, int]) -> dict[str, Part]:
        rows, columns = shape
        groups = count_groups(module, columns, self.group)
        if rows % FACTOR:
            raise CheckpointError(
                f"{module} has {rows} rows, but AWQ packs {FACTOR} at a time",
                remedy="use a checkpoint of another format",
            )
        return {
            "qweight": Part((columns, rows // FACTOR), INT32),
            "qzeros": Part((groups, rows // FACTOR), INT32),
            "scales": Part((groups, rows), SCALES),
        }

    def check(self, module: str, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> None:
        if self.symmetric and bool((_ordered(tensors["qzeros"]) != MIDDLE).any()):
            raise CheckpointError(
                f"tensor {module}.qzeros has a zero point other than {MIDDLE}, but config.json has none",
                remedy="take both files from one checkpoint",
            )

    def codes(self, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> Codes:
        stored, zeros = _ordered(tensors["qweight"]), _ordered(tensors["qzeros"])  # [M, K], [M, G]
        codes = subtract_zeros(stored, zeros, BITS)
        return Codes(codes, tensors["scales"].T.contiguous(), self.group or shape[1], self.coding)


def _ordered(packed: Tensor) -> Tensor:
    """Return the numbers [N, L] in words [L, N / 8], in the order of the weight's rows."""
    numbers = unpack(packed, BITS).reshape(len(packed), -1, FACTOR)
    return numbers[:, :, PLACES].flatten(1).T.contiguous()


def read_awq(read: ConfigReader, naming: Naming) -> Quantisation:
    """Return the scheme of a `quantization_config` of AWQ.

    Args:
        read: The config.
        naming: How the checkpoint names modules.

    Raises:
        CheckpointError: A key has a value that is not supported.
    """
    for key in ("version", "format", "checkpoint_format"):
        name = read.take(key, VERSION)
        if not isinstance(name, str) or name.lower() != VERSION:
            raise read.error(key, f"only {VERSION!r} is supported")
    if read.take("backend") == "llm-awq":
        raise read.error("backend", "its order of numbers is not supported")
    read.choice("desc_act", (False,), False)
    read.choice("pack_dtype", ("int32",), "int32")
    read.choice("method", ("awq",), "awq")
    read.choice("lm_head", (False,), False)
    check_auto_round(read, naming)
    if read.take("dynamic"):
        raise read.error("dynamic", "settings of single modules are not supported; it must be empty")
    bits, group = (_either(read, *keys) for keys in (("bits", "w_bit"), ("group_size", "q_group_size")))
    read.choice(bits, (BITS,), BITS)
    zero_point = read.flag("zero_point", default=not read.flag("sym"))
    if "sym" in read.config and read.flag("sym") == zero_point:
        raise read.error("sym", f"zero_point is {zero_point}; they must differ")
    found = AWQFormat(read_group(read, group, 128), not zero_point)
    kept = [re.escape(name) for name in read_names(read, "modules_to_not_convert")]  # parts of names
    rules = [SchemeRule(rf".*(?:{'|'.join(kept)})", None)] if kept else []
    head = SchemeRule(exactly([naming.stored_module(HEAD)]), None)
    return Quantisation("awq", (*rules, head, SchemeRule("", found, layer_class=LINEAR)))


def _either(read: ConfigReader, key: str, old: str) -> str:
    """Return which of two keys a config has; with both they must agree."""
    if key in read.config and read.take(old, read.take(key)) != read.take(key):
        raise read.error(old, f"{key} is another number")
    return key if key in read.config else old
