"""Draft: the proposed tokens of one round, and the drafter protocols.

Two kinds of drafter. A *stepper* (a draft model, layer skipping, an adapter) only gives logits for each
row's next token; the one loop (`drafting`) draws from them. A *guesser* (lookup in the text, a predicted
output) returns tokens; their law is one-hot. A batch may mix them, row by row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from foredraft.decode.constraint import masks_along
from foredraft.decode.distribution import Distribution
from foredraft.decode.noise import NoiseKeys
from foredraft.decode.penalty_context import PenaltyContext
from foredraft.decode.sampling import SamplingTable
from foredraft.decode.sequence import Sequence
from foredraft.model.cache import KVCache
from foredraft.model.device import upload
from foredraft.model.runner import FusedDraft, Resume, SamplingInputs, StopThresholds

__all__ = [
    "Draft",
    "Drafter",
    "Free",
    "Guesser",
    "Latecomer",
    "Looper",
    "Reader",
    "RoundInputs",
    "Stepper",
    "as_free",
    "as_guesser",
    "as_latecomer",
    "as_looper",
    "as_reader",
    "as_stepper",
    "lengths_of",
    "no_draft",
]


@dataclass(frozen=True, slots=True)
class Draft:
    """tokens [B, K] int64, padded with 0; lengths [B] int64; q: laws at the K positions.

    resume: the target's states that a stepper already has for the columns [pending, *tokens].
    sick [B] bool: rows whose drafter gave logits that are not finite; None = none could.
    sure [B, N] float32, N steps, K or more: how sure a stepper was at every step that it took, -1 at others;
    None unless a policy stops by it. known: as much as the host knows of the lengths, at most so many; None =
    nothing.
    """

    tokens: Tensor
    lengths: Tensor
    q: Distribution
    resume: Resume | None = None
    drafter_nonfinite: Tensor | None = None
    sure: Tensor | None = None
    known: list[int] | None = None


@dataclass(frozen=True)
class RoundInputs:
    """What one round is about: every row of the batch, in row order.

    budgets [B]: tokens to draft at most, 0 in idle rows (those still in prefill) and plain ones.
    weighed: whether the policy was asked, and is told what comes of it. past: what the rows have said, where
    that bears on a law.
    """

    sequences: list[Sequence]
    idle: list[bool]
    budgets: list[int]
    table: SamplingTable
    vocabulary: int
    device: torch.device
    weighed: bool = True
    penalty_context: PenaltyContext | None = None

    @classmethod
    def of(
        cls, sequences: list[Sequence], idle: list[bool], budgets: list[int] | None, table: SamplingTable,
        vocabulary: int, device: torch.device,
    ) -> RoundInputs:  # fmt: skip
        """No budgets: the policy was not asked, and everyone takes a plain step."""
        weighed, penalty_context = budgets is not None, PenaltyContext.of(sequences, device)
        return cls(
            sequences,
            idle,
            budgets or [0] * len(sequences),
            table,
            vocabulary,
            device,
            weighed,
            penalty_context,
        )

    def masks(self, drafted: Tensor) -> Tensor | None:
        """[B, K + 1, V] bool along every constrained row's draft of drafted [B, K], or None."""
        if all(s.constraint is None for s in self.sequences):
            return None
        free = torch.ones(drafted.shape[1] + 1, self.vocabulary, dtype=torch.bool, device=self.device)
        masks: list[Tensor] = []
        for sequence, tokens, idle in zip(self.sequences, drafted.tolist(), self.idle, strict=True):
            if sequence.constraint is None or idle:
                masks.append(free)
            else:
                masks.append(masks_along(sequence.constraint, tokens, self.vocabulary, self.device)[0])
        return torch.stack(masks)

    @cached_property
    def coupled(self) -> list[bool]:
        """[B]: rows whose text is one whatever drafts it: drafts share their target's noise."""
        return [s.params.is_coupled for s in self.sequences]

    @cached_property
    def noise(self) -> NoiseKeys:
        """Keys of every position that the round may draw at, from each row's next one on: uploaded once, if
        anything is drawn at all."""
        width = max(self.budgets) + 1
        starts = [len(s.tokens) for s in self.sequences]
        base, start, rounds = upload(
            [[s.key for s in self.sequences], starts, [s.round_count for s in self.sequences]], self.device
        )
        attempt = None
        if any(s.attempts for s in self.sequences):
            rows = [
                [s.attempts.get(position, 0) for position in range(at, at + width)]
                for s, at in zip(self.sequences, starts, strict=True)
            ]
            attempt = upload(rows, self.device)
        position = start[:, None] + torch.arange(width, device=self.device)
        return NoiseKeys(base, position, attempt, rounds, self.table.vocab_ops, self.coupled)


