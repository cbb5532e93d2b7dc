"""Drafts by recent texts: their lengths, whose texts they copy, their index, the bound of memory, and their file."""

from __future__ import annotations

import stat
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

import foredraft
from foredraft.decode.sequence import Finish
from foredraft.drafters.assets import DEFAULT_MIB
from foredraft.drafters.lookup import LONGEST_MATCH, OCCURRENCES, Matches, TextIndex
from foredraft.drafters.recent_texts import (
    CONTEXT,
    LONGEST_DRAFT,
    RecentText,
    RecentTexts,
    Suffix,
    TextsFile,
    agreed,
)
from foredraft.errors import ConfigError, RequestError
from tests.support import checkpoints
from tests.support.harness import request
from tests.support.mutation import Mutant, assert_caught, defect

Function = Callable[..., Any]
MIB = 1 << 20
SIZE = 1000  # ids of the vocabulary


def drafter(most_bytes: int = MIB) -> Suffix:
    return Suffix(RecentTexts(most_bytes), TextsFile(None, None, SIZE))


def written(
    suffix: Suffix, prompt: list[int], output: list[int], scope: bytes = b"", finish: Any = Finish.EOS
) -> None:
    sequence = request(prompt, "suffix")
    sequence.text_scope = scope
    suffix.join(sequence)
    sequence.tokens += output
    suffix.rewind(sequence)
    sequence.finish = finish
    suffix.leave(sequence)


def draft(suffix: Suffix, tokens: list[int], scope: bytes = b"", most: int = 99) -> list[int]:
    sequence = request(tokens, "suffix")
    sequence.text_scope = scope
    suffix.join(sequence)
    [made] = suffix.propose([(sequence, most)])
    assert suffix.peek(sequence, most).length == len(made)
    suffix.leave(sequence)
    return made


def test_a_draft_copies_what_an_earlier_request_wrote() -> None:
    suffix = drafter()
    prompt, output = [*range(100, 150)], [*range(10, 90)]
    written(suffix, prompt, output)
    assert draft(suffix, output[:8]) == output[8 : 8 + LONGEST_DRAFT]
    assert draft(suffix, [5, *prompt[-3:]]) == output[:12]  # the end of the prompt leads to the output
    assert draft(suffix, prompt[: -CONTEXT - 1]) == []  # but the rest of the prompt is not kept
    assert draft(suffix, output[:8], most=3) == output[8:11]


def test_a_request_copies_from_its_own_text_first() -> None:
    suffix = drafter()
    written(suffix, [1], [2, 3, 4, 5, 6, 7])
    assert draft(suffix, [2, 3, 4, 9, 9, 2, 3, 4]) == [9, 9, 2, 3, 4]  # of equally many counts
    assert draft(suffix, [3, 4, 9, 9, 2, 3, 4])[:1] == [5]  # by a longer match
    assert draft(suffix, [8, 9, 8]) == [9, 8]


@pytest.mark.parametrize(("length", "most"), [(1, 4), (2, 8), (3, 12), (6, 24), (20, LONGEST_DRAFT)])
def test_a_draft_is_as_long_as_its_match_allows(length: int, most: int) -> None:
    text = [*range(100)]
    assert draft(drafter(), [*text, 500, *text[40 : 40 + length]]) == text[40 + length : 40 + length + most]


def test_a_draft_ends_where_its_counts_say() -> None:
    assert agreed([[1, 2, 3], [1, 2, 4], [1, 5, 6]], 9) == ([1, 2, 3], 1.0)
    assert agreed([[1, 2], [2, 3], [3, 4], [4, 5], [5, 6]], 9) == ([], 1.0)
    assert agreed([[1, 2, 3], [1, 2, 4], [1, 3, 5], [1, 4, 6], [1, 5, 7]], 9) == ([1, 2], 1.0)
    assert agreed([[7, 1], [8, 2], [8, 3]], 9) == ([8, 2], 2 / 3)
    assert agreed([[7, 1], [8, 2]], 9) == ([7, 1], 0.5)  # of equally many, the latest decides
    assert agreed([[7], [7, 8, 9]], 2) == ([7, 8], 1.0)  # a text that ends counts no further


def test_confidence_follows_the_match_and_the_counts() -> None:
    suffix, text = drafter(), [*range(60)]
    for known in (text, [*text[:20], 70, 71], [*text[:20], 80, 81]):
        written(suffix, [99], known)

    def confidence(tokens: list[int]) -> float | None:
        sequence = request(tokens, "suffix")
        suffix.join(sequence)
        return suffix.peek(sequence, 8).confidence

    assert [confidence([500, *text[30 : 30 + n]]) for n in (3, 5, 12)] == [0.6, 0.85, 0.95]
    assert confidence(text[:20]) == 0.2  # one of three texts goes on so
    assert confidence([500]) == 0.2 and draft(suffix, [500]) == []


