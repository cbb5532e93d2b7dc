"""Agreement between the τ of real decoding and the τ that teacher forcing predicts for the same texts.

Both sides cover the very texts that were decoded, so the choice of texts adds no error. At temperature 0
they are equal. Above it the decoded rounds of a text scatter around the expected ones (`expected_rounds`),
and their scatter gives the standard error of τ.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

from foredraft.drafters.skips import Skips
from foredraft.model.runner import Runner
from foredraft.tune.calibration import CalibrationText, CalibrationTexts
from foredraft.tune.teacher_forced import TeacherForced

__all__ = ["Agreement"]


class Agreement:
    """Decoded and expected rounds of one plan at one draft length.

    Attributes:
        tokens: New tokens of all texts.
        decoded_rounds: Rounds that each text took.
        expected_rounds: Rounds that teacher forcing expects of each text.
    """

    def __init__(
        self, runner: Runner, drafting: Runner | None, skips: Skips, draft_length: int, temperature: float
    ) -> None:
        self.runner, self.drafting = runner, drafting
        self.draft_length, self.temperature = draft_length, temperature
        self.plan = skips.plan(runner.decoder.spec.layers)
        self.tokens = 0
        self.decoded_rounds: list[int] = []
        self.expected_rounds: list[float] = []

    def add(self, texts: Sequence[CalibrationText], rounds: Sequence[int]) -> None:
        """Add decoded texts and the rounds that each took; the end of a text may cut its last round."""
        pairs = zip(texts, rounds, strict=True)
        ordered = sorted(pairs, key=lambda pair: -pair[0].new_tokens)  # the order that TeacherForced uses
        calibration = CalibrationTexts(tuple(text for text, _ in ordered), self.temperature)
        teacher_forced = TeacherForced(self.runner, calibration, self.draft_length, drafting=self.drafting)
        starts = teacher_forced.rounds(self.plan, every_start=True).starts[self.draft_length - 1]  # [R, N]
        self.expected_rounds += map(float, starts.sum(1))
        self.decoded_rounds += [decoded for _, decoded in ordered]
        self.tokens += teacher_forced.tokens

    @property
    def tau(self) -> float:
        """τ of decoding."""
        return self.tokens / sum(self.decoded_rounds)

    @property
    def predicted_tau(self) -> float:
        """τ that teacher forcing predicts."""
        return self.tokens / sum(self.expected_rounds)

    @property
    def relative_error(self) -> float:
        """Standard error of `tau` ÷ `tau`."""
        if self.temperature == 0:
            return 0.0
        pairs = zip(self.decoded_rounds, self.expected_rounds, strict=True)
        squares = sum((decoded - expected) ** 2 for decoded, expected in pairs)
        return sqrt(squares) / sum(self.decoded_rounds)
