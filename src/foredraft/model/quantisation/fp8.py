"""FP8 by block: float8_e4m3fn weights, one scale for 128 x 128, as in DeepSeek-V3 (arXiv:2412.19437).

A weight is q · s: `weight` holds q, `weight_scale_inv` holds s, whose last blocks may be smaller. The
definition is that of transformers (https://github.com/huggingface/transformers,
`integrations/finegrained_fp8.py`).

Only the weights are as the method defines them. The method also rounds activations to FP8, with a scale for
128 values of a row; Foredraft keeps activations in the model's dtype, which is more exact, and another
model. The scheme's `note` says so. Static scales of activations are refused, and so are weights with one
scale: their method takes the activations' scale from all rows of a pass, so a token's result would depend
on its neighbours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from foredraft.model.config import ConfigReader
from foredraft.model.quantisation.codes import Codes, Coding
from foredraft.model.quantisation.scheme import SCALES, Part, Quantisation, SchemeRule, exactly, read_names
from foredraft.model.tensor_names import HEAD, LINEAR, Naming

__all__ = ["BLOCK", "HARMLESS", "FP8BlockFormat", "read_fp8"]

HARMLESS = frozenset({"dequantize"})  # says how a library runs the weights
BLOCK = 128  # rows and columns of a block
NOTE = "activations stay in the model's dtype; the method's authors round them to FP8 too"


@dataclass(frozen=True, slots=True)
class FP8BlockFormat:
    """The format of FP8 weights by block.

    Attributes:
        scales: The suffix of the tensor of scales.
    """

    scales: str = "weight_scale_inv"
    by_rows: ClassVar[bool] = False

    def __str__(self) -> str:
        return f"FP8 in blocks of {BLOCK} x {BLOCK}"

    @property
    def coding(self) -> Coding:
        return Coding(8, float8=True)

    def parts(self, module: str, shape: tuple[int, int]) -> dict[str, Part]:
        rows, columns = shape
        blocks = -(-rows // BLOCK), -(-columns // BLOCK)
        return {"weight": Part(shape, ("F8_E4M3",)), self.scales: Part(blocks, SCALES)}

    def check(self, module: str, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> None:
        return None

    def codes(self, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> Codes:
        scales = tensors[self.scales].repeat_interleave(BLOCK, dim=0)[: shape[0]]
        return Codes(tensors["weight"], scales, BLOCK, self.coding)


def read_fp8(read: ConfigReader, naming: Naming) -> Quantisation:
    """Return the scheme of a `quantization_config` of FP8.

    Args:
        read: The config.
        naming: How the checkpoint names modules.

    Raises:
        CheckpointError: A key has a value that is not supported.
    """
    if read.take("activation_scheme", "dynamic") != "dynamic":
        raise read.error("activation_scheme", "fixed scales of activations are not supported")
    block = read.take("weight_block_size")
    if block is None:
        raise read.error(
            "weight_block_size",
            "without blocks, activations have one scale in a pass, so a token would depend on its neighbours",
        )
    if block != [BLOCK, BLOCK]:
        raise read.error("weight_block_size", f"only {[BLOCK, BLOCK]} is supported")
    read.choice("fmt", ("e4m3",), "e4m3")
    read.choice("scale_fmt", ("float",), "float")
    read.choice("expert_dtype", ("fp8",), "fp8")
    if read.take("modules_to_convert"):
        raise read.error("modules_to_convert", "it must be empty")
    lists = [key for key in ("modules_to_not_convert", "ignored_layers") if read.take(key) is not None]
    if len(lists) == 2:
        raise read.error("ignored_layers", "keep modules_to_not_convert alone")
    # transformers leaves the head alone unless a list is given
    kept = [re.escape(name) for key in lists for name in read_names(read, key)]
    pattern = rf"(?:.*\.)?(?:{'|'.join(kept)})(?:\.|\Z)" if kept else exactly([naming.stored_module(HEAD)])
    rules = [] if lists and not kept else [SchemeRule(pattern, None)]
    blocks = SchemeRule("", FP8BlockFormat(), layer_class=LINEAR)
    return Quantisation("fp8", (*rules, blocks), NOTE, float32_scales=True)
