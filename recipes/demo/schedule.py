"""Decide batch size, learning rate, layer dropout and early exit of a step, and when a run ends.

Layer dropout and the rotating early exit follow LayerSkip, arXiv:2404.16710, in a mild form.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from .config import TrainingConfig

# (steps so far, seconds of training so far) -> fraction of the run that has passed; the run ends at 1
Schedule = Callable[[int, float], float]


class Progress(NamedTuple):
    """The steps before this one, and the share of the run that has passed."""

    step: int
    fraction: float


@dataclass(frozen=True)
class ByDeadline:
    """Measure progress in time: seconds of training over those plus the seconds left until the deadline."""

    deadline: float  # seconds since the epoch

    def __call__(self, step: int, elapsed: float) -> float:
        left = self.deadline - time.time()
        return 1.0 if left <= 0 else elapsed / (elapsed + left)


def batch_blocks(config: TrainingConfig, progress: Progress) -> int:
    """Return the number of blocks of this step."""
    return [blocks for start, blocks in config.batch_blocks if progress.fraction >= start][-1]


def lr_scale(config: TrainingConfig, progress: Progress) -> float:
    """Return the share of the peak learning rate: linear warm-up, plateau, linear decay to zero."""
    warmup = min(1.0, (progress.step + 1) / config.warmup_steps)
    return warmup * min(1.0, max(0.0, (1 - progress.fraction) / max(1e-9, 1 - config.decay_from)))


def dropped_sublayers(config: TrainingConfig, progress: Progress, block: int) -> frozenset[int]:
    """Draw the sub-layers that a pass leaves out, more of the deep ones (LayerSkip, equation 1)."""
    draw = random.Random(f"{config.seed}:{progress.step}:{block}")
    depth = max(1, config.target.layers - 1)
    return frozenset(
        sublayer
        for sublayer in range(2 * config.target.layers)
        if draw.random() < config.layer_dropout * (math.exp((sublayer // 2) * math.log(2) / depth) - 1)
    )


def early_exit_layer(config: TrainingConfig, progress: Progress, block: int) -> int:
    """Return the layer whose early exit a pass trains. The layers take turns, the last one excepted."""
    depth = config.target.layers
    lowest = max(1, depth // 8)
    return lowest + (progress.step * 7 + block * 5) % max(1, depth - lowest)
