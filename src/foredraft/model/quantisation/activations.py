"""Activation formats: how a quantised model rounds the inputs of its linear layers.

Each row has one scale, or one for every `GROUP` columns, taken from the largest value there. So a token's
result does not depend on its neighbours. The values stay in their dtype, in which every step is rounded. That
is how compressed-tensors defines it (`calculate_qparams` and `fake_quantize` in
https://github.com/vllm-project/compressed-tensors/tree/main/src/compressed_tensors/quantization); vLLM's
kernels divide by 127 in float32 instead.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

__all__ = ["ActivationFormat"]

GROUP = 128  # columns that share a scale, where not all do


class ActivationFormat(IntEnum):
    """The numbers that inputs become; the values are those of kernels.c."""

    INT8 = 1  # integers from -128 to 127
    FP8 = 2  # float8_e4m3fn
    FP8_GROUPS = 3  # the same, by groups of columns

    def __str__(self) -> str:
        numbers = "8 bits" if self is ActivationFormat.INT8 else "FP8"
        shares = f"groups of {GROUP}" if self is ActivationFormat.FP8_GROUPS else "token"
        return f"activations in {numbers} by {shares}"

    def holds(self, columns: int) -> bool:
        """Return whether rows of so many columns can be rounded: they need whole groups."""
        return self is not ActivationFormat.FP8_GROUPS or columns % GROUP == 0

    def rounded(self, x: Tensor) -> Tensor:
        """Return what the numbers of x [..., K] stand for; the definition of the kernels' rounding."""
        if torch.compiler.is_compiling():  # its code rounds at the end only
            traced: Tensor = torch.ops.foredraft.rounded_inputs(x, int(self))
            return traced
        return _rounded(x, self)


def _rounded(x: Tensor, format: int) -> Tensor:
    if format == ActivationFormat.FP8_GROUPS:
        grouped = x.reshape(*x.shape[:-1], x.shape[-1] // GROUP, GROUP)
        return _rounded(grouped, ActivationFormat.FP8).flatten(-2)
    integers = format == ActivationFormat.INT8
    scales = x.abs().amax(-1, keepdim=True)
    # divided by a tensor: a number might be inverted first
    scales = scales / torch.full_like(scales, 127.5 if integers else 448)
    scales = torch.where(scales == 0, torch.finfo(x.dtype).eps, scales)
    shares = x / scales
    if integers:
        return shares.clamp(-128, 127).round() * scales
    return shares.clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) * scales


_library: Any = torch.library.Library("foredraft", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("rounded_inputs(Tensor x, int format) -> Tensor")
_library.impl("rounded_inputs", _rounded, "CompositeExplicitAutograd")
torch.library.register_fake("foredraft::rounded_inputs", lambda x, format: torch.empty_like(x), lib=_library)
