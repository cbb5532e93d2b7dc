"""Planted defects of published heads: each must fail a comparison with the definition, or an enumeration."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from foredraft.decode.distribution import Distribution
from foredraft.drafters.block_drafter import BlockDrafter, BlockHead, Chain
from foredraft.drafters.draft_model import VocabularyMap
from foredraft.drafters.eagle3 import Eagle3, Eagle3Head, load_eagle3
from foredraft.drafters.heads.gguf_files import row_order  # imported before any defect is planted
from foredraft.drafters.heads.record import BlockRecord, HeadRecord, draft_ids
from foredraft.drafters.heads.transitions import Convolution, Markov, Selector
from foredraft.drafters.medusa import MedusaHeads, load_medusa
from foredraft.drafters.p_eagle import PEagleHead
from foredraft.drafters.states import kept
from foredraft.errors import CheckpointError
from tests.exactness.matrix import check_distribution, tiny
from tests.parity.test_heads import check_parity
from tests.support.heads import DRAFT_VOCAB
from tests.support.mutation import Mutant, Mutation, assert_caught, caught_by
from tests.support.mutations import Function, argument, around, instead


def in_record(**changes: Callable[[Any], Any]) -> Mutation:
    """Mutate a method of a head, which works by a record with other fields."""
    return lambda sound: (
        lambda head, *given: sound(replace(head, record=changed(head.record, changes)), *given)
    )


def of_record(**changes: Callable[[Any], Any]) -> Mutation:
    """Mutate a function that returns a record, which gets other fields."""
    return lambda sound: lambda *given: changed(sound(*given), changes)


def changed(record: Any, changes: dict[str, Callable[[Any], Any]]) -> Any:
    return replace(record, **{name: change(record) for name, change in changes.items()})


def layers_shifted(layers: int) -> Mutation:
    return of_record(aux_layers=lambda record: tuple(layer + layers for layer in record.aux_layers))


OTHER_RESIDUAL = in_record(norm_before_residual=lambda record: not record.norm_before_residual)
OTHER_RECURRENCE = in_record(norm_output=lambda record: not record.norm_output)

offsets_as_ids = around(lambda read, *given, **named: read(*given, **{**named, "absolute": True}))
token_of_the_state_itself = argument(2, lambda tokens: tokens.roll(1, 1))


@around
def drafted_pairs_kept(rewind: Function, drafter: Eagle3, sequence: Any) -> None:
    """The head's cache keeps what drafted tokens wrote, instead of reading them with the target's states."""
    rewind(drafter, sequence)
    drafter.cache.lengths[sequence.row] = len(sequence.tokens) - 1


@instead
def not_scattered(vocabulary: VocabularyMap, logits: Any) -> Any:
    return F.pad(logits, (0, len(vocabulary.draft_ids) - logits.shape[1]), value=-torch.inf)


@around
def empty_slot_attended(context: Function, head: Eagle3Head, *given: Any) -> Any:
    found = context(head, *given)
    for mask in found.masks.values():
        mask[..., 0] = 0.0
    return found


layers_swapped = around(
    lambda joined, head, states: joined(
        head, torch.cat([*reversed(states.chunk(len(head.record.aux_layers or ()), -1))], -1)
    )
)


@around
def halves_swapped(load: Function, *given: Any) -> Eagle3Head:
    """Join the state and the embedding in the other order."""
    found: Any = load(*given)
    return replace(found, fc=lambda x: found.fc(torch.cat([*reversed(x.chunk(2, -1))], -1)))


# put the target's final norm before its head, as for the target's own states
head_normed = around(lambda logits, head, left: logits(head, head.target.norm(left)))
head_of_the_slot_before = around(
    lambda load, *given: (lambda found: replace(found, heads=(found.heads[-1], *found.heads[:-1])))(
        load(*given)
    )
)
state_before_the_last = argument(2, lambda positions: (positions - 1).clamp(min=0))
ids_as_offsets = around(lambda read, *given, **named: read(*given))
another_mask = around(
    lambda masked, *given: (lambda found: replace(found, token=found.token - 1))(masked(*given))
)
a_state_of_zeros = around(
    lambda masked, *given: (lambda found: replace(found, state=found.state * 0))(masked(*given))
)
slots_in_another_order = around(
    lambda step, *given: (lambda left, drafts: (left.flip(1), drafts))(*step(*given))
)

safeailab, qwen3, residual, eagle_1, p_eagle = (
    functools.partial(check_parity, format, "operators")
    for format in ("safeailab", "qwen3", "residual", "eagle-1", "p-eagle specforge")
)
gguf, fasterdecoding = (
    functools.partial(check_parity, "gguf"),
    functools.partial(check_parity, "fasterdecoding"),
)
# the offsets 0 to 5 of the ids 0, 2, 4, ... are ids themselves, too; and these ids as offsets are other ids
distinct_offsets = functools.partial(check_parity, "specforge", tensors={"d2t": torch.arange(DRAFT_VOCAB)})
gguf_offsets = functools.partial(
    check_parity, "gguf", tensors={"d2t": torch.zeros(DRAFT_VOCAB, dtype=torch.int64)}
)
token_map = functools.partial(check_parity, "vllm", tensors={"token_map": torch.arange(DRAFT_VOCAB)})
OF_HEADS = {
    safeailab: [
        ("one layer late", HeadRecord.for_target, layers_shifted(1)),
        ("the embedding of the state's own token", Eagle3Head.run, token_of_the_state_itself),
        ("the residual normed", Eagle3Head.residual, OTHER_RESIDUAL),
        ("the normed state recurs", Eagle3Head.recurring, OTHER_RECURRENCE),
        ("the cache not rewound", Eagle3.rewind, drafted_pairs_kept),
        ("q of the draft vocabulary not scattered", VocabularyMap.columns, not_scattered),
        ("the empty slot attended", Eagle3Head._context, empty_slot_attended),
    ],
    qwen3: [
        ("layers in the wrong order", Eagle3Head.joined, layers_swapped),
        ("the raw state recurs", Eagle3Head.recurring, OTHER_RECURRENCE),
    ],
    distinct_offsets: [("d2t read as ids", draft_ids, offsets_as_ids)],
    residual: [("the residual not normed", Eagle3Head.residual, OTHER_RESIDUAL)],
    gguf: [("GGUF: the rows of q and k as they lie", row_order, lambda order: lambda *given: None)],
    gguf_offsets: [("GGUF: d2t read as offsets", draft_ids, ids_as_offsets)],
    eagle_1: [
        (
            "EAGLE: the state before the final norm",
            HeadRecord.for_target,
            of_record(final_norm=lambda _: False),
        ),
        ("EAGLE: one layer early", HeadRecord.for_target, layers_shifted(-1)),
        ("EAGLE: state before embedding", load_eagle3, halves_swapped),
        ("EAGLE: the final norm before the head", Eagle3Head.logits, head_normed),
        ("EAGLE: the embedding of the state's token", Eagle3Head.run, token_of_the_state_itself),
    ],
    p_eagle: [
        ("P-EAGLE: another token in masked slots", PEagleHead.masked, another_mask),
        ("P-EAGLE: a state of zeros in masked slots", PEagleHead.masked, a_state_of_zeros),
        ("P-EAGLE: the slots in another order", Eagle3.first_step, slots_in_another_order),
    ],
    fasterdecoding: [
        (
            "Medusa: the state before the final norm",
            MedusaHeads.entering,
            lambda entering: lambda head, states: states,
        ),
        ("Medusa: the head of another slot", load_medusa, head_of_the_slot_before),
        ("Medusa: the state one position early", kept, state_before_the_last),
    ],
    token_map: [("Medusa: token_map read as offsets", draft_ids, ids_as_offsets)],
}

# --- block drafters --------------------------------------------------------------------------------------

the_other_first_slot = around(lambda first, record: 1 - first(record))


@around
def the_slot_before(after: Function, chain: Chain, before: Any) -> Any:
    """Give the first slot again, and so each one late."""
    late = chain.taken > 0
    chain.taken -= late
    found = after(chain, before)
    chain.taken += late
    return found


@around
def contexts_of_accepted_tokens_left_out(
    observe: Function, drafter: Any, sequence: Any, start: int, states: Any
) -> None:
    """Keep what the block wrote at the positions of accepted tokens, in place of the target's states."""
    prompt = start + len(next(iter(states.values()))) < len(sequence.prompt)
    observe(drafter, sequence, start, states if prompt else {layer: own[:1] for layer, own in states.items()})


