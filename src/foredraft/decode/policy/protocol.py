"""What every policy is, and what those share that look at one sequence at a time."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from foredraft.decode.distribution import Distribution
from foredraft.decode.sequence import Sequence
from foredraft.decode.stats import Round
from foredraft.model.runner import StopThresholds

__all__ = ["PLAIN", "Alone", "Choice", "Offers", "Policy", "Signal", "Source"]

# How sure the target was of the token that it gave last, from its own logits; 1 is certain.
Signal: TypeAlias = Literal["probability", "entropy", "margin"]
Calibrate: TypeAlias = Callable[[Any, Seq[Sequence]], None]
# A drafter, and how sure it is, where it tells before it is asked.
Source: TypeAlias = tuple[str, float | None]


class Choice(NamedTuple):
    """Who drafts for a row in this round, and how many tokens at most. reads: of a text that is new to it, so
    many of the last tokens are all that it reads first; None: whatever it has not read."""

    drafter: str | None
    budget: int
    reads: int | None = None


PLAIN = Choice(None, 0)


@dataclass(frozen=True, slots=True)
class Offers:
    """What a row has at hand in this round.

    most: who may draft -> tokens that it may draft at most, 1 or more; in the order of the request.
    behind: tokens before the pending one that a drafter has not read yet, of those that read. sure: of what
    it has to say, of those that are free to ask. late: those to whom the text is new, and may begin later
    than it does. All three where the policy weighs costs. idle: its prompt is being read yet, so that
    nothing is on offer, but it counts in the batch, in which it soon will decode.
    """

    sequence: Sequence
    most: dict[str, int]
    behind: dict[str, int] = field(default_factory=dict)
    sure: dict[str, float] = field(default_factory=dict)
    late: set[str] = field(default_factory=set)
    idle: bool = False

    def source(self, name: str) -> Source:
        """As what a drafter is known here."""
        return name, self.sure.get(name)


class Policy(Protocol):
    """rests / choose / draws / go_on / stops / learn.

    looks: `draws` and `go_on` are asked at all. wants: what of the target's law `learn` is told; None spares
    its making.
    weighs: costs decide, so that a drafter reads a text only once it is chosen, and `Offers` tells what that
    takes and how much a drafter that is free has to say.
    calibrate: called with the engine and those that wait, before the first of them gets a row and while
    nobody else has one.
    """

    @property
    def name(self) -> str: ...

    @property
    def looks(self) -> bool: ...

    @property
    def wants(self) -> Signal | None: ...

    @property
    def weighs(self) -> bool: ...

    @property
    def calibrate(self) -> Calibrate | None: ...

    def start(self) -> Any:
        """State of a new sequence, kept by the sequence."""
        ...

    def rests(self, sequences: Seq[Sequence]) -> bool:
        """Whether nobody of those that decode drafts in this round, whatever is on offer: neither `choose`
        nor `learn` is called for it then."""
        ...

    def choose(self, rows: Seq[Offers]) -> list[Choice]:
        """Of every row, in order, jointly; a budget of 0 is a plain step. Not asked where nobody may
        draft."""
        ...

    def draws(
        self, sequences: Seq[Sequence], position: int, q: Distribution, logits: Tensor
    ) -> Tensor | None:
        """Before a token is drawn for `position` of every draft: [B] bool, False = that place is left to the
        target. logits [B, 1, V] float32: the drafter's own. None = always."""
        ...

    def go_on(
        self, sequences: Seq[Sequence], position: int, q: Distribution, logits: Tensor
    ) -> Tensor | None:
        """After the token at `position` of every draft was drawn from q [B, 1, V] (and kept): [B] bool,
        True = draft another. logits [B, 1, V] float32: the drafter's own. None = always, which spares the
        read of it on the host."""
        ...

    def stops(
        self, sequences: Seq[Sequence], budgets: Seq[int], device: torch.device
    ) -> StopThresholds | None:
        """Where a stepper's drafts of this round end before their budgets [B], by how sure it is; K of it is
        the largest of these. None = nowhere. It spares a call for every token, unlike `draws` and `go_on`;
        of a policy that has both, either ends a draft."""
        ...

    def learn(self, sequence: Sequence, outcome: Round, sure: float | None) -> None:
        """Of every row that decodes, after its commit, whoever may draft for it; sure: what it `wants`. Not
        called of a round that was not chosen for."""
        ...


class Alone:
    """A policy that looks at one sequence at a time and leaves its first drafter at it."""

    looks: bool = False
    wants: Signal | None = None
    weighs: bool = False
    calibrate: Calibrate | None = None

    def start(self) -> Any:
        return None

    def budget(self, sequence: Sequence) -> int:
        """Tokens to draft at most."""
        raise NotImplementedError

    def rests(self, sequences: Seq[Sequence]) -> bool:
        return False

    def choose(self, rows: Seq[Offers]) -> list[Choice]:
        choices = []
        for row in rows:
            name = next(iter(row.most), None)
            budget = 0 if name is None else min(self.budget(row.sequence), row.most[name])
            choices.append(Choice(name, budget))
        return choices

    def draws(
        self, sequences: Seq[Sequence], position: int, q: Distribution, logits: Tensor
    ) -> Tensor | None:
        return None

    def go_on(
        self, sequences: Seq[Sequence], position: int, q: Distribution, logits: Tensor
    ) -> Tensor | None:
        return None

    def stops(
        self, sequences: Seq[Sequence], budgets: Seq[int], device: torch.device
    ) -> StopThresholds | None:
        return None

    def learn(self, sequence: Sequence, outcome: Round, sure: float | None) -> None:
        return None
