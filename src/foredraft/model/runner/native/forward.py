"""A stretch of a forward by the kernels.

Contract: as the runner's own of the same job, but that only the real columns are computed, whatever their
number.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foredraft.model.device import upload
from foredraft.model.runner.body import Forward
from foredraft.model.runner.job import Job
from foredraft.model.runner.native.passes import NativePasses

__all__ = ["stretch"]


def stretch(native: NativePasses, job: Job, hidden: Tensor | None, start: int, at: Tensor | None) -> Forward:
    """The job's pass from layer `start` on, which `hidden` [B, T, D] enters; without it, the tokens enter."""
    batch, width = job.tokens.shape
    job.check(width)
    rows = enumerate(zip(job.starts, job.real, strict=True), start=job.first_row)
    columns = [(row, start + some.start, len(some)) for row, (start, some) in rows if some]
    count = sum(own for _, _, own in columns)
    real = None
    if count < batch * width:
        indices = [b * width + t for b, some in enumerate(job.real) for t in some]
        real = upload(indices, job.tokens.device)

    def spread(computed: Tensor) -> Tensor:
        """[N, ...] -> [B, T, ...]"""
        if real is None:
            return computed.view(batch, width, -1)
        grid = computed.new_zeros(batch * width, computed.shape[-1])
        return grid.index_copy_(0, real, computed).view(batch, width, -1)

    tokens: Tensor | None = None
    if hidden is None:
        flat = job.tokens.flatten().contiguous()
        tokens = flat if real is None else flat[real]
        x = native.states(count)
    else:
        x = hidden.reshape(batch * width, -1)  # [B * T, D]
        x = x.clone() if real is None else x[real]
    kept: dict[int, Tensor] = {}
    logits: Tensor | None = None
    for depth in sorted({*job.taps, job.stop}):
        head = job.head and at is None and depth == job.stop
        logits = native.forward(tokens, x, job.cache, columns, job.plan, start, depth, head=head)
        start, tokens = depth, None
        if depth in job.taps:
            kept[depth] = spread(x.clone())
    out = spread(x)
    if logits is not None:
        logits = spread(logits)
    elif job.head:
        logits = native.head(out[torch.arange(batch), at])[:, None]
    return Forward(logits, out, kept)
