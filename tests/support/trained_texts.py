"""What a training predicts of a drafter, held against its decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from foredraft import LLM, SamplingParams
from foredraft.train.loop import acceptance, summarise
from foredraft.train.target import Document, FrozenTarget
from foredraft.tune.teacher_forced import ExpectedRounds


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
