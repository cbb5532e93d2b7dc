"""Planted defects of published heads: each must fail the comparison of draft logits with the definition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from foredraft.drafters.eagle3 import Eagle3
from foredraft.drafters.heads.eagle3_head import Eagle3Head, load_eagle3
from foredraft.drafters.heads.medusa_heads import MedusaHeads, load_medusa
from foredraft.drafters.heads.record import HeadRecord
from foredraft.drafters.heads.words import draft_words
from foredraft.drafters.kept_states import kept
from foredraft.drafters.vocabulary_map import VocabularyMap
from foredraft.model.gguf.names import row_order
from tests.parity.test_heads import check_parity
from tests.support.heads import WORDS
from tests.support.planting import Mutant, assert_caught, defect

Function = Callable[..., Any]


def taps_one_layer_late(for_target: Function) -> Function:
    def spoilt(record: HeadRecord, *given: Any) -> HeadRecord:
        found = for_target(record, *given)
        return replace(found, taps=tuple(tap + 1 for tap in found.taps))

    return spoilt


def offsets_as_ids(words: Function) -> Function:
    return lambda *given, **named: words(*given, **{**named, "absolute": True})


def token_of_the_state_itself(run: Function) -> Function:
    def spoilt(head: Eagle3Head, cache: Any, tables: Any, tokens: Any, *more: Any, **named: Any) -> Any:
        return run(head, cache, tables, tokens.roll(1, 1), *more, **named)

    return spoilt


def the_other_residual(residual: Function) -> Function:
    def spoilt(head: Eagle3Head, state: Any) -> Any:
        flipped = replace(head.record, norm_before_residual=not head.record.norm_before_residual)
        return residual(replace(head, record=flipped), state)

    return spoilt


def the_other_recurrence(recurring: Function) -> Function:
    def spoilt(head: Eagle3Head, left: Any) -> Any:
        flipped = replace(head.record, norm_output=not head.record.norm_output)
        return recurring(replace(head, record=flipped), left)

    return spoilt


def drafted_pairs_kept(rewind: Function) -> Function:
    """The head's cache keeps what drafted tokens wrote, instead of reading them with the target's states."""

    def spoilt(drafter: Eagle3, sequence: Any) -> None:
        rewind(drafter, sequence)
        drafter.cache.lengths[sequence.row] = len(sequence.tokens) - 1

    return spoilt


def not_scattered(columns: Function) -> Function:
    def spoilt(vocabulary: VocabularyMap, logits: Any) -> Any:
        return F.pad(logits, (0, len(vocabulary.draft_ids) - logits.shape[1]), value=-torch.inf)

    return spoilt


def empty_slot_attended(context: Function) -> Function:
    def spoilt(head: Eagle3Head, *given: Any) -> Any:
        found = context(head, *given)
        for mask in found.masks.values():
            mask[..., 0] = 0.0
        return found

    return spoilt


def taps_swapped(joined: Function) -> Function:
    def spoilt(head: Eagle3Head, taps: Any) -> Any:
        return joined(head, torch.cat([*reversed(taps.chunk(len(head.record.taps or ()), -1))], -1))

    return spoilt


def tap_not_normed(for_target: Function) -> Function:
    def spoilt(record: HeadRecord, *given: Any) -> HeadRecord:
        return replace(for_target(record, *given), final_norm=False)

    return spoilt


def tap_one_layer_early(for_target: Function) -> Function:
    def spoilt(record: HeadRecord, *given: Any) -> HeadRecord:
        found = for_target(record, *given)
        return replace(found, taps=tuple(tap - 1 for tap in found.taps))

    return spoilt


def halves_swapped(load: Function) -> Function:
    """Join the state and the embedding in the other order."""

    def spoilt(*given: Any) -> Eagle3Head:
        found: Any = load(*given)
        return replace(found, fc=lambda x: found.fc(torch.cat([*reversed(x.chunk(2, -1))], -1)))

    return spoilt


def head_normed(logits: Function) -> Function:
    """Put the target's final norm before its head, as for the target's own states."""
    return lambda head, left: logits(head, head.target.norm(left))


def raw_last_state(entering: Function) -> Function:
    return lambda head, states: states


def head_of_the_slot_before(load: Function) -> Function:
    def spoilt(*given: Any) -> MedusaHeads:
        found: MedusaHeads = load(*given)
        return replace(found, heads=(found.heads[-1], *found.heads[:-1]))

    return spoilt


def state_before_the_last(kept: Function) -> Function:
    return lambda cache, rows, positions: kept(cache, rows, (positions - 1).clamp(min=0))


def ids_as_offsets(words: Function) -> Function:
    return lambda *given, **named: words(*given)


def rows_as_stored(order: Function) -> Function:
    return lambda *given: None


def distinct_offsets() -> None:
    """The offsets 0 to 5 of the ids 0, 2, 4, ... are ids themselves, too."""
    check_parity("specforge", tensors={"d2t": torch.arange(WORDS)})


def safeailab() -> None:
    check_parity("safeailab", "operators")


def qwen3() -> None:
    check_parity("qwen3", "operators")


def residual() -> None:
    check_parity("residual", "operators")


def gguf() -> None:
    check_parity("gguf")


def gguf_offsets() -> None:
    """The ids 0 to 5 as offsets would be the ids 0, 2, 4, ..."""
    check_parity("gguf", head_tensors={"d2t": torch.zeros(WORDS, dtype=torch.int64)})


def eagle_1() -> None:
    check_parity("eagle-1", "operators")


def fasterdecoding() -> None:
    check_parity("fasterdecoding")


def token_map() -> None:
    """The ids 0 to 5 as offsets would be the ids 0, 2, 4, ..."""
    check_parity("vllm", tensors={"token_map": torch.arange(WORDS)})


MUTANTS = [
    defect("taps one layer late", HeadRecord.for_target, taps_one_layer_late, safeailab),
    defect("taps in the wrong order", Eagle3Head.joined, taps_swapped, qwen3),
    defect("d2t read as ids", draft_words, offsets_as_ids, distinct_offsets),
    defect("the embedding of the state's own token", Eagle3Head.run, token_of_the_state_itself, safeailab),
    defect("the residual normed", Eagle3Head.residual, the_other_residual, safeailab),
    defect("the residual not normed", Eagle3Head.residual, the_other_residual, residual),
    defect("the normed state recurs", Eagle3Head.recurring, the_other_recurrence, safeailab),
    defect("the raw state recurs", Eagle3Head.recurring, the_other_recurrence, qwen3),
    defect("the cache not rewound", Eagle3.rewind, drafted_pairs_kept, safeailab),
    defect("q of the words not scattered", VocabularyMap.columns, not_scattered, safeailab),
    defect("the empty slot attended", Eagle3Head._context, empty_slot_attended, safeailab),
    defect("GGUF: the rows of q and k as they lie", row_order, rows_as_stored, gguf),
    defect("GGUF: d2t read as offsets", draft_words, ids_as_offsets, gguf_offsets),
    defect("EAGLE: the tap before the final norm", HeadRecord.for_target, tap_not_normed, eagle_1),
    defect("EAGLE: the tap one layer early", HeadRecord.for_target, tap_one_layer_early, eagle_1),
    defect("EAGLE: state before embedding", load_eagle3, halves_swapped, eagle_1),
    defect("EAGLE: the final norm before the head", Eagle3Head.logits, head_normed, eagle_1),
    defect("EAGLE: the embedding of the state's token", Eagle3Head.run, token_of_the_state_itself, eagle_1),
    defect("Medusa: the state before the final norm", MedusaHeads.entering, raw_last_state, fasterdecoding),
    defect("Medusa: the head of another slot", load_medusa, head_of_the_slot_before, fasterdecoding),
    defect("Medusa: the state one position early", kept, state_before_the_last, fasterdecoding),
    defect("Medusa: token_map read as offsets", draft_words, ids_as_offsets, token_map),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_defect_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(mutant, monkeypatch)


@pytest.mark.parametrize(
    "check",
    [distinct_offsets, safeailab, qwen3, residual, gguf, gguf_offsets, eagle_1, fasterdecoding, token_map],
    ids=lambda check: check.__name__,
)
def test_a_check_passes_without_defect(check: Callable[[], None]) -> None:
    check()
