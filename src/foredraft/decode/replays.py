"""Replays: functions of a round's tensors, on a GPU as CUDA graphs where they recur.

Sampling and acceptance are some hundred small operators, each of which takes longer to launch than to run. A
graph is one launch. What is large takes longer to run than to launch, and stays as it is: a graph keeps its
inputs and results for good.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import torch
from torch import Tensor

from foredraft.decode.noise import Noise
from foredraft.model.runner.graphs import CudaGraphCapturer, Graphs

__all__ = ["ONCE", "Replays"]

MOST_BYTES: Final = 2**23  # of the largest tensor of what is captured
MOST_GRAPHS: Final = 16  # each keeps a few such tensors; together at most `graphs.KEPT_BYTES`

In = TypeVar("In")
Out = TypeVar("Out")


class Replays:
    """The graphs of one engine.

    Args:
        graphs: Captures functions; None runs all as they are.
    """

    def __init__(self, graphs: Graphs | None = None) -> None:
        self.graphs = graphs

    @classmethod
    def on(cls, device: torch.device) -> Replays:
        """Return replays on a device."""
        return cls(Graphs(CudaGraphCapturer(device), MOST_GRAPHS) if device.type == "cuda" else None)

    def run(self, compute: Callable[[In], Out], inputs: In, largest: Tensor, noise: Noise) -> Out:
        """Return compute(inputs), by replaying a graph where that saves launches.

        Args:
            compute: A function of a module, which reads nothing but its inputs.
            inputs: A tree of tensors.
            largest: The largest of them.
            noise: What the function draws by, if it draws.
        """
        if self.graphs is None or largest.nbytes > MOST_BYTES or not noise.uses_gumbel_argmax:
            return compute(inputs)
        return self.graphs.run(compute, inputs, owner=self, key=compute)


ONCE: Final = Replays()  # runs all functions as they are
