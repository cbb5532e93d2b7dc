"""Policy: the base class, its records, and policies that draft while the drafter, or the target, is sure
enough.

Contract: a policy decides from distributions and from what was emitted. It never drops a drawn token, because
a token dropped for its own probability would bias the output; it stops *after* a token. Confidence is the raw
probability of the drafter's likeliest token, without temperature or truncation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from foredraft.decode.distribution import Distribution
from foredraft.decode.sequence import Sequence
from foredraft.decode.stats import Round
from foredraft.decode.vocab_ops import log_softmax, softmax, sums
from foredraft.model.memory import upload

# Measure of the target's confidence in the token that it emitted last, from its own logits; 1 is certain.
Signal: TypeAlias = Literal["probability", "entropy", "margin"]


class Decision(NamedTuple):
    """One row's draft in a round, as the policy decides it."""

    drafter: str | None  # None takes a plain step
    budget: int  # tokens to draft at most; 0 takes a plain step
    # Where the text is new to the drafter: so many tokens before the pending one it reads; None reads all
    context: int | None = None
    siblings: int = 0  # leaves beside the drafted tokens in the token tree, at most


PLAIN = Decision(None, 0)


@dataclass(frozen=True, slots=True)
class Candidates:
    """The drafters that one row may use in a round."""

    sequence: Sequence
    limits: dict[str, int]  # drafter -> tokens that it may draft at most, 1 or more, in the request's order
    unread: dict[str, int] = field(default_factory=dict)  # tokens before the pending one that it has not read
    confidence: dict[str, float] = field(default_factory=dict)  # in its next proposal, from `Drafter.peek`
    late: set[str] = field(default_factory=set)  # to which the text is new, and for which it may begin late
    trees: set[str] = field(default_factory=set)  # whose drafts may be token trees, with siblings
    idle: bool = False  # in prefill, or paused: no candidates, but it counts in the batch, as it soon decodes


class Policy:
    """Base class: drafts `budget` tokens by the first candidate of each row, and learns nothing."""

    name: str  # as users name it
    max_draft: int  # longest draft, in tokens
    siblings: int = 0  # leaves beside the drafted tokens in each token tree
    # `may_draw` and `go_on` are called. Each call costs a [B]-sized read of the device.
    stops_by_content: bool = False
    # which confidence of the target `learn` gets; None spares computing it
    target_signal: Signal | None = None
    # The policy chooses among drafters by their cost. A drafter then reads a text only once it is chosen, and
    # `Candidates` tell what it has not read and how confident it is.
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

    def rests(self, sequences: Seq[Sequence]) -> bool:
        """Return whether every row takes a plain step in this round, of which the policy learns nothing.

        Then no other method is called. Nor is this one where no row has a drafter.
        """
        return False

    def decide(self, rows: Seq[Candidates]) -> list[Decision]:
        """Return a decision for every row, in order."""
        decisions = []
        for row in rows:
            name = next(iter(row.limits), None)
            budget = 0 if name is None else min(self.budget(row.sequence), row.limits[name])
            decisions.append(Decision(name, budget, siblings=self.siblings))
        return decisions

    def may_draw(
        self, sequences: Seq[Sequence], position: int, q: Distribution, logits: Tensor
    ) -> Tensor | None:
        """Return in which rows [B] the token at `position` may be drawn, else the place is the target's.

        q are the drafter's distributions [B, 1, V] after the sampling transforms, `logits` its own. None is
        yes for all rows.
        """
        return None

    def go_on(
        self, sequences: Seq[Sequence], position: int, q: Distribution, logits: Tensor
    ) -> Tensor | None:
        """After the token at `position` was drawn from q and kept: does the draft continue? As `may_draw`."""
        return None

    def learn(self, sequence: Sequence, outcome: Round, confidence: float | None) -> None:
        """Learn from the round of a row that decodes, after its commit, if `decide` was called.

        `confidence` is the target's, as `target_signal` names it.
        """

    def took(self, seconds: float) -> None:
        """Learn what the round took, from its first decision to its commit, after `learn` of its rows."""

    def why_plain(self, sequence: Sequence) -> str:
        """Return why a sequence that has drafters was decoded without drafts, in a few words."""
        return "the drafter had nothing to propose"


