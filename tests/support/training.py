"""What tests of training runs share: data, the figures of a run, a run that stops early, and predictions held against decoding."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from foredraft import LLM, SamplingParams
from foredraft.drafters.heads.configs import read_eagle3
from foredraft.train.head_students import Eagle3Student
from foredraft.train.loop import acceptance, summarise
from foredraft.train.target import Document, FrozenTarget
from foredraft.train.training_checkpoints import TrainingCheckpoints
from foredraft.tune.teacher_forced import ExpectedRounds
from tests.support.checkpoints import TEXT, save_checkpoint
from tests.support.heads import FILE

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


def check_prediction(
    llm: LLM,
    student: Any,
    target: FrozenTarget,
    *,
    temperature: float,
    gamma: int,
    count: int,
    new: int,
    windows_of: Callable[[Sequence[Any]], Any],
) -> None:
    """Check on `count` texts of the target's: within the interval of a bootstrap over whole texts.

    `windows_of` returns the acceptance of every draft, [texts, tokens, gamma or more], of the runs of texts.
    """
    prompts = [[1, 3 + n, 5 + n] for n in range(count)]
    common = {"temperature": temperature, "max_new_tokens": new, "ignore_eos": True}
    params = [SamplingParams(**common, seed=n, acceptance="speculative") for n in range(count)]
    outputs = llm.generate(prompts, params)
    texts = [
        Document((*prompt, *output.token_ids), (False,) * 3 + (True,) * new)
        for prompt, output in zip(prompts, outputs, strict=True)
    ]
    runs, _ = acceptance(student, target, [texts], temperature)
    windows = windows_of(runs)

    def predicted(rows: Any) -> float:
        rounds = ExpectedRounds.from_acceptance(windows[rows], np.full(len(rows), new))
        return float(rounds.taus[gamma - 1])

    def decoded(rows: Any) -> float:
        # rounds that the end of a text cuts are left out, as in the prediction
        return sum(new for _ in rows) / sum(outputs[row].stats.rounds for row in rows)

    random = np.random.default_rng(0)
    drawn = [random.integers(count, size=count) for _ in range(200)]
    differences = [predicted(rows) - decoded(rows) for rows in drawn]
    low, high = np.quantile(differences, [0.005, 0.995])
    ends = gamma / (new / decoded(range(count)))  # what one cut round of each text may change
    assert low - ends <= 0 <= high + ends, (predicted(range(count)), decoded(range(count)), low, high)
    assert decoded(range(count)) > 1.1
    assert summarise(runs, 0.0, 0.2).tau > 1


def student_of(head: Path, target: FrozenTarget, steps: int, decay: float) -> Eagle3Student:
    record = read_eagle3(head).record.for_target(target.spec, "the head")
    stored = load_file(head / FILE)
    ids = (stored["d2t"] + torch.arange(record.draft_vocab_size)).tolist() if "d2t" in stored else None
    student = Eagle3Student(
        record, target.decoder, target.head_weight, vocabulary=ids, steps=steps, decay=decay
    )
    student.own.fill(stored)
    return student
