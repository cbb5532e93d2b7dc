"""Banned text against its definition: masks, rollbacks and rewinds over vocabularies that overlap nastily."""

from __future__ import annotations

import gc
import weakref

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from foredraft.constraints.banned import BanList
from foredraft.constraints.combined import Phase, ThinkingPlace, ThinkingTokens
from foredraft.constraints.phrases import (
    LAST,
    PhraseAutomaton,
    PhraseState,
    Symbols,
    is_word,
    word_characters,
)
from foredraft.constraints.token_masks import TokenTable
from tests.support.bans import Ban

DASH = (b"\xe2", b"\x80", b"\x93")  # U+2013, a boundary; E2 B0 80 is a letter, E2 93 B0 a number

PIECES = [
    b"a", b"b", b"ab", b"ba", b"A", b" ", b"a b", b"_", b"!", b"aab", b"\xc3", b"\xa9", b"\x89", "\u00e9".encode(),
    b"b\xe4\xbd", b"\xa0", "\u4f60".encode(), b"\xa0a", b"\xf0\x9f\x99", b"\x82", "\U0001f642a".encode(), b"", b"\xff", b"b!",
    b"\xa9\xc3", b"\xe2\x80", b"\x93", b"\xe2", b"\x80",
    b"aaaaaaab", b"aaaaaaaa", b"aaaaaaa", b"aaaaaa\0", b"aaaaaa", b"b\0",  # equal at the beginning
]  # fmt: skip
LONG = ["aaaaaaaa", "baaaaaaa", "baaaaaaab", "aaaaaa\0", "b\0", "\0"]
LETTERS = "abA \u00e9\u00c9\u4f60\U0001f642\u2013\ufffd_!"

vocabularies = st.lists(st.sampled_from(PIECES), min_size=3, max_size=14, unique=True).map(tuple)
phrase = st.text(LETTERS, min_size=1, max_size=4) | st.sampled_from(LONG)
phrases = st.lists(phrase, min_size=1, max_size=4, unique=True).map(tuple)


@st.composite
def bans(draw: st.DrawFn, mode: str) -> Ban:
    texts = draw(vocabularies)
    ids = st.integers(0, len(texts) - 1)
    return Ban(
        texts,
        draw(phrases),
        mode,
        frozenset(id for id, text in enumerate(texts) if not text and draw(st.booleans())),
        draw(st.integers(1, 8)),
        draw(st.booleans()),
        draw(st.booleans()),
        tuple(draw(st.lists(ids, max_size=3))),
        draw(st.integers(0, 6)),
    )


@settings(max_examples=120, deadline=None)
@given(bans("mask"), st.data())
def test_a_mask_forbids_exactly_the_tokens_that_complete_banned_text(ban: Ban, data: st.DataObject) -> None:
    shipped, defined = ban.shipped(), ban.defined()
    for _ in range(ban.last):
        mask, want = shipped.mask(), defined.mask()
        assert mask is not None and want is not None
        assert mask.tolist() == want.tolist()
        allowed = [id for id, is_allowed in enumerate(want.tolist()) if is_allowed]
        if not allowed:
            # of a text without tokens there is nothing to take back
            assert shipped.length == 0 or shipped.retreat() == defined.retreat()
            return
        token = data.draw(st.sampled_from(allowed))
        shipped.advance(token)
        defined.advance(token)
        if token in ban.ends:
            return


@settings(max_examples=200, deadline=None)
@given(bans("rollback"), st.data())
def test_a_rollback_cuts_before_the_first_byte_of_the_phrase(ban: Ban, data: st.DataObject) -> None:
    shipped, defined = ban.shipped(), ban.defined()
    for _ in range(30):
        mask, want = shipped.mask(), defined.mask()
        assert want is not None
        allowed = want.tolist()
        assert mask is None or mask.tolist() == allowed
        if not any(allowed):
            kept = shipped.retreat()
            assert kept == defined.retreat()
            if kept is None:
                return
        else:
            token = data.draw(st.sampled_from([id for id, is_allowed in enumerate(allowed) if is_allowed]))
            kept = shipped.advance(token)
            assert kept == defined.advance(token)
            if kept == shipped.length:
                if token in ban.ends or kept == ban.last:
                    return
                continue
        shipped.roll_back(kept)
        defined.roll_back(kept)
        assert (shipped.ended_by is None) == (defined.ended_by is None)
        if shipped.ended_by is not None:
            return


