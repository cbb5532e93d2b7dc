"""The n-gram index against a search by brute force."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from foredraft.decode.constraint import masks_along
from foredraft.decode.distribution import Distribution
from foredraft.decode.drafting import DraftTools, _guess, propose
from foredraft.decode.noise import Noise
from foredraft.decode.params import SamplingParams
from foredraft.decode.policy import Fixed
from foredraft.decode.round_draft import Draft, RoundInputs
from foredraft.decode.sampling import SamplingTable
from foredraft.decode.sequence import Sequence
from foredraft.drafters.lookup import CONFIDENCE, Lookup
from foredraft.drafters.recent_texts import TextIndex
from tests.support.mutation import Mutant, assert_caught, defect
from tests.support.parts import NoRepeat

Function = Callable[..., Any]
tokens = st.lists(st.integers(0, 2), max_size=25)


def search(text: list[int], longest: int, most: int) -> list[int]:
    """Return what followed the latest occurrence of the longest suffix, of `longest` tokens at most, by its definition."""
    for n in range(min(longest, len(text)), 0, -1):
        suffix = text[-n:]
        for start in range(len(text) - n - 1, -1, -1):
            if text[start : start + n] == suffix:
                return text[start + n : start + n + most]
    return []


def continuation(index: TextIndex, text: list[int], most: int) -> list[int]:
    found = index.search(text[-9:], most, occurrences=1).continuations
    return found[0] if found else []


@given(tokens, st.integers(1, 4), st.integers(0, 6))
def test_the_index_agrees_with_a_search(text: list[int], longest: int, most: int) -> None:
    index = TextIndex(range(1, longest + 1))
    for end, token in enumerate(text, 1):
        index.extend([token])
        assert continuation(index, text[:end], most) == search(text[:end], longest, most)


@given(tokens, st.integers(1, 4), st.data())
def test_a_rewound_index_agrees_with_a_search(text: list[int], longest: int, data: st.DataObject) -> None:
    index = TextIndex(range(1, longest + 1))
    index.extend(text)
    for _ in range(3):
        end, more = data.draw(st.integers(0, len(text))), data.draw(tokens)
        index.rewind(end)
        index.extend(more)
        text = [*text[:end], *more]
        assert continuation(index, text, 5) == search(text, longest, 5)


def matching(text: list[int], place: int) -> int:
    return next((n for n in range(place) if text[place - 1 - n] != text[len(text) - 1 - n]), place)


@given(tokens, st.integers(0, 12))
def test_peek_tells_the_length_and_the_confidence(text: list[int], most: int) -> None:
    """The confidence counts all matching tokens, also more than the n-grams of the index have."""
    lookup, sequence = Lookup(3), Sequence(0, text, SamplingParams(), 0)
    lookup.join(sequence)
    length, confidence = lookup.peek(sequence, most)
    assert lookup.propose([(sequence, most)]) == [search(text, 3, most)]
    assert length == len(search(text, 3, most))
    if length:
        rest = len(search(text, 3, len(text)))
        n = matching(text, len(text) - rest)
        assert confidence == max(chance for known, chance in CONFIDENCE.items() if known <= n)


class Without(NoRepeat):
    def __init__(self, barred: int) -> None:
        super().__init__(10)
        self.barred = barred

    def mask(self) -> torch.Tensor:
        return torch.arange(10) != self.barred


def test_each_row_gets_its_own_guess() -> None:
    """Rows with budget 0 lie in between, one row has no match, and a constraint cuts another."""
    texts = [[1, 2, 1], [7, 8, 7], [3, 4, 5, 3], [6], [2, 5, 6, 2]]
    budgets = [2, 0, 1, 3, 3]
    rows: Any = [Sequence(i, text, SamplingParams(), 0, drafters=("lookup",)) for i, text in enumerate(texts)]
    rows[4].constraint = Without(6)
    lookup, cpu = Lookup(2), torch.device("cpu")
    for row in rows:
        lookup.join(row)
    table = SamplingTable.of([row.params for row in rows], cpu)
    names = ["lookup" if budget else None for budget in budgets]
    inputs = RoundInputs(rows, [False] * 5, budgets, names, table, 10, cpu)
    draft = propose({"lookup": lookup}, inputs, DraftTools(Fixed(3), Noise()))
    assert draft.lengths.tolist() == [2, 0, 1, 0, 1]
    assert draft.tokens.tolist() == [[2, 1], [0, 0], [4, 0], [0, 0], [5, 0]]


def moved_to_the_first_rows(guess: Function) -> Function:
    def mutated(drafter: Lookup, rows: list[bool], inputs: RoundInputs) -> Draft:
        draft: Draft = guess(drafter, rows, inputs)
        order = sorted(range(len(rows)), key=lambda row: not rows[row])
        tokens = draft.tokens[order]
        return replace(draft, tokens=tokens, lengths=draft.lengths[order], q=Distribution(ids=tokens))

    return mutated


def all_allowed(sound: Function) -> Function:
    return lambda constraint, tokens, *rest: sound(constraint, tokens, *rest)._replace(legal=len(tokens))


check = test_each_row_gets_its_own_guess
PROPOSE = Lookup.propose
MUTANTS = [
    defect("another row's request", PROPOSE, lambda made: lambda own, rows: made(own, rows[::-1]), check),
    defect("another row's guess", PROPOSE, lambda propose: lambda *args: propose(*args)[::-1], check),
    defect("into another row", _guess, moved_to_the_first_rows, check),
    defect("past the constraint", masks_along, all_allowed, check),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_defects_are_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(mutant, monkeypatch)
