"""Train target and draft together: the target on text, the draft on the target.

Contract: `train` runs until its schedule ends and leaves a checkpoint; started again with the same
settings it continues from the newest checkpoint. The learning rate is a function of the share of the
time budget that has passed (or of the steps, for tests): warm-up, plateau, linear decay to zero.

Every batch serves twice: the target learns by cross-entropy, and the draft by KL divergence to the
target's distribution of the same pass, so distillation costs one small forward and backward. Layer
dropout and a rotating early-exit loss follow LayerSkip, arXiv:2404.16710, in a mild form.

    python -m foredraft.demo.recipe.train \\
        --stage 2 --corpus DIR --checkpoints DIR --deadline 2026-01-01T04:00:00
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from .model import DRAFT, TARGET, Decoder, ModelShape
from .optimiser import Optimiser, Rates, Worker

Report = Callable[[dict[str, float]], None]
FIGURES = ("nats", "exit_nats", "overlap", "agreement")
BLOCK = 1024  # tokens of one shuffled unit of the stream


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what a run does, apart from when it ends."""

    target: ModelShape = TARGET
    draft: ModelShape = DRAFT
    rates: Rates = field(default_factory=Rates)
    seed: int = 0
    # (share of the run, blocks of 1,024 tokens per step): at first steps count, later the noise does.
    batches: tuple[tuple[float, int], ...] = ((0.0, 4),)
    length: int = 512
    long_from: float = 2.0  # share of the run after which sequences are 1,024 long
    warmup_steps: int = 20
    decay_from: float = 1.0
    layer_dropout: float = 0.1  # probability of the deepest sub-layers
    exit_scale: float = 0.15
    draft_learns: bool = True
    target_learns: bool = True  # False: it only teaches
    compiled: bool = True


class Progress(NamedTuple):
    """Where a run stands."""

    step: int
    share: float  # of the schedule that has passed


class Where(NamedTuple):
    """What a spawned worker must know to continue."""

    step: int
    cursor: int
    elapsed: float
    updates: tuple[int, ...]  # of each optimiser


class Gradients(NamedTuple):
    """Gradients with respect to the logits, and what is worth reporting."""

    target: Tensor
    tap: Tensor | None
    draft: Tensor | None
    figures: Tensor  # sums over positions: target nats, exit nats, overlap, agreement


def blocks_at(recipe: Recipe, progress: Progress) -> int:
    """Blocks of this step."""
    return [blocks for since, blocks in recipe.batches if progress.share >= since][-1]


def rate_scale(recipe: Recipe, progress: Progress) -> float:
    """Share of the peak learning rate."""
    warm = min(1.0, (progress.step + 1) / recipe.warmup_steps)
    return warm * min(1.0, max(0.0, (1 - progress.share) / max(1e-9, 1 - recipe.decay_from)))