contexts_a_position_late = argument(3, lambda starts: [start + 1 for start in starts])
# take the states of a draft's tokens for contexts: the block sees one position more than is committed
anchor_in_the_context = argument(1, lambda anchors: anchors + 1)
the_likeliest_token_before = argument(2, torch.zeros_like)
state_forgotten = argument(4, lambda state: None)
every_token_chosen = around(lambda sound, chosen, *given: sound(replace(chosen, candidates=64), *given))
nothing_of_the_slot_before = around(lambda sound, own, x, block: sound(own, x, 1))
output_as_it_is = around(lambda sound, *given: (sound(*given)[0], lambda y: y))
q_of_the_next_slot = argument(1, lambda steps: [*steps[1:], steps[0]])

reduced_gguf, z_lab, scaled, speculators, anchored, gated, rnn, dflash_2, modelopt = (
    functools.partial(check_parity, f"block {name}")
    for name in (
        "gguf reduced",
        "z-lab",
        "scaled",
        "speculators",
        "anchored",
        "gated",
        "rnn",
        "dflash 2",
        "modelopt",
    )
)
OF_BLOCKS = {
    reduced_gguf: [("d2t of a file read as offsets", draft_ids, ids_as_offsets, CheckpointError)],
    z_lab: [
        ("one layer late", BlockRecord.for_target, layers_shifted(1)),
        ("another mask token", BlockHead.run, in_record(mask_token=lambda r: r.mask_token - 1)),
        ("slots shifted by one", BlockRecord.first_slot, the_other_first_slot),
        ("the first slot twice", Chain.next, the_slot_before),
        ("causal slots in full attention", BlockHead.block_masks, in_record(causal=lambda r: True)),
        ("states of accepted tokens left out", BlockDrafter.observe, contexts_of_accepted_tokens_left_out),
        ("contexts a position late", BlockHead.inject, contexts_a_position_late),
    ],
    anchored: [
        ("slots of an anchored block shifted by one", BlockRecord.first_slot, the_other_first_slot),
        ("causal slots in free windows", BlockHead.block_masks, in_record(causal_windows=lambda r: True)),
        ("the anchor among the contexts", BlockHead.block_masks, anchor_in_the_context),
    ],
    scaled: [
        ("free slots in causal attention", BlockHead.block_masks, in_record(causal_windows=lambda r: False)),
        ("windows from the anchor", BlockHead.block_masks, in_record(window_from_anchor=lambda r: True)),
        ("no scale of embeddings", BlockHead.embed, in_record(embedding_scale=lambda r: 1.0)),
        ("no scale of logits", BlockHead.logits, in_record(logit_scale=lambda r: 1.0)),
        ("no soft-cap", BlockHead.logits, in_record(logit_softcap=lambda r: None)),
    ],
    speculators: [
        ("windows from each slot", BlockHead.block_masks, in_record(window_from_anchor=lambda r: False)),
        ("q of the draft vocabulary not scattered", VocabularyMap.columns, not_scattered),
    ],
    gated: [("the bias of another token", Markov.__call__, the_likeliest_token_before)],
    rnn: [
        ("the state of the bias forgotten", Markov.__call__, state_forgotten),
        ("the anchor's slot left out of the state", Markov.after, lambda after: lambda *given: None),
    ],
    dflash_2: [
        ("the choice by another token", Selector.__call__, the_likeliest_token_before),
        ("every token chosen from", Selector.__call__, every_token_chosen),
        ("nothing of the slot before", Convolution.__call__, nothing_of_the_slot_before),
        ("what leaves not convolved", Convolution.__call__, output_as_it_is),
    ],
    modelopt: [("slots of a shifted head not shifted", BlockRecord.first_slot, the_other_first_slot)],
    lambda: check_distribution(tiny("block z-lab"), "cold top-k"): [
        ("q of an unreached slot, independent slots", Distribution.along, q_of_the_next_slot)
    ],
    lambda: check_distribution(tiny("block gated"), "cold top-k"): [
        ("q of an unreached slot, slots in order", Distribution.along, q_of_the_next_slot)
    ],
}


@pytest.mark.parametrize("mutant", caught_by(OF_HEADS, OF_BLOCKS), ids=lambda mutant: mutant.name)
def test_a_defect_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(mutant, monkeypatch)


@pytest.mark.parametrize(
    "check", [distinct_offsets, gguf_offsets, token_map], ids=("d2t", "gguf", "token_map")
)
def test_a_check_passes_without_defect(check: Callable[[], None]) -> None:
    check()
