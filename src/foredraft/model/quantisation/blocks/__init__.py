"""The block formats of ggml: what the bytes of a block of a GGUF file's tensor stand for.

bits.py      numbers of a few bits in bytes
plain.py     blocks with scales of their own, which stand beside the codes
nested.py    the K-quants and IQ4_XS: integer scales in steps that 256 values share
grids.py     IQ1, IQ2 and IQ3: a number names several codes at once, those of a point of a grid

`BLOCKS` is the table of all. In float32 an expanded weight has the bits of `gguf.quants.dequantize`. In
another dtype one without offsets was rounded once; a difference is rounded to float32 first.

Formats: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h,
https://github.com/ggml-org/ggml/blob/master/src/ggml-quants.c and
https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/quants.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from foredraft.model.quantisation.blocks import grids, nested, plain
from foredraft.model.quantisation.codes import Codes, Coding

__all__ = ["BLOCKS", "BlockFormat"]


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """A block format.

    Attributes:
        values: Of a block.
        size: Its bytes.
        unpack: Blocks [B, size] of uint8 -> the weight of (rows, columns), B * values in all.
        coding: How the kernels keep it; None where they do not, and the weight is expanded.
    """

    values: int
    size: int
    unpack: Callable[[Tensor, int, int], Codes]
    coding: Coding | None = None


BLOCKS: dict[str, BlockFormat] = {
    "Q4_0": BlockFormat(32, 18, plain.q4_0, plain.Q4_0),
    "Q4_1": BlockFormat(32, 20, plain.q4_1, plain.Q4_1),
    "Q5_0": BlockFormat(32, 22, plain.q5_0, plain.Q5_0),
    "Q5_1": BlockFormat(32, 24, plain.q5_1, plain.Q5_1),
    "Q8_0": BlockFormat(32, 34, plain.q8_0, plain.Q8_0),
    "Q2_K": BlockFormat(256, 84, nested.q2_k, nested.Q2_K),
    "Q3_K": BlockFormat(256, 110, nested.q3_k, nested.Q3_K),
    "Q4_K": BlockFormat(256, 144, nested.q4_k, nested.Q4_K),
    "Q5_K": BlockFormat(256, 176, nested.q5_k, nested.Q5_K),
    "Q6_K": BlockFormat(256, 210, nested.q6_k, nested.Q6_K),
    "IQ4_NL": BlockFormat(32, 18, plain.iq4_nl, plain.IQ4_NL),
    "IQ4_XS": BlockFormat(256, 136, nested.iq4_xs, nested.IQ4_XS),
    "MXFP4": BlockFormat(32, 17, plain.mxfp4, plain.MXFP4),
    "NVFP4": BlockFormat(64, 36, plain.nvfp4),
    "IQ1_S": BlockFormat(256, 50, grids.iq1_s),
    "IQ1_M": BlockFormat(256, 56, grids.iq1_m),
    "IQ2_XXS": BlockFormat(256, 66, grids.iq2_xxs),
    "IQ2_XS": BlockFormat(256, 74, grids.iq2_xs),
    "IQ2_S": BlockFormat(256, 82, grids.iq2_s),
    "IQ3_XXS": BlockFormat(256, 98, grids.iq3_xxs),
    "IQ3_S": BlockFormat(256, 110, grids.iq3_s),
    "TQ1_0": BlockFormat(256, 54, plain.tq1_0),
    "TQ2_0": BlockFormat(256, 66, plain.tq2_0),
    "Q1_0": BlockFormat(128, 18, plain.q1_0),
    "Q2_0": BlockFormat(64, 18, plain.q2_0),
}
