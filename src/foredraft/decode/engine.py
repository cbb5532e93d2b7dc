"""The engine: the round, over a batch.

    budget → draft → one forward over [pending, *draft] of every row → accept → commit

Batch 1 is B = 1 and plain decoding is K = 0, not other paths. Before each round every sequence's cache
length is len(tokens) - 1: the last token is pending. Rollback is setting a length. The device is read
once per round, in `_read`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from foredraft.decode.accept import Verdict, accept
from foredraft.decode.constraint import masks_along
from foredraft.decode.draft import Draft, Drafter, RoundInputs, Stepper, propose
from foredraft.decode.noise import Noise
from foredraft.decode.policy import Policy
from foredraft.decode.rows import Rows
from foredraft.decode.sampling import SamplingTable, law_of
from foredraft.decode.scheduler import Scheduler
from foredraft.decode.sequence import Finish, Origin, Sequence, State
from foredraft.decode.stats import Round
from foredraft.model.cache import KVCache
from foredraft.model.runner import Forward, Resume

__all__ = ["Engine", "Target"]


class Target(Protocol):
    """What the engine needs of `model.runner.Runner`."""

    max_queries: int  # longest [pending, *draft] that one pass takes
    chunk: int  # prefill is cut at multiples of it

    def forward(
        self,
        cache: KVCache,
        tokens: Tensor,
        starts: list[int],
        *,
        idle: Seq[bool] | None = None,
        counts: list[int] | None = None,
        resume: Resume | None = None,
        taps: Seq[int] = (),
    ) -> Forward: ...

    def prefill(
        self, cache: KVCache, row: int, tokens: list[int], start: int, *, taps: Seq[int] = ()
    ) -> Forward: ...


@dataclass(frozen=True, slots=True)
class Reading:
    """One row of what the host learns from a round."""

    accepted: int
    next_token: int
    drafted: int
    broken: bool  # logits that decide were not finite
    tokens: list[int]  # [K]


class Engine:
    """Not thread-safe: one caller steps it at a time.

    greedy_drafts: steppers draft their argmax (a one-hot q) instead of sampling from q.
    """

    def __init__(
        self,
        target: Target,
        cache: KVCache,
        policy: Policy,
        drafters: Mapping[str, Drafter],
        *,
        vocabulary: int,
        device: torch.device,
        noise: Noise | None = None,
        greedy_drafts: bool = False,
    ) -> None:
        self.target, self.cache, self.policy = target, cache, policy
        self.drafters = dict(drafters)
        self.vocabulary, self.device = vocabulary, device
        self.noise = noise or Noise()
        self.greedy_drafts = greedy_drafts
        self.rows = Rows([cache, *(c for drafter in drafters.values() for c in drafter.caches)])
        self.scheduler = Scheduler(self.rows, target.chunk)
        self._table: tuple[list[int], SamplingTable] | None = None

    def submit(self, sequence: Sequence) -> None:
        sequence.policy_state = self.policy.start()
        self.scheduler.submit(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """At any time between steps; what was generated is kept."""
        self._leave(sequence, Finish.CANCELLED)

    def fail(self, sequence: Sequence, error: str) -> None:
        """End it because its batch could not go on; its row may hold anything and is zeroed."""
        self._leave(sequence, Finish.ERROR, error)

    def step(self) -> list[Sequence]:
        """One chunk of prefill and one round, or the chunk alone while nobody decodes; who was in it."""
        self._start(self.scheduler.admit())
        busy = self.scheduler.running
        if (sequence := self.scheduler.prefilling) is not None:
            self._prefill(sequence)
            self._start(self.scheduler.admit())
        if not busy and self.scheduler.prefilling is not None:
            return []
        return self.round() if self.scheduler.running else []

    @torch.inference_mode()
    def round(self) -> list[Sequence]:
        inputs = self._inputs()
        draft = propose(self.drafters, inputs, self.policy, self.noise, greedy=self.greedy_drafts)
        forward = self._verify(inputs, draft)
        assert forward.logits is not None
        p, finite = law_of(forward.logits, inputs.table, self._masks(inputs, draft))
        coupled = [s.params.is_coupled for s in inputs.sequences]
        keys = inputs.keys(draft.tokens.shape[1] + 1)
        verdict = accept(draft, p, keys, self.noise, coupled)
        readings = _read(draft, verdict, finite)
        return self._commit(inputs, readings, forward)

    def _inputs(self) -> RoundInputs:
        sequences = list(self.rows.sequences)
        idle = [s.state is not State.RUNNING for s in sequences]
        budgets = [0 if i else self._budget(s) for s, i in zip(sequences, idle, strict=True)]
        ids = [s.id for s in sequences]
        if self._table is None or self._table[0] != ids:
            self._table = ids, SamplingTable.of([s.params for s in sequences], self.device)
        return RoundInputs(sequences, idle, budgets, self._table[1], self.vocabulary, self.device)

    def _budget(self, sequence: Sequence) -> int:
        """The policy's, clipped: a round emits one more token than it drafts."""
        if sequence.drafter is None:
            return 0
        most = min(sequence.remaining, self.target.max_queries) - 1
        limit = self.drafters[sequence.drafter].max_length
        if limit is not None:
            most = min(most, limit - len(sequence.tokens))
        return max(0, min(self.policy.budget(sequence), most))

    def _verify(self, inputs: RoundInputs, draft: Draft) -> Forward:
        """One forward over [pending, *draft] of every row."""
        pending = torch.tensor([[s.tokens[-1]] for s in inputs.sequences], device=self.device)
        return self.target.forward(
            self.cache,
            torch.cat([pending, draft.tokens], 1),
            [len(s.tokens) - 1 for s in inputs.sequences],
            idle=inputs.idle,
            counts=[0 if i else 1 + b for i, b in zip(inputs.idle, inputs.budgets, strict=True)],
            resume=draft.resume,
            taps=sorted({depth for s in inputs.sequences for depth in self._taps(s)}),
        )

    def _masks(self, inputs: RoundInputs, draft: Draft) -> Tensor | None:
        """[B, K + 1, V] bool along every constrained row's draft, or None."""
        if not any(s.constraint is not None for s in inputs.sequences):
            return None
        width = draft.tokens.shape[1] + 1
        free = torch.ones(width, self.vocabulary, dtype=torch.bool, device=self.device)
        masks: list[Tensor] = []
        tokens = draft.tokens.tolist()
        for sequence, ids, idle in zip(inputs.sequences, tokens, inputs.idle, strict=True):
            if sequence.constraint is None or idle:
                masks.append(free)
            else:
                masks.append(masks_along(sequence.constraint, ids, self.vocabulary, self.device)[0])
        return torch.stack(masks)

    def _commit(self, inputs: RoundInputs, readings: list[Reading], forward: Forward) -> list[Sequence]:
        """Tokens, cache length, constraint, drafter and policy of each row move together."""
        over: list[tuple[Sequence, Finish, str | None]] = []
        for sequence, idle, reading in zip(inputs.sequences, inputs.idle, readings, strict=True):
            if idle:
                continue
            if reading.broken:
                where = len(sequence.tokens)
                over.append(
                    (sequence, Finish.ERROR, f"the model's logits at position {where} are not finite")
                )
                continue
            base = len(sequence.tokens) - 1
            whole = reading.accepted == reading.drafted > 0
            origins = [Origin.DRAFTER] * reading.accepted + [Origin.BONUS if whole else Origin.TARGET]
            sequence.extend([*reading.tokens[: reading.accepted], reading.next_token], origins)
            sequence.round_count += 1
            outcome = Round(reading.drafted, reading.accepted, len(sequence.tokens) - 1 - base)
            sequence.rounds.append(outcome)
            self.cache.lengths[sequence.row] = len(sequence.tokens) - 1
            if sequence.drafter is not None:
                drafter = self.drafters[sequence.drafter]
                if drafter.taps and outcome.emitted > 0:
                    row = sequence.row
                    states = {d: forward.taps[d][row, : outcome.emitted] for d in drafter.taps}
                    drafter.observe(sequence, base, states)
                drafter.rewind(sequence)
                self.policy.learn(sequence, outcome)
            if sequence.finish is not None:
                over.append((sequence, sequence.finish, None))
        # failed rows leave first, while each is still where it wrote what is not finite
        for sequence, finish, error in sorted(over, key=lambda leaving: leaving[1] is not Finish.ERROR):
            self._leave(sequence, finish, error)
        return [s for s, idle in zip(inputs.sequences, inputs.idle, strict=True) if not idle]

    @torch.inference_mode()
    def _prefill(self, sequence: Sequence) -> None:
        """The next chunk of its prompt through the target, and its drafter."""
        start, stop = self.cache.lengths[sequence.row], len(sequence.prompt) - 1
        end = self.scheduler.next_chunk(start, stop)
        taps = self._taps(sequence)
        forward = self.target.prefill(self.cache, sequence.row, sequence.prompt[start:end], start, taps=taps)
        self.cache.lengths[sequence.row] = end
        if sequence.drafter is not None:
            drafter = self.drafters[sequence.drafter]
            if taps:
                drafter.observe(sequence, start, {d: forward.taps[d][0, : end - start] for d in taps})
            fits = drafter.max_length is None or stop <= drafter.max_length
            if isinstance(drafter, Stepper) and fits:  # one that can never draft need not read either
                drafter.read(sequence, start, end)
        if end == stop:
            sequence.state = State.RUNNING
            self._start([sequence])

    def _start(self, ready: list[Sequence]) -> None:
        for sequence in ready:
            sequence.started = time.perf_counter()
            if sequence.drafter is not None:
                self.drafters[sequence.drafter].join(sequence)

    def _leave(self, sequence: Sequence, finish: Finish, error: str | None = None) -> None:
        if sequence.state is State.RUNNING:
            sequence.ended = time.perf_counter()
            if sequence.drafter is not None:
                self.drafters[sequence.drafter].leave(sequence)
        sibling = self.scheduler.leave(sequence, finish, error)
        if sibling is not None:
            self._start([sibling])

    def _taps(self, sequence: Sequence) -> tuple[int, ...]:
        return () if sequence.drafter is None else self.drafters[sequence.drafter].taps


def _read(draft: Draft, verdict: Verdict, finite: Tensor) -> list[Reading]:
    """The round's one device synchronisation."""
    columns = torch.arange(finite.shape[1], device=finite.device)
    broken = (~finite & (columns <= verdict.accepted[:, None])).any(1)
    figures = torch.stack([verdict.accepted, verdict.next_token, draft.lengths, broken.long()], 1)
    rows = torch.cat([figures, draft.tokens], 1).tolist()
    return [Reading(row[0], row[1], row[2], bool(row[3]), row[4:]) for row in rows]
