"""The engine: the round, over a batch.

    choose → draft → one forward over [pending, *draft] of every row → accept → commit

Batch 1 is B = 1 and plain decoding is K = 0; neither is another path. Before each round the cache of a
sequence is len(tokens) - 1 long: the last token is pending. Rollback is setting a length. The host reads the
device once a round, and once after each draft step that a policy or a constraint may end. An error harms its
own request alone (`Guarded`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from foredraft.decode.accept import ONCE, GraphCache, Rule, VerifyInputs, accept, decide
from foredraft.decode.drafter import Drafter
from foredraft.decode.drafting import DraftTools, propose
from foredraft.decode.engine_target import (
    SILENT,
    Observer,
    abandon_round,
    memory_message,
    nonfinite_message,
    prefill_chunk,
    reset_drafter,
)
from foredraft.decode.noise import Noise
from foredraft.decode.policy import ByRequest, Policy
from foredraft.decode.prefix_cache import PrefixCache
from foredraft.decode.round_draft import JUMP_FORWARD, Draft, JumpForward, RoundInputs, choose_drafts
from foredraft.decode.round_results import RowResult, fetch_results
from foredraft.decode.sampling import SamplingTable
from foredraft.decode.scheduler import Rows, Scheduler
from foredraft.decode.sequence import Finish, Sequence, State, TokenOrigin
from foredraft.decode.stats import Round
from foredraft.decode.vocab_ops import TORCH_VOCAB_OPS, VocabOps
from foredraft.model.cache import KVCache
from foredraft.model.memory import upload
from foredraft.model.runner import Forward, Runner
from foredraft.workers import operators_alone

# tokens at a prompt's end that a template may leave out of a history, as those of a thought
OPENING = 16
FREE_DRAFTERS = {JUMP_FORWARD: JumpForward()}  # that no request names, and no policy decides about


class Engine:
    """Decodes sequences in rounds. Not thread-safe: one caller steps it at a time."""

    def __init__(
        self,
        target: Runner,  # runs the model whose output counts
        cache: KVCache,  # the target's KV cache
        policy: Policy,  # decides about drafts. It may be replaced while no sequence has a row
        drafters: Mapping[str, Drafter],
        *,
        vocabulary: int,  # size V
        vocab_ops: VocabOps = TORCH_VOCAB_OPS,  # vocabulary operations: kernels or PyTorch
        noise: Noise | None = None,  # random draws; tests swap in noise that enumerates all branches
        greedy_drafts: bool = False,
    ) -> None:
        self.target, self.cache, self.policy = target, cache, policy
        self.drafters = dict(drafters)  # by name
        self.vocabulary, self.device = vocabulary, cache.device
        self.vocab_ops, self.noise = vocab_ops, noise or Noise()
        self.greedy_drafts = greedy_drafts  # autoregressive drafters draft their argmax, with a one-hot q
        # attributes so that `verify --self-test` can plant a defective one
        self.accept: Rule = accept
        self.round_inputs: Callable[..., RoundInputs] = RoundInputs
        self.draft_temperature = 1.0  # divides the logits of drafters; above 1 it weakens one
        self.observer: Observer = SILENT  # told about phases; replaced while a program times the engine
        self.prefix_cache: PrefixCache | None = None  # servers turn it on
        self.rows = Rows([cache, *(c for drafter in drafters.values() for c in drafter.caches)])
        self.scheduler = Scheduler(self.rows)
        self.replays = GraphCache.on(self.device)  # run what a round makes of logits, on a GPU as graphs
        self._table: tuple[list[int], SamplingTable] | None = None

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence; it gets a row as soon as one is free. A cancelled sequence is not queued."""
        if sequence.state is State.FINISHED:
            return
        sequence.policy_state = self.policy_of(sequence).start()
        self.scheduler.submit(sequence)

    def policy_of(self, sequence: Sequence) -> Policy:
        """Return the policy that decides about a sequence: its request's own, or the engine's."""
        return sequence.policy or self.policy

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence between two steps; its tokens stay, but for what would end in a banned word."""
        sequence.cut_off()
        self._leave(sequence, Finish.CANCELLED)

    def pause(self, sequence: Sequence) -> None:
        """Leave a sequence out of all rounds until it is resumed, between two steps. Its text is the same."""
        if sequence.state is not State.FINISHED and sequence.paused_at is None:
            sequence.paused_at = time.perf_counter()

    def resume(self, sequence: Sequence) -> None:
        """Let a paused sequence go on, between two steps. Its seconds do not count the pause."""
        if sequence.paused_at is not None:
            sequence.started += time.perf_counter() - sequence.paused_at if sequence.started else 0.0
            sequence.paused_at = None

    def fail(self, sequence: Sequence, error: str) -> None:
        """End one sequence between two steps, after a call for it broke off. Its row may hold anything."""
        for name in sequence.drafters:
            with contextlib.suppress(Exception):  # perhaps the drafter is what broke
                self.drafters[name].leave(sequence)
        sequence.drafters = ()
        self._leave(sequence, Finish.ERROR, error)

    def fail_batch(self, error: str) -> None:
        """End every sequence that has a row, after a pass broke off. Their rows may hold anything."""
        failed = list(self.rows.sequences)
        for sequence in failed:  # all drafters first: they know a sequence by its row, and rows move below
            sequence.cache_finite = False
            for name in sequence.drafters:
                self.drafters[name].leave(sequence)
            sequence.drafters = ()
        for sequence in failed:
            self._leave(sequence, Finish.ERROR, error)

    def step(self) -> list[Sequence]:
        """Run one chunk of prefill and one round, or the chunk alone where no row decodes."""
        with self.observer.phase("step"):
            if self.scheduler.steady:
                return self.round()
            self._park()
            self._start(self.scheduler.admit())
            decoding = self.scheduler.running
            if (sequence := self.scheduler.prefilling) is not None:
                self._prefill(sequence)
                self._start(self.scheduler.admit())
            if not decoding and self.scheduler.prefilling is not None:
                return []
            decoded = self.round() if self.scheduler.running else []
            self.scheduler.count_round(decoded)
            return decoded

    @property
    def _by_kernels(self) -> bool:
        """Whether the kernels run all models, so that PyTorch's operators are a small rest of the work."""
        own = [drafter.draft_pass for drafter in self.drafters.values() if drafter.whole_model]
        return self.target.by_kernels and all(each.runner.by_kernels for each in own if each is not None)

    def round(self) -> list[Sequence]:
        alone = operators_alone(self._by_kernels)
        with self.observer.phase("round"), torch.inference_mode(), alone:
            started, own = time.perf_counter(), any(s.policy is not None for s in self.rows.sequences)
            policy = ByRequest(self.policy, self.rows.sequences) if own else self.policy
            try:
                inputs, results, forward = self._draft_and_verify(policy)
            except torch.OutOfMemoryError as error:
                self._give_up_one(memory_message(error))
                return []
            decoded = self._commit(inputs, results, forward)
            if inputs.asked and any(sequence.drafters for sequence in decoded):
                policy.took(time.perf_counter() - started)
            return decoded

    def _draft_and_verify(self, policy: Policy) -> tuple[RoundInputs, list[RowResult], Forward]:
        """Draft, verify and accept; nothing moves before the commit."""
        inputs = self._inputs(policy)
        with self.observer.phase("draft"):
            tools = DraftTools(
                policy, self.noise, self.greedy_drafts, self.draft_temperature, self.observer, self.replays
            )
            draft = propose({**self.drafters, **FREE_DRAFTERS}, inputs, tools)
        with self.observer.phase("verify"):
            forward = self._verify(inputs, draft)
        assert forward.logits is not None
        penalties = inputs.penalty_context and inputs.penalty_context.along(draft.tokens)
        masks, siblings, dead_ends = inputs.masks(draft)
        keys = None if inputs.table.all_greedy else inputs.noise
        judged = Draft(draft.tokens, draft.lengths, draft.q, siblings=siblings)
        verify_inputs = VerifyInputs(
            forward.logits, judged, inputs.table, masks, penalties, keys,
            inputs.rules, self.accept, self.noise,
        )  # fmt: skip
        replays = self.replays if inputs.one_rule and verify_inputs.transforms else ONCE
        found = replays.run(decide, verify_inputs, forward.logits, self.noise)
        signal = policy.target_signal if inputs.asked else None
        return (
            inputs,
            fetch_results(inputs.sequences, draft, verify_inputs, found, dead_ends, signal),
            forward,
        )

    def _give_up_one(self, error: str) -> None:
        """End the youngest request of a round that broke off for want of memory; the others go on."""
        active = [sequence for sequence in self.rows.sequences if sequence.active]
        abandon_round(active, self.drafters)
        self._leave(max(active, key=lambda sequence: sequence.id), Finish.ERROR, error)

    def _inputs(self, policy: Policy) -> RoundInputs:
        sequences = list(self.rows.sequences)
        idle = [not s.active for s in sequences]
        ids = [s.id for s in sequences]
        if self._table is None or self._table[0] != ids:
            params, ends = [s.params for s in sequences], [s.eos for s in sequences]
            self._table = ids, SamplingTable.of(params, self.device, ends, self.vocab_ops)
        asked = any(s.drafters for s in sequences) and not policy.rests(sequences)
        budgets, drafters, siblings = choose_drafts(
            sequences, idle, self.drafters, policy if asked else None, self.target.max_queries,
            self.target.takes_leaves,
        )  # fmt: skip
        return self.round_inputs(
            sequences, idle, budgets, drafters, self._table[1], self.vocabulary, self.device, siblings,
            asked,
        )  # fmt: skip

    def _verify(self, inputs: RoundInputs, draft: Draft) -> Forward:
        """Run one forward over every row's [pending, *draft, *siblings], a token tree."""
        pending = upload([[s.tokens[-1]] for s in inputs.sequences], self.device)
        tokens = torch.cat([pending, draft.tokens], 1) if draft.tokens.shape[1] else pending
        width = tokens.shape[1]
        lengths = inputs.budgets if draft.host_lengths is None else draft.host_lengths
        drafters = {name for sequence in inputs.sequences for name in sequence.drafters}
        aux_layers = sorted({layer for name in drafters for layer in self.drafters[name].aux_layers})
        resume, leaves = draft.resume, None
        if draft.siblings is not None:
            leaves = draft.siblings.leaves(width)
            tokens = torch.cat([tokens, draft.siblings.tokens.clamp_min(0)], 1)
            resume = resume and resume.fit(tokens.shape[1])
        if resume is not None and any(layer < resume.depth for layer in aux_layers):
            resume = None  # another row's drafter wants states that a resumed pass does not compute
        starts = [len(s.tokens) - 1 for s in inputs.sequences]
        counts = [0 if i else min(1 + n, width) for i, n in zip(inputs.idle, lengths, strict=True)]
        return self.target.forward(
            self.cache, tokens, starts, idle=inputs.idle, counts=counts, resume=resume,
            aux_layers=aux_layers, leaves=leaves,
        )  # fmt: skip

    def _commit(self, inputs: RoundInputs, results: list[RowResult], forward: Forward) -> list[Sequence]:
        """Move tokens, cache length, constraint, drafters and policy of every row together."""
        active = [row for row, idle in enumerate(inputs.idle) if not idle]
        ends = [
            (inputs.sequences[row], self._commit_row(inputs, row, results[row], forward)) for row in active
        ]
        for sequence, end in ends:
            if end is not None:
                self._leave(sequence, *end)
        return [inputs.sequences[row] for row in active]

    def _commit_row(
        self, inputs: RoundInputs, row: int, result: RowResult, forward: Forward
    ) -> tuple[Finish, str | None] | None:
        """Commit one row; return why its text ends, and the error, or None where it goes on."""
        sequence, budget, drafter = inputs.sequences[row], inputs.budgets[row], inputs.drafters[row]
        if sequence.failure is not None:  # what the round decided for the row was perhaps not constrained
            return Finish.ERROR, sequence.failure
        base = len(sequence.tokens) - 1
        sequence.round_count += 1
        sequence.skip_draft, sequence.cache_finite = result.target_nonfinite, not result.target_nonfinite
        if result.target_nonfinite and result.drafted == 0:
            return Finish.ERROR, nonfinite_message(sequence, self.cache.dtype)
        outcome = self._append(sequence, result, drafter)
        if inputs.siblings and (wanted := inputs.siblings[row]):  # those beyond a short draft were left out
            siblings = wanted if result.drafted == budget else min(wanted, result.drafted)
            outcome = replace(outcome, siblings=siblings)
        sequence.rounds.append(outcome)
        self.cache.lengths[sequence.row] = len(sequence.tokens) - 1
        failure = None
        try:
            self._tell_drafters(sequence, base, outcome.emitted, forward)
            whole = outcome.emitted == result.accepted + 1 and sequence.finish is None
            if result.sibling is not None and whole:
                column = 1 + len(result.tokens) + result.sibling
                emitted = self._append_after_sibling(sequence, result, base, column, forward)
                outcome = replace(outcome, emitted=outcome.emitted + emitted, sibling=True)
                sequence.rounds[-1] = outcome
            if sequence.finish is None and sequence.takes_back and self.rows.recurrent:
                self._settle_states(sequence)
        except torch.OutOfMemoryError as error:
            failure = memory_message(error)
        if sequence.traced:
            sequence.trace.append(result.trace(sequence, outcome, base + 1, budget))
        if failure is not None and sequence.finish is None:  # else the text needs no drafter any more
            return Finish.ERROR, failure
        if inputs.asked and drafter != JUMP_FORWARD:  # forced tokens say nothing about drafters
            self.policy_of(sequence).learn(sequence, outcome, result.target_confidence)
        if result.drafter_nonfinite:
            assert drafter is not None
            reset_drafter(sequence, self.drafters[drafter], self.cache)
        return None if sequence.finish is None else (sequence.finish, sequence.failure)

    def _append(self, sequence: Sequence, result: RowResult, drafter: str | None) -> Round:
        """Append the tokens of the round; tokens after the end of the text count nowhere."""
        if result.target_nonfinite:
            # Under the lossless rules, only here the output may differ from p: a draft whose verifying pass
            # gives NaN or infinity is discarded whole, so other drafts become slightly likelier. To keep what
            # was accepted before the first such value would be exact, but NaN reaches every column of its row
            # (0 * NaN is NaN behind any mask), and only another pass could tell which column was first.
            self.cache.wipe(sequence.row, len(sequence.tokens) - 1)
            return Round(result.drafted, 0, 0, drafter, result.undrawn)
        whole = result.accepted == result.drafted > 0
        last = TokenOrigin.BONUS if whole else TokenOrigin.TARGET
        origins = [TokenOrigin.DRAFTER] * result.accepted + [last]
        before = len(sequence.tokens)
        taken = sequence.extend(result.new_tokens, origins[: len(result.new_tokens)], result.scores)
        if result.dead_end and taken == result.accepted and sequence.finish is None:
            sequence.leave_dead_end()
        emitted = len(sequence.tokens) - before
        if taken <= result.accepted:  # the text ended within the accepted tokens; the rest counts nowhere
            return Round(taken, taken, emitted, drafter)
        return Round(result.drafted, result.accepted, emitted, drafter, result.undrawn)

    def _append_after_sibling(
        self, sequence: Sequence, result: RowResult, base: int, column: int, forward: Forward
    ) -> int:
        """Append the token after a sibling, as the plain step would that was spared; return how many came."""
        before = len(sequence.tokens)
        sequence.origins[-1] = TokenOrigin.DRAFTER
        self.cache.move(sequence.row, base + column, before - 1)
        sequence.extend([result.after_sibling], [TokenOrigin.BONUS], result.scores[result.accepted + 1 :])
        self.cache.lengths[sequence.row] = len(sequence.tokens) - 1
        emitted = len(sequence.tokens) - before
        self._tell_drafters(sequence, before - 1, emitted, forward, column)
        return emitted

    def _tell_drafters(
        self, sequence: Sequence, base: int, emitted: int, forward: Forward, column: int = 0
    ) -> None:
        """Hand the row's drafters the auxiliary states committed from `base` on, and roll them back.

        Nothing else in a commit allocates a GPU's memory; a row for which it ends harms no other.
        """
        for name in sequence.drafters:
            drafter = self.drafters[name]
            if drafter.aux_layers and emitted > 0:
                columns = slice(column, column + emitted)
                states = {d: forward.aux_states[d][sequence.row, columns] for d in drafter.aux_layers}
                drafter.observe(sequence, base, states)
            drafter.rewind(sequence)

    def _settle_states(self, sequence: Sequence) -> None:
        """Go back to a snapshot where a ban cut the text below its states, or else keep another one."""
        length, whole = len(sequence.tokens) - 1, self._whole_caches(sequence)
        if all(cache.base(sequence.row) <= length for cache in self.rows.recurrent):
            self.rows.keep_snapshot(sequence, whole)
            return
        self._part_from_drafters(sequence)
        for cache in self.rows.caches:
            if cache not in whole:
                cache.lengths[sequence.row] = 0
        self.rows.cut(sequence, length)
        sequence.state = State.PREFILLING

    @torch.inference_mode()
    def _prefill(self, sequence: Sequence) -> None:
        with self.observer.phase("prefill"), operators_alone(self._by_kernels):
            try:
                self._restore_prefix(sequence)
                start = self.cache.lengths[sequence.row]
                drafters = [self.drafters[name] for name in sequence.drafters]
                reads = not self.policy_of(sequence).uses_costs
                finite = start == len(sequence.tokens) - 1 or prefill_chunk(
                    sequence, self.target, self.cache, drafters, early=self._early(sequence) or 0,
                    drafters_read=reads, vocab_ops=self.vocab_ops,
                )  # fmt: skip
                if not sequence.started:
                    self._keep_prefix(sequence)
            except torch.OutOfMemoryError as error:
                self.fail(sequence, memory_message(error))
                return
        self.scheduler.count_chunk(sequence, self.cache.lengths[sequence.row] - start)
        if not finite:
            self._leave(sequence, Finish.ERROR, "the model's logits within the prompt are not finite")
        elif self.cache.lengths[sequence.row] == len(sequence.tokens) - 1:
            sequence.state = State.RUNNING
            if sequence.group is not None or sequence.takes_back:
                self.rows.keep_snapshot(sequence, self._whole_caches(sequence))
            self._start([sequence])

    def _restore_prefix(self, sequence: Sequence) -> None:
        """Copy what is kept of a prompt that is about to be read, unless the request needs its scores."""
        scored = sequence.params.prompt_logprobs is not None
        if self.prefix_cache is None or self.cache.lengths[sequence.row] or sequence.prefix.end or scored:
            return
        readers = [self.drafters[name] for name in sequence.drafters if self.drafters[name].aux_layers]
        needed = [self.cache, *(cache for drafter in readers for cache in drafter.caches)]
        caches, tokens = self._whole_caches(sequence), sequence.prompt[:-1]
        sequence.prefix = self.prefix_cache.restore(
            sequence.prefix, tokens, caches, sequence.row, self.target.chunk, needed,
            anywhere=self._by_kernels,
        )  # fmt: skip
        sequence.cached = self.cache.lengths[sequence.row]

    def _keep_prefix(self, sequence: Sequence) -> None:
        """Keep what a row has of a text, after each chunk of the prompt and at the end of the reply."""
        if self.prefix_cache is None:
            return
        last = len(sequence.prompt) - 1
        # operators give other bits in rounds than in chunks, and in parts of chunks
        length = min(self.cache.lengths[sequence.row], len(sequence.tokens) - 1 if self._by_kernels else last)
        sequence.prefix = self.prefix_cache.keep(
            sequence.prefix, sequence.tokens[:length], self._whole_caches(sequence), sequence.row,
            self.target.chunk, last, self._early(sequence),
        )  # fmt: skip

    def _early(self, sequence: Sequence) -> int | None:
        """Return where states are kept before what a history may leave out of a prompt's end; 0: nowhere.

        None: texts are not kept within chunks.
        """
        if self.prefix_cache is None or not self._by_kernels:
            return None
        return max(0, len(sequence.prompt) - 1 - OPENING) if self.rows.recurrent else 0

    def _whole_caches(self, sequence: Sequence) -> list[KVCache]:
        """Return the caches whose rows hold a text from its first token on, the target's first."""
        drafters = [self.drafters[name] for name in sequence.drafters]
        own = [c for drafter in drafters if not drafter.context_start(sequence) for c in drafter.caches]
        return list(dict.fromkeys([self.cache, *own]))

    def _part_from_drafters(self, sequence: Sequence) -> None:
        """Let a sequence's drafters leave it, until they join again."""
        for name in sequence.drafters:
            self.drafters[name].settle(sequence)
            self.drafters[name].leave(sequence)

    def _park(self) -> None:
        """Take the row that a sequence gives up for another one. Its drafters join again with a row."""
        sequence = self.scheduler.to_park
        if sequence is not None:
            caches = self._whole_caches(sequence)
            self._part_from_drafters(sequence)
            self.scheduler.park(sequence, caches)

    def _start(self, ready: list[Sequence]) -> None:
        for sequence in ready:
            sequence.started = sequence.started or time.perf_counter()
            if sequence.remaining == 0:  # the request asks for scores of its prompt alone
                self._leave(sequence, Finish.LENGTH)
                continue
            for name in sequence.drafters:
                self.drafters[name].join(sequence)

    def _leave(self, sequence: Sequence, finish: Finish, error: str | None = None) -> None:
        if sequence.decoding:
            sequence.ended = sequence.paused_at or time.perf_counter()
        if finish is Finish.ERROR:
            sequence.cache_finite = False
        sound = sequence.state is State.RUNNING and sequence.cache_finite
        if self.prefix_cache is not None and self._by_kernels and sound:
            with contextlib.suppress(torch.OutOfMemoryError):  # the reply goes without
                for name in sequence.drafters:
                    self.drafters[name].settle(sequence)
                self._keep_prefix(sequence)
        if sequence.row >= 0:
            for name in sequence.drafters:
                self.drafters[name].leave(sequence)
        choice = self.scheduler.leave(sequence, finish, error)
        if choice is not None:
            self._start([choice])
