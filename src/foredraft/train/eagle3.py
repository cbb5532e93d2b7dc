"""Train an EAGLE-3 head, and write it in the spelling that `--draft` and other programs read."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from foredraft.drafters.heads.eagle3_files import is_eagle3
from foredraft.drafters.heads.eagle3_writing import head_config
from foredraft.model.unread import Checkpoint
from foredraft.train.eagle3_student import Eagle3Student
from foredraft.train.head_run import train_head
from foredraft.train.loop import OnProgress
from foredraft.train.preparation import Prepared, check_out, prepare
from foredraft.train.processes import Processes, joined
from foredraft.train.result import Result
from foredraft.train.starting_head import check_start, new_head, read_start
from foredraft.train.target import step_weights
from foredraft.train.training_options import Eagle3Options
from foredraft.train.written_drafter import holds_a_head

__all__ = ["train_eagle3"]


def train_eagle3(
    options: Eagle3Options,
    model: str | None = None,
    *,
    report: OnProgress = lambda stage, done, total, note: None,
    **load: Any,
) -> Result:
    """Train an EAGLE-3 head, or continue its training.

    Arguments, result and errors as `adapter.train_adapter`.
    """
    with joined(load.get("device")) as processes:
        return _trained(options, model, processes, report, load)


def _trained(
    options: Eagle3Options,
    model: str | None,
    processes: Processes,
    report: OnProgress,
    load: Mapping[str, Any],
) -> Result:
    prepared = prepare(model, options, load, processes, report, lambda target, hash: _check(target, options))
    target, folder = prepared.target, options.from_head
    start = (
        new_head(target.spec, prepared.batches.documents, options)
        if folder is None
        else read_start(folder, prepared.checkpoint)
    )
    student = Eagle3Student(
        start.record, target.decoder, target.head_weight, vocabulary=start.words, steps=options.draft_length,
        decay=options.decay, seed=options.seed, start=start.tensors,
    )  # fmt: skip
    config = head_config(start.body, start.record, prepared.checkpoint, prepared.checkpoint.dtype)
    return train_head(student, config, _cost(prepared, student), options, prepared, processes, report)


def _check(target: Checkpoint, options: Eagle3Options) -> None:
    """Refuse a folder that holds anything but a head, and what the training cannot start from.

    Raises:
        ConfigError: So it is.
        CheckpointError: The head to start from is broken, or for another target.
    """
    check_out(options.out, partial(holds_a_head, is_eagle3))
    check_start(target, options)


def _cost(prepared: Prepared, student: Eagle3Student) -> float:
    """Return c, by the weights that a draft step and a plain step read."""
    own = sum(value.numel() for name, value in student.own.by_name.items() if not name.startswith("fc"))
    return own / step_weights(prepared.target.spec)
