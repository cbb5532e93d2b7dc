"""Validation: how well a student drafts on held-out documents, by what counts in decoding.

A drafted token is accepted with probability Σ min(p, q) at its position, at temperature 0 if both argmax
agree. The states that an adapter reads, and the tokens that a draft model reads, are those of the text for as
long as a draft is accepted. So one pass over a text gives the acceptance at every position for every draft
that may reach it, and `tune.expected_rounds` gives the rounds that decoding takes. A head that reads its own
states in a draft is run for as many tokens as it learned, from every position on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from foredraft.train.chunks import Rows
from foredraft.train.losses import overlap
from foredraft.train.packed_documents import Document, Packed
from foredraft.train.students import Student
from foredraft.train.target import FrozenTarget
from foredraft.tune.expected_rounds import ExpectedRounds, Floats

__all__ = ["Validation", "acceptance", "drafts_of", "summarise"]

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
    """Return the probabilities of acceptance by run of tokens that count, and the agreement.

    Those of a run are [T, K], of the draft that begins with each of its tokens. K is 1 where they do not
    depend on where a draft began.

    Args:
        student: The student.
        target: The target.
        groups: Documents, as many in a pass as fit.
        temperature: Divides both models' logits.
    """
    runs: list[Floats] = []
    same = total = 0.0
    for group in groups:
        packed = Packed.of(group, target.decoder.device)
        states = target.states(packed, student.taps)
        p = target.decoder.head(states.last)
        accept = partial(_accepted, p, student.vocabulary, temperature)
        accepted, agrees = student(packed, states.tapped, accept=accept).unbind(-1)  # [M, K]
        same, total = same + float(agrees[:, 0].sum()), total + len(agrees)
        runs += _runs(packed.predicting, accepted)
    return runs, same / max(1, total)


def _accepted(
    target: Tensor, vocabulary: Tensor | None, temperature: float, logits: Tensor, rows: Rows
) -> Tensor:
    """Return the probability of acceptance and whether both argmax agree, [n, 2], of a student's logits.

    Args:
        target: The target's logits of all predictions, [M, V].
        vocabulary: The ids of the student's words; None is all.
        temperature: Divides both.
        logits: The student's, [n, words].
        rows: Which predictions they are of.
    """
    p, q = target[rows], logits.float()
    best = q.argmax(-1)
    agrees = (p.argmax(-1) == (best if vocabulary is None else vocabulary[best])).double()
    if temperature == 0:
        return torch.stack([agrees, agrees], -1)
    log_p = (p / temperature).log_softmax(-1)
    if vocabulary is not None:
        log_p = log_p[:, vocabulary]
    return torch.stack([overlap(log_p, (q / temperature).log_softmax(-1)).double(), agrees], -1)


def _runs(predicting: Tensor, values: Tensor) -> Iterator[Floats]:
    """Cut values where the columns are no neighbours: at the ends of documents, and around prompts."""
    columns, found = predicting.cpu().numpy(), values.cpu().numpy()
    yield from np.split(found, np.flatnonzero(np.diff(columns) > 1) + 1)


def drafts_of(runs: Sequence[Floats]) -> Floats:
    """Return the probabilities of every draft [runs, T, K], for runs as `acceptance` returns them."""
    most, tokens = max(map(len, runs)), runs[0].shape[1]
    longest = min(LONGEST, most)
    padded = np.zeros((len(runs), most + longest, tokens))
    for row, run in enumerate(runs):
        padded[row, : len(run)] = run
    if tokens > 1:
        return padded[:, :most, :LONGEST]
    return np.lib.stride_tricks.sliding_window_view(padded[..., 0], longest, axis=1)[:, :most]


def summarise(runs: Sequence[Floats], agreement: float, cost: float) -> Validation:
    """Return the figures of runs of acceptance probabilities.

    Args:
        runs: Of each run of tokens that count, as `acceptance` returns them.
        agreement: As in `Validation`.
        cost: c, of a draft step in plain steps.
    """
    lengths = np.array([len(run) for run in runs], dtype=np.int64)
    windows = drafts_of(runs)
    longest = windows.shape[2]
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
