"""The n-gram index against a search by brute force."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from foredraft.decode.constraint import Constraint, masks_along
from foredraft.decode.distribution import Distribution
from foredraft.decode.drafting import DraftTools, _guess, propose
from foredraft.decode.noise import Noise
from foredraft.decode.params import SamplingParams
from foredraft.decode.policy import Fixed
from foredraft.decode.round_draft import Draft, RoundInputs
from foredraft.decode.sampling import SamplingTable
from foredraft.decode.sequence import Sequence
from foredraft.drafters.lookup import CONFIDENCE, Lookup, NGramIndex
from tests.support.planting import Mutant, assert_caught, defect

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


@given(tokens, st.integers(1, 4), st.integers(0, 6))
def test_the_index_agrees_with_a_search(text: list[int], longest: int, most: int) -> None:
    index = NGramIndex(longest)
    for end, token in enumerate(text, 1):
        index.extend([token])
        assert index.continuation(most) == search(text[:end], longest, most)


@given(tokens, st.integers(1, 4), st.data())
def test_a_rewound_index_equals_a_fresh_one(text: list[int], longest: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, len(text)))
    index = NGramIndex(longest, text[:first])
    index.extend(text[first:])
    for _ in range(3):
        index.match()
        length = data.draw(st.integers(0, len(index.tokens)))
        kept = index.tokens[:length]
        index.rewind(length)
        first = min(first, length)
        fresh = NGramIndex(longest, kept[:first])
        fresh.extend(kept[first:])
        assert index.tokens == fresh.tokens == kept
        one_by_one = NGramIndex(longest)
        one_by_one.extend(kept)
        assert index._after == fresh._after == one_by_one._after
        assert index._undo == fresh._undo
        assert index.match() == fresh.match()
        index.extend(data.draw(tokens))
        assert index.continuation(5) == search(index.tokens, longest, 5)


@pytest.mark.parametrize(
    ("text", "guess"),
    [
        ([1, 2, 3, 9, 1, 2, 3], [9, 1, 2, 3]),
        ([1, 2, 7, 2, 8, 2], [8, 2]),  # the latest of two
        ([5, 1, 2, 6, 1, 2, 7, 5, 1, 2], [6, 1, 2, 7]),  # a longer match wins over a later one
        ([1, 2, 3], []),
        ([4], []),
        ([4, 4], [4]),
    ],
)
def test_the_continuation_of_an_example(text: list[int], guess: list[int]) -> None:
    index = NGramIndex(3)
    index.extend(text)
    assert index.continuation(4) == guess


def matching(text: list[int], place: int) -> int:
    """Return how many tokens before a place equal the text's last ones."""
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


@pytest.mark.parametrize(
    ("text", "n"),
    [
        ([1, 9, 1], 1),
        ([1, 2, 9, 1, 2], 2),
        ([5, 1, 2, 3, 4, 9, 6, 1, 2, 3, 4], 3),
        ([1, 2, 3, 9, 2, 3, 1, 2, 3], 3),
        ([7] * 9, 5),
    ],
)
def test_a_longer_match_is_more_confident(text: list[int], n: int) -> None:
    lookup, sequence = Lookup(3), Sequence(0, text, SamplingParams(), 0)
    lookup.join(sequence)
    assert lookup.peek(sequence, 1) == (1, CONFIDENCE[n])


def test_each_sequence_has_an_index_of_its_own() -> None:
    lookup = Lookup(2)
    one, other = (Sequence(i, text, SamplingParams(), 0) for i, text in enumerate(([1, 2, 1], [3, 4, 3])))
    lookup.join(one)
    lookup.join(other)
    assert lookup.propose([(one, 1), (other, 1)]) == [[2], [4]]
    one.tokens += [2, 5, 1, 2]
    lookup.rewind(one)
    assert lookup.propose([(one, 2)]) == [[5, 1]]
    del one.tokens[4:]  # a ban took them back
    lookup.rewind(one)
    assert lookup.propose([(one, 3)]) == [[1, 2]]
    lookup.leave(one)
    assert lookup.propose([(other, 3)]) == [[4, 3]]
    lookup.leave(one)  # a second call is harmless


class Without(Constraint):
    """A constraint that never allows one token, out of ten."""

    def __init__(self, barred: int) -> None:
        self.allowed, self._length = torch.arange(10) != barred, 0

    @property
    def length(self) -> int:
        return self._length

    def mask(self) -> torch.Tensor:
        return self.allowed

    def advance(self, token: int) -> int:
        self._length += 1
        return self._length

    def rewind(self, length: int) -> None:
        self._length = length


def test_each_row_gets_its_own_guess() -> None:
    """Rows with budget 0 lie in between, one row has no match, and a constraint cuts another."""
    texts = [[1, 2, 1], [7, 8, 7], [3, 4, 5, 3], [6], [2, 5, 6, 2]]
    budgets = [2, 0, 1, 3, 3]
    rows: list[Any] = [
        Sequence(i, text, SamplingParams(), 0, drafters=("lookup",)) for i, text in enumerate(texts)
    ]
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
    def spoilt(drafter: Lookup, rows: list[bool], inputs: RoundInputs) -> Draft:
        draft: Draft = guess(drafter, rows, inputs)
        order = sorted(range(len(rows)), key=lambda row: not rows[row])
        tokens = draft.tokens[order]
        return replace(draft, tokens=tokens, lengths=draft.lengths[order], q=Distribution(ids=tokens))

    return spoilt


def all_allowed(sound: Function) -> Function:
    return lambda constraint, tokens, *rest: sound(constraint, tokens, *rest)._replace(legal=len(tokens))


check = test_each_row_gets_its_own_guess
MUTANTS = [
    defect(
        "another row's request",
        Lookup.propose,
        lambda propose: lambda lookup, requests: propose(lookup, requests[::-1]),
        check,
    ),
    defect(
        "another row's guess",
        Lookup.propose,
        lambda propose: lambda *args: propose(*args)[::-1],
        check,
    ),
    defect("into another row", _guess, moved_to_the_first_rows, check),
    defect("past the constraint", masks_along, all_allowed, check),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_defects_are_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(mutant, monkeypatch)
