"""Chunks: the student's logits are compared with the target's a few positions at a time.

The logits of all positions are far larger than anything else in a step: with 128,256 words, 4,096 positions
take 2.1 GB in float32, several times over. So the head, the comparison and their backward pass run on `CHUNK`
positions, whose logits are dropped before the next ones are made. Only the gradients of what goes in are
kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["CHUNK", "Compare", "Rows", "by_chunks"]

CHUNK = 256  # positions: few enough for a processor's caches, and enough that products are efficient
Rows = slice | Tensor  # some of the predictions
# (logits of predictions, which ones) -> float32 [2]: the loss, and a figure without gradient
Compare = Callable[[Tensor, Rows], Tensor]


def by_chunks(compare: Callable[[Tensor, slice], Tensor], x: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Return the sum of `compare` over all chunks of x, [2]; its first value has a gradient.

    Args:
        compare: Given a chunk of x and its positions, returns a loss and a figure, [2].
        x: [M, hidden].
        parameters: The other tensors that the loss depends on.
    """
    found: Tensor = _ByChunks.apply(compare, x, *parameters)  # type: ignore[no-untyped-call]
    return found


class _ByChunks(torch.autograd.Function):
    """The gradients are computed with the loss, while its logits are there."""

    @staticmethod
    def forward(
        ctx: Any, compare: Callable[[Tensor, slice], Tensor], x: Tensor, *parameters: Tensor
    ) -> Tensor:
        learned = [
            value for value, needed in zip(parameters, ctx.needs_input_grad[2:], strict=True) if needed
        ]
        sums = torch.zeros(2, device=x.device)
        of_x, of_learned = torch.zeros_like(x), [torch.zeros_like(value) for value in learned]
        for first in range(0, len(x), CHUNK):
            rows = slice(first, first + CHUNK)
            with torch.enable_grad():
                part = x[rows].detach().requires_grad_()
                own = compare(part, rows)
                of_x[rows], *gradients = torch.autograd.grad(own[0], [part, *learned])
            for sum_, gradient in zip(of_learned, gradients, strict=True):
                sum_ += gradient
            sums += own.detach()
        ctx.save_for_backward(of_x, *of_learned)
        return sums

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> Any:
        scale = given[0][0]  # of the loss
        of_x, *of_learned = (gradient * scale.to(gradient.dtype) for gradient in ctx.saved_tensors)
        rest = iter(of_learned)
        return None, of_x, *(next(rest) if needed else None for needed in ctx.needs_input_grad[2:])
