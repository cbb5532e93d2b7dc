"""The settings of a training run, and of the stages that made the demo models."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from .model import DRAFT, TARGET, ModelShape
from .optimiser import OptimiserConfig


@dataclass(frozen=True)
class TrainingConfig:
    """The settings that decide what a run computes. `schedule.py` decides when it ends.

    A *fraction* is the share of the run that has passed, from 0 to 1. A *block* is 1,024 tokens.
    """

    target: ModelShape = TARGET
    draft: ModelShape = DRAFT
    optimiser: OptimiserConfig = field(default_factory=OptimiserConfig)
    seed: int = 0  # of the weights, of the order of the data and of layer dropout
    # (fraction, blocks per step from there on). Small batches give more steps early in a run, where steps
    # count; later the noise of a small batch costs more.
    batch_blocks: tuple[tuple[float, int], ...] = ((0.0, 4),)
    sequence_length: int = 512  # tokens, a divisor of 1,024
    long_sequences_from: float = 2.0  # fraction after which sequences are 1,024 tokens long; 2 means never
    warmup_steps: int = 20  # over which the learning rate rises
    decay_from: float = 1.0  # fraction after which the learning rate falls linearly to zero
    layer_dropout: float = 0.1  # probability of leaving out a sub-layer of the last layer
    exit_loss_weight: float = 0.15  # of the early-exit loss; 0 turns it off
    train_draft: bool = True
    train_target: bool = True  # if not, the target still teaches the draft
    compile: bool = True  # the sub-layers and the loss


# The target grows in depth from stage to stage; `grow.py` makes the checkpoint that the next stage starts
# from. With a small budget a shallow model learns far more per second, and a deep model grown from it keeps
# what it learnt.
STAGES = {
    "2": TrainingConfig(
        target=replace(TARGET, layers=2),
        layer_dropout=0.0,
        exit_loss_weight=0.0,
        batch_blocks=((0.0, 2), (0.25, 4)),
        train_draft=False,
    ),
    "4": TrainingConfig(
        target=replace(TARGET, layers=4),
        layer_dropout=0.0,
        exit_loss_weight=0.0,
        train_draft=False,
        warmup_steps=5,
    ),
    "16": TrainingConfig(warmup_steps=8, decay_from=0.05, long_sequences_from=0.88, exit_loss_weight=0.1),
    "draft": TrainingConfig(
        optimiser=OptimiserConfig(matrix_lr=1.5e-3, vector_lr=1.5e-3),
        decay_from=0.0,
        long_sequences_from=0.88,
        exit_loss_weight=0.0,
        train_target=False,
    ),
}
