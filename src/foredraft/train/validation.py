"""Validation: how well a student drafts on held-out documents, by what counts in decoding.

A drafted token is accepted with probability Σ min(p, q) at its position, at temperature 0 if both argmax
agree. The states that an adapter reads, and the tokens that a draft model reads, are those of the text for as
long as a draft is accepted. So one pass over a text gives the acceptance at every position for every draft
that may reach it, and `tune.expected_rounds` gives the rounds that decoding takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from foredraft.train.losses import overlap
from foredraft.train.packed_documents import Document, Packed
from foredraft.train.students import Student
from foredraft.train.target import FrozenTarget
from foredraft.tune.expected_rounds import ExpectedRounds, Floats

__all__ = ["Validation", "acceptance", "summarise"]

LONGEST = 10  # tokens of the drafts that are looked at


@dataclass(frozen=True, slots=True)
class Validation:
    """How a student drafts.

    Attributes:
        alpha: α: of the drafted tokens that are reached, the share that is accepted.
        by_position: The same for the first, second, ... token of a draft.
        tau: τ at `max_draft`.
        max_draft: The best draft length.
        predicted: The speed-up there, at draft costs by the bytes that a step reads.
        agreement: Share of the positions at which both argmax agree.
    """

    alpha: float
    by_position: tuple[float, ...]
    tau: float
    max_draft: int
    predicted: float
    agreement: float


@torch.no_grad()
def acceptance(
    student: Student, target: FrozenTarget, groups: Sequence[Sequence[Document]], temperature: float
) -> tuple[list[Floats], float]:
    """Return the probability that each token that counts is accepted, by run of them, and the agreement.

    Args:
        student: The student.
        target: The target.
        groups: Documents, as many in a pass as fit.
        temperature: Divides both models' logits.
    """
    runs: list[Floats] = []
    same = total = 0
    for group in groups:
        packed = Packed.of(group, target.decoder.device)
        states = target.states(packed, student.depth)
        p, q = target.decoder.head(states.last), student(packed, states.tapped).float()
        agrees = p.argmax(-1) == _on_all_words(q.argmax(-1), student)
        same, total = same + int(agrees.sum()), total + len(agrees)
        if temperature == 0:
            accepted = agrees.double()
        else:
            log_p = (p / temperature).log_softmax(-1)
            if student.vocabulary is not None:
                log_p = log_p[:, student.vocabulary]
            accepted = overlap(log_p, (q / temperature).log_softmax(-1)).double()
        runs += _runs(packed.predicting, accepted)
    return runs, same / max(1, total)


def _on_all_words(words: Tensor, student: Student) -> Tensor:
    return words if student.vocabulary is None else student.vocabulary[words]


def _runs(predicting: Tensor, values: Tensor) -> Iterator[Floats]:
    """Cut values where the columns are no neighbours: at the ends of documents, and around prompts."""
    columns, found = predicting.cpu().numpy(), values.cpu().numpy()
    yield from np.split(found, np.flatnonzero(np.diff(columns) > 1) + 1)


def summarise(runs: Sequence[Floats], agreement: float, cost: float) -> Validation:
    """Return the figures of runs of acceptance probabilities.

    Args:
        runs: Of each run of tokens that count.
        agreement: As in `Validation`.
        cost: c, of a draft step in plain steps.
    """
    longest = min(LONGEST, max(map(len, runs)))
    lengths = np.array([len(run) for run in runs], dtype=np.int64)
    padded = np.zeros((len(runs), int(lengths.max()) + longest))
    for row, run in enumerate(runs):
        padded[row, : len(run)] = run
    windows = np.lib.stride_tricks.sliding_window_view(padded, longest, axis=1)[:, : lengths.max()]
    rounds = ExpectedRounds.from_acceptance(windows, lengths)
    drafts = np.arange(1, longest + 1)
    speedups = rounds.taus / (drafts * cost + 1)
    best = int(speedups.argmax())
    starts = rounds.starts[best][:, :, None]
    reached = np.concatenate([np.ones_like(windows[:, :, :1]), np.cumprod(windows, 2)[:, :, :-1]], 2)
    reached, kept = (starts * reached)[..., : best + 1], (starts * reached * windows)[..., : best + 1]
    return Validation(
        alpha=float(kept.sum() / reached.sum()),
        by_position=tuple((kept.sum((0, 1)) / np.maximum(reached.sum((0, 1)), 1e-30)).tolist()),
        tau=float(rounds.taus[best]),
        max_draft=best + 1,
        predicted=float(speedups[best]),
        agreement=agreement,
    )
