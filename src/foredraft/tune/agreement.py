"""Whether a plan's drafts do in decoding what its trials say: rounds taken against rounds expected.

Contract: both are of the very texts that were decoded, one by one, so no draw of a text stands between them.
What is left at a temperature above 0 is chance of acceptance, whose error the texts tell themselves: given a
text, the rounds that it took lie about the expected ones (`rounds`). At temperature 0 there is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

from foredraft.drafters.skips import Skips
from foredraft.model.runner import Runner
from foredraft.tune.calibration import CalibrationTexts, Text
from foredraft.tune.teacher_forced import TeacherForced

__all__ = ["Agreement"]


class Agreement:
    """Of drafts of one plan, all `draft` tokens long."""

    def __init__(self, runner: Runner, skips: Skips, draft: int, temperature: float) -> None:
        self.runner, self.draft, self.temperature = runner, draft, temperature
        self.plan = skips.plan(runner.decoder.spec.layers)
        self.tokens = 0
        self.taken: list[int] = []  # rounds of each text
        self.expected: list[float] = []

    def add(self, texts: Sequence[Text], rounds: Sequence[int]) -> None:
        """Texts as they were decoded, ends that cut a round included, and the rounds that each took."""
        told = zip(texts, rounds, strict=True)
        pairs = sorted(told, key=lambda pair: -pair[0].new)  # as a teacher has them
        ordered = tuple(text for text, _ in pairs)
        teacher = TeacherForced(self.runner, CalibrationTexts(ordered, self.temperature), self.draft)
        starts = teacher.rounds(self.plan, every_start=True).starts[self.draft - 1]  # [R, N]
        self.expected += map(float, starts.sum(1))
        self.taken += [taken for _, taken in pairs]
        self.tokens += teacher.tokens

    @property
    def tau(self) -> float:
        """Of the decoding."""
        return self.tokens / sum(self.taken)

    @property
    def predicted_tau(self) -> float:
        return self.tokens / sum(self.expected)

    @property
    def error(self) -> float:
        """The standard error of tau, by tau."""
        if self.temperature == 0:
            return 0.0
        pairs = zip(self.taken, self.expected, strict=True)
        return sqrt(sum((taken - expected) ** 2 for taken, expected in pairs)) / sum(self.taken)
