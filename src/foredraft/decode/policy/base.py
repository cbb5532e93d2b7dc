"""Policy: the base class, and the records that it receives and returns.

Contract: a policy decides from distributions and from what was emitted. It never drops a drawn token,
because a token dropped for its own probability would bias the output; it stops *after* a token, which goes to
verification. So no policy changes the distribution of the text.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

from torch import Tensor

from foredraft.decode.distribution import Distribution
from foredraft.decode.sequence import Sequence
from foredraft.decode.stats import Round

__all__ = ["PLAIN", "Candidates", "Decision", "Policy", "Signal"]

# Measure of the target's confidence in the token that it emitted last, from its own logits; 1 is certain.
Signal: TypeAlias = Literal["probability", "entropy", "margin"]


class Decision(NamedTuple):
    """One row's draft in a round, as the policy decides it.

    Attributes:
        drafter: The drafter's name; None takes a plain step.
        budget: Tokens to draft at most; 0 takes a plain step.
        context: Where the text is new to the drafter: how many of the last tokens before the pending one it
            reads. None reads all that it has not read.
        siblings: Further choices beside the drafted tokens, at most.
    """

    drafter: str | None
    budget: int
    context: int | None = None
    siblings: int = 0


PLAIN = Decision(None, 0)


@dataclass(frozen=True, slots=True)
class Candidates:
    """The drafters that one row may use in a round.

    Attributes:
        sequence: The row's sequence.
        limits: Drafter -> tokens that it may draft at most, 1 or more, in the order of the request.
        unread: Drafter -> tokens before the pending one that it has not read.
        confidence: Drafter -> confidence in its next proposal, where it can tell (`Drafter.peek`).
        late: Drafters to which the text is new and for which it may begin late.
        combs: Drafters whose drafts may have siblings.
        idle: The row is in prefill, or paused. It has no candidates, but it counts in the batch, where it
            soon decodes.
    """

    sequence: Sequence
    limits: dict[str, int]
    unread: dict[str, int] = field(default_factory=dict)
    confidence: dict[str, float] = field(default_factory=dict)
    late: set[str] = field(default_factory=set)
    combs: set[str] = field(default_factory=set)
    idle: bool = False


class Policy:
    """Base class: drafts `budget` tokens by the first candidate of each row, and learns nothing.

    Attributes:
        name: As users name it.
        max_draft: Longest draft, in tokens.
        siblings: Further choices beside the tokens of each draft.
        stops_by_content: `may_draw` and `go_on` are called. Each call costs a [B]-sized read of the device.
        target_signal: Which confidence of the target `learn` receives; None spares its computation.
        uses_costs: The policy chooses among drafters by their cost. A drafter then reads a text only once it
            is chosen, and `Candidates` tell what it has not read and how confident it is.
    """

    name: str
    max_draft: int
    siblings: int = 0
    stops_by_content: bool = False
    target_signal: Signal | None = None
    uses_costs: bool = False

    def of(self, sequence: Sequence) -> Policy:
        """Return the policy that decides about a sequence: this one, unless requests name their own."""
        return self

    def start(self) -> Any:
        """Return the policy's state for a new sequence; the sequence keeps it as `policy_state`."""
        return None

    def budget(self, sequence: Sequence) -> int:
        """Return how many tokens to draft at most."""
        return self.max_draft

    def decide(self, rows: Seq[Candidates]) -> list[Decision]:
        """Return a decision for every row, in order. Not called where no row has a drafter."""
        decisions = []
        for row in rows:
            name = next(iter(row.limits), None)
            budget = 0 if name is None else min(self.budget(row.sequence), row.limits[name])
            decisions.append(Decision(name, budget, siblings=self.siblings))
        return decisions

    def may_draw(
        self, sequences: Seq[Sequence], position: int, q: Distribution, logits: Tensor
    ) -> Tensor | None:
        """Before the token at `position` of every draft is drawn: may it be?

        Args:
            sequences: [B].
            position: From 0.
            q: The drafter's distributions [B, 1, V] after the sampling transforms.
            logits: The drafter's own, [B, 1, V] float32.

        Returns:
            [B] bool, where False leaves the place to the target; None is yes for all rows.
        """
        return None

    def go_on(
        self, sequences: Seq[Sequence], position: int, q: Distribution, logits: Tensor
    ) -> Tensor | None:
        """After the token at `position` was drawn from q and kept: does the draft continue? As `may_draw`."""
        return None

    def learn(self, sequence: Sequence, outcome: Round, confidence: float | None) -> None:
        """Learn from one row's round after its commit; confidence: the target's, as `target_signal` names it.

        Called for every row that decodes, in rounds in which `decide` was called.
        """

    def took(self, seconds: float) -> None:
        """Learn what the round took, from its first decision to its commit, after `learn` of its rows."""

    def why_plain(self, sequence: Sequence) -> str:
        """Return why a sequence that has drafters was decoded without drafts, in a few words."""
        return "the drafter had nothing to propose"
