"""The losses of target, early exit and draft, as gradients with respect to the logits."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

METRICS = ("nats", "exit_nats", "overlap", "agreement")  # of `LogitGradients.metrics`, in order


class LogitGradients(NamedTuple):
    """Gradients with respect to the logits, and metrics of the same positions.

    Attributes:
        target: Gradient of the target's cross-entropy, [N, V].
        exit: Gradient of the early exit's cross-entropy, [N, V], if there is one.
        draft: Gradient of the draft's KL divergence, [N, V], if the draft takes part.
        metrics: Sums over positions, [4]: nats of the target, nats of the early exit, sum of min(p, q), and
            positions where target and draft have the same argmax.
    """

    target: Tensor
    exit: Tensor | None
    draft: Tensor | None
    metrics: Tensor


def logit_gradients(
    target: Tensor, early_exit: Tensor | None, draft: Tensor | None, labels: Tensor, weights: Tensor
) -> LogitGradients:
    """Return the gradients of cross-entropy (target, early exit) and of KL(target || draft).

    The gradients are written out because all of them need the target's softmax, which autograd would compute
    and keep up to three times.

    Args:
        target: Logits of the target, [N, V].
        early_exit: Logits of the early exit, [N, V].
        draft: Logits of the draft, [N, V].
        labels: Next tokens, [N].
        weights: The weight of a position (1 / positions of the batch), and that of the early-exit loss, [2].
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