@pytest.mark.parametrize("mode", ["mask", "rollback"])
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_rewound_ban_equals_a_fresh_one(mode: str, data: st.DataObject) -> None:
    ban = data.draw(bans(mode))
    tokens = data.draw(st.lists(st.integers(0, len(ban.texts) - 1), min_size=1, max_size=8))
    length = data.draw(st.integers(0, len(tokens)))
    rewound, fresh = ban.shipped(), ban.shipped()
    for token in tokens:
        rewound.advance(token)
    rewound.rewind(length)
    for token in tokens[:length]:
        fresh.advance(token)
    for token in range(len(ban.texts)):
        assert rewound.advance(token) == fresh.advance(token)
        rewound.rewind(length)
        fresh.rewind(length)
    masks = [mask if mask is None else mask.tolist() for mask in (rewound.mask(), fresh.mask())]
    assert masks[0] == masks[1]
    assert rewound.settled() == fresh.settled()


@settings(max_examples=100, deadline=None)
@given(bans("rollback"), st.data())
def test_no_rollback_takes_back_what_was_settled(ban: Ban, data: st.DataObject) -> None:
    shipped = ban.shipped()
    shipped._holds_all = False  # type: ignore[attr-defined]
    settled = 0
    for _ in range(20):
        token = data.draw(st.integers(0, len(ban.texts) - 1))
        kept = shipped.advance(token)
        assert kept >= settled
        if kept < shipped.length:
            shipped.roll_back(kept)
        elif token in ban.ends or kept == ban.last:
            return
        assert shipped.settled() >= settled
        settled = shipped.settled()


ALIKE = (b"aaaaaaab", b"aaaaaaaa", b"aaaaaaa", b"aaaaaa\0", b"aaaaaa")
FOR = {"phrases": ("for",), "whole_words": True}
EXAMPLES = {  # a ban, the tokens so far, and the tokens that may follow
    "all completions are boundaries": (Ban((b"for", b"m", b" ", b"\xe2\x80", b"\x93", b""), **FOR), [0], {0, 1, 5}),
    "the same elsewhere": (Ban((b"for", b"m", b" ", b"\xe2\x80", b"\x93", b""), **FOR), [1], {0, 1, 2, 3, 4, 5}),
    "a letter": (Ban((b"for", b"\xc3", b"\xa9"), **FOR), [0], {0, 1}),
    "a letter that no token completes": (Ban((b"for", b"\xc3"), **FOR), [0], {0}),
    "byte by byte": (Ban((b"for", *DASH), **FOR), [0], {0}),
    "byte by byte, with a letter": (Ban((b"for", *DASH, b"\xb0"), **FOR), [0], {0, 1}),
    "within the letter": (Ban((b"for", *DASH, b"\xb0"), **FOR), [0, 1], {3, 4}),
    "time for the letter": (Ban((b"for", *DASH, b"\xb0"), **FOR, last=4), [0], {0, 1}),
    "no time for the letter": (Ban((b"for", *DASH, b"\xb0"), **FOR, last=3), [0], {0}),
    "no time, but no need": (Ban((b"for", *DASH, b"\xb0"), ("for",), last=3), [0], {1, 2, 3, 4}),
    "bytes that complete nothing": (Ban((b"a", b"\xe2", b"\xa0a"), ("x",)), [0], {0, 2}),
    "in a circle": (Ban((b"a", b"\xc3", b"\xa9\xc3"), ("x",)), [0], {0, 1, 2}),
    "within a token": (Ban((b"a", b"x\xe2\x80", b"\x93"), ("x\u2013",)), [0], {0, 2}),
    "the end shows no open character": (Ban((b"for", b"\xc3", b"\xa9"), **FOR, last=2), [0], {0}),
    "no text is left": (Ban((b"a", b"b", b""), ("a", "b")), [], set()),
    "no text is left but the end": (Ban((b"a", b"b", b"", b""), ("a", "b"), ends=frozenset({3})), [], {3}),
    "a byte that reads U+FFFD": (Ban((b"a", b"\xff"), ("\ufffd",)), [0], {0}),
    "tokens that are equal at the beginning": (Ban((*ALIKE, b"x"), ("xaaaaaaab", "xaaaaaa\0")), [5], {1, 2, 4, 5}),
    "bytes that read U+FFFD": (Ban((b"a", b"\xe2\x80", b"\x93", b"\xff"), ("\ufffd",)), [1], {2}),
}  # fmt: skip


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_character_is_begun_only_if_it_may_end(name: str) -> None:
    ban, tokens, legal = EXAMPLES[name]
    for made in (ban.shipped(), ban.defined()):
        for token in tokens:
            made.advance(token)
        mask = made.mask()
        assert mask is not None
        assert set(mask.nonzero()[:, 0].tolist()) == legal