@pytest.mark.parametrize(
    ("finish", "memory"), [(None, MIB), (Finish.CANCELLED, MIB), (Finish.ERROR, MIB), (Finish.EOS, 0)]
)
def test_texts_that_did_not_end_or_do_not_fit_are_not_kept(finish: Finish | None, memory: int) -> None:
    suffix = drafter(memory)
    written(suffix, [1], [*range(10, 30)], finish=finish)
    assert len(suffix.texts) == suffix.texts.bytes == 0 and draft(suffix, [10, 11, 12, 13]) == []


def test_texts_of_two_scopes_never_meet() -> None:
    suffix = drafter()
    one, other = [*range(100, 140)], [*range(100, 110), *range(200, 230)]
    written(suffix, [1], one, b"one")
    written(suffix, [1], other, b"other")
    assert draft(suffix, one[:10], b"one") == one[10 : 10 + LONGEST_DRAFT]
    assert draft(suffix, one[:10], b"other") == other[10 : 10 + LONGEST_DRAFT]
    assert draft(suffix, one[:10]) == []
    assert draft(suffix, one[12:20], b"other") == []


def test_the_oldest_texts_go_first_whoever_wrote_them() -> None:
    recent = RecentTexts(64 << 10)
    for number in range(400):
        recent.add(b"%d" % (number % 3), [number % SIZE, *range(10)])
        assert recent.bytes <= recent.most_bytes
    kept = recent.all()
    assert 3 < len(kept) == len(recent) < 400
    assert [text.tokens[0] for text in kept] == [*range(400 - len(kept), 400)]
    assert [text.scope for text in kept] == [b"%d" % (text.tokens[0] % 3) for text in kept]
    gone = kept[0].tokens[0] - 1
    assert recent.search(b"%d" % (gone % 3), [gone, 0, 1], 9).length < 3


def test_of_a_text_that_never_fits_the_end_is_kept() -> None:
    recent = RecentTexts(64 << 10)
    recent.add(b"", [*range(5000)])
    [kept] = recent.all()
    assert 50 < len(kept.tokens) < 200 and kept.tokens[-1] == 4999 and recent.bytes <= recent.most_bytes