def dropped(recipe: Recipe, progress: Progress, micro: int) -> frozenset[int]:
    """Sub-layers left out of a pass: more likely the deeper (LayerSkip, equation 1)."""
    draw = random.Random(f"{recipe.seed}:{progress.step}:{micro}")
    depth = max(1, recipe.target.layers - 1)
    return frozenset(
        part
        for part in range(2 * recipe.target.layers)
        if draw.random() < recipe.layer_dropout * (math.exp((part // 2) * math.log(2) / depth) - 1)
    )


def exit_layer(recipe: Recipe, progress: Progress, micro: int) -> int:
    """The layer whose early exit is trained in this pass: each in turn, never the last."""
    depth = recipe.target.layers
    lowest = max(1, depth // 8)
    return lowest + (progress.step * 7 + micro * 5) % max(1, depth - lowest)


def logit_gradients(
    target: Tensor, tap: Tensor | None, draft: Tensor | None, labels: Tensor, weights: Tensor
) -> Gradients:
    """Gradients of cross-entropy (target, tap) and of KL to the target (draft), written out.

    The target's softmax is needed up to three times; autograd would compute and keep it thrice.
    `weights` holds 1 / positions and the exit scale.
    """
    share, scale = weights[0], weights[1]
    index = labels.unsqueeze(-1)  # [N, 1]
    one = (torch.arange(target.shape[-1]) == index).float()  # [N, V]
    p = target.float().softmax(-1)
    zero = torch.zeros(())
    exit_nats, overlap, agreement, grad_tap, grad_draft = zero, zero, zero, None, None
    if tap is not None:
        r = tap.float().softmax(-1)
        exit_nats = -r.gather(-1, index).clamp_min(1e-20).log().sum()
        grad_tap = ((r - one) * (share * scale)).to(target.dtype)
    if draft is not None:
        q = draft.float().softmax(-1)
        overlap = torch.minimum(p, q).sum()
        agreement = (target.argmax(-1) == draft.argmax(-1)).float().sum()
        grad_draft = ((q - p) * share).to(target.dtype)
    nats = -p.gather(-1, index).clamp_min(1e-20).log().sum()
    grad_target = ((p - one) * share).to(target.dtype)
    return Gradients(grad_target, grad_tap, grad_draft, torch.stack([nats, exit_nats, overlap, agreement]))


class Stream:
    """Shuffled blocks of the token stream; which come next follows from the step alone."""

    def __init__(self, tokens: NDArray[np.uint16], seed: int) -> None:
        self.tokens = tokens
        self.order = np.random.default_rng(seed).permutation((len(tokens) - 1) // BLOCK)

    def take(self, first: int, count: int, length: int) -> tuple[Tensor, Tensor]:
        """Inputs and labels of `count` blocks from the `first`, cut into sequences."""
        picked = [int(self.order[(first + i) % len(self.order)]) * BLOCK for i in range(count)]
        ids = np.stack([self.tokens[start : start + BLOCK + 1] for start in picked]).astype(np.int64)
        pairs = torch.from_numpy(ids[:, :-1].copy()), torch.from_numpy(ids[:, 1:].copy())
        return pairs[0].view(-1, length), pairs[1].view(-1, length)  # [B, T]


@dataclass(frozen=True)
class Shared:
    """What the workers of one run share: weights, optimiser tensors, gradients, figures, the clock.

    One single-threaded process per core, meeting once per step, keeps its speed on a busy machine;
    threads that meet in every operator lose most of it.
    """

    weights: list[dict[str, Tensor]]
    states: list[dict[str, dict[str, Tensor]]]
    gradients: list[list[dict[str, Tensor]]]  # by worker, then model
    figures: Tensor  # [workers, 4]
    share: Tensor  # [1]


class Trainer:
    """Both models and both optimisers of one worker."""

    def __init__(self, recipe: Recipe, tokens: NDArray[np.uint16], worker: Worker | None = None) -> None:
        worker = worker or Worker()
        self.recipe, self.worker = recipe, worker
        self.step, self.cursor, self.elapsed = 0, 0, 0.0
        self.stream = Stream(tokens, recipe.seed)
        self.target, self.draft = Decoder(recipe.target), Decoder(recipe.draft)
        self.models = (self.target, self.draft)
        for index, model in enumerate(self.models):
            model.initialise(recipe.seed + index)
        self.optimisers = [
            Optimiser(model, recipe.rates, worker, extra) for extra, model in enumerate(self.models)
        ]
        for model in self.models:
            model.bfloat16()
        self.gradients = logit_gradients
        if recipe.compiled:
            for model in self.models:
                model.compile()
            self.gradients = torch.compile(logit_gradients, dynamic=False)

    def share(self) -> Shared:
        """Move everything that workers share into shared memory."""
        for model in self.models:
            model.share_memory()
        states = [{k: getattr(o, k) for k in ("masters", "first", "second")} for o in self.optimisers]
        for tensor in (t for state in states for part in state.values() for t in part.values()):
            tensor.share_memory_()
        gradients = [
            [{n: torch.zeros_like(m).share_memory_() for n, m in o.masters.items()} for o in self.optimisers]
            for _ in range(self.worker.count)
        ]
        weights = [{n: p.data for n, p in model.named_parameters()} for model in self.models]
        figures = torch.zeros(self.worker.count, 4).share_memory_()
        share = torch.zeros(1, dtype=torch.float64).share_memory_()
        return Shared(weights, states, gradients, figures, share)

    def adopt(self, shared: Shared) -> None:
        """Use another worker's tensors in place of this one's."""
        for model, optimiser, weights, state in zip(
            self.models, self.optimisers, shared.weights, shared.states, strict=True
        ):
            for name, weight in model.named_parameters():
                weight.data = weights[name]
            for key, tensors in state.items():
                getattr(optimiser, key).update(tensors)

    def gather(self, progress: Progress) -> Tensor:
        """Gradients of this worker's part of a batch, left in `.grad`; sums of the figures."""
        recipe = self.recipe
        length = BLOCK if progress.share >= recipe.long_from else recipe.length
        blocks = blocks_at(recipe, progress)
        weights = torch.tensor([1 / (blocks * BLOCK), recipe.exit_scale])
        total = torch.zeros(4)
        for micro in range(self.worker.rank, blocks, self.worker.count):
            ids, labels = self.stream.take(self.cursor + micro, 1, length)
            tap = exit_layer(recipe, progress, micro) if recipe.exit_scale else None
            with torch.set_grad_enabled(recipe.target_learns):
                left_out = dropped(recipe, progress, micro) if recipe.target_learns else frozenset()
                hidden, tapped = self.target(ids, left_out, tap)
                outputs = {"target": self.target.head(hidden).flatten(0, 1)}  # [N, V]
                if tapped is not None:
                    outputs["tap"] = self.target.head(tapped).flatten(0, 1)
            if recipe.draft_learns:
                outputs["draft"] = self.draft.head(self.draft(ids)[0]).flatten(0, 1)
            with torch.no_grad():
                plain = {name: output.detach() for name, output in outputs.items()}
                found = self.gradients(
                    plain["target"], plain.get("tap"), plain.get("draft"), labels.flatten(), weights
                )
            learning = {name: output for name, output in outputs.items() if output.requires_grad}
            torch.autograd.backward(list(learning.values()), [getattr(found, name) for name in learning])
            total += found.figures
        return total

    def run_step(self, progress: Progress, shared: Shared | None, meet: Callable[[], object]) -> Tensor:
        """One optimiser step; returns mean figures (nats, exit nats, overlap, agreement)."""
        figures = self.gather(progress)
        rank, scale = self.worker.rank, rate_scale(self.recipe, progress)
        learns = (self.recipe.target_learns, self.recipe.draft_learns)
        active = [(i, optimiser) for i, optimiser in enumerate(self.optimisers) if learns[i]]
        for index, optimiser in active:
            grads = {}
            for name, weight in optimiser.parameters.items():
                # A sub-layer that every pass left out has no gradient.
                grads[name] = torch.zeros_like(weight) if weight.grad is None else weight.grad
                weight.grad = None
                if shared is not None:
                    shared.gradients[rank][index][name].copy_(grads[name])
            if shared is None:
                optimiser.step({name: grad.float() for name, grad in grads.items()}, scale)
        if shared is not None:
            shared.figures[rank] = figures
            meet()
            figures = shared.figures.sum(0)
            for index, optimiser in active:
                inboxes = [gradients[index] for gradients in shared.gradients]
                summed = {n: torch.stack([g[n] for g in inboxes]).sum(0) for n in optimiser.owned}
                optimiser.step(summed, scale)
            meet()
        self.step += 1
        blocks = blocks_at(self.recipe, progress)
        self.cursor += blocks
        return figures / (blocks * BLOCK)

    def save(self, folder: Path) -> None:
        """Write beside, then rename: a reader never sees half a checkpoint."""
        folder.mkdir(parents=True, exist_ok=True)
        beside = folder / "checkpoint.pt.partial"
        states = [optimiser.state() for optimiser in self.optimisers]
        where = {"step": self.step, "cursor": self.cursor, "elapsed": self.elapsed}
        torch.save({"states": states, "where": where, "recipe": asdict(self.recipe)}, beside)
        os.replace(beside, folder / "checkpoint.pt")

    def resume(self, folder: Path) -> bool:
        """Continue from the newest checkpoint, if there is one."""
        path = folder / "checkpoint.pt"
        if not path.is_file():
            return False
        found = torch.load(path, weights_only=True)
        for optimiser, state in zip(self.optimisers, found["states"], strict=True):
            optimiser.restore(state)
        where = found["where"]
        self.step, self.cursor, self.elapsed = where["step"], where["cursor"], where["elapsed"]
        return True

    @torch.no_grad()
    def measure(self, tokens: NDArray[np.uint16], blocks: int = 8) -> dict[str, float]:
        """Quick held-out figures: target nats, nats of an exit half way, both alphas."""
        stream, half = Stream(tokens, seed=1), max(1, self.recipe.target.layers // 2)
        total = torch.zeros(4)
        for first in range(blocks):
            ids, labels = stream.take(first, 1, self.recipe.length)
            hidden, tapped = self.target(ids, (), half)
            assert tapped is not None
            logits, early = (self.target.head(h).flatten(0, 1) for h in (hidden, tapped))
            guesses = self.draft.head(self.draft(ids)[0]).flatten(0, 1)
            total += self.gradients(logits, early, guesses, labels.flatten(), torch.ones(2)).figures
        return dict(zip(FIGURES, (total / (blocks * BLOCK)).tolist(), strict=True))


@dataclass(frozen=True)
class Run:
    """Where a run reads, writes and when it ends."""

    recipe: Recipe
    tokens: Path
    checkpoints: Path
    share: Callable[[Trainer], float]
    heldout: Path | None = None
    save_every: float = 300.0
    workers: int = 1


def work(
    run: Run, trainer: Trainer, shared: Shared | None, meet: Callable[[], object], report: Report
) -> None:
    """The loop of one worker. The first one keeps the clock, reports and saves."""
    leads = trainer.worker.rank == 0
    last = saved = time.monotonic()
    while True:
        share = run.share(trainer)
        if shared is not None:
            if leads:
                shared.share[0] = share
            meet()
            share = float(shared.share[0])
        if share >= 1:
            break
        figures = trainer.run_step(Progress(trainer.step, share), shared, meet)
        now = time.monotonic()
        trainer.elapsed, seconds, last = trainer.elapsed + now - last, now - last, now
        if leads:
            row = dict(zip(FIGURES, figures.tolist(), strict=True))
            report({"step": trainer.step, "share": share, "seconds": seconds} | row)
            if now - saved > run.save_every:
                finish(run, trainer, report)
                saved = time.monotonic()
    if leads:
        finish(run, trainer, report)


def finish(run: Run, trainer: Trainer, report: Report) -> None:
    """Save, then measure."""
    trainer.save(run.checkpoints)
    if run.heldout is not None:
        report({"step": trainer.step, "heldout": 1.0} | trainer.measure(np.load(run.heldout)))


def print_row(row: dict[str, float]) -> None:
    """The report of the command line: one JSON line."""
    print(json.dumps({key: round(value, 4) for key, value in row.items()}), flush=True)


def start_worker(rank: int, run: Run, shared: Shared, barrier: Barrier, where: Where) -> None:
    """Entry of a spawned process."""
    torch.set_num_threads(1)
    trainer = Trainer(run.recipe, np.load(run.tokens, mmap_mode="r"), Worker(rank, run.workers))
    trainer.adopt(shared)
    trainer.step, trainer.cursor, trainer.elapsed = where.step, where.cursor, where.elapsed
    for optimiser, steps in zip(trainer.optimisers, where.updates, strict=True):
        optimiser.steps = steps
    work(run, trainer, shared, lambda: barrier.wait(1200), print_row)


def train(run: Run, report: Report = lambda row: None) -> Trainer:
    """Run to the end of the schedule; with several workers, one process each."""
    trainer = Trainer(run.recipe, np.load(run.tokens, mmap_mode="r"), Worker(0, run.workers))
    trainer.resume(run.checkpoints)
    torch.set_num_threads(1)
    if run.workers == 1:
        work(run, trainer, None, lambda: None, report)
        return trainer
    shared, barrier = trainer.share(), torch.multiprocessing.get_context("spawn").Barrier(run.workers)
    updates = tuple(optimiser.steps for optimiser in trainer.optimisers)
    where = Where(trainer.step, trainer.cursor, trainer.elapsed, updates)
    spawn(start_worker, (run, shared, barrier, where), nprocs=run.workers)
    trainer.resume(run.checkpoints)
    return trainer


@dataclass(frozen=True)
class ByDeadline:
    """Share of the time spent: what has run, over that plus what is left until the deadline."""

    deadline: float

    def __call__(self, trainer: Trainer) -> float:
        left = self.deadline - time.time()
        return 1.0 if left <= 0 else trainer.elapsed / (trainer.elapsed + left)


@dataclass(frozen=True)
class BySteps:
    """Share of a fixed number of steps: for tests, where time must not count."""

    steps: int

    def __call__(self, trainer: Trainer) -> float:
        return trainer.step / self.steps


# Stages of growing depth, then the draft's own; `grow.py` leads from one to the next and starts the draft. At
# a small budget a shallow model learns far more per second, and a deep one grown from it keeps that.
STAGES = {
    "2": Recipe(
        target=replace(TARGET, layers=2),
        layer_dropout=0.0,
        exit_scale=0.0,
        batches=((0.0, 2), (0.25, 4)),
        draft_learns=False,
    ),
    "4": Recipe(
        target=replace(TARGET, layers=4),
        layer_dropout=0.0,
        exit_scale=0.0,
        draft_learns=False,
        warmup_steps=5,
    ),
    "16": Recipe(warmup_steps=8, decay_from=0.05, long_from=0.88, exit_scale=0.1),
    # The finished target teaches; only the draft still learns.
    "draft": Recipe(
        rates=Rates(matrix=1.5e-3, vector=1.5e-3),
        decay_from=0.0,
        long_from=0.88,
        exit_scale=0.0,
        target_learns=False,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo target and draft.")
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--deadline", type=datetime.fromisoformat, required=True, help="UTC, ISO 8601")
    parser.add_argument("--stage", choices=STAGES, required=True)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--ordinary", action="store_true", help="no layer dropout, no early-exit loss")
    options = parser.parse_args()
    recipe = STAGES[options.stage]
    if options.ordinary:
        recipe = replace(recipe, layer_dropout=0.0, exit_scale=0.0)
    run = Run(
        recipe,
        tokens=options.corpus / "train.npy",
        checkpoints=options.checkpoints,
        share=ByDeadline(options.deadline.replace(tzinfo=UTC).timestamp()),
        heldout=options.corpus / "heldout.npy",
        workers=options.workers,
    )
    train(run, print_row)


if __name__ == "__main__":
    main()
