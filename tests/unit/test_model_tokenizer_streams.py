"""Streams of text over tokenizers of every shape that checkpoints have, and defects that they must not have.

What the text is, the `tokenizers` library says of all ids at once. Ids are those of real texts, any at all, and
both with special tokens between them. Runs of byte tokens stay shorter than the longest that is held back: what
happens to longer ones is in test_model_tokenizer.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Inner

from foredraft.model.tokenizer import BYTE_LEVEL, LONGEST_RUN, Detokenizer, Tokenizer
from tests.support.checkpoints import TEXT
from tests.support.planting import Mutant, assert_caught

BAD = "\N{REPLACEMENT CHARACTER}"
SPECIAL = ["<s>", "</s>", "<|turn|>"]
WORDS = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+"


def byte_level(*, words: bool, normal_form: bool) -> Tokenizer:
    """GPT-2's own splitting, or a pattern's as Llama 3 has it; and, as Qwen has it, in normal form C."""
    inner = Inner(models.BPE())
    if normal_form:
        inner.normalizer = normalizers.NFC()
    alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not words)
    split = pre_tokenizers.Split(Regex(WORDS), "isolated")
    inner.pre_tokenizer = pre_tokenizers.Sequence([split, alone]) if words else alone
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator([TEXT, *[BAD] * 50], trainer)
    # added, not special, and not spelled in the table of bytes
    inner.add_tokens([AddedToken("<think>", normalized=False), AddedToken(f"a {BAD}", normalized=False)])
    return Tokenizer(inner)


def sentencepiece(normalizer: Any, pre_tokenizer: Any, *decoding: Any) -> Tokenizer:
    """Words of ASCII and a few characters more; what else there is comes as bytes."""
    known = "".join(c for c in TEXT if c.isascii()) + "éü"
    inner = Inner(models.BPE(unk_token="<unk>"))
    inner.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(vocab_size=160, special_tokens=["<unk>"], show_progress=False)
    inner.train_from_iterator([known], trainer)
    trained = json.loads(inner.to_str())["model"]
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *trained["vocab"], BAD]
    vocabulary = {piece: id for id, piece in enumerate(dict.fromkeys(pieces))}
    merges = [tuple(merge) for merge in trained["merges"]]
    inner = Inner(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    if normalizer is not None:
        inner.normalizer = normalizer
    if pre_tokenizer is not None:
        inner.pre_tokenizer = pre_tokenizer
    inner.decoder = decoders.Sequence([*decoding])
    inner.add_special_tokens(SPECIAL)
    return Tokenizer(inner)


SPACES = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
MADE = {
    "gpt2": byte_level(words=False, normal_form=False),
    "llama3": byte_level(words=True, normal_form=False),
    "qwen": byte_level(words=True, normal_form=True),
    "llama2": sentencepiece(
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        None,
        *SPACES,
        decoders.Strip(" ", 1, 0),
    ),
    "mistral": sentencepiece(
        None,
        pre_tokenizers.Metaspace(prepend_scheme="first", split=False),
        *SPACES,
        decoders.Strip(" ", 1, 0),
    ),
    "gemma": sentencepiece(
        normalizers.Replace(" ", "▁"), pre_tokenizers.Split(" ", "merged_with_previous"), *SPACES
    ),
    "metaspace": sentencepiece(
        None, pre_tokenizers.Metaspace(), decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()
    ),
}
NAMES = sorted(MADE)


def ids_of(made: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Of texts, of any tokens, and of special ones, in turns."""
    texts = st.text(st.sampled_from("ab the\n'é漢🙂𝄞👩‍👧\u0301\N{REPLACEMENT CHARACTER}"), max_size=6)
    parts = st.one_of(
        texts.map(lambda text: made.encode(text, add_special_tokens=False)),
        st.lists(st.integers(0, made.size + 1), max_size=4),
        st.sampled_from(SPECIAL).map(lambda text: [made._inner.token_to_id(text)]),
    )
    lists = st.lists(parts, max_size=6).map(lambda found: [*chain.from_iterable(found)])
    return lists.filter(lambda ids: longest_run(made, ids) <= LONGEST_RUN)


def longest_run(made: Tokenizer, ids: list[int]) -> int:
    longest = run = 0
    for id in ids:
        if made.shows(id, True):
            run = 0 if made.byte(id) is None else run + 1
            longest = max(longest, run)
    return longest