class ByRequest(Policy):
    """The policies of one batch."""

    name = "by request"

    def __init__(self, default: Policy, sequences: Seq[Sequence]) -> None:
        self._default = default
        self._policies = list(dict.fromkeys(map(self.of, sequences)))
        self.stops_by_content = any(policy.stops_by_content for policy in self._policies)
        signals = (policy.target_signal for policy in self._policies)
        # Two requests cannot ask for two signals: they name policies, whose settings are those of loading.
        self.target_signal: Signal | None = next((signal for signal in signals if signal is not None), None)

    def of(self, sequence: Sequence) -> Policy:
        return sequence.policy or self._default

    def decide(self, rows: Seq[Candidates]) -> list[Decision]:
        decisions = [PLAIN] * len(rows)
        for policy in self._policies:
            own = [at for at, row in enumerate(rows) if self.of(row.sequence) is policy]
            if not all(rows[at].idle for at in own):
                for at, decision in zip(own, policy.decide([rows[at] for at in own]), strict=True):
                    decisions[at] = decision
        return decisions

    def may_draw(
        self, sequences: Seq[Sequence], position: int, q: Distribution, logits: Tensor
    ) -> Tensor | None:
        return self._answers(
            sequences, logits, lambda policy: policy.may_draw(sequences, position, q, logits)
        )

    def go_on(
        self, sequences: Seq[Sequence], position: int, q: Distribution, logits: Tensor
    ) -> Tensor | None:
        return self._answers(sequences, logits, lambda policy: policy.go_on(sequences, position, q, logits))

    def learn(self, sequence: Sequence, outcome: Round, confidence: float | None) -> None:
        self.of(sequence).learn(sequence, outcome, confidence)

    def took(self, seconds: float) -> None:
        if len(self._policies) == 1:  # of a mixed batch no policy knows the whole round
            self._policies[0].took(seconds)

    def _answers(
        self, sequences: Seq[Sequence], logits: Tensor, call: Callable[[Policy], Tensor | None]
    ) -> Tensor | None:
        """Return every row's answer [B] by its own policy; None where every policy returns None."""
        answers: Tensor | None = None
        for policy in self._policies:
            if policy.stops_by_content and (answer := call(policy)) is not None:
                own = upload([self.of(sequence) is policy for sequence in sequences], logits.device)
                yes = torch.ones_like(answer) if answers is None else answers
                answers = torch.where(own, answer, yes)
        return answers


@dataclass(frozen=True)
class Fixed(Policy):
    """Always draft `max_draft` tokens (gamma of Leviathan et al. 2023, arXiv 2211.17192), with `siblings`."""

    max_draft: int
    siblings: int = 0
    name: str = "fixed"


@dataclass(frozen=True)
class Heuristic(Policy):
    """Draft two tokens more after a draft accepted whole, else one fewer (as `transformers`, "heuristic")."""

    max_draft: int
    first: int = 5
    name: str = "heuristic"

    def start(self) -> list[int]:
        return [min(self.first, self.max_draft)]

    def budget(self, sequence: Sequence) -> int:
        return int(sequence.policy_state[0])

    def learn(self, sequence: Sequence, outcome: Round, confidence: float | None) -> None:
        if outcome.drafted == 0:
            return
        length = sequence.policy_state[0]
        whole = outcome.accepted == outcome.drafted
        sequence.policy_state[0] = min(length + 2, self.max_draft) if whole else max(length - 1, 1)


def target_confidence(logits: Tensor, tokens: Tensor, signal: Signal) -> Tensor:
    """Return the target's confidence in its last tokens, [B], from the raw softmax of logits [B, V]."""
    if signal == "entropy":
        logs = log_softmax(logits)
        return 1 + sums((logs.exp() * logs).nan_to_num(0.0)) / math.log(logits.shape[-1])
    probs = softmax(logits)
    if signal == "margin":
        first, second = probs.topk(2, -1).values.unbind(-1)
        return first - second
    return probs.gather(-1, tokens[:, None])[:, 0]


