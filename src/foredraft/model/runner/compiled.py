"""A layer's steps, compiled by torch.compile.

Contract: what lies between a layer's products becomes a few fused kernels. The row counts of the `RowSpan`
are kept here, outside of what is compiled, so that each step is compiled for any number of rows and once more
for a single one: compiling happens at loading and at the beginning of the first text, and not again. Fused
kernels round otherwise than the operators that they stand for, so the self-check's confirmation and every
pass that it speaks for run the same steps.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.errors import ConfigError
from foredraft.model.decoder import STEPS, Attention, Layer, Steps
from foredraft.model.layers import RowSpan
from foredraft.model.spec import ModelSpec


def check_compiler(device: torch.device) -> None:
    """Raises ConfigError where nothing can be compiled for this device."""
    try:
        if device.type == "cpu":  # looked for, because a result that was cached needs none
            import torch._inductor.cpp_builder

            torch._inductor.cpp_builder.get_cpp_compiler()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler warns of itself; where warnings are errors, too
            torch.compile(lambda x: x * 2 + 1)(torch.ones(32, device=device))
    except Exception as error:
        needed = "Triton" if device.type == "cuda" else "a C++ compiler such as g++ (CXX may name it)"
        reason = next(filter(None, map(str.strip, str(error).splitlines())), type(error).__name__)
        raise ConfigError(
            f"compile is on, but PyTorch cannot compile here ({reason}); install {needed}, or leave it out"
        ) from error


def compiled_steps() -> Steps:
    """Steps that compile themselves when they first run."""
    projecting, finishing = _compiled(STEPS.project), _compiled(STEPS.finish)

    def project(spec: ModelSpec, weights: Attention, x: Tensor, span: RowSpan | None) -> Tensor:
        return _joined([projecting(spec, weights, rows, None) for rows in _pieces(x, span)], x.shape[0])

    def finish(
        spec: ModelSpec, layer: Layer, x: Tensor, attended: Tensor | None, mlp: bool, span: RowSpan | None
    ) -> Tensor:
        pieces = _pieces(x, span)
        others = [None] * len(pieces) if attended is None else _pieces(attended, span)
        done = [finishing(spec, layer, *rows, mlp, None) for rows in zip(pieces, others, strict=True)]
        return _joined(done, x.shape[0])

    return Steps(project, finish)


def _compiled(step: Any) -> Callable[..., Tensor]:
    """`fullgraph` makes an error of what would otherwise quietly run uncompiled, to other bits."""
    # code of its own: compiled versions are kept with the code object, and other models have other shapes
    code: Any = step.__code__
    own = FunctionType(code.replace(), step.__globals__, step.__name__)
    return torch.compile(own, fullgraph=True, dynamic=False)


def _pieces(x: Tensor, span: RowSpan | None) -> list[Tensor]:
    """The rows of x, cut and padded to what products may see."""
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
