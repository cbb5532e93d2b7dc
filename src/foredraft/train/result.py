"""Result: what a training gave."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from foredraft.train.preparation import Prepared
from foredraft.train.training_checkpoints import TrainingProgress

__all__ = ["Result"]


@dataclass(frozen=True, slots=True)
class Result:
    """What was trained, and how far.

    Attributes:
        out: The folder that was written.
        work: Checkpoints and logs.
        steps: Steps of the optimiser.
        tokens: Tokens learned from, each as often as it was.
        seconds: Of training.
        documents: Documents to learn from.
        held_out: Documents of the validation.
        skipped: Bad lines that were left out.
        predicted: The speed-up that the best validation predicts.
        stopped_early: The validation got no better, and training ended before the last step.
    """

    out: str
    work: str
    steps: int
    tokens: int
    seconds: float
    documents: int
    held_out: int
    skipped: int
    predicted: float
    stopped_early: bool

    @classmethod
    def of(cls, out: Path, progress: TrainingProgress, prepared: Prepared) -> Result:
        """Return the result of a run."""
        return cls(
            out=str(out),
            work=str(prepared.folder),
            steps=progress.step,
            tokens=progress.tokens,
            seconds=progress.seconds,
            documents=len(prepared.batches.documents),
            held_out=len(prepared.held_out),
            skipped=prepared.skipped,
            predicted=progress.best,
            stopped_early=progress.finished,
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON document."""
        return asdict(self)