def settled(made: Tokenizer, ids: list[int], skip_special: bool) -> str:
    """What of the text of these ids no further id can change, by its definition: a byte run that is open and a
    character that is cut are left out."""
    shown = [id for id in ids if made.shows(id, skip_special)]
    while shown and made.byte(shown[-1]) is not None:
        shown.pop()
    return made.text(shown, skip_special).removesuffix(BAD if made.cuts(shown) else "")


def corners(made: Tokenizer) -> list[list[int]]:
    """Where windows end: characters of as many ids as can be, and special tokens, at every place."""
    found = []
    for words in range(10):
        text = made.encode("the " * words + "𝄞𐍈" * 4, False)
        found += [
            text,
            [*made.encode("the drafter " * 4, False), *[0, 1] * words, *made.encode(" a b", False)],
        ]
        found += [[*chain.from_iterable([id, *[2] * (words % 4)] for id in text[:LONGEST_RUN])]]
    return [ids for ids in found if longest_run(made, ids) <= LONGEST_RUN]


def assert_streams(made: Tokenizer, ids: list[int], cuts: list[int], skip_special: bool) -> None:
    """Pieces join to the whole, however pushed, with nothing in them that may still change, and nothing later
    than need be."""
    expected = made.text(ids, skip_special)
    stream, shown = made.detokenizer(skip_special=skip_special), ""
    for count, id in enumerate(ids, start=1):
        shown += stream.push([id])
        assert len(shown) >= len(settled(made, ids[:count], skip_special))
        assert expected.startswith(shown)
    assert shown + stream.flush() == expected
    stream, out, at = made.detokenizer(skip_special=skip_special), "", 0
    for cut in cuts:
        out += stream.push(ids[at : at + cut])
        at += cut
    assert out + stream.push(ids[at:]) + stream.flush() == expected


def check_text(name: str) -> None:
    made = MADE[name]
    for ids in corners(made):
        assert_streams(made, ids, [1, 2, 3], True)

    @settings(max_examples=150, database=None, report_multiple_bugs=False)
    @given(ids_of(made), st.lists(st.integers(0, 7), max_size=8), st.booleans())
    def any_ids(ids: list[int], cuts: list[int], skip_special: bool) -> None:
        assert_streams(made, ids, cuts, skip_special)

    any_ids()


def check_prompt(name: str) -> None:
    """What a prompt says is not said again, however it ends."""
    made = MADE[name]

    @settings(max_examples=150, database=None, report_multiple_bugs=False)
    @given(ids_of(made), ids_of(made))
    def continues(prompt: list[int], new: list[int]) -> None:
        if longest_run(made, prompt + new) > LONGEST_RUN:
            return
        before, whole, added = (
            made.text(prompt, True),
            made.text(prompt + new, True),
            made.decode(new, prompt),
        )
        assert whole.endswith(added)
        assert made.decode([], prompt) == ""
        shown = [id for id in prompt if made.shows(id, True)]
        if not made.cuts(shown) and not any(made.byte(id) is not None for id in shown[-1:]):
            assert before + added == whole

    continues()


def check_cost() -> None:
    """Ids that the library decodes, per id pushed, are bounded: of all kinds of text, and of none."""
    for made in MADE.values():
        for ids in streams(made):
            assert decoded(made, ids * 40) < 40 * len(ids) * 40
            few, many = decoded(made, ids * 20), decoded(made, ids * 40)
            assert many < 2.2 * few + 100


def streams(made: Tokenizer) -> list[list[int]]:
    texts = ["the drafter guesses ", "漢字", "🙂", BAD, "é\n"]
    return [made.encode(text, False) * 4 for text in texts] + [[made.size + 1] * 8, [0, 1, 2] * 4]


def decoded(made: Tokenizer, ids: list[int]) -> int:
    """How many ids the library is given to decode while these are pushed, one at a time."""
    count = 0
    text = Tokenizer.text

    def noted(self: Tokenizer, given: list[int], skip_special: bool) -> str:
        nonlocal count
        count += len(given)
        return text(self, given, skip_special)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tokenizer, "text", noted)
        stream = made.detokenizer()
        for id in ids:
            stream.push([id])
        stream.flush()
    return count