@dataclass(frozen=True)
class TargetConfidence(Policy):
    """Draft `max_draft` tokens unless the target was less sure of its last token than `threshold`."""

    max_draft: int
    threshold: float = 0.5
    by: Signal = "probability"
    name: str = "target-confidence"

    @property
    def target_signal(self) -> Signal:  # type: ignore[override]
        return self.by

    def start(self) -> list[float]:
        return [math.inf]  # the target has emitted nothing yet

    def budget(self, sequence: Sequence) -> int:
        return self.max_draft if sequence.policy_state[0] >= self.threshold else 0

    def learn(self, sequence: Sequence, outcome: Round, confidence: float | None) -> None:
        assert confidence is not None
        sequence.policy_state[0] = confidence


def max_prob(q: Distribution, logits: Tensor) -> Tensor:
    """Return the likeliest token's probability [B] of logits [B, 1, V]; NaN where they are not finite."""
    return q.vocab_ops.max_prob(logits[:, 0])


@dataclass(frozen=True)
class Confidence(Policy):
    """Draft on while max_v q(v) >= threshold. The token after which the draft ends is kept and verified.

    The second exit of Kangaroo (Liu et al. 2024, arXiv 2404.18911; 0.6 there).
    """

    max_draft: int
    threshold: float = 0.6
    name: str = "confidence"

    stops_by_content = True

    def go_on(self, sequences: Seq[Sequence], position: int, q: Distribution, logits: Tensor) -> Tensor:
        return max_prob(q, logits) >= self.threshold


@dataclass(frozen=True)
class Fallback(Policy):
    """Draft a token only where max_v q(v) >= threshold; the first place where it is not goes to the target.

    Big Little Decoder's (Kim et al. 2023, arXiv 2302.07863; 0.6, 10 tokens); lossless, as it precedes the
    draw.
    """

    max_draft: int
    threshold: float = 0.6
    name: str = "fallback"

    stops_by_content = True

    def may_draw(self, sequences: Seq[Sequence], position: int, q: Distribution, logits: Tensor) -> Tensor:
        return max_prob(q, logits) >= self.threshold


@dataclass(slots=True)
class _ExitState:
    threshold: float
    acceptance: float = 0.0  # AR of the paper


@dataclass(frozen=True)
class AdaptiveExit(Policy):
    """Draft on while max_v q(v) >= th, which moves towards a share of drafted tokens that are accepted.

    Draft & Verify (Zhang et al. 2023, arXiv 2309.08168). After a round in which m of n tokens were accepted:

        AR  <- beta1 AR + (1 - beta1) m / n
        th' <- th + epsilon where AR < target; th where n is the longest draft; else th - epsilon
        th  <- beta2 th + (1 - beta2) th'

    beginning with AR = 0 and th = `first`; th stays within 0 and 1.
    """

    max_draft: int
    target: float = 0.9
    first: float = 0.6
    epsilon: float = 0.01
    beta1: float = 0.5
    beta2: float = 0.9
    name: str = "adaptive-exit"

    stops_by_content = True

    def start(self) -> _ExitState:
        return _ExitState(self.first)

    def go_on(self, sequences: Seq[Sequence], position: int, q: Distribution, logits: Tensor) -> Tensor:
        # rows of other policies have no threshold, and their answers do not count
        thresholds = [getattr(sequence.policy_state, "threshold", 0.0) for sequence in sequences]
        return max_prob(q, logits) >= upload(thresholds, logits.device)

    def learn(self, sequence: Sequence, outcome: Round, confidence: float | None) -> None:
        if outcome.drafted == 0:
            return
        state: _ExitState = sequence.policy_state
        state.acceptance = (
            self.beta1 * state.acceptance + (1 - self.beta1) * outcome.accepted / outcome.drafted
        )
        if state.acceptance < self.target:
            moved = state.threshold + self.epsilon
        elif outcome.drafted >= self.max_draft:
            moved = state.threshold
        else:
            moved = state.threshold - self.epsilon
        moved = self.beta2 * state.threshold + (1 - self.beta2) * moved
        state.threshold = min(max(moved, 0.0), 1.0)