@pytest.mark.parametrize(("tokens", "scopes"), [(400, 1), (4, 1), (4, 10**6), (40, 7)])
def test_memory_is_no_more_than_is_counted(tokens: int, scopes: int) -> None:
    """All runs differ, which takes the most memory; twice as many texts come as there is room for."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        recent, number, dropped = RecentTexts(2 * MIB), 0, False
        while not dropped:
            held = len(recent)
            for _ in range(max(8, 2 * held)):
                recent.add(b"%d" % (number % scopes), [*range(number * tokens, (number + 1) * tokens)])
                number += 1
            dropped = len(recent) < number
            assert tracemalloc.get_traced_memory()[0] - before < 1.02 * recent.most_bytes
    finally:
        tracemalloc.stop()


def test_saved_texts_are_drafted_by_a_later_process(tmp_path: Path) -> None:
    file, suffix = TextsFile(tmp_path / "texts", "digest", SIZE), drafter()
    written(suffix, [1], [*range(10, 40)], b"\x01key")
    written(suffix, [1], [*range(50, 60)])
    assert suffix.save(tmp_path / "texts") == 2
    file.write(suffix.texts.all())
    assert stat.S_IMODE((tmp_path / "texts").stat().st_mode) == 0o600
    later = drafter()
    for text in file.read():
        later.texts.add(*text)
    assert later.texts.all() == suffix.texts.all()
    assert draft(later, [10, 11, 12, 13], b"\x01key") == [*range(14, 30)]
    assert draft(later, [10, 11, 12, 13]) == []


def test_there_may_be_no_file_yet(tmp_path: Path) -> None:
    file, nowhere = TextsFile(tmp_path / "texts", None, SIZE), TextsFile(None, None, SIZE)
    assert file.read() == nowhere.read() == []
    file.write([])
    assert file.read() == []
    with pytest.raises(ConfigError, match="in a folder that exists"):
        TextsFile(tmp_path / "missing/texts", None, SIZE).read()
    with pytest.raises(ConfigError, match="have no file"):
        nowhere.write([])


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda whole: whole[:-3], "which is damaged; remove it, or give another one"),
        (lambda whole: whole[:-1] + bytes([whole[-1] ^ 1]), "which is damaged"),
        (lambda whole: whole.replace(b'"6b6579"', b'"6b657a"'), "which is damaged"),  # the text's scope
        (lambda whole: whole[:40], "which is damaged"),
        (lambda whole: b"", "which is no file of texts"),
        (lambda whole: b"{}\n", "which is no file of texts"),
    ],
)
def test_a_damaged_file_is_one_line(spoil: Callable[[bytes], bytes], says: str, tmp_path: Path) -> None:
    file = TextsFile(tmp_path / "texts", None, SIZE)
    file.write([RecentText(b"key", [1, 2, 3, 4])])
    whole = (tmp_path / "texts").read_bytes()
    assert spoil(whole) != whole
    (tmp_path / "texts").write_bytes(spoil(whole))
    with pytest.raises(ConfigError, match=says) as refused:
        file.read()
    assert str(tmp_path / "texts") in str(refused.value) and "\n" not in str(refused.value)


def test_texts_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    TextsFile(tmp_path / "texts", "one", SIZE).write([RecentText(b"", [1, 2, 3, 4])])
    for other in (TextsFile(tmp_path / "texts", "two", SIZE), TextsFile(tmp_path / "texts", "one", SIZE + 1)):
        with pytest.raises(ConfigError, match="whose texts are of another tokenizer"):
            other.read()


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.save_pair(tmp_path_factory.mktemp("models")) / "big"


def load(big: Path, **options: Any) -> foredraft.LLM:
    common = {"device": "cpu", "max_batch": 2, "max_length": 128, "policy": "fixed"}
    return foredraft.load(big, **common | options)


def test_it_drafts_only_where_it_is_asked_for(big: Path, tmp_path: Path) -> None:
    with load(big) as llm:
        assert "suffix" not in llm.loaded.engine.drafters
        with pytest.raises(RequestError, match="which is not loaded"):
            llm.generate("a", drafter="suffix")
        with pytest.raises(RequestError, match="suffix is not loaded; load with recent_texts"):
            llm.save_texts(tmp_path / "texts")
        with pytest.raises(ConfigError, match="recent_texts"):
            load(big, recent_texts="many")
    for options, mib, longest in (
        ({"drafter": "suffix"}, 0, LONGEST_DRAFT),
        ({"recent_texts": 3}, 3, 5),  # the default drafter is another one
        ({"recent_texts": 1, "policy": "auto"}, 1, LONGEST_DRAFT),
        ({"texts_file": tmp_path / "texts"}, DEFAULT_MIB, 5),
        ({"texts_file": str(tmp_path / "texts"), "recent_texts": 0}, 0, 5),
    ):
        with load(big, **options) as llm:
            found, policy = llm.loaded.engine.drafters["suffix"], llm.loaded.engine.policy
            assert isinstance(found, Suffix) and found.texts.most_bytes == mib << 20
            assert policy.max_draft == longest, "longer where it drafts"


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
    found, want = index.search(tail, MOST), expected(several, tail)
    assert found == want
    fresh = made(several)
    assert [len(table.latest) for table in index._tables] == [len(table.latest) for table in fresh._tables]


@given(texts, tokens)
def test_a_search_finds_the_longest_match(several: list[list[int]], tail: list[int]) -> None:
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
        tables = [[(each.latest, each.earlier) for each in own._tables] for own in (index, fresh)]
        assert tables[0] == tables[1]


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


def test_the_latest_occurrences_are_looked_at_and_long_matches_are_equally_long() -> None:
    index = made([[1, each] for each in range(2, 60)])
    assert [first for [first] in index.search([1], 1).continuations] == [*range(59, 59 - OCCURRENCES, -1)]
    long = [*range(100)]
    assert made([long]).search(long[20:50][-LONGEST_MATCH:], 1) == Matches(30, [[50]])


def check_index() -> None:
    """Neither a match nor a continuation reaches from one text into the next, a dropped one, or what was taken back."""
    index = made([[9, 4], [4, 5, 1], [2, 6, 7, 8]])
    assert index.search([5, 1], MOST) == Matches(0, [])
    assert index.search([1, 2], MOST) == Matches(1, [[6, 7, 8]])
    index.drop_oldest(2)
    assert index.search([9], MOST) == Matches(0, [])
    index.rewind(index.end - 1)
    index.extend([3])
    assert index.search([6, 7], MOST) == Matches(2, [[3]])


def nothing(_: Function) -> Function:
    return lambda *given: None


def without_counts(_: Function) -> Function:
    return lambda continuations, most: (max(continuations, key=len, default=[])[:most], 1.0)


def scope_ignored(sound: Function) -> Function:
    return lambda recent, scope, *rest: sound(recent, b"", *rest)


SCOPES = ((RecentTexts.add, scope_ignored), (RecentTexts.search, scope_ignored))
DEFECTS = [
    defect("drafts longer than counts allow", agreed, without_counts, test_a_draft_ends_where_its_counts_say),
    Mutant("another key's text is drafted", SCOPES, test_texts_of_two_scopes_never_meet),
    defect("a match crosses two texts", TextIndex.begin_text, nothing, check_index),
    defect("a dropped text is still matched", TextIndex.drop_oldest, nothing, check_index),
    defect("tokens are not taken back", TextIndex.rewind, nothing, check_index),
]


@pytest.mark.parametrize("mutant", DEFECTS, ids=lambda mutant: mutant.name)
def test_the_defect_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.check()
    assert_caught(mutant, monkeypatch)
