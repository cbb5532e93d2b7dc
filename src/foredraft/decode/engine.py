"""The engine: the round, over a batch.

    budget → draft → one forward over [pending, *draft] of every row → accept → commit

Batch 1 is B = 1 and plain decoding is K = 0, not other paths. Before each round every sequence's cache
length is len(tokens) - 1: the last token is pending. Rollback is setting a length. The device is read
once per round, in `reading`, and after each draft step that a policy or a constraint may end.

A value that is not finite harms its own request alone, and only if plain decoding met it too: a row whose
draft led there is wiped past its text and takes its next step without a draft; a drafter that gives such
logits starts anew, and the second time the request goes on without it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from foredraft.decode.accept import Rollback, Verdict, accept
from foredraft.decode.draft import Draft, Drafter, RoundInputs, as_guesser, as_reader, as_stepper
from foredraft.decode.drafting import propose
from foredraft.decode.law import Law
from foredraft.decode.noise import Keys, Noise
from foredraft.decode.operators import DEFINITION, Operators
from foredraft.decode.policy import Offers, Policy
from foredraft.decode.prompt_scores import score_chunk
from foredraft.decode.reading import Reading, read
from foredraft.decode.rows import Rows
from foredraft.decode.sampling import SamplingTable, law_of
from foredraft.decode.scheduler import Scheduler
from foredraft.decode.sequence import Finish, Origin, Sequence, State
from foredraft.decode.stats import Round
from foredraft.decode.target import Target
from foredraft.model.cache import KVCache
from foredraft.model.device import upload
from foredraft.model.runner import Forward, next_chunk

__all__ = ["Engine"]

logger = logging.getLogger(__name__)


Rule = Callable[[Draft, Law, Keys | None, Noise, list[bool], Rollback | None], Verdict]


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
        operators: Operators = DEFINITION,
        noise: Noise | None = None,
        greedy_drafts: bool = False,
    ) -> None:
        self.target, self.cache, self.policy = target, cache, policy
        self.drafters = dict(drafters)
        self.vocabulary, self.device = vocabulary, device
        self.operators, self.noise = operators, noise or Noise()
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
            sequence.proven = False
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
        if calibrate is not None and not self.rows.sequences and _may_draft(waiting):
            calibrate(self, len(waiting))
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
        past = inputs.past and inputs.past.along(draft.tokens)
        masks = inputs.masks(draft.tokens)
        p, finite = law_of(forward.logits, inputs.table, masks, past)
        rollback = Rollback.of(inputs.table, p, forward.logits, masks, past)
        keys = None if p.all_certain else inputs.noise.first(draft.tokens.shape[1] + 1)
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
            self._table = ids, SamplingTable.of(params, self.device, ends, self.operators)
        table, budgets = self._table[1], self._budgets(sequences, idle)
        return RoundInputs.of(sequences, idle, budgets, table, self.vocabulary, self.device)

    def _budgets(self, sequences: list[Sequence], idle: list[bool]) -> list[int] | None:
        """Who drafts for each row, and how much at most: the policy's choice; 0 = a plain step. None where it
        was not asked."""
        running = [s for s, i in zip(sequences, idle, strict=True) if not i]
        if not _may_draft(sequences) or self.policy.rests(running):
            return None
        budgets = [0] * len(sequences)
        rows = [self._offers(s) for s in running]
        for row, choice in zip(rows, self.policy.choose(rows), strict=True):
            if choice.drafter in row.most and choice.budget > 0:
                row.sequence.drafter = choice.drafter
                budgets[row.sequence.row] = min(choice.budget, row.most[choice.drafter])
        return budgets

    def _offers(self, sequence: Sequence) -> Offers:
        """A round emits one more token than it drafts, so no draft is longer than what may be emitted, but
        for one."""
        offers = Offers(sequence, {})
        if sequence.wary:
            return offers
        room = min(sequence.remaining, self.target.max_queries) - 1
        for name in sequence.drafters:
            drafter, most = self.drafters[name], room
            if drafter.max_length is not None:
                most = min(most, drafter.max_length - len(sequence.tokens))
            if self.policy.weighs and most > 0:
                if (reader := as_reader(drafter)) is not None:
                    offers.behind[name] = len(sequence.tokens) - 1 - reader.length(sequence)
                elif (guesser := as_guesser(drafter)).free:
                    most = len(guesser.propose([(sequence, most)])[0])
            if most > 0:
                offers.most[name] = most
        return offers

    def _verify(self, inputs: RoundInputs, draft: Draft) -> Forward:
        """One forward over [pending, *draft] of every row."""
        pending = upload([[s.tokens[-1]] for s in inputs.sequences], self.device)
        tokens = torch.cat([pending, draft.tokens], 1) if draft.tokens.shape[1] else pending
        width, longest = tokens.shape[1], inputs.budgets if draft.known is None else draft.known
        taps = sorted({depth for s in inputs.sequences for depth in self._taps(s)})
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

    def _commit(self, inputs: RoundInputs, readings: list[Reading], forward: Forward) -> list[Sequence]:
        """Tokens, cache length, constraint, drafter and policy of each row move together."""
        over: list[tuple[Sequence, Finish, str | None]] = []
        rows = zip(inputs.sequences, inputs.idle, inputs.budgets, readings, strict=True)
        for sequence, idle, budget, reading in rows:
            if idle:
                continue
            base = len(sequence.tokens) - 1
            sequence.round_count += 1
            sequence.wary, sequence.proven = reading.broken, not reading.broken
            if reading.broken and reading.drafted == 0:
                over.append((sequence, Finish.ERROR, _not_finite(sequence)))
                continue
            if reading.broken:
                # Whole, whatever the coins said. Drafts that lead to such values are never judged then, and
                # the others weigh a little more in the output's law. To keep what was accepted before the
                # first such value would be exact; but NaN reaches every column of its row, for no mask hides
                # it (0 * NaN), and which was the first cannot be told without another pass.
                self.cache.wipe(sequence.row, base)
                outcome = Round(reading.drafted, 0, 0, reading.draft_sure)
            else:
                outcome = self._extend(sequence, reading)
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
            if reading.sick:
                self._cure(sequence)
            if sequence.finish is not None:
                over.append((sequence, sequence.finish, None))
        for sequence, finish, error in over:
            self._leave(sequence, finish, error)
        return [s for s, idle in zip(inputs.sequences, inputs.idle, strict=True) if not idle]

    def _extend(self, sequence: Sequence, reading: Reading) -> Round:
        """Append what the round decided; tokens after the end of the text are in no figure."""
        whole = reading.accepted == reading.drafted > 0
        origins = [Origin.DRAFTER] * reading.accepted + [Origin.BONUS if whole else Origin.TARGET]
        before = len(sequence.tokens)
        read = sequence.extend(reading.new, origins, reading.scores)
        emitted = len(sequence.tokens) - before
        if read <= reading.accepted:
            return Round(read, read, emitted, reading.draft_sure)
        return Round(reading.drafted, reading.accepted, emitted, reading.draft_sure)

    def _cure(self, sequence: Sequence) -> None:
        """After logits of its drafter that are not finite: empty what only the drafter wrote, or give up."""
        assert sequence.drafter is not None
        drafter = self.drafters[sequence.drafter]
        for cache in drafter.caches:
            if cache is self.cache:
                cache.wipe(sequence.row, len(sequence.tokens) - 1)
            else:
                cache.zero_row(sequence.row)
        sequence.drafter_faults += 1
        if sequence.drafter_faults > 1:
            logger.warning(
                "request %d goes on without %s: its logits are not finite", sequence.id, drafter.name
            )
            drafter.leave(sequence)
            sequence.drafters = tuple(name for name in sequence.drafters if name != drafter.name)
            sequence.drafter = None

    @torch.inference_mode()
    def _prefill(self, sequence: Sequence) -> None:
        """The next chunk of its prompt through the target, and its drafter."""
        start, stop = self.cache.lengths[sequence.row], len(sequence.prompt) - 1
        end = next_chunk(start, stop, self.target.chunk)
        taps = self._taps(sequence)
        forward = self.target.prefill(self.cache, sequence.row, sequence.prompt[start:end], start, taps=taps)
        self.cache.lengths[sequence.row] = end
        if sequence.params.prompt_logprobs is not None and not self._score(sequence, forward.hidden, start):
            return
        for name in sequence.drafters:
            drafter = self.drafters[name]
            if drafter.taps:
                drafter.observe(sequence, start, {d: forward.taps[d][0, : end - start] for d in drafter.taps})
            fits = drafter.max_length is None or stop <= drafter.max_length
            # one that can never draft need not read, nor one that may never be chosen
            stepper = as_stepper(drafter)
            if stepper is not None and fits and not self.policy.weighs:
                stepper.read(sequence, start, end)
        if end == stop:
            sequence.state = State.RUNNING
            self._start([sequence])

    def _score(self, sequence: Sequence, hidden: Tensor, start: int) -> bool:
        """Scores of the prompt's tokens after the chunk's; False where the request fails for it."""
        scores = score_chunk(self.target.head, hidden, sequence, start, self.operators)
        if scores is None:
            self._leave(sequence, Finish.ERROR, "the model's logits within the prompt are not finite")
            return False
        # whoever reads the prompt anew, because its first reader was cancelled, scores it anew
        del sequence.prompt_scores[start + 1 :]
        sequence.prompt_scores += scores
        return True

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
            sequence.proven = False
        if sequence.row >= 0:
            for name in sequence.drafters:
                self.drafters[name].leave(sequence)
        sibling = self.scheduler.leave(sequence, finish, error)
        if sibling is not None:
            self._start([sibling])

    def _taps(self, sequence: Sequence) -> tuple[int, ...]:
        return tuple(depth for name in sequence.drafters for depth in self.drafters[name].taps)


def _may_draft(sequences: Iterable[Sequence]) -> bool:
    """Whether anybody may, for one of them; a policy is neither asked nor told anything where nobody may."""
    return any(sequence.drafters for sequence in sequences)


def _not_finite(sequence: Sequence) -> str:
    where = len(sequence.tokens)
    if sequence.constraint is not None:
        return f"the model gives no allowed token at position {where} a finite logit"
    return f"the model's logits at position {where} are not finite"
