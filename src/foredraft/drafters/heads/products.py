"""The linear layers of a head, laid out as its target's are."""

from __future__ import annotations

from torch import Tensor

from foredraft.model.layers import Product
from foredraft.model.runner import Runner
from foredraft.model.runner.native import fits, pack_native
from foredraft.model.runner.packed import pack

__all__ = ["packed_beside"]


def packed_beside(target: Runner, weight: Tensor, bias: Tensor | None = None) -> Product:
    """Return a weight [out, in] as a product by the kernels where they run the target, else by operators."""
    if target.by_kernels and fits(weight.dtype, weight.shape[1]):
        return pack_native(weight, bias)
    return pack(weight, bias)
