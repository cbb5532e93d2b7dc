"""One worker of a training run: both models, both optimisers, one step at a time, and checkpoints.

Every batch serves both models. The target learns by cross-entropy; the draft learns by KL divergence to the
target's distribution of the same pass, so distillation costs one small forward and backward pass.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .config import TrainingConfig
from .data import BLOCK, BlockStream
from .losses import METRICS, logit_gradients
from .model import Decoder
from .optimiser import Optimiser, Worker
from .schedule import Progress, batch_blocks, dropped_sublayers, early_exit_layer, lr_scale

CHECKPOINT = "checkpoint.pt"
BARRIER_TIMEOUT = 1200  # seconds; far above any step, save or evaluation, so only a dead worker exceeds it


@dataclass(frozen=True)
class SharedState:
    """The shared memory of the workers of one run.

    One single-threaded process per core that synchronises once per step keeps its speed on a busy machine.
    Threads synchronise in every operator and lose most of it.
    """

    weights: list[dict[str, Tensor]]  # of each model, by parameter name
    optimisers: list[dict[str, dict[str, Tensor]]]  # by attribute and parameter name
    gradients: list[list[dict[str, Tensor]]]  # by worker, then model, then parameter name
    metrics: Tensor  # by worker, [workers, 4]
    fraction: Tensor  # of the run that has passed, [1], which worker 0 sets
    barrier: Barrier

    def wait(self) -> None:
        """Wait until every worker has arrived here."""
        self.barrier.wait(BARRIER_TIMEOUT)


class ResumePoint(NamedTuple):
    """The counters that a spawned worker starts with."""

    step: int
    next_block: int  # position in the shuffled data
    elapsed: float  # seconds of training
    optimiser_steps: tuple[int, ...]  # updates so far of each optimiser


class Trainer:
    """Train both models on this worker's share of every batch."""

    def __init__(
        self, config: TrainingConfig, tokens: NDArray[np.uint16], worker: Worker | None = None
    ) -> None:
        worker = worker or Worker()
        self.config, self.worker = config, worker
        self.step, self.next_block, self.elapsed = 0, 0, 0.0
        self.stream = BlockStream(tokens, config.seed)
        self.target, self.draft = Decoder(config.target), Decoder(config.draft)
        self.models = (self.target, self.draft)
        for index, model in enumerate(self.models):
            model.initialise(config.seed + index)
        # The embeddings of target and draft go to different workers: the index serves as default rank.
        self.optimisers = [
            Optimiser(model, config.optimiser, worker, index) for index, model in enumerate(self.models)
        ]
        for model in self.models:
            model.bfloat16()
        self._logit_gradients = logit_gradients
        if config.compile:
            for model in self.models:
                model.compile_sublayers()
            self._logit_gradients = torch.compile(logit_gradients, dynamic=False)

    def resume_point(self) -> ResumePoint:
        """Return the counters of this trainer."""
        optimiser_steps = tuple(optimiser.steps for optimiser in self.optimisers)
        return ResumePoint(self.step, self.next_block, self.elapsed, optimiser_steps)

    def share_memory(self) -> SharedState:
        """Move weights and optimiser tensors into shared memory, and add the buffers of the exchange."""
        for model in self.models:
            model.share_memory()
        optimisers = [optimiser.tensors() for optimiser in self.optimisers]
        for tensor in (t for tensors in optimisers for group in tensors.values() for t in group.values()):
            tensor.share_memory_()
        workers = self.worker.count
        gradients = [
            [{n: torch.zeros_like(m).share_memory_() for n, m in o.masters.items()} for o in self.optimisers]
            for _ in range(workers)
        ]
        return SharedState(
            weights=[{n: p.data for n, p in model.named_parameters()} for model in self.models],
            optimisers=optimisers,
            gradients=gradients,
            metrics=torch.zeros(workers, len(METRICS)).share_memory_(),
            fraction=torch.zeros(1, dtype=torch.float64).share_memory_(),
            barrier=torch.multiprocessing.get_context("spawn").Barrier(workers),
        )

    def join(self, shared: SharedState, start: ResumePoint) -> None:
        """Use the tensors of another worker in place of this trainer's own, from its counters on."""
        for model, weights in zip(self.models, shared.weights, strict=True):
            for name, weight in model.named_parameters():
                weight.data = weights[name]
        for optimiser, tensors in zip(self.optimisers, shared.optimisers, strict=True):
            for key, own in optimiser.tensors().items():
                own.update(tensors[key])
        self.step, self.next_block, self.elapsed = start.step, start.next_block, start.elapsed
        for optimiser, steps in zip(self.optimisers, start.optimiser_steps, strict=True):
            optimiser.steps = steps

    def train_step(self, progress: Progress, shared: SharedState | None) -> Tensor:
        """Run one step of all models that learn; return the `METRICS` as means over positions."""
        metrics = self._accumulate_gradients(progress)
        scale = lr_scale(self.config, progress)
        learns = (self.config.train_target, self.config.train_draft)
        gradients = {
            index: take_gradients(optimiser)
            for index, optimiser in enumerate(self.optimisers)
            if learns[index]
        }
        if shared is None:
            for index, own in gradients.items():
                self.optimisers[index].step({name: grad.float() for name, grad in own.items()}, scale)
        else:
            metrics = self._exchange_and_update(gradients, metrics, scale, shared)
        self.step += 1
        blocks = batch_blocks(self.config, progress)
        self.next_block += blocks
        return metrics / (blocks * BLOCK)

    def _accumulate_gradients(self, progress: Progress) -> Tensor:
        """Add the gradients of this worker's blocks to `.grad` and return the sums of the metrics."""
        config = self.config
        length = BLOCK if progress.fraction >= config.long_sequences_from else config.sequence_length
        blocks = batch_blocks(config, progress)
        weights = torch.tensor([1 / (blocks * BLOCK), config.exit_loss_weight])
        total = torch.zeros(len(METRICS))
        for block in range(self.worker.rank, blocks, self.worker.count):
            ids, labels = self.stream.take(self.next_block + block, 1, length)
            outputs = self._logits(ids, progress, block)
            with torch.no_grad():
                values = {name: output.detach() for name, output in outputs.items()}
                gradients = self._logit_gradients(
                    values["target"], values.get("exit"), values.get("draft"), labels.flatten(), weights
                )
            learning = {name: output for name, output in outputs.items() if output.requires_grad}
            torch.autograd.backward(list(learning.values()), [getattr(gradients, name) for name in learning])
            total += gradients.metrics
        return total

    def _logits(self, ids: Tensor, progress: Progress, block: int) -> dict[str, Tensor]:
        """Return the logits [N, V] that take part in this pass, by their name in `LogitGradients`."""
        config = self.config
        exit_layer = early_exit_layer(config, progress, block) if config.exit_loss_weight else None
        with torch.set_grad_enabled(config.train_target):
            skip = dropped_sublayers(config, progress, block) if config.train_target else frozenset()
            hidden, exit_hidden = self.target(ids, skip, exit_layer)
            outputs = {"target": self.target.logits(hidden).flatten(0, 1)}
            if exit_hidden is not None:
                outputs["exit"] = self.target.logits(exit_hidden).flatten(0, 1)
        if config.train_draft:
            outputs["draft"] = self.draft.logits(self.draft(ids)[0]).flatten(0, 1)
        return outputs

    def _exchange_and_update(
        self, gradients: dict[int, dict[str, Tensor]], metrics: Tensor, scale: float, shared: SharedState
    ) -> Tensor:
        """Sum gradients and metrics over the workers, update the owned parameters, and return the metrics."""
        rank = self.worker.rank
        for index, own in gradients.items():
            for name, gradient in own.items():
                shared.gradients[rank][index][name].copy_(gradient)
        shared.metrics[rank] = metrics
        shared.wait()
        metrics = shared.metrics.sum(0)
        for index in gradients:
            optimiser, of_workers = self.optimisers[index], [models[index] for models in shared.gradients]
            summed = {name: torch.stack([g[name] for g in of_workers]).sum(0) for name in optimiser.owned}
            optimiser.step(summed, scale)
        shared.wait()
        return metrics

    def save(self, folder: Path) -> None:
        """Write a checkpoint, first under another name, so that a killed run never leaves half of one."""
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f"{CHECKPOINT}.partial"
        progress = {"step": self.step, "next_block": self.next_block, "elapsed": self.elapsed}
        optimisers = [optimiser.state() for optimiser in self.optimisers]
        torch.save({"config": asdict(self.config), "progress": progress, "optimisers": optimisers}, partial)
        os.replace(partial, folder / CHECKPOINT)

    def resume(self, folder: Path) -> bool:
        """Load the checkpoint of a folder. Returns False if there is none."""
        path = folder / CHECKPOINT
        if not path.is_file():
            return False
        checkpoint = torch.load(path, weights_only=True)
        for optimiser, state in zip(self.optimisers, checkpoint["optimisers"], strict=True):
            optimiser.restore(state)
        progress = checkpoint["progress"]
        self.step, self.next_block = progress["step"], progress["next_block"]
        self.elapsed = progress["elapsed"]
        return True

    @torch.no_grad()
    def evaluate(self, tokens: NDArray[np.uint16], blocks: int = 8) -> dict[str, float]:
        """Return the `METRICS` on a few blocks of a held-out stream, with an early exit half way."""
        stream, half = BlockStream(tokens, seed=1), max(1, self.config.target.layers // 2)
        total = torch.zeros(len(METRICS))
        for block in range(blocks):
            ids, labels = stream.take(block, 1, self.config.sequence_length)
            hidden, exit_hidden = self.target(ids, (), half)
            assert exit_hidden is not None
            target, early_exit = (self.target.logits(h).flatten(0, 1) for h in (hidden, exit_hidden))
            draft = self.draft.logits(self.draft(ids)[0]).flatten(0, 1)
            gradients = self._logit_gradients(target, early_exit, draft, labels.flatten(), torch.ones(2))
            total += gradients.metrics
        return dict(zip(METRICS, (total / (blocks * BLOCK)).tolist(), strict=True))


def take_gradients(optimiser: Optimiser) -> dict[str, Tensor]:
    """Return the gradients of all parameters and clear them."""
    gradients = {}
    for name, weight in optimiser.parameters.items():
        # A sub-layer that every pass of the batch left out has no gradient.
        gradients[name] = torch.zeros_like(weight) if weight.grad is None else weight.grad
        weight.grad = None
    return gradients
