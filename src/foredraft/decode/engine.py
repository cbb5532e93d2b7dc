"""The engine: the round, over a batch.

    budget → draft → one forward over [pending, *draft] of every row → accept → commit

Batch 1 is B = 1 and plain decoding is K = 0, not other paths. Before each round every sequence's cache
length is len(tokens) - 1: the last token is pending. Rollback is setting a length. The device is read
once per round, in `reading`, and after each draft step that a policy or a constraint may end.

A value that is not finite harms its own request alone, and only if plain decoding met it too (`faults`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

from foredraft.decode.accept import Rollback, Verdict, accept
from foredraft.decode.choices import choose, may_draft
from foredraft.decode.distribution import Distribution
from foredraft.decode.draft import Draft, Drafter, RoundInputs
from foredraft.decode.drafting import propose
from foredraft.decode.faults import cure, not_finite
from foredraft.decode.noise import Keys, Noise
from foredraft.decode.policy import Policy
from foredraft.decode.prefill import prefill_chunk
from foredraft.decode.round_results import RowResult, read
from foredraft.decode.rows import Rows
from foredraft.decode.sampling import SamplingTable, distribution_of
from foredraft.decode.scheduler import Scheduler
from foredraft.decode.sequence import Finish, Origin, Sequence, State
from foredraft.decode.stats import Round
from foredraft.decode.target import Target
from foredraft.decode.vocab_ops import TORCH_VOCAB_OPS, VocabOps
from foredraft.model.cache import KVCache
from foredraft.model.device import upload
from foredraft.model.runner import Forward

__all__ = ["Engine"]

Rule = Callable[[Draft, Distribution, Keys | None, Noise, list[bool], Rollback | None], Verdict]


class Engine:
    """Not thread-safe: one caller steps it at a time.

    operators: what everything over a vocabulary goes by. greedy_drafts: steppers draft their argmax (a one-
    hot q) instead of sampling from q. `accept` is an attribute so that a verification can see what it makes
    of a defective rule. `policy` may be another one whenever nobody has a row: what it keeps of a sequence
    begins with that.
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
        vocab_ops: VocabOps = TORCH_VOCAB_OPS,
        noise: Noise | None = None,
        greedy_drafts: bool = False,
    ) -> None:
        self.target, self.cache, self.policy = target, cache, policy
        self.drafters = dict(drafters)
        self.vocabulary, self.device = vocabulary, device
        self.vocab_ops, self.noise = vocab_ops, noise or Noise()
        self.greedy_drafts = greedy_drafts
        self.accept: Rule = accept
        self.rows = Rows([cache, *(c for drafter in drafters.values() for c in drafter.caches)])
        self.scheduler = Scheduler(self.rows)
        self._table: tuple[list[int], SamplingTable] | None = None

    def submit(self, sequence: Sequence) -> None:
        sequence.policy_state = self.policy.start()
        self.scheduler.submit(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """At any time between steps; what was generated is kept."""
        self._leave(sequence, Finish.CANCELLED)

    def fail_batch(self, error: str) -> None:
        """End every sequence that has a row, because a pass over them broke off; rows may hold anything."""
        several = list(self.rows.sequences)
        for sequence in several:  # all, before one moves: drafters know a sequence by its row
            sequence.cache_finite = False
            for name in sequence.drafters:
                self.drafters[name].leave(sequence)
            sequence.drafters = ()
        for sequence in several:
            self._leave(sequence, Finish.ERROR, error)

    def step(self) -> list[Sequence]:
        """One chunk of prefill and one round, or the chunk alone while nobody decodes; who was in it."""
        if self.scheduler.steady:
            return self.round()
        waiting, calibrate = self.scheduler.waiting, self.policy.calibrate
        if calibrate is not None and not self.rows.sequences and may_draft(waiting):
            calibrate(self, list(waiting))
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
        penalty_context = inputs.penalty_context and inputs.penalty_context.along(draft.tokens)
        masks = inputs.masks(draft.tokens)
        p, finite = distribution_of(forward.logits, inputs.table, masks, penalty_context)
        rollback = Rollback.of(inputs.table, p, forward.logits, masks, penalty_context)
        keys = None if p.all_one_hot else inputs.noise.first(draft.tokens.shape[1] + 1)
        verdict = self.accept(draft, p, keys, self.noise, inputs.coupled, rollback)
        judge = p if rollback is None else rollback.judge
        signal = self.policy.wants if inputs.weighed else None
        readings = read(inputs.sequences, draft, verdict, p, judge, forward.logits, finite, signal)
        return self._commit(inputs, readings, forward)

    def _inputs(self) -> RoundInputs:
        sequences = list(self.rows.sequences)
        idle = [s.state is not State.RUNNING for s in sequences]
        ids = [s.id for s in sequences]
        if self._table is None or self._table[0] != ids:
            params, ends = [s.params for s in sequences], [s.eos for s in sequences]
            self._table = ids, SamplingTable.of(params, self.device, ends, self.vocab_ops)
        budgets = choose(sequences, idle, self.drafters, self.policy, self.target.max_queries)
        return RoundInputs.of(sequences, idle, budgets, self._table[1], self.vocabulary, self.device)

    def _verify(self, inputs: RoundInputs, draft: Draft) -> Forward:
        """One forward over [pending, *draft] of every row."""
        pending = upload([[s.tokens[-1]] for s in inputs.sequences], self.device)
        tokens = torch.cat([pending, draft.tokens], 1) if draft.tokens.shape[1] else pending
        width, longest = tokens.shape[1], inputs.budgets if draft.known is None else draft.known
        taps = sorted({d for s in inputs.sequences for name in s.drafters for d in self.drafters[name].taps})
        resume = draft.resume
        if resume is not None and any(tap < resume.depth for tap in taps):
            resume = None  # another row's drafter wants states that would not be computed
        return self.target.forward(
            self.cache,
            tokens,
            [len(s.tokens) - 1 for s in inputs.sequences],
            idle=inputs.idle,
            counts=[0 if i else min(1 + n, width) for i, n in zip(inputs.idle, longest, strict=True)],
            resume=resume,
            taps=taps,
        )

    def _commit(self, inputs: RoundInputs, readings: list[RowResult], forward: Forward) -> list[Sequence]:
        """Tokens, cache length, constraint, drafter and policy of each row move together."""
        over: list[tuple[Sequence, Finish, str | None]] = []
        rows = zip(inputs.sequences, inputs.idle, inputs.budgets, readings, strict=True)
        for sequence, idle, budget, reading in rows:
            if idle:
                continue
            base, drafted_by = len(sequence.tokens) - 1, sequence.drafter if budget else None
            sequence.round_count += 1
            sequence.skip_draft, sequence.cache_finite = reading.broken, not reading.broken
            if reading.broken and reading.drafted == 0:
                over.append((sequence, Finish.ERROR, not_finite(sequence)))
                continue
            if reading.broken:
                # Whole, whatever the coins said. Drafts that lead to such values are never judged then, and
                # the others weigh a little more in the output's law. To keep what was accepted before the
                # first such value would be exact; but NaN reaches every column of its row, for no mask hides
                # it (0 * NaN), and which was the first cannot be told without another pass.
                self.cache.wipe(sequence.row, base)
                outcome = Round(reading.drafted, 0, 0, reading.draft_sure, drafted_by)
            else:
                outcome = self._extend(sequence, reading, drafted_by)
            sequence.rounds.append(outcome)
            if sequence.traced:
                sequence.trace.append(reading.traced(sequence, outcome, base + 1, budget))
            self.cache.lengths[sequence.row] = len(sequence.tokens) - 1
            for name in sequence.drafters:
                drafter = self.drafters[name]
                if drafter.taps and outcome.emitted > 0:
                    row = sequence.row
                    states = {d: forward.taps[d][row, : outcome.emitted] for d in drafter.taps}
                    drafter.observe(sequence, base, states)
                drafter.rewind(sequence)
            if inputs.weighed:
                self.policy.learn(sequence, outcome, reading.sure)
            if reading.drafter_nonfinite:
                cure(sequence, self.drafters, self.cache)
            if sequence.finish is not None:
                over.append((sequence, sequence.finish, None))
        for sequence, finish, error in over:
            self._leave(sequence, finish, error)
        return [s for s, idle in zip(inputs.sequences, inputs.idle, strict=True) if not idle]

    def _extend(self, sequence: Sequence, reading: RowResult, drafter: str | None) -> Round:
        """Append what the round decided; tokens after the end of the text are in no figure."""
        whole = reading.accepted == reading.drafted > 0
        origins = [Origin.DRAFTER] * reading.accepted + [Origin.BONUS if whole else Origin.TARGET]
        before = len(sequence.tokens)
        read = sequence.extend(reading.new, origins, reading.scores)
        emitted = len(sequence.tokens) - before
        if read <= reading.accepted:
            return Round(read, read, emitted, reading.draft_sure, drafter)
        return Round(reading.drafted, reading.accepted, emitted, reading.draft_sure, drafter)

    @torch.inference_mode()
    def _prefill(self, sequence: Sequence) -> None:
        """The next chunk of its prompt through the target, and its drafters."""
        sound = prefill_chunk(
            sequence,
            self.target,
            self.cache,
            [self.drafters[name] for name in sequence.drafters],
            ahead=not self.policy.weighs,
            vocab_ops=self.vocab_ops,
        )
        if not sound:
            self._leave(sequence, Finish.ERROR, "the model's logits within the prompt are not finite")
        elif self.cache.lengths[sequence.row] == len(sequence.prompt) - 1:
            sequence.state = State.RUNNING
            self._start([sequence])

    def _start(self, ready: list[Sequence]) -> None:
        for sequence in ready:
            sequence.started = time.perf_counter()
            if sequence.remaining == 0:  # only its prompt was to be scored
                self._leave(sequence, Finish.LENGTH)
                continue
            for name in sequence.drafters:
                self.drafters[name].join(sequence)

    def _leave(self, sequence: Sequence, finish: Finish, error: str | None = None) -> None:
        if sequence.state is State.RUNNING:
            sequence.ended = time.perf_counter()
        if finish is Finish.ERROR:
            sequence.cache_finite = False
        if sequence.row >= 0:
            for name in sequence.drafters:
                self.drafters[name].leave(sequence)
        sibling = self.scheduler.leave(sequence, finish, error)
        if sibling is not None:
            self._start([sibling])
