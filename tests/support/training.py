"""What tests of training runs share: words to learn from, the figures of a run, and a run that stops early."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from foredraft.train.training_checkpoints import TrainingCheckpoints
from tests.support.checkpoints import TEXT, save_checkpoint

CPU = torch.device("cpu")
QUICK: dict[str, Any] = {
    "length": 64, "step_tokens": 512, "group_tokens": 256, "warm_up": 2, "validate_every": 4, "learning_rate": 3e-3,
    "patience": 0,
}  # fmt: skip


def save_target(folder: Path, **more: Any) -> Path:
    return save_checkpoint(folder, "llama", tokenizer=True, vocab_size=97, **more)


def random_words(count: int, seed: int = 0) -> str:
    words = TEXT.split()
    return " ".join(words[at] for at in np.random.default_rng(seed).integers(len(words), size=count))


def curve(work: Path) -> list[dict[str, Any]]:
    entries = [json.loads(line) for line in (work / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in each.items() if name != "tokens_per_second"} for each in entries]


@contextmanager
def stopped_at_its_first_checkpoint() -> Iterator[None]:
    save = TrainingCheckpoints.save

    def save_and_stop(self: TrainingCheckpoints, *state: Any) -> None:
        save(self, *state)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingCheckpoints, "save", save_and_stop)
        with pytest.raises(KeyboardInterrupt):
            yield
