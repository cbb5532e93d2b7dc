"""Planted defects of constraints, each with a check that must fail under it.

A table entry reads: name, seam, spoiler, check. A spoiler takes the sound function and returns the defective one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from foredraft.constraints import thinking_tokens
from foredraft.constraints.after_thinking import AfterThinking
from foredraft.constraints.phrases import ROOT, PhraseAutomaton, PhraseState
from foredraft.constraints.thinking_tokens import ThinkingTokens
from foredraft.constraints.token_automaton import Move, TokenAutomaton
from foredraft.constraints.token_masks import TokenMasks
from foredraft.constraints.token_table import TokenTable
from foredraft.decode.sampling import distribution_of
from foredraft.decode.scheduler import Scheduler
from foredraft.decode.sequence import Sequence
from foredraft.drafters.draft_model import DraftModel
from tests.exactness import test_constraints as constraints
from tests.exactness import test_thinking as thinking
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


def grammar_behind_thinking() -> None:
    thinking.check_distribution("begun by the prompt")


def rewound_thinking() -> None:
    thinking.check_rewinds("the content may begin as the marker does", 0)


def repeating_marker() -> None:
    for seed in range(8):
        thinking.check_rewinds("a marker that begins again within itself", seed)


def without_the_marker_s_last_character(init: Function) -> Function:
    return lambda tokens, texts, opens, closes, ends: init(tokens, texts, opens, closes[:-1], ends)


def ends_allowed(mask: Function) -> Function:
    def spoilt(tokens: ThinkingTokens, place: Any) -> Any:
        found = mask(tokens, place).clone()
        found[tokens._ends] = True
        return found

    return spoilt


def content_left_as_it_is(rewind: Function) -> Function:
    def spoilt(constraint: AfterThinking, length: int) -> None:
        del constraint._new[length:]
        del constraint._steps[length + 1 :]
        constraint._follow()

    return spoilt


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
    defect(
        "the last of the closing marker counted as content", ThinkingTokens.__init__,
        without_the_marker_s_last_character, grammar_behind_thinking,
    ),
    defect(
        "a schema begun inside the thinking", AfterThinking.mask,
        lambda _: lambda constraint: constraint._content.mask(), grammar_behind_thinking,
    ),
    defect("a text that ends within its thinking", ThinkingTokens.mask, ends_allowed, grammar_behind_thinking),
    defect("content not rewound", AfterThinking.rewind, content_left_as_it_is, rewound_thinking),
    defect(
        "a marker that begins again is missed", thinking_tokens._fallbacks,
        lambda _: lambda marker: [0] * (len(marker) + 1), repeating_marker,
    ),
    defect("mask applied after top-p", distribution_of, masked_after_the_cuts, masked_distribution),
]  # fmt: skip
CHECKS = list(dict.fromkeys(mutant.check for mutant in MUTANTS))
