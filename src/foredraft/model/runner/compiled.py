"""Layers laid out for speed: the position-wise parts compiled by torch.compile, weights packed once for
oneDNN.

Rows are padded and cut to the `RowSpan` outside the compiled code, so each part compiles once for any number
of rows and once for a single row. Fused kernels round differently, so the self-check confirms shapes with the
compiled parts. `pack` returns a product that equals `F.linear` up to rounding, and keeps no ordinary weight;
where oneDNN fails a trial, and on other devices, it is an ordinary product.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.errors import ConfigError, Option
from foredraft.model.decoder import EAGER_PARTS, Attention, Layer, LayerParts
from foredraft.model.layers import Linear, Product, RowSpan
from foredraft.model.spec import ModelSpec

logger = logging.getLogger(__name__)


def check_compiler(device: torch.device) -> None:
    try:
        if device.type == "cpu":  # asked for by name, because a cached result compiles without a compiler
            import torch._inductor.cpp_builder

            torch._inductor.cpp_builder.get_cpp_compiler()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler's own warnings, even where warnings are errors
            torch.compile(lambda x: x * 2 + 1)(torch.ones(32, device=device))
    except Exception as error:
        needed = "a C++ compiler such as g++ (CXX may name it)"
        reason = next(filter(None, map(str.strip, str(error).splitlines())), type(error).__name__)
        if device.type == "cuda":  # Triton itself compiles its launchers by a C compiler
            has_triton = find_spec("triton") is not None
            needed = "a C compiler such as gcc (CC may name it)" if has_triton else "Triton"
        raise ConfigError(
            option="compile",
            problem=f"needs a working compiler, but PyTorch cannot compile here ({reason})",
            remedy=(f"install {needed}, or leave out ", Option("compile")),
        ) from error


def compiled_parts() -> LayerParts:
    compiled_project, compiled_finish = _compiled(EAGER_PARTS.project), _compiled(EAGER_PARTS.finish)

    def project(spec: ModelSpec, weights: Attention, x: Tensor, span: RowSpan | None) -> Tensor:
        return _joined([compiled_project(spec, weights, rows, None) for rows in _pieces(x, span)], x.shape[0])

    def finish(
        spec: ModelSpec,
        layer: Layer,
        x: Tensor,
        attended: Tensor | None,
        mlp: bool,
        span: RowSpan | None,
        given: Tensor | None = None,
    ) -> Tensor:
        pieces = _pieces(x, span)
        others = ([None] * len(pieces) if part is None else _pieces(part, span) for part in (attended, given))
        parts = zip(pieces, *others, strict=True)
        done = [compiled_finish(spec, layer, own, heads, mlp, None, input) for own, heads, input in parts]
        return _joined(done, x.shape[0])

    return LayerParts(project, finish)


def _compiled(part: Any) -> Callable[..., Tensor]:
    """Return a compiled copy of a part; it raises an error where it would run uncompiled, to other bits."""
    # torch.compile keeps its results with the code object; a copy keeps models of other shapes apart
    code: Any = part.__code__
    copy = FunctionType(code.replace(), part.__globals__, part.__name__)
    return torch.compile(copy, fullgraph=True, dynamic=False)


def _pieces(x: Tensor, span: RowSpan | None) -> list[Tensor]:
    pieces = [x] if span is None else list(torch.split(x, span.high))
    if span is not None:
        rows = pieces[-1].shape[0]
        pieces[-1] = F.pad(pieces[-1], (0, 0, 0, span.padded(rows) - rows))
    for piece in pieces:
        if piece.shape[0] > 1:
            torch._dynamo.mark_dynamic(piece, 0)
    return pieces


def _joined(pieces: list[Tensor], rows: int) -> Tensor:
    whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return whole[:rows]


ROWS_HINT = 16  # rows of x that oneDNN chooses the layout for: a verifying pass of a draft


@dataclass(frozen=True, slots=True)
class PackedLinear(Linear):
    """A product whose weight lies in a layout that only oneDNN reads."""

    def __call__(self, x: Tensor) -> Tensor:
        x = x if self.inputs is None else self.inputs.rounded(x)
        if torch.compiler.is_compiling():
            traced: Tensor = torch.ops.foredraft.packed_linear(x, self.weight, self.bias)
            return traced
        return _linear(x, self.weight, self.bias)

    def dense(self) -> Tensor:
        return self.weight.to_dense()


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


# An operator for torch.compile, which lowers oneDNN's own operator only with weights that it packed itself.
_library: Any = torch.library.Library("foredraft", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("packed_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_library.impl("packed_linear", _linear, "CompositeExplicitAutograd")
torch.library.register_fake(
    "foredraft::packed_linear", lambda x, weight, bias: x.new_empty(x.shape[0], weight.shape[0]), lib=_library
)


def _packed(weight: Tensor) -> Tensor:
    out: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_HINT)
    return out


def unpacked_because(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why `pack` gives ordinary products; None where it packs."""
    return _fault(dtype) if device.type == "cpu" else "not on a CPU"


def pack(weight: Tensor, bias: Tensor | None = None) -> Product:
    """Return the fastest product with a weight [M, K] and a bias [M]."""
    if unpacked_because(weight.device, weight.dtype) is None:
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
