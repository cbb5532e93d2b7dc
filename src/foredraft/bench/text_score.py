"""How likely the target finds a text that a contender wrote."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from foredraft.doctor.teacher_forced import read_text
from foredraft.model.runner import Runner

__all__ = ["mean_log_probability"]


def mean_log_probability(runner: Runner, prompt: Sequence[int], tokens: Sequence[int]) -> float:
    """Return the mean of log p of new tokens after a prompt, at temperature 1, in nats.

    Args:
        runner: The target.
        prompt: Its token ids.
        tokens: The new ones.
    """
    read = read_text(runner, [*prompt, *tokens[:-1]], ())
    log_p = read.logits[len(prompt) - 1 :].log_softmax(-1)  # [len(tokens), V]
    places = torch.tensor(list(tokens), device=log_p.device)[:, None]
    return float(log_p.gather(1, places).mean())
