"""Streams of text over every type of tokenizer that checkpoints have, and planted defects that must be caught.

The reference is the `tokenizers` library, which decodes all ids at once. Runs of byte tokens stay shorter than
`MAX_HELD_BYTES`; test_model_tokenizer.py tests longer ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Inner

from foredraft.model import tokenizer as module
from foredraft.model.tokenizer import BYTE_LEVEL, CONTEXT, MAX_HELD_BYTES, Detokenizer, Tokenizer
from tests.support.alphabets import decoded
from tests.support.checkpoints import TEXT
from tests.support.mutation import Mutant, Mutation, assert_caught, defect, replaced
from tests.support.mutations import around

Function = Callable[..., Any]
BAD = "\N{REPLACEMENT CHARACTER}"
SPECIAL = ["<s>", "</s>", "<|turn|>"]
WORDS = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+"


def byte_level(*, words: bool, normal_form: bool) -> Tokenizer:
    """Return a byte-level tokenizer: split as GPT-2's, or by a pattern as Llama 3's; in NFC as Qwen's."""
    inner = Inner(models.BPE())
    if normal_form:
        inner.normalizer = normalizers.NFC()
    alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not words)
    split = pre_tokenizers.Split(Regex(WORDS), "isolated")
    inner.pre_tokenizer = pre_tokenizers.Sequence([split, alone]) if words else alone
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"special_tokens": SPECIAL, "initial_alphabet": alphabet, "show_progress": False}
    inner.train_from_iterator([TEXT, *[BAD] * 50], trainers.BpeTrainer(vocab_size=400, **options))
    # added tokens that are not special, in plain text
    inner.add_tokens([AddedToken("<think>", normalized=False), AddedToken(f"a {BAD}", normalized=False)])
    return Tokenizer(inner)