def check_genuine() -> None:
    """A token that is U+FFFD, and a byte that begins nothing, are shown at once: nothing can complete them."""
    for name in NAMES:
        made = MADE[name]
        ids = made.encode(BAD, False)[-1:]
        stream = made.detokenizer()
        if made.text(ids, True) == BAD:
            assert [stream.push(ids) for _ in range(3)] == [BAD] * 3, name
    stray = MADE["gpt2"]._inner.token_to_id("ÿ")  # the byte 0xFF in the table
    stream = MADE["gpt2"].detokenizer()
    assert [stream.push([stray]) for _ in range(3)] == [BAD] * 3
    begun, added = (MADE["gpt2"]._inner.token_to_id(token) for token in ("ð", f"a {BAD}"))  # ð: 0xF0
    stream = MADE["gpt2"].detokenizer()
    assert [stream.push([id]) for id in (begun, added)] == ["", f"{BAD}a {BAD}"]
    assert sum(made.text(made.encode(BAD, False)[-1:], True) == BAD for made in MADE.values()) >= 5


@pytest.mark.parametrize("name", NAMES)
def test_pieces_join_to_the_whole(name: str) -> None:
    check_text(name)


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_is_not_said_again(name: str) -> None:
    check_prompt(name)


def test_cost_is_linear() -> None:
    check_cost()


def test_a_genuine_replacement_character_is_complete() -> None:
    check_genuine()


def test_the_table_of_bytes_is_the_librarys() -> None:
    splits = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for code in [*range(0x800), 0x800, 0xFFFF, 0x10000, 0x40000, 0x80000, 0xC0000, 0x10FFFF]:
        [(piece, _)] = splits.pre_tokenize_str(chr(code))
        assert bytes(BYTE_LEVEL[character] for character in piece) == chr(code).encode()


def test_the_shapes_are_what_they_stand_for() -> None:
    """Bytes where they must come, and words elsewhere; else the properties would say little."""
    for name, made in MADE.items():
        ids = made.encode("the 漢", False)
        assert made.text(ids, True) == "the 漢", name
        assert (longest_run(made, ids) == 3) is (not made._byte_level), name
        assert len(made.encode("the drafter", False)) < 11
        assert made.has(made.encode("x<s>y")[-2]) and "<s>" not in made.decode(made.encode("x<s>y")), name
        assert "<s>" in made.decode(made.encode("x<s>y"), skip_special=False)
    assert MADE["qwen"].decode(MADE["qwen"].encode("e\u0301")) == "é"


def each(check: Callable[[str], None], *names: str) -> Callable[[], None]:
    def all_of_them() -> None:
        for name in names:
            check(name)

    return all_of_them


MUTANTS = [
    Mutant(
        "a provisional U+FFFD is shown",
        (
            (
                Detokenizer._push,
                "(text.endswith(UNDECODED) and self._tokenizer.cuts(self._window))",
                "0",
            ),
        ),
        each(check_text, "gpt2"),
    ),
    Mutant(
        "a genuine U+FFFD is held back",
        ((Detokenizer._push, " and self._tokenizer.cuts(self._window)", ""),),
        check_genuine,
    ),
    Mutant(
        "the window is cut within a character",
        ((Detokenizer._push, "self._window[-CONTEXT:]", "self._window[-CONTEXT + 2 :]"),),
        each(check_text, "gpt2"),
    ),
    Mutant(
        "the window is cut to nothing before a word",
        ((Detokenizer._push, "self._window[-CONTEXT:]", "[]"),),
        each(check_text, "llama2"),
    ),
    Mutant(
        "special tokens count as context",
        ((Detokenizer._push, "not self._tokenizer.shows(id, self._skip_special)", "False"),),
        each(check_text, "llama2", "mistral"),
    ),
    Mutant(
        "the window is never cut",
        ((Detokenizer._push, "len(self._window) > 2 * CONTEXT", "False"),),
        check_cost,
    ),
    Mutant(
        "a run of bytes is shown as it grows",
        ((Detokenizer._push, "if self._held() < LONGEST_RUN or self._incomplete():", "if False:"),),
        each(check_text, "gemma"),
    ),
    Mutant(
        "the prompt's cut character is said again",
        ((Detokenizer.__init__, "self._given = self._rest()", "self._given = ''"),),
        each(check_prompt, "gpt2"),
    ),
    Mutant(
        "the prompt is no context",
        ((Detokenizer.__init__, "self.push(self._suffix(after))", "pass"),),
        each(check_prompt, "llama2"),
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_defect_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(mutant, monkeypatch)
