"""Drafter: the base class of everything that proposes tokens, and its two kinds.

An *autoregressive drafter* (a draft model, layer skipping, an adapter) gives logits for each row's next
token; the draft loop in `drafting` transforms them, draws and keeps q. A *model-free drafter* (prompt
lookup, retokenised drafts) returns tokens; its q is one-hot. Optional abilities are methods with a default
answer. A batch may mix drafters, row by row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from foredraft.decode.sequence import Sequence
from foredraft.model.cache import CacheLayers, KVCache
from foredraft.model.runner import DraftInputs, Forward, FusedDraft, Resume, Runner
from foredraft.model.spec import Plan


class Peek(NamedTuple):
    """A drafter's proposal in outline, before it drafts (`Drafter.peek`)."""

    length: int  # tokens that it would propose at most
    # Rough probability that each is accepted, one of a few values, for each of which acceptance is estimated
    # separately; None where the drafter cannot tell
    confidence: float | None = None


@dataclass(frozen=True, slots=True)
class DraftPass:
    """The forward of a draft step: always the same sub-layers of the same runner."""

    runner: Runner
    plan: Plan | None = None  # sub-layers to run; None runs all of them
    # The layer at which the verifying pass resumes: the passes return the states that enter it, and keep to
    # batch-invariant shapes. None: it does not resume.
    exit: int | None = None

    @property
    def described(self) -> str:
        """What tells its forwards from others of the same runner, as a key of kept costs."""
        return repr(self.plan)

    def __call__(self, cache: CacheLayers, tokens: Tensor, starts: list[int], **more: Any) -> Forward:
        """Run one draft step; arguments as `Runner.forward`."""
        aux_layers, resumes = () if self.exit is None else (self.exit,), self.exit is not None
        return self.runner.forward(
            cache, tokens, starts, plan=self.plan, aux_layers=aux_layers, invariant=resumes, **more
        )

    def fused(self, cache: CacheLayers, inputs: DraftInputs) -> FusedDraft | None:
        """Run all steps of a draft in one call, as `Runner.draft`; None where the steps have to be single."""
        return self.runner.draft(cache, inputs, plan=self.plan, exit=self.exit)


class Drafter:
    """Base class of all drafters. State of a sequence lives in tables or cache rows of the drafter."""

    name: str  # as requests name it
    aux_layers: tuple[int, ...] = ()  # whose entering states, of committed positions, the drafter reads
    max_length: int | None = None  # positions that it can read; drafts end there. None is no limit
    max_draft: int | None = None  # tokens of a draft at most; None is no limit
    planned: int | None = None  # draft length that it was made for, in tokens; None: it was made for none
    # tokens of a draft that may pay, where that is longer than the drafts of a policy that compares costs
    longest_draft: int = 0
    caches: tuple[KVCache, ...] = ()  # whose rows follow the rows of the batch
    draft_pass: DraftPass | None = None  # the forward of one drafted token; None where drafts cost no forward
    whole_model: ClassVar[bool] = False  # its draft pass runs a whole model of its own
    starts_late: ClassVar[bool] = False  # a text may begin late for this drafter (`start_context`)

    def join(self, sequence: Sequence) -> None:
        """Take up a sequence that has a row; the target's cache holds its prompt but for the last token."""

    def observe(self, sequence: Sequence, start: int, states: Mapping[int, Tensor]) -> None:
        """Receive the target's states at every auxiliary layer, [n, D], of newly committed positions.

        The first state belongs to position `start`. States of the prompt come before `join`, unless the cache
        rows of the prompt are copied from another choice or from the prefix cache.
        """

    def rewind(self, sequence: Sequence) -> None:
        """Forget everything past `sequence.tokens`, which a commit or a ban's rollback has just changed."""

    def settle(self, sequence: Sequence) -> None:
        """Write all that is known of the sequence to its cache rows, which are about to be copied."""

    def leave(self, sequence: Sequence) -> None:
        """Drop the sequence. It may leave before it joined."""

    def unread(self, sequence: Sequence) -> int:
        """Return how many tokens before the pending one the drafter has to read before it can draft."""
        return 0

    def peek(self, sequence: Sequence, limit: int) -> Peek:
        """Return what the drafter would propose now, `limit` tokens at most, without changing anything."""
        return Peek(limit)

    def context_start(self, sequence: Sequence) -> int:
        """Return the position of the token with which the text begins for this drafter."""
        return 0

    def start_context(self, sequence: Sequence, start: int) -> None:
        """Forget what was read; for this drafter the text begins with token `start`."""
        raise NotImplementedError


class AutoregressiveDrafter(Drafter):
    """A drafter that gives logits, one step after the other. Positions count from `context_start`."""

    def length(self, sequence: Sequence) -> int:
        """Return the leading tokens of the sequence that the drafter has read, at most len(tokens) - 1."""
        raise NotImplementedError

    def unread(self, sequence: Sequence) -> int:
        return len(sequence.tokens) - 1 - self.length(sequence)

    def expect(self, budgets: list[int]) -> None:
        """Learn how many tokens each row drafts at most, [B], before the first step of a draft."""

    def read(self, sequence: Sequence, start: int, stop: int) -> None:
        """Read tokens [start, stop) of the sequence ahead of the draft steps."""

    def step(
        self,
        tokens: Tensor,  # [B, T] int64, padded on the right
        starts: list[int],  # position of each row's first token
        counts: list[int],  # real tokens of each row
        idle: list[bool],  # rows that do not draft; their logits mean nothing
        at: Tensor | None,  # [B] column after which the logits are wanted; None where T is 1
    ) -> Tensor:
        """Read tokens and return the logits of the next one, [B, V] float32."""
        raise NotImplementedError

    def fused_draft(self, inputs: DraftInputs) -> FusedDraft | None:
        """Take all steps of a round in one call: the same draws as the draft loop, by the same noise.

        None where this drafter has to take single steps.
        """
        return None

    def resume(self) -> Resume | None:
        """Return, once, the states of the target that the steps of a draft computed, if these resume.

        The steps then keep to batch-invariant shapes.
        """
        return None


class ModelFreeDrafter(Drafter):
    """A drafter that returns tokens."""

    def propose(self, requests: list[tuple[Sequence, int]]) -> list[list[int]]:
        """Return the proposed tokens of each (sequence, budget): at most `budget` of them, perhaps none."""
        raise NotImplementedError
