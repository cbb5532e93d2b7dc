"""Stats: figures of rounds.

Words as in docs/architecture.md: *acceptance rate* = accepted / drafted, for people; *alpha* =
accepted / (accepted + rounds that a rejection ended), the constant-rate model's parameter: P(a drafted
token is accepted | all before it in its draft were); *mean accepted length* tau = tokens emitted per
round, the correction or bonus token included.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

__all__ = ["Round", "Stats"]


@dataclass(frozen=True, slots=True)
class Round:
    """One sequence's part in one round.

    Attributes:
        drafted: Tokens proposed.
        accepted: Proposed tokens that the acceptance rule kept.
        emitted: Tokens appended; EOS or a limit may cut an accepted run short, and a ban's rollback may make
            the number negative.
        drafter: The drafter that the policy chose; None in a plain step.
        undrawn: Draft steps that proposed no token, because the policy left their place to the target.
        siblings: Further choices that were verified beside the draft.
        sibling: A sibling of the draft followed the accepted tokens, and one token more.
    """

    drafted: int
    accepted: int
    emitted: int
    drafter: str | None = None
    undrawn: int = 0
    siblings: int = 0
    sibling: bool = False

    @property
    def steps(self) -> int:
        """Return the draft steps: one for each proposed token, and those that proposed none."""
        return self.drafted + self.undrawn


@dataclass(slots=True)
class Stats:
    """Figures of one output, or of several merged.

    Attributes:
        seconds: From the first round to the end; of merged outputs their sum, unless told otherwise.
        tokens: New tokens.
        rounds: Verifying passes of the target, plain steps included.
        drafted: Tokens proposed.
        accepted: Proposed tokens that were kept.
        rejections: Rounds that a rejection ended.
        drafts: Rounds in which a drafter took a step, by drafter.
        steps: Draft steps, by drafter.
        accepted_by: Proposed tokens that were kept, by drafter.
        drafted_at: Drafts that reached each position, from the first on.
        accepted_at: Those of them whose token there was accepted.
        widths: Verifying passes by their columns of the row: the pending token, the draft and its siblings.
        siblings: Rounds that wrote a sibling, and so one token more.

    Examples:
        >>> stats = Stats(seconds=0.5, tokens=10, rounds=4, drafted=8, accepted=6, rejections=2)
        >>> stats.tokens_per_second, stats.mean_accepted_length, stats.acceptance_rate, stats.alpha
        (20.0, 2.5, 0.75, 0.75)
    """

    seconds: float = 0.0
    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    rejections: int = 0
    drafts: Counter[str] = field(default_factory=Counter)
    steps: Counter[str] = field(default_factory=Counter)
    accepted_by: Counter[str] = field(default_factory=Counter)
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    widths: Counter[int] = field(default_factory=Counter)
    siblings: int = 0

    @classmethod
    def of(cls, rounds: Iterable[Round], seconds: float = 0.0) -> Stats:
        stats = cls(seconds=seconds)
        for r in rounds:
            stats.rounds += 1
            stats.tokens += r.emitted
            stats.drafted += r.drafted
            stats.accepted += r.accepted
            stats.rejections += r.accepted < r.drafted
            stats.widths[1 + r.drafted + r.siblings] += 1
            stats.siblings += r.sibling
            if r.drafter is not None and r.steps:
                stats.drafts[r.drafter] += 1
                stats.steps[r.drafter] += r.steps
                stats.accepted_by[r.drafter] += r.accepted
            stats._widen(r.drafted)
            for j in range(r.drafted):
                stats.drafted_at[j] += 1
                stats.accepted_at[j] += j < r.accepted
        return stats

    @classmethod
    def merge(cls, several: Iterable[Stats], seconds: float | None = None) -> Stats:
        """Add several up; `seconds` is the wall clock of them all where they ran side by side."""
        total = cls()
        for s in several:
            total.seconds += s.seconds
            total.tokens += s.tokens
            total.rounds += s.rounds
            total.drafted += s.drafted
            total.accepted += s.accepted
            total.rejections += s.rejections
            total.widths += s.widths
            total.siblings += s.siblings
            total.drafts += s.drafts
            total.steps += s.steps
            total.accepted_by += s.accepted_by
            total._widen(len(s.drafted_at))
            for j, (drafted, accepted) in enumerate(zip(s.drafted_at, s.accepted_at, strict=True)):
                total.drafted_at[j] += drafted
                total.accepted_at[j] += accepted
        if seconds is not None:
            total.seconds = seconds
        return total

    @property
    def tokens_per_second(self) -> float:
        """New tokens by seconds."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def acceptance_rate(self) -> float | None:
        """accepted ÷ drafted: easy to read, never put into a formula. None where nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def alpha(self) -> float | None:
        """accepted ÷ (accepted + rejections): how likely a drafted token is kept, if all before it were."""
        tried = self.accepted + self.rejections
        return self.accepted / tried if tried else None

    @property
    def mean_accepted_length(self) -> float | None:
        """τ: tokens per round, the correction or bonus included."""
        return self.tokens / self.rounds if self.rounds else None

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of kept tokens at each position, of the drafts that reached it."""
        pairs = zip(self.accepted_at, self.drafted_at, strict=True)
        return [accepted / drafted if drafted else 0.0 for accepted, drafted in pairs]

    def as_dict(self) -> dict[str, object]:
        """The figures, for JSON."""
        return {
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "rounds": self.rounds,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "acceptance_rate": self.acceptance_rate,
            "alpha": self.alpha,
            "mean_accepted_length": self.mean_accepted_length,
            "acceptance_by_position": self.acceptance_by_position,
            "siblings": self.siblings,
        }

    def _widen(self, length: int) -> None:
        missing = length - len(self.drafted_at)
        self.drafted_at += [0] * missing
        self.accepted_at += [0] * missing
