"""Weights packed once for oneDNN's matrix products, on CPUs.

Contract: `pack` returns a product that equals `F.linear` up to rounding, and does not keep the ordinary
weight. The packed layout suits the CPU's matrix units at the few rows of a decoding pass, where `F.linear`
reorders or streams the weight in every call. On other devices, and where oneDNN's operators are missing or
fail a trial, `pack` returns an ordinary product.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foredraft.model.layers import Linear, Product

logger = logging.getLogger(__name__)

ROWS_HINT = 16  # rows of x that oneDNN chooses the layout for: a verifying pass of a draft


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """The product with a packed weight.

    Attributes:
        weight: [M, K] in a layout that only oneDNN reads.
        bias: [M], or None.
    """

    weight: Tensor
    bias: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(M, K) of the weight."""
        rows, columns = self.weight.shape
        return rows, columns

    def __call__(self, x: Tensor) -> Tensor:
        """Return x [N, K] times the weight, plus the bias: [N, M]."""
        if torch.compiler.is_compiling():
            traced: Tensor = torch.ops.foredraft.packed_linear(x, self.weight, self.bias)
            return traced
        return _linear(x, self.weight, self.bias)

    def dense(self) -> Tensor:
        """Return the weight as an ordinary tensor [M, K], a copy."""
        return self.weight.to_dense()


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


# An operator for torch.compile, whose lowering of oneDNN's own operator takes only weights that it packed
# itself.
_library: Any = torch.library.Library("foredraft", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("packed_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_library.impl("packed_linear", _linear, "CompositeExplicitAutograd")
torch.library.register_fake(
    "foredraft::packed_linear",
    lambda x, weight, bias: x.new_empty(x.shape[0], weight.shape[0]),
    lib=_library,
)


def _packed(weight: Tensor) -> Tensor:
    out: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_HINT)
    return out


def packs(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether `pack` copies a weight of this device and dtype, so that the weight can be freed."""
    return unpacked_because(device, dtype) is None


def unpacked_because(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why `pack` gives ordinary products; None where it packs."""
    return _fault(dtype) if device.type == "cpu" else "not on a CPU"


def pack(weight: Tensor, bias: Tensor | None = None) -> Product:
    """Return the fastest product with a weight [M, K] and a bias [M]."""
    if packs(weight.device, weight.dtype):
        return PackedLinear(_packed(weight.contiguous()), bias)
    return Linear(weight, bias)


@functools.cache
def _fault(dtype: torch.dtype) -> str | None:
    """Return why packed products of this dtype fail a trial on this machine; None where they work."""
    try:
        weight = torch.linspace(-1, 1, 32 * 64).view(32, 64).to(dtype)
        x = torch.linspace(-1, 1, 4 * 64).view(4, 64).to(dtype)
        got = _linear(x, _packed(weight), None).float()
    except (AttributeError, RuntimeError, NotImplementedError) as error:
        return str(error).splitlines()[0]
    # sums of 64 terms below 1, rounded to dtype
    if torch.allclose(got, x.float() @ weight.float().T, rtol=0.02, atol=0.02):
        return None
    logger.warning("packed products of %s are wrong on this machine; ordinary products run instead", dtype)
    return "packed products are wrong on this machine"
