"""Reading: what the host learns from a round, in one device synchronisation.

Everything travels together: the verdict, and where a request asks for them the scores of its new tokens and
the probabilities that its trace shows.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.decode.accept import Verdict
from foredraft.decode.distribution import Distribution
from foredraft.decode.draft import Draft
from foredraft.decode.policy.gate import certainty
from foredraft.decode.policy.protocol import Signal
from foredraft.decode.scores import Integers, Score, score, scores_in
from foredraft.decode.sequence import Sequence
from foredraft.decode.stats import Round
from foredraft.decode.trace import RoundTrace
from foredraft.model.device import download, upload

__all__ = ["RowResult", "read"]


@dataclass(slots=True)
class RowResult:
    """One row of it. p, q: what the laws gave the drafted tokens, p by those that judged them; next_p: the
    next one. None unless traced.

    sure: how sure the target was of the next token, None unless a policy wants it. draft_sure: how sure the
    drafter was at every step that it took, if a policy stops by that.
    """

    accepted: int
    next_token: int
    drafted: int
    broken: bool  # logits of a real column were not finite
    drafter_nonfinite: bool  # logits of the drafter were not finite
    tokens: list[int]  # [K]
    scores: list[Score]  # of the accepted tokens and the next one, where they are asked for
    p: list[float]
    q: list[float]
    next_p: float
    sure: float | None = None
    draft_sure: tuple[float, ...] = ()

    @property
    def new(self) -> list[int]:
        """The tokens that the round decided on."""
        return [*self.tokens[: self.accepted], self.next_token]

    def traced(self, sequence: Sequence, outcome: Round, length: int, budget: int) -> RoundTrace:
        """Of the round that began with so many tokens."""
        # what lies past the end of the text, nobody looked at
        count = 0 if self.broken else outcome.drafted
        return RoundTrace(
            start=length - len(sequence.prompt),
            drafter=outcome.drafter,
            budget=budget,
            draft=self.tokens[: outcome.drafted],
            p=self.p[:count],
            q=self.q[:count],
            accepted=outcome.accepted,
            next_token=self.next_token,
            next_p=0.0 if self.broken else self.next_p,
            emitted=outcome.emitted,
            discarded=self.broken,
            rollback=sequence.params.bound,
        )


def read(
    sequences: Seq[Sequence],
    draft: Draft,
    verdict: Verdict,
    p: Distribution,
    judge: Distribution,
    logits: Tensor,
    finite: Tensor,
    signal: Signal | None = None,
) -> list[RowResult]:
    """A Reading of every row; logits [B, K + 1, V] as the model gave them. signal: what a policy wants.

    judge: the laws by which a draft was accepted, which are p but under the lossy rule.
    """
    batch = len(sequences)
    tensors = [verdict.accepted, verdict.next_token, draft.lengths, draft.tokens, finite]
    if draft.drafter_nonfinite is not None:
        tensors.append(draft.drafter_nonfinite)
    asking = [row for row, s in enumerate(sequences) if s.params.logprobs is not None]
    top = max((sequences[row].params.logprobs or 0 for row in asking), default=0)
    traced = any(s.traced for s in sequences)
    if asking or traced:
        # the tokens decided on, in their columns; what lies past them is never looked at
        accepted, next_token = verdict.accepted[:, None], verdict.next_token[:, None]
        new = torch.nn.functional.pad(draft.tokens, (0, 1)).scatter(1, accepted, next_token)
        if asking:
            rows = upload(asking, logits.device)
            tensors.append(score(logits[rows], p.rows(rows), new[rows], top))
        if traced:
            pair = [judge.at(draft.tokens), draft.q.at(draft.tokens)]
            tensors.append(torch.cat([*pair, p.at(new).gather(1, accepted)], 1))
    if signal is not None:
        last = logits[torch.arange(batch, device=logits.device), verdict.accepted]  # [B, V]
        tensors.append(certainty(last, verdict.next_token, signal))
    if draft.sure is not None:
        tensors.append(draft.sure)
    several = download(tensors)
    verdicts = zip(*(tensor.tolist() for tensor in several[:5]), strict=True)
    more = several[5:]
    drafter_nonfinite = [False] * batch if draft.drafter_nonfinite is None else more.pop(0).tolist()
    scores = dict(zip(asking, more.pop(0).numpy(), strict=True)) if asking else {}
    chances: list[list[float]] = more.pop(0).tolist() if traced else [[]] * batch
    sure = [None] * batch if signal is None else more.pop(0).tolist()
    readings = [
        _row_result(
            *decided,
            drafter_nonfinite=bool(drafter_nonfinite[row]),
            sequence=sequence,
            figures=scores.get(row),
            top=top,
            chances=chances[row] if sequence.traced else [],
            sure=sure[row],
        )
        for row, (decided, sequence) in enumerate(zip(verdicts, sequences, strict=True))
    ]
    if draft.sure is not None:
        for reading, steps in zip(readings, more.pop(0).tolist(), strict=True):
            reading.draft_sure = tuple(step for step in steps if step != -1.0)
    return readings


def _row_result(
    accepted: int,
    next_token: int,
    drafted: int,
    tokens: list[int],
    finite: list[bool],
    *,
    drafter_nonfinite: bool,
    sequence: Sequence,
    figures: Integers | None,
    top: int,
    chances: list[float],
    sure: float | None,
) -> RowResult:
    width = len(tokens)
    scores: list[Score] = []
    if figures is not None:
        shown = sequence.params.logprobs or 0
        scores = scores_in(figures, [*tokens[:accepted], next_token], top, shown)
    p, q, next_p = chances[:drafted], chances[width : width + drafted], chances[-1] if chances else 0.0
    return RowResult(
        accepted,
        next_token,
        drafted,
        not all(finite[: drafted + 1]),
        drafter_nonfinite,
        tokens,
        scores=scores,
        p=p,
        q=q,
        next_p=next_p,
        sure=sure,
    )
