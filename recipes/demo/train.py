"""Train target and draft together, in one process per core, until a deadline.

A run leaves a checkpoint. A run that starts again with the same settings continues from it. The learning rate
depends on the fraction of the time budget that has passed (`schedule.py`); `config.py` has the stages.

    python -m recipes.demo.train --stage 2 --corpus DIR --checkpoints DIR --deadline 2026-01-01T04:00:00
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch
from torch.multiprocessing.spawn import spawn

from .config import STAGES, TrainingConfig
from .losses import METRICS
from .optimiser import Worker
from .schedule import ByDeadline, Progress, Schedule
from .trainer import ResumePoint, SharedState, Trainer

Report = Callable[[dict[str, float]], None]


@dataclass(frozen=True)
class TrainingRun:
    """The files and the schedule of a run; the token streams are `.npy` files."""

    config: TrainingConfig
    tokens: Path
    checkpoints: Path
    schedule: Schedule  # tells the fraction of the run that has passed
    heldout: Path | None = None  # to evaluate on
    save_every: float = 300.0  # seconds
    workers: int = 1  # processes


def train(run: TrainingRun, report: Report = lambda row: None) -> Trainer:
    """Train to the end of the schedule; return the trainer with the final weights.

    `report` receives the metrics of each step. Several workers print them instead (`print_row`).
    """
    trainer = Trainer(run.config, np.load(run.tokens, mmap_mode="r"), Worker(0, run.workers))
    trainer.resume(run.checkpoints)
    torch.set_num_threads(1)
    if run.workers == 1:
        run_worker(run, trainer, None, report)
        return trainer
    spawn(worker_process, (run, trainer.share_memory(), trainer.resume_point()), nprocs=run.workers)
    trainer.resume(run.checkpoints)
    return trainer


def worker_process(rank: int, run: TrainingRun, shared: SharedState, start: ResumePoint) -> None:
    """Run one worker in a spawned process."""
    torch.set_num_threads(1)
    trainer = Trainer(run.config, np.load(run.tokens, mmap_mode="r"), Worker(rank, run.workers))
    trainer.join(shared, start)
    run_worker(run, trainer, shared, print_row)


def run_worker(run: TrainingRun, trainer: Trainer, shared: SharedState | None, report: Report) -> None:
    """Train until the schedule ends. Worker 0 evaluates the schedule, reports and saves for all workers."""
    leads = trainer.worker.rank == 0
    last = last_saved = time.monotonic()
    while True:
        fraction = run.schedule(trainer.step, trainer.elapsed)
        if shared is not None:
            if leads:
                shared.fraction[0] = fraction
            shared.wait()
            fraction = float(shared.fraction[0])
        if fraction >= 1:
            break
        metrics = trainer.train_step(Progress(trainer.step, fraction), shared)
        now = time.monotonic()
        trainer.elapsed, seconds, last = trainer.elapsed + now - last, now - last, now
        if leads:
            row = dict(zip(METRICS, metrics.tolist(), strict=True))
            report({"step": trainer.step, "fraction": fraction, "seconds": seconds} | row)
            if now - last_saved > run.save_every:
                save_and_evaluate(run, trainer, report)
                last_saved = time.monotonic()
    if leads:
        save_and_evaluate(run, trainer, report)


def save_and_evaluate(run: TrainingRun, trainer: Trainer, report: Report) -> None:
    """Save a checkpoint, then report the held-out metrics."""
    trainer.save(run.checkpoints)
    if run.heldout is not None:
        report({"step": trainer.step, "heldout": 1.0} | trainer.evaluate(np.load(run.heldout)))


def print_row(row: dict[str, float]) -> None:
    """Print a report as one JSON line."""
    print(json.dumps({key: round(value, 4) for key, value in row.items()}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo target and draft.")
    parser.add_argument("--corpus", type=Path, required=True, help="folder with train.npy and heldout.npy")
    parser.add_argument("--checkpoints", type=Path, required=True, help="folder to continue from and save to")
    parser.add_argument("--deadline", type=datetime.fromisoformat, required=True, help="UTC, ISO 8601")
    parser.add_argument("--stage", choices=STAGES, required=True)
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count(), help="processes (default: one per core)"
    )
    parser.add_argument(
        "--no-layerskip", action="store_true", help="train without layer dropout and early-exit loss"
    )
    options = parser.parse_args()
    config = STAGES[options.stage]
    if options.no_layerskip:
        config = replace(config, layer_dropout=0.0, exit_loss_weight=0.0)
    run = TrainingRun(
        config,
        tokens=options.corpus / "train.npy",
        checkpoints=options.checkpoints,
        schedule=ByDeadline(options.deadline.replace(tzinfo=UTC).timestamp()),
        heldout=options.corpus / "heldout.npy",
        workers=options.workers,
    )
    train(run, print_row)


if __name__ == "__main__":
    main()
