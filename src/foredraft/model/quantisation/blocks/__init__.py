"""The block formats of ggml: what the bytes of a block of a GGUF file's tensor stand for.

In float32 an expanded weight has the bits of `gguf.quants.dequantize`. In another dtype one without offsets
was rounded once; a difference is rounded to float32 first. Formats:
https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h,
https://github.com/ggml-org/ggml/blob/master/src/ggml-quants.c and
https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/quants.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from foredraft.model.quantisation.blocks import formats
from foredraft.model.quantisation.codes import CodeFormat, Codes

__all__ = ["BLOCKS", "BlockFormat"]


@dataclass(frozen=True, slots=True)
class BlockFormat:
    values: int  # of a block
    size: int  # its bytes
    unpack: Callable[[Tensor, int, int], Codes]  # blocks [B, size] uint8, rows, columns -> weight
    code_format: CodeFormat | None = None  # how the kernels keep it; None: it is expanded


BLOCKS: dict[str, BlockFormat] = {
    "Q4_0": BlockFormat(32, 18, formats.q4_0, formats.Q4_0),
    "Q4_1": BlockFormat(32, 20, formats.q4_1, formats.Q4_1),
    "Q5_0": BlockFormat(32, 22, formats.q5_0, formats.Q5_0),
    "Q5_1": BlockFormat(32, 24, formats.q5_1, formats.Q5_1),
    "Q8_0": BlockFormat(32, 34, formats.q8_0, formats.Q8_0),
    "Q2_K": BlockFormat(256, 84, formats.q2_k, formats.Q2_K),
    "Q3_K": BlockFormat(256, 110, formats.q3_k, formats.Q3_K),
    "Q4_K": BlockFormat(256, 144, formats.q4_k, formats.Q4_K),
    "Q5_K": BlockFormat(256, 176, formats.q5_k, formats.Q5_K),
    "Q6_K": BlockFormat(256, 210, formats.q6_k, formats.Q6_K),
    "IQ4_NL": BlockFormat(32, 18, formats.iq4_nl, formats.IQ4_NL),
    "IQ4_XS": BlockFormat(256, 136, formats.iq4_xs, formats.IQ4_XS),
    "MXFP4": BlockFormat(32, 17, formats.mxfp4, formats.MXFP4),
    "NVFP4": BlockFormat(64, 36, formats.nvfp4),
    "IQ1_S": BlockFormat(256, 50, formats.iq1_s),
    "IQ1_M": BlockFormat(256, 56, formats.iq1_m),
    "IQ2_XXS": BlockFormat(256, 66, formats.iq2_xxs),
    "IQ2_XS": BlockFormat(256, 74, formats.iq2_xs),
    "IQ2_S": BlockFormat(256, 82, formats.iq2_s),
    "IQ3_XXS": BlockFormat(256, 98, formats.iq3_xxs),
    "IQ3_S": BlockFormat(256, 110, formats.iq3_s),
    "TQ1_0": BlockFormat(256, 54, formats.tq1_0),
    "TQ2_0": BlockFormat(256, 66, formats.tq2_0),
    "Q1_0": BlockFormat(128, 18, formats.q1_0),
    "Q2_0": BlockFormat(64, 18, formats.q2_0),
}
