"""Stats: figures of rounds; and the trace, the course of one round of one sequence.

Words as in docs/architecture.md: *acceptance rate* = accepted / drafted, for people; *alpha* =
accepted / (accepted + rounds that a rejection ended), the constant-rate model's parameter: P(a drafted
token is accepted | all before it in its draft were); *mean accepted length* tau = tokens emitted per
round, the correction or bonus token included.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from itertools import zip_longest


@dataclass(frozen=True, slots=True)
class Round:
    """One sequence's part in one round."""

    drafted: int  # tokens proposed
    accepted: int  # proposed tokens that the acceptance rule kept
    # Tokens appended; EOS or a limit may cut an accepted run short, and a ban's rollback may make it negative
    emitted: int
    drafter: str | None = None  # the drafter that the policy chose; None in a plain step
    undrawn: int = 0  # draft steps that proposed no token, because the policy left their place to the target
    siblings: int = 0  # leaves of the token tree, which were verified beside the draft
    sibling: bool = False  # a sibling of the draft followed the accepted tokens, and one token more

    @property
    def steps(self) -> int:
        """Return the draft steps: one for each proposed token, and those that proposed none."""
        return self.drafted + self.undrawn


SHOWN = (
    "seconds", "tokens_per_second", "rounds", "drafted", "accepted", "acceptance_rate", "alpha",
    "mean_accepted_length", "acceptance_by_position", "siblings",
)  # fmt: skip


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
        stats, reached, kept = cls(seconds=seconds), Counter[int](), Counter[int]()
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
            reached.update(range(r.drafted))
            kept.update(range(r.accepted))
        stats.drafted_at, stats.accepted_at = ([of[j] for j in range(len(reached))] for of in (reached, kept))
        return stats

    @classmethod
    def merge(cls, several: Iterable[Stats], seconds: float | None = None) -> Stats:
        """Add several up; `seconds` is the wall clock of them all where they ran side by side."""
        total = cls()
        for s in several:
            for name in (each.name for each in fields(cls)):
                own, more = getattr(total, name), getattr(s, name)
                lists = isinstance(own, list)
                both = [a + b for a, b in zip_longest(own, more, fillvalue=0)] if lists else own + more
                setattr(total, name, both)
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
        return {name: getattr(self, name) for name in SHOWN}


@dataclass(frozen=True, slots=True)
class RoundTrace:
    """One round of one output.

    Attributes:
        start: New tokens before it.
        drafter: The drafter; None in a plain step.
        budget: How many tokens the policy allowed. A shorter draft was ended by the policy or the drafter.
        draft: The proposed ids.
        p: The target's probability of each drafted token; empty if discarded. Under the lossy rule at
            temperature 0 it is that of temperature 1, by which the rule judges.
        q: The drafter's probability of each drafted token; empty if discarded.
        accepted: How many were kept.
        next_token: The target's own token after them: a correction, the bonus, or a plain step.
        next_p: The target's probability of it.
        emitted: Tokens appended; an end of the text may cut them short, and a ban's rollback may make it
            negative.
        discarded: The target's logits along the draft were not finite, so nothing was judged.
        rollback: Under the lossy rule, the surprise -log p above which a drafted token was cut, in nats; None
            under the lossless ones.
        legal: Tokens that the constraint allowed at each judged position; None without a constraint.
        after_sibling: The target's token after `next_token`, which is a sibling of the rejected token; None
            where it is none.

    Examples:
        >>> params = SamplingParams(max_new_tokens=8, ignore_eos=True)
        >>> [output] = llm.generate("def add(a, b):", params, trace=True)
        >>> len(output.trace) == output.stats.rounds, sum(each.emitted for each in output.trace)
        (True, 8)
    """

    start: int
    drafter: str | None
    budget: int
    draft: list[int]
    p: list[float]
    q: list[float]
    accepted: int
    next_token: int
    next_p: float
    emitted: int
    discarded: bool = False
    rollback: float | None = None
    legal: list[int] | None = None
    after_sibling: int | None = None
