"""GPTQ (arXiv:2210.17323): 4 or 8 bits with zero points, in groups along the columns of a weight.

A weight is s · (q - z). `qweight` holds q, packed along the columns of the weight. `qzeros` holds z, packed
along its rows: as z - 1 in `checkpoint_format` "gptq" (v1), as z in "gptq_v2". The definition is AutoGPTQ's
(https://github.com/AutoGPTQ/AutoGPTQ, `qlinear_cuda.py`) in exact arithmetic: AutoGPTQ itself rounds the
product to the scale's dtype. GPTQModel (https://github.com/ModelCloud/GPTQModel) reads v1 otherwise where a
stored zero has all bits set: it adds 1 to the packed word, which carries into the neighbour. Such a file is
refused.

`g_idx`, where a file has it, says to which group a column belongs. With act-order (`desc_act`) columns are
quantised in the order of their activations' sizes, so the columns of a group lie apart. Codes are read group
by group: the columns of group 0 in the weight's order, then those of group 1, and so on. That is the order of
the kernels' sums, too. The tensor decides, not the flag.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
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
    shown_group,
)
from foredraft.model.tensor_names import HEAD, Naming

__all__ = ["HARMLESS", "GPTQFormat", "read_gptq"]

# Keys that say how the weights were found, or how a library runs them.
HARMLESS = frozenset(
    """
    act_group_aware backend batch_size cache_block_outputs damp_auto_increment damp_percent dataset
    disable_exllama exllama_config max_input_length meta model_file_base_name model_name_or_path model_seqlen
    module_name_preceding_first_block mse pad_token_id static_groups tokenizer true_sequential use_cuda_fp16
    use_exllama
    """.split()
)
V1, V2 = "gptq", "gptq_v2"  # names of `checkpoint_format`


@dataclass(frozen=True, slots=True)
class GPTQFormat:
    """The format of GPTQ weights.

    Attributes:
        bits: Bits of a number, 4 or 8.
        group: Columns of a group; None if a row is one group.
        symmetric: Every zero point is the middle, 2^(bits - 1).
        less_one: Zero points are stored less 1, as v1 does.
        act_order: `g_idx` must be there.
    """

    bits: int
    group: int | None
    symmetric: bool
    less_one: bool
    act_order: bool = False
    by_rows: ClassVar[bool] = False

    def __str__(self) -> str:
        return f"{self.bits} bits {shown_group(self.group)}"

    @property
    def coding(self) -> Coding | None:
        return Coding.of(self.bits, self.group, symmetric=self.symmetric)

    def parts(self, module: str, shape: tuple[int, int]) -> dict[str, Part]:
        rows, columns = shape
        groups, factor = count_groups(module, columns, self.group), 32 // self.bits
        if rows % factor or columns % factor:
            raise CheckpointError(
                f"{module} has {rows} rows and {columns} columns, but GPTQ packs {factor} at a time",
                remedy="use a checkpoint of another format",
            )
        return {
            "qweight": Part((columns // factor, rows), INT32),
            "qzeros": Part((groups, rows // factor), INT32),
            "scales": Part((groups, rows), SCALES),
            "g_idx": Part((columns,), INT32, optional=not self.act_order),
        }

    def check(self, module: str, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> None:
        if "g_idx" in tensors:
            self._check_groups(f"tensor {module}.g_idx", shape[1], tensors["g_idx"])
        stored, name = unpack(tensors["qzeros"], self.bits), f"tensor {module}.qzeros"
        if self.less_one and bool((stored == 2**self.bits - 1).any()):
            raise CheckpointError(
                f"{name} has a stored zero point of {2**self.bits - 1}, which libraries read in two ways",
                remedy=f"use a checkpoint in checkpoint_format {V2}",
            )
        if self.symmetric and bool((self._zeros(tensors) != 2 ** (self.bits - 1)).any()):
            raise CheckpointError(
                f"{name} has a zero point other than {2 ** (self.bits - 1)}, but config.json has sym true",
                remedy="take both files from one checkpoint",
            )

    def _check_groups(self, name: str, columns: int, found: Tensor) -> None:
        """Check that every group has its number of columns."""
        size = self.group or columns
        groups = columns // size
        if bool((found < 0).any()) or bool((found >= groups).any()):
            raise CheckpointError(
                f"{name} names a group beyond 0 to {groups - 1}", remedy="take both files from one checkpoint"
            )
        counts = torch.bincount(found, minlength=groups)
        if bool((counts != size).any()):
            group = int((counts != size).nonzero()[0])
            raise CheckpointError(
                f"{name} gives group {group} {int(counts[group])} columns, but config.json implies {size}",
                remedy="take both files from one checkpoint",
            )

    def codes(self, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> Codes:
        stored = unpack(tensors["qweight"].T, self.bits)  # [M, K]
        order = _order(tensors.get("g_idx"))
        if order is not None:
            stored = stored[:, order.long()]
        codes = subtract_zeros(stored, self._zeros(tensors), self.bits)
        scales = tensors["scales"].T.contiguous()
        return Codes(codes, scales, self.group or shape[1], self.coding, order=order)

    def _zeros(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the zero points, [M, G] int16."""
        return unpack(tensors["qzeros"], self.bits).T.to(torch.int16) + int(self.less_one)


def _order(groups: Tensor | None) -> Tensor | None:
    """Return the columns [K] int32 group by group, of the group of each; None if they lie so."""
    if groups is None or bool((groups.diff() >= 0).all()):
        return None
    return groups.argsort(stable=True).to(torch.int32)


def read_gptq(read: ConfigReader, naming: Naming) -> Quantisation:
    """Return the scheme of a `quantization_config` of GPTQ.

    Args:
        read: The config.
        naming: How the checkpoint names modules.

    Raises:
        CheckpointError: A key has a value that is not supported.
    """
    if read.take("dynamic"):
        raise read.error("dynamic", "settings of single modules are not supported; it must be empty")
    read.choice("is_marlin_format", (False,), False)
    read.choice("pack_dtype", ("int32",), "int32")
    read.choice("method", ("gptq",), "gptq")
    read.choice("block_name_to_quantize", (naming.stored_layers, None), None)
    check_auto_round(read, naming)
    layout = read.choice("checkpoint_format", (V1, V2), read.choice("format", (V1, V2), V1))
    group = read_group(read, "group_size")
    found = GPTQFormat(
        read.choice("bits", (4, 8)),
        group,
        read.flag("sym", default=True),
        layout == V1,
        act_order=read.flag("desc_act", if_null=False) and group is not None,
    )
    head = SchemeRule(
        exactly([naming.stored_module(HEAD)]), found if read.flag("lm_head", if_null=False) else None
    )
    return Quantisation("gptq", (head, SchemeRule(_modules(read), found)))


def _modules(read: ConfigReader) -> str:
    """Return the pattern of the quantised modules: of all, or of those whose ends of names are listed."""
    key = "modules_in_block_to_quantize"
    lists = read.take(key)
    if lists is None:
        return ""
    if not isinstance(lists, list) or not all(isinstance(names, list) for names in lists):
        raise read.error(key, "it must be a list of lists of names or null")
    names = [name for names in lists for name in names]
    if not names or not all(isinstance(name, str) and name for name in names):
        raise read.error(key, "it must be a list of lists of names or null")
    return rf".*\.(?:{'|'.join(re.escape(name) for name in names)})\Z"
