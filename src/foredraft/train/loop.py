"""The loop: steps of an optimiser over packed documents, validated by what counts in decoding, logged and
continued.

One pass over a held-out text gives the acceptance at every position for every draft that may reach it, and
`ExpectedRounds` the rounds that decoding takes. A run is a function of its options: whatever step a process
dies at, the next one goes on from the last checkpoint to the same losses.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from foredraft.errors import ConfigError
from foredraft.files import errors_named
from foredraft.model.checkpoint import Checkpoint
from foredraft.train.students import Rows, Student, mixture, overlap
from foredraft.train.target import Batches, Document, FrozenTarget, KeptStates, Packed
from foredraft.train.training_checkpoints import Journal, Processes, TrainingCheckpoints, TrainingProgress
from foredraft.train.training_options import TrainOptions, parse_loss
from foredraft.tune.teacher_forced import ExpectedRounds, Floats

LONGEST = 10  # tokens of the drafts that are looked at


@dataclass(frozen=True, slots=True)
class Validation:
    """How a student drafts."""

    alpha: float  # α: of the drafted tokens that are reached, the share that is accepted
    by_position: tuple[float, ...]  # the same for the first, second, ... token of a draft
    tau: float  # τ at `max_draft`
    max_draft: int  # the best draft length
    predicted: float  # the speed-up there, at draft costs by the bytes that a step reads
    agreement: float  # share of the positions at which both argmax agree


@torch.no_grad()
def acceptance(
    student: Student, target: FrozenTarget, groups: Sequence[Sequence[Document]], temperature: float
) -> tuple[list[Floats], float]:
    """Return the probabilities of acceptance by run of tokens that count, and the agreement.

    Those of a run are [T, K], of the draft that begins with each token; K is 1 where that makes no
    difference.
    """
    runs: list[Floats] = []
    same = total = 0.0
    for group in groups:
        packed = Packed.of(group, target.decoder.device)
        states = target.states(packed, student.aux_layers)
        p = target.decoder.head(states.last)
        accept = partial(_accepted, p, student.vocabulary, temperature)
        accepted, agrees = student(packed, states.aux_states, accept=accept).unbind(-1)  # [M, K]
        same, total = same + float(agrees[:, 0].sum()), total + len(agrees)
        # cut where the columns are no neighbours: at the ends of documents, and around prompts
        columns = packed.predicting.cpu().numpy()
        runs += np.split(accepted.cpu().numpy(), np.flatnonzero(np.diff(columns) > 1) + 1)
    return runs, same / max(1, total)


def _accepted(
    target: Tensor, vocabulary: Tensor | None, temperature: float, logits: Tensor, rows: Rows
) -> Tensor:
    """Return the probability of acceptance and whether both argmax agree, [n, 2]; `target` is [M, V]."""
    p, q = target[rows], logits.float()
    best = q.argmax(-1)
    agrees = (p.argmax(-1) == (best if vocabulary is None else vocabulary[best])).double()
    if temperature == 0:
        return torch.stack([agrees, agrees], -1)
    log_p = (p / temperature).log_softmax(-1)
    if vocabulary is not None:
        log_p = log_p[:, vocabulary]
    return torch.stack([overlap(log_p, (q / temperature).log_softmax(-1)).double(), agrees], -1)


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
    """Return the figures of runs of acceptance probabilities."""
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


LOWEST = 0.1  # of the learning rate, at the last step
BETAS = (0.9, 0.95)  # of AdamW, as the reference has them
GIB = 2**30
FIGURES = ("alpha", "tau", "predicted", "agreement", "max_draft")  # of a validation, in the journal

OnProgress = Callable[[str, int, int, str], None]  # stage, done, total, note


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a run starts from."""

    checkpoint: Checkpoint  # the target's, not loaded
    hash: str  # the target's hash
    name: str  # the target's name, for display
    target: FrozenTarget  # the target
    batches: Batches  # the data
    held_out: list[Document]  # documents of the validation
    skipped: int  # bad lines that were left out
    folder: Path  # of checkpoints and logs
    digest: str  # of what makes it the same run
    processes: Processes  # those that train together


class Trainee(NamedTuple):
    """A student before its first step."""

    student: Student  # what learns
    cost: float  # c, of a draft step by the student, in plain steps; by the bytes that both read
    place: Path  # folder to write
    write: Callable[[Validation, TrainingProgress, Mapping[str, Tensor]], None]  # writes the tensors


