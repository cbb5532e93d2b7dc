"""Planted defects of constraints, each with a check that must fail under it.

A table entry reads: name, seam, spoiler, check. A spoiler takes the sound function and returns the defective one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from foredraft.constraints.phrases import ROOT, PhraseAutomaton, PhraseState
from foredraft.constraints.token_automaton import Move, TokenAutomaton
from foredraft.constraints.token_masks import TokenMasks
from foredraft.constraints.token_table import TokenTable
from foredraft.decode.sampling import distribution_of
from foredraft.decode.scheduler import Scheduler
from foredraft.decode.sequence import Sequence
from foredraft.drafters.draft_model import DraftModel
from tests.exactness import test_constraints as constraints
from tests.support.planting import Mutant, Spoiler, defect

Function = Callable[..., Any]


def masked_distribution() -> None:
    for name in ("from the prompt on", "within a token"):
        constraints.test_the_output_has_the_distribution_of_the_definition(name, "mask")


def rolled_back_distribution() -> None:
    for name in ("from the prompt on", "within a token"):
        constraints.test_the_output_has_the_distribution_of_the_definition(name, "rollback")


def masked_open_character() -> None:
    constraints.test_the_output_has_the_distribution_of_the_definition("an open character", "mask")


def masked_idle_tokens() -> None:
    constraints.test_the_output_has_the_distribution_of_the_definition("no text but the end", "mask")


def rolled_back_text() -> None:
    constraints.test_the_text_is_that_of_plain_decoding("overlapping tokens", "rollback", {"temperature": 0})


def without_failure_links(step: Function) -> Function:
    def spoilt(automaton: PhraseAutomaton, node: int, symbol: str) -> int:
        return automaton._next[node].get(symbol) or automaton._next[ROOT].get(symbol, ROOT)

    return spoilt


def complete_at_the_end_alone(read: Function) -> Function:
    def spoilt(automaton: TokenAutomaton, state: PhraseState, token: int, last: bool = False) -> Move:
        move: Move = read(automaton, state, token, last)
        return move if automaton.phrases.shortest[move.state.node] else move._replace(found=None)

    return spoilt


def cache_kept_past_a_rollback(rewind: Function) -> Function:
    def spoilt(drafter: DraftModel, sequence: Sequence) -> None:
        before = drafter.cache.lengths[sequence.row]
        rewind(drafter, sequence)
        if sequence.attempts:
            drafter.cache.lengths[sequence.row] = max(before, drafter.cache.lengths[sequence.row])

    return spoilt


def released_when_a_row_leaves() -> tuple[tuple[Any, Spoiler], ...]:
    released: set[int] = set()

    def remember(leave: Function) -> Function:
        def spoilt(scheduler: Scheduler, sequence: Sequence, *rest: Any) -> Any:
            released.update(other.id for other in scheduler.rows.sequences)
            return leave(scheduler, sequence, *rest)

        return spoilt

    def spoil_settled(settled: Function) -> Function:
        def spoilt(sequence: Sequence) -> int:
            if sequence.id in released:
                released.discard(sequence.id)
                return len(sequence.new_ids)
            found: int = settled(sequence)
            return found

        return spoilt

    return (Scheduler.leave, remember), (Sequence.settled, spoil_settled)


def masked_after_the_cuts(sound: Function) -> Function:
    def spoilt(logits: Any, table: Any, masks: Any = None, *rest: Any, **more: Any) -> Any:
        p, finite = sound(logits, table, None, *rest, **more)
        if masks is None or p.probs is None:
            return sound(logits, table, masks, *rest, **more)
        allowed = p.probs * masks
        p.probs[:] = allowed / allowed.sum(-1, keepdim=True).clamp_min(1e-30)
        return p, finite

    return spoilt


MUTANTS = [
    defect("no failure links, by mask", PhraseAutomaton.step, without_failure_links, masked_distribution),
    defect("no failure links, by rollback", PhraseAutomaton.step, without_failure_links, rolled_back_distribution),
    defect(
        "a match inside one token missed, by mask", PhraseAutomaton.completes,
        lambda _: lambda *args: False, masked_distribution,
    ),
    defect(
        "a match inside one token missed, by rollback", TokenAutomaton.read,
        complete_at_the_end_alone, rolled_back_distribution,
    ),
    defect("a rollback forgets the draft's cache", DraftModel.rewind, cache_kept_past_a_rollback, rolled_back_text),
    Mutant(
        "held text released on a batch change", released_when_a_row_leaves(),
        constraints.test_what_is_settled_stays_while_the_batch_changes,
    ),
    defect(
        "a character begun that only banned text completes", TokenMasks._can_complete,
        lambda _: lambda *args: True, masked_open_character,
    ),
    defect(
        "tokens without text fill a budget", TokenTable.without_idle,
        lambda _: lambda table, mask: mask, masked_idle_tokens,
    ),
    defect("mask applied after top-p", distribution_of, masked_after_the_cuts, masked_distribution),
]  # fmt: skip
CHECKS = list(dict.fromkeys(mutant.check for mutant in MUTANTS))