@pytest.mark.parametrize("ignore_case", [False, True])
def test_behind_a_banned_word_only_beginnings_of_letters_are_allowed(ignore_case: bool) -> None:
    """Over all bytes, by a search through all characters; some letters complete another banned word."""
    openings = [b"\xe2\x80", b"\xe2\xb0", b"\xf0\x9f", b"\xf0\x90", b"\xf0\x9f\x98", b"\xed\xa0", b"\xc3"]
    texts = (*(bytes([byte]) for byte in range(256)), b"for", *openings)
    greek = tuple(f"for{chr(code)}" for code in range(0x3B0, 0x3C0))
    ban = Ban(texts, ("for", *greek), ignore_case=ignore_case, whole_words=True).shipped()
    ban.advance(256)
    mask = ban.mask()
    assert mask is not None
    letters = {chr(code).encode() for code in range(0x110000) if chr(code).isalnum() or chr(code) == "_"}
    begun = {letter[:length] for letter in letters for length in range(1, 5)}
    allowed = {texts[id] for id in mask.nonzero()[:, 0].tolist()}
    assert allowed == {text for text in texts if text in begun} | {b"for"}


def test_a_first_byte_whose_characters_are_all_banned_is_forbidden() -> None:
    texts = tuple(bytes([byte]) for byte in range(256))
    every = tuple(chr(code) for code in range(0x380, 0x3C0))  # all that begin with CE
    cases = (every, False, False), (every[1:], False, True), (every[1:], True, True)
    for phrases, ignore_case, legal in cases:
        mask = Ban(texts, phrases, ignore_case=ignore_case).shipped().mask()
        assert mask is not None and bool(mask[0xCE]) is legal and bool(mask[0xCD])


def test_a_rollback_that_bars_all_text_leaves_the_ends_alone() -> None:
    for ends, legal in ((frozenset[int](), [False] * 3), (frozenset({2}), [False, False, True])):
        ban = Ban((b"a", b"b", b""), ("a", "b"), "rollback", ends).shipped()
        for token in (0, 1):
            ban.roll_back(ban.advance(token))
        mask = ban.mask()
        assert mask is not None and mask.tolist() == legal


def test_characters_of_words_are_those_that_are_it_one_by_one() -> None:
    assert word_characters().tolist() == [is_word(chr(code)) for code in range(LAST)]


def test_a_list_that_goes_is_freed_at_once() -> None:
    """With its masks, some 100 MB for many phrases, and not when Python's collector comes."""
    table = TokenTable([b"a", b"b", b"\xe2", b"\x98", b""], frozenset({4}))
    banned = BanList(PhraseAutomaton(("ab",), Symbols(ignore_case=False, whole_words=False)), table)
    state = banned.read(PhraseState(0), 0, False).state
    banned.masks.allowed(state)
    tokens = ThinkingTokens(table.texts, "<a>", "</a>", {4})
    tokens.mask(ThinkingPlace(Phase.OPENING))
    seen = [weakref.ref(each) for each in (banned, banned.masks, tokens)]
    gc.disable()
    try:
        del banned, tokens
        assert [each() for each in seen] == [None] * 3
    finally:
        gc.enable()