def sentencepiece(normalizer: Any, pre_tokenizer: Any, *decoding: Any) -> Tokenizer:
    """Return a tokenizer of ASCII words and a few more characters; all others become byte tokens."""
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
STRIPPED, TO_SPACES = decoders.Strip(" ", 1, 0), normalizers.Replace(" ", "▁")
META = [decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()]
PREPENDED = normalizers.Sequence([normalizers.Prepend("▁"), TO_SPACES])
FIRST = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
TOKENIZERS = {
    "gpt2": byte_level(words=False, normal_form=False),
    "llama3": byte_level(words=True, normal_form=False),
    "qwen": byte_level(words=True, normal_form=True),
    "llama2": sentencepiece(PREPENDED, None, *SPACES, STRIPPED),
    "mistral": sentencepiece(None, FIRST, *SPACES, STRIPPED),
    "gemma": sentencepiece(TO_SPACES, pre_tokenizers.Split(" ", "merged_with_previous"), *SPACES),
    "metaspace": sentencepiece(None, pre_tokenizers.Metaspace(), *META),
}
NAMES = sorted(TOKENIZERS)
# examples are short, and to shrink those of planted defects takes long
SETTINGS = settings(max_examples=100, database=None, phases=[Phase.generate])


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Draw ids: mixtures of encoded texts, random ids and special tokens."""
    texts = st.text(st.sampled_from("ab the\n'é漢🙂𝄞👩‍👧\u0301\N{REPLACEMENT CHARACTER}"), max_size=6)
    parts = st.one_of(
        texts.map(lambda text: tokenizer.encode(text, add_special_tokens=False)),
        st.lists(st.integers(0, tokenizer.size + 1), max_size=4),
        st.sampled_from(SPECIAL).map(lambda text: [tokenizer.inner.token_to_id(text)]),
    )
    lists = st.lists(parts, max_size=6).map(lambda found: [*chain.from_iterable(found)])
    return lists.filter(lambda ids: longest_run(tokenizer, ids) <= MAX_HELD_BYTES)


def longest_run(tokenizer: Tokenizer, ids: list[int]) -> int:
    longest = run = 0
    for id in ids:
        if tokenizer.is_visible(id, True):
            run = 0 if tokenizer.byte(id) is None else run + 1
            longest = max(longest, run)
    return longest


def settled(tokenizer: Tokenizer, ids: list[int], skip_special: bool) -> str:
    """Return the text of these ids that no further id can change, by its definition.

    An open run of byte tokens and an incomplete character are left out.
    """
    shown = [id for id in ids if tokenizer.is_visible(id, skip_special)]
    while shown and tokenizer.byte(shown[-1]) is not None:
        shown.pop()
    return tokenizer.text(shown, skip_special).removesuffix(
        BAD if tokenizer.ends_mid_character(shown) else ""
    )


def corners(tokenizer: Tokenizer) -> list[list[int]]:
    """Return ids that put long characters and special tokens at every offset from the end of a window."""
    found, guesses = [], tokenizer.encode("the drafter " * 4, False)
    for words in range(10):
        text = tokenizer.encode("the " * words + "𝄞𐍈" * 4, False)
        found += [text, [*guesses, *[0, 1] * words, *tokenizer.encode(" a b", False)]]
        found += [[*chain.from_iterable([id, *[2] * (words % 4)] for id in text[:MAX_HELD_BYTES])]]
    return [ids for ids in found if longest_run(tokenizer, ids) <= MAX_HELD_BYTES]


def assert_streams(tokenizer: Tokenizer, ids: list[int], cuts: list[int], skip_special: bool) -> None:
    """Check that pieces join to the decoded text, are final, and come as early as possible."""
    expected = decoded(tokenizer, ids, skip_special)
    stream, shown = tokenizer.detokenizer(skip_special=skip_special), ""
    for count, id in enumerate(ids, start=1):
        shown += stream.push([id])
        assert len(shown) >= len(settled(tokenizer, ids[:count], skip_special))
        assert expected.startswith(shown)
    assert shown + stream.pending() == expected
    stream, out, at = tokenizer.detokenizer(skip_special=skip_special), "", 0
    for cut in cuts:
        out += stream.push(ids[at : at + cut])
        at += cut
    assert out + stream.push(ids[at:]) + stream.pending() == expected


@pytest.mark.parametrize("name", NAMES)
def test_streamed_pieces_join_to_the_decoded_text(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    for ids in corners(tokenizer):
        assert_streams(tokenizer, ids, [1, 2, 3], True)

    @SETTINGS
    @given(ids_of(tokenizer), st.lists(st.integers(0, 7), max_size=8), st.booleans())
    def any_ids(ids: list[int], cuts: list[int], skip_special: bool) -> None:
        assert_streams(tokenizer, ids, cuts, skip_special)

    any_ids()


@pytest.mark.parametrize("name", NAMES)
def test_the_prompt_is_not_returned_again(name: str) -> None:
    tokenizer = TOKENIZERS[name]

    @SETTINGS
    @given(ids_of(tokenizer), ids_of(tokenizer))
    def continues(prompt: list[int], new: list[int]) -> None:
        if longest_run(tokenizer, prompt + new) > MAX_HELD_BYTES:
            return
        before, whole = tokenizer.text(prompt, True), decoded(tokenizer, prompt + new)
        added = tokenizer.decode(new, prompt)
        assert whole.endswith(added)
        assert tokenizer.decode([], prompt) == ""
        shown = [id for id in prompt if tokenizer.is_visible(id, True)]
        in_bytes = any(tokenizer.byte(id) is not None for id in shown[-1:])
        if not tokenizer.ends_mid_character(shown) and not in_bytes:
            assert before + added == whole

    continues()
    han = tokenizer.encode("the 漢", False)
    cut, word = han[:-1], tokenizer.encode("the drafter", False)[-1:]
    if tokenizer.decode(cut) != tokenizer.decode(han):
        assert tokenizer.decode(cut) == "the "
        assert tokenizer.decode(han[-1:], cut) == "漢"
        assert BAD not in tokenizer.decode(word, cut), "a character that the prompt breaks off is its own"


def test_decoding_cost_is_linear() -> None:
    for tokenizer in TOKENIZERS.values():
        for ids in streams(tokenizer):
            assert decodings(tokenizer, ids * 40) < 40 * len(ids) * 40
            few, many = decodings(tokenizer, ids * 20), decodings(tokenizer, ids * 40)
            assert many < 2.2 * few + 100


def streams(tokenizer: Tokenizer) -> list[list[int]]:
    texts = ["the drafter guesses ", "漢字", "🙂", BAD, "é\n"]
    return [tokenizer.encode(text, False) * 4 for text in texts] + [[tokenizer.size + 1] * 8, [0, 1, 2] * 4]


def decodings(tokenizer: Tokenizer, ids: list[int]) -> int:
    count = 0
    text = Tokenizer.text

    def recorded(self: Tokenizer, given: list[int], skip_special: bool) -> str:
        nonlocal count
        count += len(given)
        return text(self, given, skip_special)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tokenizer, "text", recorded)
        stream = tokenizer.detokenizer()
        for id in ids:
            stream.push([id])
        stream.pending()
    return count


def test_a_genuine_replacement_character_is_returned_at_once() -> None:
    """And an invalid byte, since no id can complete them."""
    genuine = 0
    for name, tokenizer in TOKENIZERS.items():
        ids = tokenizer.encode(BAD, False)[-1:]
        if tokenizer.text(ids, True) == BAD:
            genuine, stream = genuine + 1, tokenizer.detokenizer()
            assert [stream.push(ids) for _ in range(3)] == [BAD] * 3, name
    assert genuine >= 5
    id_of = TOKENIZERS["gpt2"].inner.token_to_id  # ÿ and ð stand for the bytes 0xFF and 0xF0 in the table
    for tokens, pieces in ((["ÿ"] * 3, [BAD] * 3), (["ð", f"a {BAD}"], ["", f"{BAD}a {BAD}"])):
        stream = TOKENIZERS["gpt2"].detokenizer()
        assert [stream.push([id_of(token)]) for token in tokens] == pieces


@pytest.mark.parametrize("name", NAMES)
def test_a_long_text_has_the_same_ids_with_and_without_their_places(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = TOKENIZERS[name]
    text = f" {TEXT}  <s> é漢🙂𝄞👩‍👧 {BAD}a {BAD}<think>\r\n\t don't 12345<|turn|>́" * 5
    for special in (False, True):
        want = tokenizer.inner.encode(text, add_special_tokens=special).ids
        for long in (1, len(text) + 1):
            monkeypatch.setattr(module, "LONG", long)
            assert tokenizer.encode(text, special) == want
            encoding = tokenizer.encoding(text, special)
            assert encoding.ids == want and encoding.offsets[-1][1] == len(text)


def test_the_byte_level_table_equals_that_of_the_library() -> None:
    splits = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for code in [*range(0x800), 0x800, 0xFFFF, 0x10000, 0x40000, 0x80000, 0xC0000, 0x10FFFF]:
        [(piece, _)] = splits.pre_tokenize_str(chr(code))
        assert bytes(BYTE_LEVEL[character] for character in piece) == chr(code).encode()


def test_the_tokenizers_of_this_module_differ_as_intended() -> None:
    """Byte tokens appear where they should, and words elsewhere; otherwise the tests above prove little."""
    for name, tokenizer in TOKENIZERS.items():
        ids, special = tokenizer.encode("the 漢", False), tokenizer.encode("x<s>y")
        assert tokenizer.text(ids, True) == "the 漢", name
        assert (longest_run(tokenizer, ids) == 3) is (not tokenizer.byte_level), name
        assert len(tokenizer.encode("the drafter", False)) < 11
        assert tokenizer.has(special[-2]) and "<s>" not in tokenizer.decode(special), name
        assert "<s>" in tokenizer.decode(special, skip_special=False)
    assert TOKENIZERS["qwen"].decode(TOKENIZERS["qwen"].encode("e\u0301")) == "é"


def each(check: Callable[[str], None], *names: str) -> Callable[[], None]:
    def all_of_them() -> None:
        for name in names:
            check(name)

    return all_of_them


def during(name: str, value: Any) -> Mutation:
    """Give the tokenizer, or the module where that has no such name, another attribute while an id is pushed."""

    @around
    def mutation(push: Function, stream: Detokenizer, id: int) -> str:
        with replaced(module if name.isupper() else stream._tokenizer, name, value):
            piece: str = push(stream, id)
        return piece

    return mutation


def told(question: str, answer: bool) -> Mutation:
    return during(question, lambda *args: answer)


@around
def window_emptied(push: Function, stream: Detokenizer, id: int) -> str:
    before = len(stream._window)
    piece: str = push(stream, id)
    if stream._run == b"" and len(stream._window) < before:
        stream._window, stream._emitted = [], 0
    return piece


@around
def prompt_tail_forgotten(
    init: Function, stream: Detokenizer, tokenizer: Tokenizer, after: Sequence[int], skip_special: bool
) -> None:
    init(stream, tokenizer, after, skip_special)
    stream._prompt_tails = ()


PUSH, CONTEXT_OF = Detokenizer._push, Detokenizer._context
TEXTS, PROMPTS = test_streamed_pieces_join_to_the_decoded_text, test_the_prompt_is_not_returned_again
GENUINE = test_a_genuine_replacement_character_is_returned_at_once
MUTANTS = [
    defect("incomplete character returned", PUSH, told("ends_mid_character", False), each(TEXTS, "gpt2")),
    defect("genuine U+FFFD held back", PUSH, told("ends_mid_character", True), GENUINE),
    defect("window cut in a character", PUSH, during("CONTEXT", CONTEXT - 2), each(TEXTS, "gpt2")),
    defect("window emptied before a word", PUSH, window_emptied, each(TEXTS, "llama2")),
    defect("special tokens as context", PUSH, told("is_visible", True), each(TEXTS, "llama2", "mistral")),
    defect("window never trimmed", PUSH, during("CONTEXT", 10**6), test_decoding_cost_is_linear),
    defect("run of bytes not held", PUSH, during("MAX_HELD_BYTES", 0), each(TEXTS, "gemma")),
    defect("prompt's end returned", Detokenizer.__init__, prompt_tail_forgotten, each(PROMPTS, "gpt2")),
    defect("prompt no context", CONTEXT_OF, lambda _: lambda stream, after: [], each(PROMPTS, "llama2")),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_defect_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(mutant, monkeypatch)
