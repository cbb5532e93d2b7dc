"""Products packed once for oneDNN, on CPUs.

Contract: `pack` returns a product equal to `F.linear` up to rounding, and frees the ordinary weight. A packed
weight is laid out for the CPU's matrix units once, at loading, where `F.linear` reorders or streams it badly
at the few rows of a decoding pass. Where the operators are missing (another device, another build) or fail a
try, the product stays ordinary.
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

ROWS_HINT = 16  # the row count that the layout is chosen for


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """The product on a weight that only oneDNN can read."""

    weight: Tensor  # [M, K], opaque
    bias: Tensor | None = None  # [M]

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.weight.shape
        return rows, columns

    def __call__(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            traced: Tensor = torch.ops.foredraft.packed_linear(x, self.weight, self.bias)
            return traced
        return _linear(x, self.weight, self.bias)

    def dense(self) -> Tensor:
        return self.weight.to_dense()


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


# For torch.compile, whose own lowering of the operator takes only weights that it packed itself.
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
    """Whether `pack` makes a copy of such a weight, so that the weight may go."""
    return unpacked_because(device, dtype) is None


def unpacked_because(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why products stay ordinary; None: they are packed."""
    return _fault(dtype) if device.type == "cpu" else "not on a CPU"


def pack(weight: Tensor, bias: Tensor | None = None) -> Product:
    """The fastest product on this weight."""
    if packs(weight.device, weight.dtype):
        return PackedLinear(_packed(weight.contiguous()), bias)
    return Linear(weight, bias)


@functools.cache
def _fault(dtype: torch.dtype) -> str | None:
    """What keeps packed products of this dtype from running here and computing what they should."""
    try:
        weight = torch.linspace(-1, 1, 32 * 64).view(32, 64).to(dtype)
        x = torch.linspace(-1, 1, 4 * 64).view(4, 64).to(dtype)
        got = _linear(x, _packed(weight), None).float()
    except (AttributeError, RuntimeError, NotImplementedError) as error:
        return str(error).splitlines()[0]
    # products of up to 64 terms below 1, rounded to dtype
    if torch.allclose(got, x.float() @ weight.float().T, rtol=0.02, atol=0.02):
        return None
    logger.warning("packed products of %s compute wrong values here; using ordinary ones", dtype)
    return "they compute wrong values"
