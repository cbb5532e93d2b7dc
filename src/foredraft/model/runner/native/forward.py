"""A range of layers of one forward, run by the C kernels.

Contract: the results are those of `Runner._run_layers` for the same job. The kernels compute the real columns
of a ragged batch only, however few they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foredraft.model.device import upload
from foredraft.model.runner.body import Forward
from foredraft.model.runner.job import Job
from foredraft.model.runner.native.passes import NativePasses

__all__ = ["run_layers"]


def run_layers(
    native: NativePasses, job: Job, hidden: Tensor | None, start: int, at: Tensor | None
) -> Forward:
    """Run layers [start, job.stop) of a job.

    Args:
        native: The kernels' passes of the decoder.
        job: The forward.
        hidden: States entering layer `start`, [B, T, D]; None embeds the job's tokens.
        start: The first layer.
        at: The column of each row whose logits are wanted, [B]; None wants all columns.
    """
    batch, width = job.tokens.shape
    job.check(width)
    rows = enumerate(zip(job.starts, job.real, strict=True), start=job.first_row)
    groups = [(row, start_ + real.start, len(real)) for row, (start_, real) in rows if real]
    count = sum(columns for _, _, columns in groups)
    indices = None if count == batch * width else job.real_columns(width)
    real = None if indices is None else upload(indices, job.tokens.device)

    def scatter(computed: Tensor) -> Tensor:
        """[N, ...] -> [B, T, ...]"""
        if real is None:
            return computed.view(batch, width, -1)
        grid = computed.new_zeros(batch * width, computed.shape[-1])
        return grid.index_copy_(0, real, computed).view(batch, width, -1)

    tokens: Tensor | None = None
    if hidden is None:
        flat = job.tokens.flatten().contiguous()
        tokens = flat if real is None else flat[real]
        x = native.new_states(count)
    else:
        x = hidden.reshape(batch * width, -1)  # [B * T, D]
        x = x.clone() if real is None else x[real]
    taps: dict[int, Tensor] = {}
    logits: Tensor | None = None
    for depth in sorted({*job.taps, job.stop}):
        head = job.head and at is None and depth == job.stop
        logits = native.forward(tokens, x, job.cache, groups, job.plan, start, depth, head=head)
        start, tokens = depth, None
        if depth in job.taps:
            taps[depth] = scatter(x.clone())
    out = scatter(x)
    if logits is not None:
        logits = scatter(logits)
    elif job.head:
        logits = native.head(out[torch.arange(batch), at])[:, None]
    return Forward(logits, out, taps)