class Drafter(Protocol):
    """What every drafter is. State per sequence lives in its own tables or its own cache rows.

    taps: depths at which it wants the target's hidden states of committed positions.
    max_length: positions it can read; drafts end there. caches: those whose rows follow the batch's.
    """

    name: str
    taps: tuple[int, ...]
    max_length: int | None
    caches: tuple[KVCache, ...]

    def join(self, sequence: Sequence) -> None:
        """The sequence has a row, and its prompt but for the pending token is in the target's cache."""
        ...

    def observe(self, sequence: Sequence, start: int, states: Mapping[int, Tensor]) -> None:
        """The target's states entering each tapped depth, [n, D], of newly committed positions from
        `start` on; also of its prompt, before `join`, unless the prompt's cache rows come from a sibling."""
        ...

    def rewind(self, sequence: Sequence) -> None:
        """A commit (or a ban's rollback) left `sequence.tokens`; forget all that lies past them."""
        ...

    def leave(self, sequence: Sequence) -> None:
        """The sequence is over, perhaps before it could `join`."""
        ...


class Reader(Drafter, Protocol):
    """A drafter that has to read a text before it can go on, which takes time."""

    def length(self, sequence: Sequence) -> int:
        """Leading tokens of the sequence that it has read; at most len(tokens) - 1."""
        ...


@runtime_checkable
class Stepper(Reader, Protocol):
    def read(self, sequence: Sequence, start: int, stop: int) -> None:
        """Read tokens [start, stop) ahead of the steps: at joining, or when it is far behind."""
        ...

    def step(
        self, tokens: Tensor, starts: list[int], counts: list[int], idle: list[bool], at: Tensor | None
    ) -> Tensor:
        """Read tokens [B, T], row b's counts[b] real ones from position starts[b] on; logits of the token
        after column at[b] (None: T is 1) -> [B, V] float32. Idle rows may return anything."""
        ...

    def resume(self) -> Resume | None:
        """After the loop: the target's states that this draft computed at exact shapes, if any."""
        ...


@runtime_checkable
class Latecomer(Stepper, Protocol):
    """A Stepper for which a text may begin later than it does. What `step` and `draft` call a position counts
    from there."""

    def begin(self, sequence: Sequence, start: int) -> None:
        """Forget what was read of this text: it begins with token `start`. Not where siblings share it."""
        ...

    def began(self, sequence: Sequence) -> int:
        """The token that it begins with; 0 unless told otherwise."""
        ...


@runtime_checkable
class Looper(Stepper, Protocol):
    """A Stepper that may take all the steps of a round in one call."""

    def draft(
        self,
        tokens: list[list[int]],
        starts: list[int],
        most: list[int],
        sampling_inputs: SamplingInputs | None,
        stops: StopThresholds | None,
    ) -> FusedDraft | None:
        """All steps of a round: row b reads tokens[b] from position starts[b] on, and draws most[b] of its
        own, or as far as it is not stopped. drawing: None for the likeliest. Gives None where it cannot."""
        ...


@runtime_checkable
class Guesser(Drafter, Protocol):
    def propose(self, requests: list[tuple[Sequence, int]]) -> list[list[int]]:
        """Once a round, of all its rows that may draft, each with its budget: for each of them, in order, at
        most so many tokens that may come next; none is an answer too."""
        ...


@runtime_checkable
class Free(Guesser, Protocol):
    """A Guesser that takes no time to ask, so that a policy hears first what it has to say."""

    def has(self, sequence: Sequence, most: int) -> tuple[int, float]:
        """How many tokens it would propose, and how sure it is of each, in (0, 1]: one of a few values, by
        which what became of its drafts is told apart. Changes nothing."""
        ...


@cache
def _has(kind: type, method: str) -> bool:
    """Whether drafters of a class have a method: a protocol's own check takes longer than a small round."""
    return hasattr(kind, method)


def as_stepper(drafter: Drafter) -> Stepper | None:
    return cast(Stepper, drafter) if _has(type(drafter), "step") else None


def as_latecomer(drafter: Drafter) -> Latecomer | None:
    return cast(Latecomer, drafter) if _has(type(drafter), "begin") else None


def as_looper(drafter: Drafter) -> Looper | None:
    return cast(Looper, drafter) if _has(type(drafter), "draft") else None


def as_reader(drafter: Drafter) -> Reader | None:
    return cast(Reader, drafter) if _has(type(drafter), "length") else None


def as_guesser(drafter: Drafter) -> Guesser:
    """One that is no stepper."""
    return cast(Guesser, drafter)


def as_free(drafter: Drafter) -> Free | None:
    return cast(Free, drafter) if _has(type(drafter), "has") else None


@lru_cache(maxsize=1024)
def lengths_of(several: tuple[int, ...], device: torch.device) -> Tensor:
    """`Draft.lengths` [B]. The same few come again and again; nobody writes into them."""
    return upload(several, device)


@lru_cache(maxsize=64)
def no_draft(rows: int, device: torch.device) -> Draft:
    """K = 0: every row takes a plain step."""
    none = torch.zeros(rows, 0, dtype=torch.int64, device=device)
    return Draft(none, torch.zeros(rows, dtype=torch.int64, device=device), Distribution(ids=none))
