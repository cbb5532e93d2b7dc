"""The index of texts against a search by brute force: while texts grow, shrink, begin and are dropped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from foredraft.drafters.text_index import LONGEST_MATCH, OCCURRENCES, Matches, TextIndex
from tests.support.planting import Mutant, assert_caught, defect

Function = Callable[..., Any]
RUNS, MOST = (3, 1), 4
tokens = st.lists(st.integers(0, 2), max_size=4)
texts = st.lists(tokens, min_size=1, max_size=2)  # so few that a search looks at every occurrence


def made(several: list[list[int]]) -> TextIndex:
    index = TextIndex(RUNS)
    for text in several:
        index.begin_text()
        index.extend(text)
    return index


def expected(several: list[list[int]], tail: list[int]) -> Matches:
    """Return what followed the longest suffix of `tail` in the texts, by its definition."""
    for length in range(len(tail), 0, -1):
        suffix = tail[-length:]
        found = [
            text[start + length : start + length + MOST]
            for text in several
            for start in range(len(text) - length)
            if text[start : start + length] == suffix
        ]
        if found:
            return Matches(length, found[::-1][:OCCURRENCES])
    return Matches(0, [])


def same(index: TextIndex, several: list[list[int]], tail: list[int]) -> None:
    """Check that the index finds what there is, and holds no run of anything else."""
    found, want = index.search(tail, MOST), expected(several, tail)
    assert found == want
    fresh = made(several)
    assert [len(table.latest) for table in index._tables] == [len(table.latest) for table in fresh._tables]


@given(texts, tokens)
def test_a_search_finds_the_longest_match_and_all_that_followed_it(
    several: list[list[int]], tail: list[int]
) -> None:
    same(made(several), several, tail)


@given(texts, tokens, st.data())
def test_a_text_that_shrank_and_grew_is_as_a_fresh_one(
    several: list[list[int]], tail: list[int], data: st.DataObject
) -> None:
    index = made(several)
    for _ in range(3):
        *before, last = several
        kept = data.draw(st.integers(0, len(last)))
        index.rewind(index.end - len(last) + kept)
        more = data.draw(st.lists(st.integers(0, 2), max_size=4 - kept))
        for token in more:
            index.extend([token])
        several = [*before, [*last[:kept], *more]]
        same(index, several, tail)
        fresh = made(several)
        assert [t.latest for t in index._tables] == [t.latest for t in fresh._tables]
        assert [t.earlier for t in index._tables] == [t.earlier for t in fresh._tables]


@given(st.lists(tokens, min_size=1, max_size=12), tokens)
def test_dropped_texts_are_as_if_they_had_never_been(several: list[list[int]], tail: list[int]) -> None:
    index, held = TextIndex(RUNS), list[list[int]]()
    for text in several:
        index.begin_text()
        index.extend(text)
        held.append(text)
        while len(held) > 2:
            index.drop_oldest(len(held.pop(0)))
        same(index, held, tail)
        assert index.oldest([len(each) for each in held]) == held
        assert len(index._tokens) <= 2 * sum(len(each) + 1 for each in held) + 1


def test_a_text_without_a_boundary_is_an_index_too() -> None:
    index = TextIndex(RUNS)
    index.extend([7, 8, 9, 7, 8])
    assert index.search([7, 8], 9) == Matches(2, [[9, 7, 8]])
    assert index.search([5], 9) == index.search([], 9) == Matches(0, [])


def test_the_latest_occurrences_are_looked_at_and_long_matches_are_equally_long() -> None:
    index = made([[1, each] for each in range(2, 60)])
    assert [first for [first] in index.search([1], 1).continuations] == [*range(59, 59 - OCCURRENCES, -1)]
    long = [*range(100)]
    assert made([long]).search(long[20:50][-LONGEST_MATCH:], 1) == Matches(30, [[50]])


# --- defects ----------------------------------------------------------------------------------------


def check_texts_are_apart() -> None:
    """Neither a match nor a continuation reaches from one text into the next."""
    index = made([[4, 5, 1], [2, 6, 7, 8]])
    assert index.search([5, 1], MOST) == Matches(0, [])
    assert index.search([4], MOST) == Matches(1, [[5, 1]])
    assert index.search([1, 2], MOST) == Matches(1, [[6, 7, 8]])


def check_dropped_texts_are_gone() -> None:
    index = made([[4, 5, 1], [2, 6, 7, 8]])
    index.drop_oldest(3)
    assert index.search([4, 5], MOST) == Matches(0, [])
    assert index.search([2, 6], MOST) == Matches(2, [[7, 8]])


def check_rewound() -> None:
    index = made([[4, 5, 1]])
    index.rewind(index.end - 1)
    index.extend([6])
    assert index.search([4, 5], MOST) == Matches(2, [[6]])


def nothing(_: Function) -> Function:
    return lambda *given: None


DEFECTS = [
    defect("a match crosses two texts", TextIndex.begin_text, nothing, check_texts_are_apart),
    defect("a dropped text is still matched", TextIndex.drop_oldest, nothing, check_dropped_texts_are_gone),
    defect("tokens are not taken back", TextIndex.rewind, nothing, check_rewound),
]


@pytest.mark.parametrize("mutant", DEFECTS, ids=lambda mutant: mutant.name)
def test_the_defect_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.check()
    assert_caught(mutant, monkeypatch)
