"""The run that trains a head, and writes it whenever a validation is the best so far."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from foredraft.drafters.heads.eagle3_writing import write_head
from foredraft.train.loop import OnProgress, TrainingRun
from foredraft.train.preparation import Prepared
from foredraft.train.processes import Processes
from foredraft.train.result import Result
from foredraft.train.students import Student
from foredraft.train.training_checkpoints import TrainingProgress
from foredraft.train.training_options import DFlashOptions, Eagle3Options
from foredraft.train.validation import Validation
from foredraft.train.written_drafter import write_drafter

__all__ = ["train_head"]


def train_head(
    student: Student,
    config: Mapping[str, Any],
    cost: float,
    options: Eagle3Options | DFlashOptions,
    prepared: Prepared,
    processes: Processes,
    report: OnProgress,
) -> Result:
    """Train a head, or continue its training.

    Args:
        student: The head.
        config: Its config.json.
        cost: c, of a draft step in plain steps.
        options: Of the training.
        prepared: The target and the data.
        processes: That share the work.
        report: The run tells it of the progress.
    """
    place = options.out

    def keep(validation: Validation, progress: TrainingProgress) -> None:
        write = partial(write_head, place, config)
        write_drafter(student, processes, prepared.checkpoint.dtype, place, write)

    run = TrainingRun(
        student, prepared.target, prepared.batches, prepared.held_out, cost, options, prepared.folder,
        prepared.digest, processes, keep, place.exists, report,
    )  # fmt: skip
    return Result.of(place, run.train(), prepared)
