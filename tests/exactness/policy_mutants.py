"""Planted defects of what a policy is asked and told; `policies.each_row_its_own` must fail under each.

A table entry reads: name, seam, spoiler. A spoiler takes the sound function and returns the defective one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from foredraft.decode.distribution import Distribution
from foredraft.decode.draft_choice import choose_drafts
from foredraft.decode.drafting import DraftTools, propose
from foredraft.decode.engine import Engine
from foredraft.decode.policy.target_confidence import target_confidence
from foredraft.decode.round_draft import Draft, RoundInputs
from foredraft.decode.round_results import RowResult, fetch_results
from foredraft.decode.sequence import Sequence
from tests.exactness import test_policies as policies
from tests.support.planting import Mutant, Spoiler, replaced

Function = Callable[..., Any]


def told(change: Callable[[RoundInputs, list[RowResult]], list[RowResult]]) -> Spoiler:
    """Commit a round with other results."""

    def spoiler(commit: Function) -> Function:
        return lambda engine, inputs, results, forward: commit(
            engine, inputs, change(inputs, results), forward
        )

    return spoiler


def confidence_of_the_first(inputs: RoundInputs, results: list[RowResult]) -> list[RowResult]:
    return [replace(result, target_confidence=results[0].target_confidence) for result in results]


def confidence_of_another_row(fetch: Function) -> Function:
    def spoilt(*args: Any, **more: Any) -> list[RowResult]:
        results: list[RowResult] = fetch(*args, **more)
        others = reversed([result.target_confidence for result in results])
        return [replace(one, target_confidence=other) for one, other in zip(results, others, strict=True)]

    return spoilt


def confidence_of_the_first_position() -> tuple[tuple[Any, Spoiler], ...]:
    seen: dict[str, Tensor] = {}

    def remember(fetch: Function) -> Function:
        def spoilt(
            sequences: Any, draft: Any, verdict: Any, p: Any, logits: Tensor, *rest: Any, **more: Any
        ) -> Any:
            seen["logits"] = logits
            return fetch(sequences, draft, verdict, p, logits, *rest, **more)

        return spoilt

    def spoil_confidence(sound: Function) -> Function:
        return lambda logits, tokens, signal: sound(seen["logits"][:, 0], tokens, signal)

    return (fetch_results, remember), (target_confidence, spoil_confidence)


def plain_steps_not_told(commit: Function) -> Function:
    def spoilt(engine: Engine, inputs: RoundInputs, *rest: Any) -> Any:
        learn = engine.policy.learn

        def learn_of_drafts(sequence: Sequence, *told: Any) -> None:
            if inputs.budgets[sequence.row]:
                learn(sequence, *told)

        with replaced(engine.policy, "learn", learn_of_drafts):
            return commit(engine, inputs, *rest)

    return spoilt


def one_state(submit: Function) -> Function:
    states: dict[Engine, Any] = {}

    def spoilt(engine: Engine, sequence: Sequence) -> None:
        submit(engine, sequence)
        sequence.policy_state = states.setdefault(engine, sequence.policy_state)

    return spoilt


def without_idle_rows(plan: Function) -> Function:
    def spoilt(sequences: list[Sequence], idle: list[bool], *rest: Any) -> Any:
        running = [row for row, is_idle in enumerate(idle) if not is_idle]
        planned = plan([sequences[row] for row in running], [False] * len(running), *rest)
        budgets, chosen, siblings = [0] * len(idle), [None] * len(idle), [0] * len(idle)
        for row, *decided in zip(running, *planned, strict=True):
            budgets[row], chosen[row], siblings[row] = decided
        return budgets, chosen, siblings

    return spoilt


def budget_of_the_next_row(plan: Function) -> Function:
    def spoilt(*args: Any) -> Any:
        budgets, *rest = plan(*args)
        drafting = [row for row, budget in enumerate(budgets) if budget]
        moved = list(budgets)
        for row, other in zip(drafting, [*drafting[1:], *drafting[:1]], strict=True):
            moved[row] = budgets[other]
        return moved, *rest

    return spoilt


class Misasked:
    """A policy that is asked about other things than the drafts, or whose answers are given to other rows."""

    def __init__(self, policy: Any, asked: Mapping[str, Function]) -> None:
        self._policy, self._asked = policy, asked

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def may_draw(self, *question: Any) -> Tensor | None:
        return self._ask("may_draw", *question)

    def go_on(self, *question: Any) -> Tensor | None:
        return self._ask("go_on", *question)

    def _ask(self, name: str, *question: Any) -> Tensor | None:
        ask = getattr(self._policy, name)
        answer: Tensor | None = self._asked[name](ask, *question) if name in self._asked else ask(*question)
        return answer


def misasked(**asked: Function) -> Spoiler:
    """Ask the policy otherwise: by method, a function of (ask, sequences, position, q, logits)."""

    def spoiler(sound: Function) -> Function:
        def spoilt(drafters: Any, inputs: RoundInputs, tools: DraftTools) -> Draft:
            policy: Any = Misasked(tools.policy, asked)
            draft: Draft = sound(drafters, inputs, replace(tools, policy=policy))
            return draft

        return spoilt

    return spoiler


def sharpened(ask: Function, sequences: Any, position: int, q: Distribution, logits: Tensor) -> Any:
    return ask(sequences, position, q, logits * 3)


def of_the_row_before(ask: Function, sequences: Any, position: int, q: Distribution, logits: Tensor) -> Any:
    return ask(sequences, position, q, logits.roll(1, 0))


def of_other_sequences(ask: Function, sequences: Any, position: int, q: Distribution, logits: Tensor) -> Any:
    return ask(sequences[::-1], position, q, logits)


def of_raw_q(ask: Function, sequences: Any, position: int, q: Distribution, logits: Tensor) -> Any:
    return ask(sequences, position, Distribution(logits.softmax(-1)), logits)


def answers_moved(ask: Function, *question: Any) -> Any:
    return ask(*question).roll(1)


def not_asked_first(ask: Function, sequences: Any, position: int, q: Distribution, logits: Tensor) -> Any:
    return ask(sequences, position, q, logits) if position else None


DEFECTS: list[tuple[str, Any, Spoiler]] = [
    (
        "the target's confidence in another token",
        target_confidence,
        lambda sound: lambda logits, tokens, signal: sound(logits, tokens.roll(1), signal),
    ),
    (
        "the target's confidence by sharpened logits",
        target_confidence,
        lambda sound: lambda logits, tokens, signal: sound(logits * 2, tokens, signal),
    ),
    ("the target's confidence in another row", fetch_results, confidence_of_another_row),
    ("each row told the confidence of the first", Engine._commit, told(confidence_of_the_first)),
    ("nothing told of plain steps", Engine._commit, plain_steps_not_told),
    ("one state for all sequences", Engine.submit, one_state),
    ("rows in prefill left out", choose_drafts, without_idle_rows),
    ("a row given the budget of another", choose_drafts, budget_of_the_next_row),
    ("an end asked of sharpened logits", propose, misasked(go_on=sharpened)),
    ("a draw asked of sharpened logits", propose, misasked(may_draw=sharpened)),
    ("a draw asked of another row's logits", propose, misasked(may_draw=of_the_row_before)),
    ("an end asked of other sequences", propose, misasked(go_on=of_other_sequences)),
    ("a draw asked of q before the transforms", propose, misasked(may_draw=of_raw_q)),
    ("an end that ends another row's draft", propose, misasked(go_on=answers_moved)),
    ("a position left in another row's draft", propose, misasked(may_draw=answers_moved)),
    ("not asked before the first draw", propose, misasked(may_draw=not_asked_first)),
]
CHECKS = [policies.each_row_its_own]
MUTANTS = [
    Mutant(
        "the target's confidence at a round's first position",
        confidence_of_the_first_position(),
        policies.each_row_its_own,
    ),
    *(Mutant(name, ((seam, spoiler),), policies.each_row_its_own) for name, seam, spoiler in DEFECTS),
]
