"""The losses of target, early exit and draft, as gradients with respect to the logits."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

METRICS = ("nats", "exit_nats", "overlap", "agreement")  # of `LogitGradients.metrics`, in order


class LogitGradients(NamedTuple):
    """Gradients [N, V] of each model's loss, and the sums of `METRICS` over positions, [4]."""

    target: Tensor
    exit: Tensor | None
    draft: Tensor | None
    metrics: Tensor


def logit_gradients(
    target: Tensor, early_exit: Tensor | None, draft: Tensor | None, labels: Tensor, weights: Tensor
) -> LogitGradients:
    """Return the gradients of cross-entropy (target, early exit) and of KL(target || draft).

    They are written out because all need the target's softmax, which autograd would keep up to three times.
    Logits are [N, V], labels [N]; the weights are that of a position (1 / positions of the batch) and that of
    the early-exit loss.
    """
    weight, exit_weight = weights[0], weights[1]
    index = labels.unsqueeze(-1)  # [N, 1]
    one_hot = (torch.arange(target.shape[-1]) == index).float()  # [N, V]
    p = target.float().softmax(-1)
    zero = torch.zeros(())
    exit_nats, overlap, agreement, exit_gradient, draft_gradient = zero, zero, zero, None, None
    if early_exit is not None:
        r = early_exit.float().softmax(-1)
        exit_nats = -r.gather(-1, index).clamp_min(1e-20).log().sum()
        exit_gradient = ((r - one_hot) * (weight * exit_weight)).to(target.dtype)
    if draft is not None:
        q = draft.float().softmax(-1)
        overlap = torch.minimum(p, q).sum()
        agreement = (target.argmax(-1) == draft.argmax(-1)).float().sum()
        draft_gradient = ((q - p) * weight).to(target.dtype)
    nats = -p.gather(-1, index).clamp_min(1e-20).log().sum()
    target_gradient = ((p - one_hot) * weight).to(target.dtype)
    metrics = torch.stack([nats, exit_nats, overlap, agreement])
    return LogitGradients(target_gradient, exit_gradient, draft_gradient, metrics)
