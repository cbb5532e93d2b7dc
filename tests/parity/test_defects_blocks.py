"""Planted defects of block drafters: each must fail a comparison with the definition, or an enumeration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from foredraft.decode.distribution import Distribution
from foredraft.drafters.block_drafter import BlockDrafter, Chain
from foredraft.drafters.heads.block_head import BlockHead, Markov
from foredraft.drafters.heads.block_record import BlockRecord
from foredraft.drafters.heads.words import draft_words
from foredraft.drafters.vocabulary_map import VocabularyMap
from foredraft.errors import CheckpointError
from tests.exactness.head_checks import check_distribution
from tests.exactness.test_blocks import tiny
from tests.parity.test_blocks import check_parity
from tests.parity.test_defects_heads import not_scattered, taps_one_layer_late
from tests.support.planting import Mutant, assert_caught, defect

Function = Callable[..., Any]


def in_record(**changes: Callable[[BlockRecord], Any]) -> Callable[[Function], Function]:
    """Return a spoiler of a method of the head, which works by a record with other fields."""

    def spoiler(sound: Function) -> Function:
        def spoilt(head: BlockHead, *given: Any) -> Any:
            made = {name: change(head.record) for name, change in changes.items()}
            return sound(replace(head, record=replace(head.record, **made)), *given)

        return spoilt

    return spoiler


def the_other_first_slot(first: Function) -> Function:
    return lambda record: 1 - first(record)


def the_slot_before(after: Function) -> Function:
    """Give the first slot again, and so each one late."""

    def spoilt(chain: Chain, before: Any) -> Any:
        late = chain.taken > 0
        chain.taken -= late
        found = after(chain, before)
        chain.taken += late
        return found

    return spoilt


def contexts_of_accepted_tokens_left_out(observe: Function) -> Function:
    """Keep what the block wrote at the positions of accepted tokens, in place of the target's states."""

    def spoilt(drafter: Any, sequence: Any, start: int, states: Any) -> None:
        prompt = start + len(next(iter(states.values()))) < len(sequence.prompt)
        observe(drafter, sequence, start, states if prompt else {tap: own[:1] for tap, own in states.items()})

    return spoilt


def contexts_a_position_late(inject: Function) -> Function:
    return lambda head, cache, tables, contexts, starts, first: inject(
        head, cache, tables, contexts, [start + 1 for start in starts], first
    )


def anchor_in_the_context(masks: Function) -> Function:
    """Take the states of a draft's tokens for contexts: the block sees one position more than is committed."""
    return lambda head, anchors, length, dtype: masks(head, anchors + 1, length, dtype)


def the_likeliest_token_before(markov: Function) -> Function:
    return lambda self, before, hidden, state: markov(self, torch.zeros_like(before), hidden, state)


def state_forgotten(markov: Function) -> Function:
    return lambda self, before, hidden, state: markov(self, before, hidden, None)


def ids_as_offsets(words: Function) -> Function:
    return lambda *given, absolute: words(*given, absolute=False)


def q_of_the_next_slot(along: Function) -> Function:
    def spoilt(cls: Any, steps: list[Distribution]) -> Distribution:
        return along(cls, [*steps[1:], steps[0]])

    return spoilt


CHECKS: dict[str, Callable[[], None]] = {
    name: (lambda name=name: check_parity(name))  # type: ignore[misc]
    for name in ("z-lab", "scaled", "speculators", "anchored", "gated", "rnn", "gguf of words")
}
FREE = {
    "causal": lambda record: not record.causal,
    "causal_windows": lambda record: not record.causal_windows,
}
MUTANTS = [
    defect("d2t of a file read as offsets", draft_words, ids_as_offsets, CHECKS["gguf of words"], CheckpointError),
    defect("taps one layer late", BlockRecord.for_target, taps_one_layer_late, CHECKS["z-lab"]),
    defect("another mask token", BlockHead.run, in_record(mask_token=lambda r: r.mask_token - 1), CHECKS["z-lab"]),
    defect("slots shifted by one", BlockRecord.first_slot, the_other_first_slot, CHECKS["z-lab"]),
    defect("slots of an anchored block shifted by one", BlockRecord.first_slot, the_other_first_slot, CHECKS["anchored"]),
    defect("the first slot twice", Chain.next, the_slot_before, CHECKS["z-lab"]),
    defect("causal slots in full attention", BlockHead.block_masks, in_record(causal=lambda r: True), CHECKS["z-lab"]),
    defect(
        "free slots in causal attention", BlockHead.block_masks, in_record(causal_windows=lambda r: False),
        CHECKS["scaled"],
    ),
    defect(
        "causal slots in free windows", BlockHead.block_masks, in_record(causal_windows=lambda r: True),
        CHECKS["anchored"],
    ),
    defect(
        "windows from each slot", BlockHead.block_masks, in_record(window_from_anchor=lambda r: False),
        CHECKS["speculators"],
    ),
    defect(
        "windows from the anchor", BlockHead.block_masks, in_record(window_from_anchor=lambda r: True),
        CHECKS["scaled"],
    ),
    defect("no scale of embeddings", BlockHead.embed, in_record(embedding_scale=lambda r: 1.0), CHECKS["scaled"]),
    defect("no scale of logits", BlockHead.logits, in_record(logit_scale=lambda r: 1.0), CHECKS["scaled"]),
    defect("no soft-cap", BlockHead.logits, in_record(logit_softcap=lambda r: None), CHECKS["scaled"]),
    defect("q of the words not scattered", VocabularyMap.columns, not_scattered, CHECKS["speculators"]),
    defect("states of accepted tokens left out", BlockDrafter.observe, contexts_of_accepted_tokens_left_out, CHECKS["z-lab"]),
    defect("contexts a position late", BlockHead.inject, contexts_a_position_late, CHECKS["z-lab"]),
    defect("the anchor among the contexts", BlockHead.block_masks, anchor_in_the_context, CHECKS["anchored"]),
    defect("the bias of another token", Markov.__call__, the_likeliest_token_before, CHECKS["gated"]),
    defect("the state of the bias forgotten", Markov.__call__, state_forgotten, CHECKS["rnn"]),
    defect("the anchor's slot left out of the state", Markov.after, lambda after: lambda *given: None, CHECKS["rnn"]),
    defect(
        "q of an unreached slot, independent slots", Distribution.along, q_of_the_next_slot,
        lambda: check_distribution(tiny("z-lab"), "cold top-k"),
    ),
    defect(
        "q of an unreached slot, slots in order", Distribution.along, q_of_the_next_slot,
        lambda: check_distribution(tiny("gated"), "cold top-k"),
    ),
]  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_defect_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(mutant, monkeypatch)
