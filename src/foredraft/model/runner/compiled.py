"""The position-wise parts of a layer, compiled by torch.compile.

Contract: torch.compile fuses the operators between a layer's products into a few kernels. Rows are padded and
cut to the `RowSpan` outside the compiled code, so each part compiles once for any number of rows and once for
a single row: at loading and at the start of the first text, and not again. Fused kernels round differently
from the operators that they replace, so the self-check confirms shapes with the same compiled parts that
passes run.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib.util import find_spec
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.errors import ConfigError, Option
from foredraft.model.decoder import EAGER_PARTS, Attention, Layer, LayerParts
from foredraft.model.layers import RowSpan
from foredraft.model.spec import ModelSpec


def check_compiler(device: torch.device) -> None:
    """Check that torch.compile works on a device.

    Raises:
        ConfigError: torch.compile finds no compiler.
    """
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
    """Return parts of a layer that compile themselves when they first run."""
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
    """Return the rows of x in pieces, cut and padded to row counts within the span."""
    pieces = [x] if span is None else list(torch.split(x, span.high))
    if span is not None:
        rows = pieces[-1].shape[0]
        pieces[-1] = F.pad(pieces[-1], (0, 0, 0, span.padded(rows) - rows))
    for piece in pieces:
        if piece.shape[0] > 1:
            torch._dynamo.mark_dynamic(piece, 0)
    return pieces


def _joined(pieces: list[Tensor], rows: int) -> Tensor:
    """Return the pieces as one tensor of `rows` rows, without the padding."""
    whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return whole[:rows]
