"""Policies by request: each decides about the rows whose requests name it, as if they were the batch."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from foredraft.decode.distribution import Distribution
from foredraft.decode.policy.base import PLAIN, Candidates, Decision, Policy, Signal
from foredraft.decode.sequence import Sequence
from foredraft.decode.stats import Round
from foredraft.model.transfers import upload

__all__ = ["ByRequest"]


class ByRequest(Policy):
    """The policies of one batch.

    Args:
        default: Of the sequences that have none of their own.
        sequences: The rows.
    """

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