class TrainingRun:
    """One training run."""

    def __init__(
        self, options: TrainOptions, prepared: Prepared, trainee: Trainee, report: OnProgress
    ) -> None:
        self.options, self.prepared, self.trainee, self.report = options, prepared, trainee, report
        self.student, self.target, self.batches = trainee.student, prepared.target, prepared.batches
        self.processes, self._loss = prepared.processes, mixture(parse_loss(options.loss))
        self.processes.shard(self.student)
        decayed = [value for value in self.student.parameters() if value.dim() > 1]
        others = [value for value in self.student.parameters() if value.dim() <= 1]
        groups: list[dict[str, Any]] = [{"params": decayed, "weight_decay": options.weight_decay}]
        groups.append({"params": others})
        self._optimizer = torch.optim.AdamW(groups, lr=options.learning_rate, betas=BETAS, weight_decay=0.0)
        folder, most_bytes = prepared.folder, int(options.kept_states * GIB)
        self._kept = KeptStates(self.target, self.student.aux_layers, folder / "states", most_bytes)
        self._checkpoints = TrainingCheckpoints(folder / "checkpoints", self.processes, prepared.digest)
        self._groups = max(self.processes.count, round(options.step_tokens / self.batches.tokens))
        self._groups -= self._groups % self.processes.count

    def train(self) -> TrainingProgress:
        """Train to the last step, or until the validation gets no better; return how far it came."""
        progress = self._checkpoints.restore(self.student, self._optimizer) or TrainingProgress()
        journal = Journal(self.prepared.folder, progress.step) if self.processes.first else None
        try:
            while progress.step < self.options.steps and not progress.finished:
                self._step(progress, journal)
                if progress.step % self.options.validate_every == 0 or progress.step == self.options.steps:
                    self._validate(progress, journal)
                    self._checkpoints.save(self.student, self._optimizer, progress)
        finally:
            if journal is not None:
                journal.close()
        if not self.trainee.place.exists():  # a run that had ended, whose drafter was removed since
            self._keep(self.validate(), progress)
        return progress

    def _step(self, progress: TrainingProgress, journal: Journal | None) -> None:
        """Take one step over this process's groups of it."""
        began, options = time.perf_counter(), self.options
        places = range(progress.step * self._groups, (progress.step + 1) * self._groups)
        groups = [self.batches.group_at(place) for place in places]
        counted = sum(document.counted for group in groups for document in self.batches.documents_of(group))
        rate = options.learning_rate * _schedule(progress.step, options.warm_up, options.steps)
        for parameters in self._optimizer.param_groups:
            parameters["lr"] = rate
        sums = torch.zeros(2, device=self.target.decoder.device)  # of the loss, and of Σ min(p, q)
        for group in groups[self.processes.rank :: self.processes.count]:
            sums += self._learn(group, counted)
        norm = torch.nn.utils.clip_grad_norm_(self.student.parameters(), options.clip)
        self._optimizer.step()
        self._optimizer.zero_grad()
        loss, alpha = (self.processes.sum(sums) / counted).tolist()
        if not math.isfinite(loss):
            problem, value = f"the loss of step {progress.step + 1} is {loss}", options.learning_rate
            raise ConfigError(problem, option="learning_rate", value=value, remedy="lower it")
        tokens = sum(len(document.ids) for group in groups for document in self.batches.documents_of(group))
        progress.step += 1
        progress.tokens += tokens
        progress.seconds += time.perf_counter() - began
        speed = tokens / (time.perf_counter() - began)
        if journal is not None:
            figures = {"loss": loss, "overlap": alpha, "learning_rate": rate, "gradient": float(norm)}
            journal.write(progress.step, {**figures, "tokens_per_second": speed})
            note = f"loss {loss:.4f}, overlap {alpha:.3f}, {speed:,.0f} tokens/s"
            self.report("train", progress.step, options.steps, note)

    def _learn(self, group: int, counted: int) -> Tensor:
        """Add the gradients of one group; return its sums of the loss and of the overlap, [2]."""
        packed = Packed.of(self.batches.documents_of(group), self.target.decoder.device)
        states = self._kept.states(group, packed)

        # steps that make the same predictions share p; without them it is made chunk by chunk
        whole = self._log_p(states.last) if self.student.steps > 1 else None

        def compare(logits: Tensor, rows: Rows) -> Tensor:
            log_q = logits.float().log_softmax(-1)
            log_p = self._log_p(states.last[rows]) if whole is None else whole[rows]
            return torch.stack([self._loss(log_p, log_q).sum(), overlap(log_p, log_q.detach()).sum()])

        with self.target.autocast():
            sums: Tensor = self.student(packed, states.aux_states, compare)
        # The gradients are averaged over the processes, but the loss is a mean over what all of them count.
        torch.autograd.backward(sums[0] * (self.processes.count / counted))
        return sums.detach()

    def _log_p(self, last: Tensor) -> Tensor:
        """Return log p of the student's draft vocabulary, [n, draft_vocab], of the target's last states."""
        log_p, draft_vocab = self.target.log_probs(last), self.student.vocabulary
        return log_p if draft_vocab is None else log_p[:, draft_vocab]

    def _validate(self, progress: TrainingProgress, journal: Journal | None) -> None:
        """Validate, keep the student where it is the best so far, and stop where it has long not been."""
        found = self.validate()
        progress.worse += 1
        if found.predicted > progress.best:
            progress.best, progress.worse = found.predicted, 0
            self._keep(found, progress)
        patience = self.options.patience
        progress.finished = 0 < patience <= progress.worse
        if journal is not None:
            figures = {each: float(getattr(found, each)) for each in FIGURES}
            journal.write(progress.step, {**figures, "alpha_by_position": list(found.by_position)})
            note = f"α {found.alpha:.3f}, τ {found.tau:.2f}, predicted {found.predicted:.2f} x"
            self.report("validate", progress.step, self.options.steps, note)

    def _keep(self, validation: Validation, progress: TrainingProgress) -> None:
        """Write the student, which is the best so far."""
        tensors, dtype = self.processes.whole(self.student.tensors()), self.prepared.checkpoint.dtype
        if self.processes.first:
            halves = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
            with errors_named(self.trainee.place, "out", "give a folder that can be"):
                self.trainee.write(validation, progress, halves)
        self.processes.wait()

    def validate(self) -> Validation:
        """Return how the student drafts on the held-out documents; every process computes all of it."""
        groups = Batches(self.prepared.held_out, self.batches.tokens, 0)
        documents = [groups.documents_of(group) for group in range(len(groups))]
        with torch.no_grad(), self.target.autocast():
            found = acceptance(self.student, self.target, documents, self.options.temperature)
        return summarise(*found, self.trainee.cost)


def _schedule(step: int, warm_up: int, steps: int) -> float:
    """Return the share of the learning rate at a step: a line up, then a cosine down to LOWEST."""
    if step < warm_up:
        return (step + 1) / warm_up
    done = (step - warm_up) / max(1, steps - warm_up)
    return LOWEST + (1 - LOWEST) * 0.5 * (1 + math.cos(math.pi * done))
