"""Planted defects of commit, cache rows, drafters, faults and policies (form: `mutants`)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from foredraft.decode import round_draft
from foredraft.decode.distribution import Distribution
from foredraft.decode.drafting import propose
from foredraft.decode.engine import Engine
from foredraft.decode.engine_target import reset_drafter
from foredraft.decode.policy import Policy, target_confidence
from foredraft.decode.round_draft import RoundInputs, choose_drafts
from foredraft.decode.round_results import RowResult, fetch_results
from foredraft.decode.scheduler import Rows, Scheduler
from foredraft.decode.sequence import Finish, Sequence, TokenOrigin
from foredraft.drafters.draft_model import DraftModel
from foredraft.drafters.layer_skip import LayerSkip, LowBit
from foredraft.drafters.lookup import TextIndex
from foredraft.drafters.states import KnownStates
from foredraft.model.runner import Resume
from tests.exactness import round_checks as checks
from tests.exactness import test_identity as identity
from tests.exactness import test_policies as policies
from tests.support import mutations
from tests.support.mutation import Edit, Mutation, caught_by, replaced
from tests.support.mutations import Function, argument, around, before, changed, holding, instead, verified

each_row_its_own = partial(policies.test_the_policy_is_asked_and_told_about_each_row_itself, "probability")

nothing = instead(lambda *args: None)


@around
def without_the_bonus(
    extend: Function, sequence: Sequence, tokens: Any, origins: Any, scores: Any = ()
) -> Any:
    count = len(tokens) - (origins[-1] is TokenOrigin.BONUS)
    return extend(sequence, tokens[:count], origins[:count], scores[:count])


def unsure_bonus_dropped() -> tuple[Edit, ...]:
    seen: dict[str, float] = {}

    def mutate_extend(extend: Function) -> Function:
        return lambda *args: (without_the_bonus(extend) if seen["confidence"] < 0.5 else extend)(*args)

    remember = before(lambda engine, own, result, *rest: seen.update(confidence=result.target_confidence))
    return (Engine._append, remember), (Sequence.extend, mutate_extend)


def goes_on_after(finish: Finish) -> tuple[Edit, ...]:
    """An end is ignored unless it is the last token of its run."""
    run: dict[str, int] = {}

    @around
    def mutate_end(end: Function, sequence: Sequence, token: int) -> Finish | None:
        found: Finish | None = end(sequence, token)
        return None if found is finish and len(sequence.tokens) < run["end"] else found

    remember = before(lambda sequence, tokens, *rest: run.update(end=len(sequence.tokens) + len(tokens)))
    return (Sequence.extend, remember), (Sequence._end, mutate_end)


limit_unknown = holding(lambda own, *_: (own, "params", own.params.replace(max_new_tokens=10**6)))


@around
def ban_not_barred(extend: Function, sequence: Sequence, *args: Any) -> Any:
    if sequence.constraint is None:
        return extend(sequence, *args)
    with replaced(sequence.constraint, "roll_back", sequence.constraint.rewind):
        return extend(sequence, *args)


def first_drafter_again(plan: Function) -> Function:
    first: dict[int, str] = {}

    def mutated(sequences: list[Sequence], *rest: Any) -> Any:
        budgets, chosen, siblings = plan(sequences, *rest)
        stale = [name and first.setdefault(s.id, name) for s, name in zip(sequences, chosen, strict=True)]
        return budgets, stale, siblings

    return mutated


end_overwritten = before(lambda engine, sequence: setattr(sequence, "finish", Finish.CANCELLED))
APPENDED = {
    checks.drafts_behind_the_gate: [("a bonus that the target is unsure of dropped", unsure_bonus_dropped())],
    checks.bonus_behind_the_gate: [("the bonus missing after a gate", Sequence.extend, without_the_bonus)],
    partial(identity.test_eos_at_every_place_of_a_run, 2, 4): [
        ("EOS inside a run ignored", goes_on_after(Finish.EOS))
    ],
    partial(identity.test_a_limit_at_every_place_of_a_run, 7): [
        (
            "the limit inside a run ignored",
            (*goes_on_after(Finish.LENGTH), (round_draft._candidates, limit_unknown)),
        )
    ],
    identity.test_cancelling_keeps_the_text_and_is_final: [
        ("an end overwritten by a cancellation", Engine.cancel, end_overwritten)
    ],
    identity.test_a_rollback_across_three_rounds: [
        ("a ban's rollback that bars nothing at temperature 0", Sequence.extend, ban_not_barred)
    ],
    each_row_its_own: [("a round drafted by the one before's drafter", choose_drafts, first_drafter_again)],
}


cache_left_as_it_is = before(
    lambda engine, own, base, *_: engine.cache.lengths.__setitem__(own.row, base + 1 + own.rounds[-1].drafted)
)
only_the_rounds_drafter = holding(
    lambda engine, own, *_: (own, "drafters", tuple(filter(None, [own.rounds[-1].drafter])))
)
rollbacks_not_told = around(
    lambda tell, engine, sequence, base, emitted, *rest: (
        tell(engine, sequence, base, emitted, *rest) if emitted >= 0 else None
    )
)


def one_off_after_whole(engine: Any, inputs: RoundInputs, draft: Any, starts: Any, options: Any) -> None:
    for row, sequence in enumerate(inputs.sequences):
        last = sequence.rounds[-1] if sequence.rounds else None
        starts[row] += last is not None and last.accepted == last.drafted > 0


def always_resumed(engine: Engine, inputs: Any, draft: Any, starts: Any, options: Any) -> None:
    options.update(resume=draft.resume)


def keep_the_table_of_the_batch_before(engine: Engine, policy: Policy) -> None:
    ids = [sequence.id for sequence in engine.rows.sequences]
    if engine._table is not None and len(engine._table[0]) == len(ids):
        engine._table = ids, engine._table[1]


TOLD = {
    checks.auxiliary_states: [
        ("states of tokens that were not kept", Engine._tell_drafters, argument(3, lambda n: n + (n > 0))),
        ("no states", Engine._tell_drafters, argument(3, lambda n: min(n, 0))),
    ],
    checks.greedy_tokens: [
        ("cache not rolled back", Engine._tell_drafters, cache_left_as_it_is),
        ("position off by one after a draft accepted whole", Engine._verify, verified(one_off_after_whole)),
    ],
    checks.decisions_among_drafters: [
        ("only the round's drafter told of a commit", Engine._tell_drafters, only_the_rounds_drafter)
    ],
    checks.greedy_bans: [("a drafter not told of a rollback", Engine._tell_drafters, rollbacks_not_told)],
    checks.skipping_drafts: [
        ("a draft's plan in the verifying pass", Engine._verify, verified(mutations.with_the_drafts_plan))
    ],
    identity.test_an_auxiliary_layer_below_the_resumed_depth_prevents_resuming: [
        ("resumes above an auxiliary layer", Engine._verify, verified(always_resumed))
    ],
    checks.mixed_rows: [
        ("parameters of the batch before", Engine._inputs, before(keep_the_table_of_the_batch_before))
    ],
}


@around
def own_rows_taken_for_text(
    step: Function, drafter: LayerSkip | LowBit, tokens: Tensor, starts: list[int], *rest: Any
) -> Any:
    logits = step(drafter, tokens, starts, *rest)
    drafter.cache.lengths[0] = starts[0] + 1
    return logits


def own_rows_left_visible() -> tuple[Edit, ...]:
    reach: dict[str, int] = {}

    def extend_the_row(engine: Engine, sequence: Sequence, *_: Any) -> None:
        reached = reach.get(sequence.rounds[-1].drafter or "", 0)
        engine.cache.lengths[sequence.row] = max(engine.cache.lengths[sequence.row], reached)

    remember = before(lambda drafter, tokens, starts, *rest: reach.update({drafter.name: starts[0] + 1}))
    return (LayerSkip.step, remember), (Engine._tell_drafters, before(extend_the_row))


begins_one_early = argument(2, lambda starts: [max(0, start - 1) for start in starts])
begins_one_further = argument(2, lambda starts: [start + (start > 8) for start in starts])
idle_rows_known = argument(2, lambda counts: [max(1, count) for count in counts])


@around
def states_kept(take: Function, known: KnownStates) -> Resume | None:
    kept = known._states, known._known
    made: Resume | None = take(known)
    known._states, known._known = kept
    return made


@around
def steps_taken_for_text(rewind: Function, drafter: DraftModel, sequence: Sequence) -> None:
    read = drafter._stepped.get(sequence.row, drafter.cache.lengths[sequence.row])
    rewind(drafter, sequence)
    drafter.cache.lengths[sequence.row] = read


@around
def one_more_read(
    step: Function, drafter: DraftModel, tokens: Any, starts: Any, counts: Any, idle: Any, at: Any
) -> Any:
    logits = step(drafter, tokens, starts, counts, idle, at)
    for row, is_idle in enumerate(idle):
        if not is_idle:
            drafter._stepped[row] += 1
    return logits


DRAFTERS = {
    checks.skipping_tokens: [
        ("a draft's own rows taken for the text while it is made", LayerSkip.step, own_rows_taken_for_text),
        ("a draft's own rows left visible to the next round", own_rows_left_visible()),
    ],
    checks.tokens_of_a_copy: [
        ("a copy's own rows taken for the text while it drafts", LowBit.step, own_rows_taken_for_text),
        ("a copy drafts over the last committed row", LowBit.step, begins_one_early),
    ],
    checks.exiting_tokens: [
        ("a draft begins after the rows of the last one", LayerSkip.step, begins_one_further),
        ("the last drafted token taken for read", KnownStates.take, mutations.last_token_known),
        ("states of the draft before handed on", KnownStates.take, states_kept),
    ],
    checks.skipping_drafts: [("states known of rows that sit out a step", KnownStates.add, idle_rows_known)],
    identity.test_a_draft_that_broke_off_leaves_no_states: [
        ("states of a draft that broke off handed on", LayerSkip.leave, nothing)
    ],
    checks.greedy_tokens: [("draft model's cache not rolled back", DraftModel.rewind, steps_taken_for_text)],
    partial(identity.test_a_perfect_drafter_is_accepted_whole, "draft-model"): [
        ("the last token of a draft accepted whole never read", DraftModel.step, one_more_read)
    ],
    checks.rewound_lookup: [("an index that does not go back", TextIndex.rewind, nothing)],
    checks.rewound_suffix: [("texts that do not go back", TextIndex.rewind, nothing)],
}


def leaver_counts_as(finite: Callable[[Sequence], bool]) -> Mutation:
    return holding(lambda kept, sequence: (sequence, "cache_finite", finite(sequence)))


def mover_counts_as(finite: Callable[[Sequence], bool]) -> Mutation:
    """Remove a row while the last one, which moves into its place, counts as finite or not."""

    def moving(kept: Rows, sequence: Sequence) -> tuple[Any, str, Any]:
        last = kept.sequences[-1]
        return last, "cache_finite", last.cache_finite if last is sequence else finite(last)

    return holding(moving)


def unless_failed(sequence: Sequence) -> bool:
    return sequence.error is None


def count_all_as_finite(scheduler: Scheduler, *_: Any) -> None:
    for sequence in scheduler.rows.sequences:
        sequence.cache_finite = True


@around
def drafters_told_last(fail_batch: Function, engine: Engine, error: str) -> None:
    failed = [(sequence, sequence.drafters) for sequence in engine.rows.sequences]
    for sequence, _ in failed:
        sequence.drafters = ()
    fail_batch(engine, error)
    for sequence, names in failed:
        for name in names:
            engine.drafters[name].leave(sequence)


as_plain = argument(2, lambda results: [replace(r, drafted=0) if r.target_nonfinite else r for r in results])


@around
def donor_wiped(add: Function, kept: Rows, sequence: Sequence, donor: Sequence | None = None) -> None:
    add(kept, sequence, donor)
    if donor is not None:
        for cache in kept.caches:
            cache.wipe(donor.row, 0)


first_row_as_donor = around(lambda add, kept, own, donor=None: add(kept, own, donor and kept.sequences[0]))


@around
def one_prompt_row_less(cut: Function, kept: Rows, sequence: Sequence, length: int) -> None:
    cut(kept, sequence, length)
    for cache in kept.caches:
        cache.wipe(sequence.row, length - 1)


@around
def moved_without_its_cache(remove: Function, kept: Rows, sequence: Sequence) -> None:
    with ExitStack() as stack:
        for cache in kept.caches:
            stack.enter_context(replaced(cache, "copy_row", lambda *args: None))
        remove(kept, sequence)


without_wiping = holding(lambda engine, *rest: (engine.cache, "wipe", lambda *_: None))
drafting_at_once = holding(lambda sequence, *rest: (sequence, "skip_draft", False))
ROWS = {
    partial(identity.test_broken_logits_end_one_request_alone, "draft-model"): [
        ("a failed row used again as it is", Rows.remove, leaver_counts_as(lambda _: True))
    ],
    checks.several_broken_rows: [
        ("what a failed row leaves behind when it moves", Rows.remove, mover_counts_as(lambda _: True))
    ],
    identity.test_a_prompt_cancelled_while_it_is_read_leaves_nothing_behind: [
        ("only rows that failed are zeroed, not unproven ones", Rows.remove, leaver_counts_as(unless_failed))
    ],
    identity.test_a_row_that_moves_before_its_first_round_leaves_nothing_behind: [
        ("only rows that failed are zeroed when they move", Rows.remove, mover_counts_as(unless_failed))
    ],
    identity.test_a_failed_batch_leaves_clean_rows: [
        ("the rows of a failed batch count as finite", Scheduler.leave, before(count_all_as_finite)),
        ("drafters leave a failed batch after rows have moved", Engine.fail_batch, drafters_told_last),
    ],
    partial(identity.test_a_draft_that_breaks_the_pass_costs_only_the_draft, "script"): [
        ("a row that its draft broke is not wiped", Engine._append, without_wiping),
        ("a row that its draft broke drafts again at once", round_draft._candidates, drafting_at_once),
        ("a row that its draft broke fails", Engine._commit, as_plain),
    ],
    identity.test_a_drafter_with_nonfinite_logits_is_reset_once_and_then_dropped: [
        ("a broken drafter's rows kept", reset_drafter, holding(lambda _, own, *rest: (own, "caches", ())))
    ],
    checks.broken_self_drafts: [
        ("the target's own row emptied for what it drafted", reset_drafter, argument(2, lambda target: None))
    ],
    checks.choices: [
        ("a donor's rows damaged by the copy", Rows.add, donor_wiped),
        ("a donor's prompt one token short", Rows.cut, one_prompt_row_less),
        ("the wrong donor", Rows.add, first_row_as_donor),
    ],
    checks.greedy_tokens: [("the last row moved without its cache", Rows.remove, moved_without_its_cache)],
}


confidence_of_the_first = argument(
    2, lambda results: [replace(each, target_confidence=results[0].target_confidence) for each in results]
)


def confidence_of_another_row(results: list[RowResult]) -> list[RowResult]:
    others = reversed([result.target_confidence for result in results])
    return [replace(one, target_confidence=other) for one, other in zip(results, others, strict=True)]


def confidence_of_the_first_position() -> tuple[Edit, ...]:
    seen: dict[str, Tensor] = {}

    def mutate_confidence(sound: Function) -> Function:
        return lambda logits, tokens, signal: sound(seen["logits"][:, 0], tokens, signal)

    remember = before(lambda sequences, draft, given, *rest: seen.update(logits=given.logits))
    return (fetch_results, remember), (target_confidence, mutate_confidence)


def learns_of_drafts_alone(engine: Engine, inputs: RoundInputs, *_: Any) -> tuple[Any, str, Any]:
    learn = engine.policy.learn

    def learn_of_drafts(sequence: Sequence, *told: Any) -> None:
        if inputs.budgets[sequence.row]:
            learn(sequence, *told)

    return engine.policy, "learn", learn_of_drafts


def one_state(submit: Function) -> Function:
    states: dict[Engine, Any] = {}

    def mutated(engine: Engine, sequence: Sequence) -> None:
        submit(engine, sequence)
        sequence.policy_state = states.setdefault(engine, sequence.policy_state)

    return mutated


@around
def without_idle_rows(plan: Function, sequences: list[Sequence], idle: list[bool], *rest: Any) -> Any:
    running = [row for row, is_idle in enumerate(idle) if not is_idle]
    planned = plan([sequences[row] for row in running], [False] * len(running), *rest)
    budgets, chosen, siblings = [0] * len(idle), [None] * len(idle), [0] * len(idle)
    for row, *decided in zip(running, *planned, strict=True):
        budgets[row], chosen[row], siblings[row] = decided
    return budgets, chosen, siblings


def budget_of_the_next_row(planned: tuple[list[int], ...]) -> tuple[list[int], ...]:
    budgets, *rest = planned
    drafting = [row for row, budget in enumerate(budgets) if budget]
    moved = list(budgets)
    for row, other in zip(drafting, [*drafting[1:], *drafting[:1]], strict=True):
        moved[row] = budgets[other]
    return moved, *rest


class Misasked:
    """A policy that is asked about other things than the drafts, or whose answers are given to other rows."""

    def __init__(self, policy: Any, name: str, asked: Function) -> None:
        self._policy = policy
        setattr(self, name, lambda *question: asked(getattr(policy, name), *question))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)


# how the policy is asked otherwise: a function of (ask, sequences, position, q, logits)
ASKED: dict[str, Function] = {
    "sharpened logits": lambda ask, rows, at, q, logits: ask(rows, at, q, logits * 3),
    "another row's logits": lambda ask, rows, at, q, logits: ask(rows, at, q, logits.roll(1, 0)),
    "other sequences": lambda ask, rows, *rest: ask(rows[::-1], *rest),
    "q before the transforms": lambda ask, rows, at, q, x: ask(rows, at, Distribution(x.softmax(-1)), x),
    "answers for another row": lambda ask, *question: ask(*question).roll(1),
    "nothing before the first": lambda ask, rows, at, *rest: ask(rows, at, *rest) if at else None,
}


def misasked(method: str, how: str) -> tuple[str, Function, Mutation]:
    asked = argument(2, lambda tools: replace(tools, policy=Misasked(tools.policy, method, ASKED[how])))
    return f"{method} asked of {how}", propose, asked


POLICIES: list[tuple[Any, ...]] = [
    ("the target's confidence at a round's first position", confidence_of_the_first_position()),
    ("the target's confidence in another token", target_confidence, argument(1, lambda ids: ids.roll(1))),
    ("the target's confidence by sharpened logits", target_confidence, argument(0, lambda x: x * 2)),
    ("the target's confidence in another row", fetch_results, changed(confidence_of_another_row)),
    ("each row told the confidence of the first", Engine._commit, confidence_of_the_first),
    ("nothing told of plain steps", Engine._commit, holding(learns_of_drafts_alone)),
    ("one state for all sequences", Engine.submit, one_state),
    ("rows in prefill left out", choose_drafts, without_idle_rows),
    ("a row given the budget of another", choose_drafts, changed(budget_of_the_next_row)),
    misasked("go_on", "sharpened logits"),
    *(misasked("may_draw", how) for how in ASKED if how != "other sequences"),
    misasked("go_on", "other sequences"),
    misasked("go_on", "answers for another row"),
]

MUTANTS = caught_by(APPENDED, TOLD, DRAFTERS, ROWS, {each_row_its_own: POLICIES})
