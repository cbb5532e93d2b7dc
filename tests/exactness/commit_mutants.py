"""Planted defects of commit, cache rows, drafters and faults, each with a check that must fail under it.

A table entry reads: name, seam, spoiler, check. A spoiler takes the sound function and returns the defective one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from torch import Tensor

from foredraft.decode import draft_choice, faults, rows
from foredraft.decode.draft_choice import choose_drafts
from foredraft.decode.engine import Engine
from foredraft.decode.policy import Policy
from foredraft.decode.round_draft import Draft, RoundInputs
from foredraft.decode.rows import Rows
from foredraft.decode.scheduler import Scheduler
from foredraft.decode.sequence import Finish, Origin, Sequence
from foredraft.drafters.draft_model import DraftModel
from foredraft.drafters.known_states import KnownStates
from foredraft.drafters.layer_skip import LayerSkip
from foredraft.drafters.lookup import NGramIndex
from foredraft.drafters.low_bit import LowBit
from foredraft.drafters.text_index import TextIndex
from foredraft.model.runner import Forward, Resume
from tests.exactness import round_checks as checks
from tests.exactness import test_identity as identity
from tests.exactness import test_policies as policies
from tests.support.planting import Mutant, Spoiler, defect, replaced
from tests.support.spoilers import last_token_known, verified, with_the_drafts_plan

Function = Callable[..., Any]


def nothing(_: Function) -> Function:
    return lambda *args: None


# --- what is appended ------------------------------------------------------------------------------------


def without_the_bonus(extend: Function) -> Function:
    def spoilt(sequence: Sequence, tokens: Any, origins: Any, scores: Any = ()) -> Any:
        count = len(tokens) - (origins[-1] is Origin.BONUS)
        return extend(sequence, tokens[:count], origins[:count], scores[:count])

    return spoilt


def unsure_bonus_dropped() -> tuple[tuple[Any, Spoiler], ...]:
    seen: dict[str, float] = {}

    def remember(append: Function) -> Function:
        def spoilt(engine: Engine, sequence: Sequence, result: Any, drafter: str | None) -> Any:
            seen["confidence"] = result.target_confidence
            return append(engine, sequence, result, drafter)

        return spoilt

    def spoil_extend(extend: Function) -> Function:
        return lambda *args: (without_the_bonus(extend) if seen["confidence"] < 0.5 else extend)(*args)

    return (Engine._append, remember), (Sequence.extend, spoil_extend)


def goes_on_after(finish: Finish) -> tuple[tuple[Any, Spoiler], ...]:
    """An end is ignored unless it is the last token of its run."""
    run: dict[str, int] = {}

    def remember(extend: Function) -> Function:
        def spoilt(sequence: Sequence, tokens: Any, *rest: Any) -> Any:
            run["end"] = len(sequence.tokens) + len(tokens)
            return extend(sequence, tokens, *rest)

        return spoilt

    def spoil_end(end: Function) -> Function:
        def spoilt(sequence: Sequence, token: int) -> Finish | None:
            found: Finish | None = end(sequence, token)
            return None if found is finish and len(sequence.tokens) < run["end"] else found

        return spoilt

    return (Sequence.extend, remember), (Sequence._end, spoil_end)


def limit_unknown(candidates: Function) -> Function:
    def spoilt(sequence: Sequence, *rest: Any) -> Any:
        with replaced(sequence, "params", sequence.params.replace(max_new_tokens=10**6)):
            return candidates(sequence, *rest)

    return spoilt


def finish_overwritten(cancel: Function) -> Function:
    def spoilt(engine: Engine, sequence: Sequence) -> None:
        sequence.finish = Finish.CANCELLED
        cancel(engine, sequence)

    return spoilt


def ban_not_barred(extend: Function) -> Function:
    def spoilt(sequence: Sequence, *args: Any) -> Any:
        if sequence.constraint is None:
            return extend(sequence, *args)
        with replaced(sequence.constraint, "roll_back", sequence.constraint.rewind):
            return extend(sequence, *args)

    return spoilt


def first_drafter_again(plan: Function) -> Function:
    first: dict[int, str] = {}

    def spoilt(sequences: list[Sequence], *rest: Any) -> Any:
        budgets, chosen, siblings = plan(sequences, *rest)
        stale = [name and first.setdefault(s.id, name) for s, name in zip(sequences, chosen, strict=True)]
        return budgets, stale, siblings

    return spoilt


APPENDED = [
    Mutant(
        "a bonus that the target was unsure of dropped",
        unsure_bonus_dropped(),
        checks.distribution_behind_the_gate,
    ),
    defect(
        "the bonus token missing after a gate",
        Sequence.extend,
        without_the_bonus,
        checks.bonus_behind_the_gate,
    ),
    Mutant("EOS inside a run ignored", goes_on_after(Finish.EOS), checks.ends),
    Mutant(
        "the limit inside a run ignored",
        (*goes_on_after(Finish.LENGTH), (draft_choice._candidates, limit_unknown)),
        checks.limits,
    ),
    defect("an end overwritten by a cancellation", Engine.cancel, finish_overwritten, checks.cancelled),
    defect(
        "a ban's rollback that bars nothing at temperature 0", Sequence.extend, ban_not_barred, checks.bans
    ),
    defect(
        "a round drafted by the drafter of an earlier round",
        choose_drafts,
        first_drafter_again,
        policies.each_row_its_own,
    ),
]


# --- what drafters and caches are told -------------------------------------------------------------------


def told(change: Function) -> Spoiler:
    """Spoil what drafters are told: `change` gets (engine, sequence, base, emitted); it returns `emitted`."""

    def spoiler(tell: Function) -> Function:
        def spoilt(engine: Engine, sequence: Sequence, base: int, emitted: int, forward: Forward) -> None:
            tell(engine, sequence, base, change(engine, sequence, base, emitted), forward)

        return spoilt

    return spoiler


def cache_not_rolled_back(engine: Engine, sequence: Sequence, base: int, emitted: int) -> int:
    engine.cache.lengths[sequence.row] = base + 1 + sequence.rounds[-1].drafted
    return emitted


def only_the_rounds_drafter_told(tell: Function) -> Function:
    def spoilt(engine: Engine, sequence: Sequence, *rest: Any) -> None:
        name = sequence.rounds[-1].drafter
        with replaced(sequence, "drafters", () if name is None else (name,)):
            tell(engine, sequence, *rest)

    return spoilt


def rollbacks_not_told(tell: Function) -> Function:
    def spoilt(engine: Engine, sequence: Sequence, base: int, emitted: int, forward: Forward) -> None:
        if emitted >= 0:
            tell(engine, sequence, base, emitted, forward)

    return spoilt


def one_off_after_whole_drafts(
    engine: Any, inputs: RoundInputs, draft: Any, starts: Any, options: Any
) -> None:
    for row, sequence in enumerate(inputs.sequences):
        last = sequence.rounds[-1] if sequence.rounds else None
        starts[row] += last is not None and last.accepted == last.drafted > 0


def resumed_above_taps(engine: Any, inputs: Any, draft: Draft, starts: Any, options: Any) -> None:
    options["resume"] = draft.resume


def table_of_the_batch_before(make_inputs: Function) -> Function:
    def spoilt(engine: Engine, policy: Policy) -> RoundInputs:
        ids = [sequence.id for sequence in engine.rows.sequences]
        if engine._table is not None and len(engine._table[0]) == len(ids):
            engine._table = ids, engine._table[1]
        inputs: RoundInputs = make_inputs(engine, policy)
        return inputs

    return spoilt


TOLD = [
    defect(
        "only the round's drafter told of a commit",
        Engine._tell_drafters,
        only_the_rounds_drafter_told,
        checks.decisions_among_drafters,
    ),
    defect(
        "a ban's rollback not told to the drafter",
        Engine._tell_drafters,
        rollbacks_not_told,
        checks.greedy_bans,
    ),
    defect(
        "taps of tokens that were not kept",
        Engine._tell_drafters,
        told(lambda engine, sequence, base, emitted: emitted + (emitted > 0)),
        checks.tapped_states,
    ),
    defect(
        "no taps",
        Engine._tell_drafters,
        told(lambda engine, sequence, base, emitted: min(emitted, 0)),
        checks.tapped_states,
    ),
    defect("cache not rolled back", Engine._tell_drafters, told(cache_not_rolled_back), checks.greedy_tokens),
    defect(
        "position off by one after a draft accepted whole",
        Engine._verify,
        verified(one_off_after_whole_drafts),
        checks.greedy_tokens,
    ),
    defect(
        "the plan of a draft applied to the verifying pass",
        Engine._verify,
        verified(with_the_drafts_plan),
        checks.distribution_of_skipping_drafts,
    ),
    defect(
        "resumes above a tapped depth",
        Engine._verify,
        verified(resumed_above_taps),
        identity.test_a_tap_below_the_resumed_depth_prevents_resuming,
    ),
    defect(
        "parameters of the batch before",
        Engine._inputs,
        table_of_the_batch_before,
        checks.distribution_of_mixed_rows,
    ),
]


# --- drafters --------------------------------------------------------------------------------------------


def own_rows_taken_for_text(step: Function) -> Function:
    def spoilt(drafter: LayerSkip | LowBit, tokens: Tensor, starts: list[int], *rest: Any) -> Tensor:
        logits: Tensor = step(drafter, tokens, starts, *rest)
        drafter.cache.lengths[0] = starts[0] + 1
        return logits

    return spoilt


def own_rows_left_visible() -> tuple[tuple[Any, Spoiler], ...]:
    reach: dict[str, int] = {}

    def remember(step: Function) -> Function:
        def spoilt(drafter: LayerSkip, tokens: Tensor, starts: list[int], *rest: Any) -> Tensor:
            reach[drafter.name] = starts[0] + 1
            logits: Tensor = step(drafter, tokens, starts, *rest)
            return logits

        return spoilt

    def extend_the_row(engine: Engine, sequence: Sequence, base: int, emitted: int) -> int:
        reached = reach.get(sequence.rounds[-1].drafter or "", 0)
        engine.cache.lengths[sequence.row] = max(engine.cache.lengths[sequence.row], reached)
        return emitted

    return (LayerSkip.step, remember), (Engine._tell_drafters, told(extend_the_row))


def begins_one_early(step: Function) -> Function:
    return lambda drafter, tokens, starts, *rest: step(
        drafter, tokens, [max(0, start - 1) for start in starts], *rest
    )


def begins_one_further(step: Function) -> Function:
    return lambda drafter, tokens, starts, *rest: step(
        drafter, tokens, [start + (start > 8) for start in starts], *rest
    )


def idle_rows_known(add: Function) -> Function:
    return lambda known, states, idle: add(known, states, [False] * len(idle))


def states_kept(take: Function) -> Function:
    def spoilt(known: KnownStates) -> Resume | None:
        kept = known._states, known._known
        made: Resume | None = take(known)
        known._states, known._known = kept
        return made

    return spoilt


def steps_taken_for_text(rewind: Function) -> Function:
    def spoilt(drafter: DraftModel, sequence: Sequence) -> None:
        read = drafter._stepped.get(sequence.row, drafter.cache.lengths[sequence.row])
        rewind(drafter, sequence)
        drafter.cache.lengths[sequence.row] = read

    return spoilt


def one_more_read(step: Function) -> Function:
    def spoilt(drafter: DraftModel, tokens: Tensor, starts: Any, counts: Any, idle: Any, at: Any) -> Tensor:
        logits: Tensor = step(drafter, tokens, starts, counts, idle, at)
        for row, is_idle in enumerate(idle):
            if not is_idle:
                drafter._stepped[row] += 1
        return logits

    return spoilt


def index_keeps_later_places(rewind: Function) -> Function:
    def spoilt(index: NGramIndex, length: int) -> None:
        later = dict(index._after)
        rewind(index, length)
        index._after = {gram: later.get(gram, place) for gram, place in index._after.items()}

    return spoilt


DRAFTERS = [
    defect(
        "a draft's own rows taken for the text while it is made",
        LayerSkip.step,
        own_rows_taken_for_text,
        checks.skipping_tokens,
    ),
    Mutant(
        "a draft's own rows left visible to the next round", own_rows_left_visible(), checks.skipping_tokens
    ),
    defect(
        "a copy's own rows taken for the text while it drafts",
        LowBit.step,
        own_rows_taken_for_text,
        checks.tokens_of_a_copy,
    ),
    defect(
        "a copy drafts over the last committed row",
        LowBit.step,
        begins_one_early,
        checks.tokens_of_a_copy,
    ),
    defect(
        "a draft begins after the rows of the last one",
        LayerSkip.step,
        begins_one_further,
        checks.exiting_tokens,
    ),
    defect(
        "the last drafted token taken for read", KnownStates.take, last_token_known, checks.exiting_tokens
    ),
    defect(
        "states known of rows that took no part in a step",
        KnownStates.add,
        idle_rows_known,
        checks.distribution_of_skipping_drafts,
    ),
    defect("states of a draft that broke off handed on", LayerSkip.leave, nothing, checks.draft_broken_off),
    defect("states of the draft before handed on", KnownStates.take, states_kept, checks.exiting_tokens),
    defect(
        "draft model's cache not rolled back", DraftModel.rewind, steps_taken_for_text, checks.greedy_tokens
    ),
    defect(
        "the draft model never reads the last token of a draft accepted whole",
        DraftModel.step,
        one_more_read,
        checks.whole_acceptance,
    ),
    defect(
        "an index that does not go back", NGramIndex.rewind, index_keeps_later_places, checks.rewound_lookup
    ),
    defect("texts that do not go back", TextIndex.rewind, nothing, checks.rewound_suffix),
]


# --- rows and faults -------------------------------------------------------------------------------------


def finite_while_removed(of: Function, value: Function) -> Spoiler:
    """Remove a row while `of(rows, sequence)` counts as finite if `value` says so of it."""

    def spoiler(remove: Function) -> Function:
        def spoilt(kept: Rows, sequence: Sequence) -> None:
            other = of(kept, sequence)
            if other is None:
                remove(kept, sequence)
                return
            with replaced(other, "cache_finite", value(other)):
                remove(kept, sequence)

        return spoilt

    return spoiler


def leaver(kept: Rows, sequence: Sequence) -> Sequence:
    return sequence


def mover(kept: Rows, sequence: Sequence) -> Sequence | None:
    last = kept.sequences[-1]
    return None if last is sequence else last


def finite(_: Sequence) -> bool:
    return True


def not_failed(sequence: Sequence) -> bool:
    return sequence.error is None


def failed_batch_finite(leave: Function) -> Function:
    def spoilt(scheduler: Scheduler, *args: Any) -> Sequence | None:
        for sequence in scheduler.rows.sequences:
            sequence.cache_finite = True
        sibling: Sequence | None = leave(scheduler, *args)
        return sibling

    return spoilt


def drafters_told_last(fail_batch: Function) -> Function:
    def spoilt(engine: Engine, error: str) -> None:
        failed = [(sequence, sequence.drafters) for sequence in engine.rows.sequences]
        for sequence, _ in failed:
            sequence.drafters = ()
        fail_batch(engine, error)
        for sequence, names in failed:
            for name in names:
                engine.drafters[name].leave(sequence)

    return spoilt


def not_wiped(append: Function) -> Function:
    def spoilt(engine: Engine, *args: Any) -> Any:
        with replaced(engine.cache, "wipe", lambda row, length: None):
            return append(engine, *args)

    return spoilt


def drafts_again_at_once(candidates: Function) -> Function:
    def spoilt(sequence: Sequence, *rest: Any) -> Any:
        with replaced(sequence, "skip_draft", False):
            return candidates(sequence, *rest)

    return spoilt


def fails_with_its_draft(commit: Function) -> Function:
    def spoilt(engine: Engine, inputs: RoundInputs, results: Any, forward: Forward) -> Any:
        plain = [replace(result, drafted=0) if result.target_nonfinite else result for result in results]
        return commit(engine, inputs, plain, forward)

    return spoilt


def keeps_its_rows(reset: Function) -> Function:
    def spoilt(sequence: Sequence, drafter: Any, target: Any) -> None:
        with replaced(drafter, "caches", ()):
            reset(sequence, drafter, target)

    return spoilt


def donor_wiped(add: Function) -> Function:
    def spoilt(kept: Rows, sequence: Sequence, donor: Sequence | None = None) -> None:
        add(kept, sequence, donor)
        if donor is not None:
            for cache in kept.caches:
                cache.wipe(donor.row, 0)

    return spoilt


def first_row_as_donor(add: Function) -> Function:
    return lambda kept, sequence, donor=None: add(kept, sequence, donor and kept.sequences[0])


def one_prompt_row_less(prompt_rows: Function) -> Function:
    return lambda cache, donor, sequence: min(prompt_rows(cache, donor, sequence), len(sequence.prompt) - 2)


def moved_without_its_cache(remove: Function) -> Function:
    def spoilt(kept: Rows, sequence: Sequence) -> None:
        with ExitStack() as stack:
            for cache in kept.caches:
                stack.enter_context(replaced(cache, "copy_row", lambda *args: None))
            remove(kept, sequence)

    return spoilt


ROWS = [
    defect(
        "a failed row used again as it is",
        Rows.remove,
        finite_while_removed(leaver, finite),
        checks.broken_rows,
    ),
    defect(
        "what a failed row leaves behind when it moves",
        Rows.remove,
        finite_while_removed(mover, finite),
        checks.several_broken_rows,
    ),
    defect(
        "only rows that failed are zeroed, not rows that were never proven finite",
        Rows.remove,
        finite_while_removed(leaver, not_failed),
        checks.cancelled_prompt,
    ),
    defect(
        "only rows that failed are zeroed when they move",
        Rows.remove,
        finite_while_removed(mover, not_failed),
        checks.moved_prompt,
    ),
    defect(
        "the rows of a failed batch count as finite",
        Scheduler.leave,
        failed_batch_finite,
        checks.failed_batch,
    ),
    defect(
        "drafters leave a failed batch after rows have moved",
        Engine.fail_batch,
        drafters_told_last,
        checks.failed_batch,
    ),
    defect("a row that its draft broke is not wiped", Engine._append, not_wiped, checks.broken_drafts),
    defect(
        "a row that its draft broke drafts again at once",
        draft_choice._candidates,
        drafts_again_at_once,
        checks.broken_drafts,
    ),
    defect("a row that its draft broke fails", Engine._commit, fails_with_its_draft, checks.broken_drafts),
    defect(
        "a drafter that breaks keeps its rows", faults.reset_drafter, keeps_its_rows, checks.broken_drafter
    ),
    defect(
        "the target's own row emptied for what it drafted",
        faults.reset_drafter,
        lambda reset: lambda sequence, drafter, target: reset(sequence, drafter, None),
        checks.broken_self_drafts,
    ),
    defect("a donor's rows damaged by the copy", Rows.add, donor_wiped, checks.siblings),
    defect("a donor's prompt one token short", rows._prompt_rows, one_prompt_row_less, checks.siblings),
    defect("the wrong donor", Rows.add, first_row_as_donor, checks.siblings),
    defect(
        "the last row moved without its cache", Rows.remove, moved_without_its_cache, checks.greedy_tokens
    ),
]

MUTANTS = [*APPENDED, *TOLD, *DRAFTERS, *ROWS]
CHECKS = list(dict.fromkeys(mutant.check for mutant in MUTANTS))
