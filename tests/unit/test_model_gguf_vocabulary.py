"""Vocabularies of GGUF files cut text as the model's own tokenizer does.

The oracle of the SentencePiece kind is its algorithm as it is published (Kudo and Richardson 2018,
arXiv:1808.06226): of all neighbours whose join is a token, those with the highest score are joined first. That of
other rules are transformers' own classes of these tokenizers.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import CohereTokenizer, GPT2Tokenizer, GPTNeoXTokenizer, Qwen2Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter, generate_merges
from transformers.models.gemma.tokenization_gemma import GemmaTokenizer
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

from foredraft.model.gguf import vocabulary
from foredraft.model.gguf.vocabulary import UnreadableVocabularyError, end_ids, special_ids, vocabulary_of
from foredraft.model.gguf.words import DIGIT, DIGITS, GPT2, RULES, WORDS
from foredraft.model.tokenizer import BYTE_LEVEL
from tests.support.mutation import Mutant, assert_caught, defect
from tests.support.mutations import Function, around
from tests.support.strings import KEY, SPACE, byte_level, sentencepiece, strings, tokenizer_of

TEXTS = ["a b", "  the  cat ", "naïve café", "tab\tnew\nline", "日本", "<s>a</s>", "it's 12345 -- ok?!", ""]


def random_texts() -> list[str]:
    draw = random.Random(0)
    return ["".join(draw.choices("abcdeh t's1\n é<>", k=draw.randint(1, 30))) for _ in range(300)]


# --- SentencePiece ---------------------------------------------------------------------------------------


def defined(text: str, metadata: dict[str, Any]) -> list[int]:
    """Return the ids of a text without special tokens, by the definition."""
    ids = {token: id for id, token in enumerate(metadata[f"{KEY}tokens"])}
    scores = metadata[f"{KEY}scores"]
    parts = list(SPACE + text.replace(" ", SPACE)) if text else []
    while True:
        joins = [
            (-scores[ids[left + right]], at)
            for at, (left, right) in enumerate(itertools.pairwise(parts))
            if left + right in ids
        ]
        if not joins:
            break
        _, at = min(joins)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    pieces = []
    for part in parts:
        pieces += [ids[part]] if part in ids else [ids[f"<0x{byte:02X}>"] for byte in part.encode()]
    return pieces


def test_a_sentencepiece_vocabulary_joins_as_it_is_defined() -> None:
    metadata = sentencepiece()
    read = tokenizer_of(metadata)
    for text in [*TEXTS, *random_texts(), *strings(500)]:
        if any(token in text for token in ("<s>", "</s>", "<unk>")):
            continue
        ids = read.encode(text, add_special_tokens=False).ids
        assert ids == defined(text, metadata), text
        assert SPACE in text or read.decode(ids) == text
    assert read.encode("a").ids[0] == 1, "a text begins with bos"
    assert read.encode("a<s>b", add_special_tokens=False).ids.count(1) == 1


def test_lost_scores_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = vocabulary._merges
    monkeypatch.setattr(vocabulary, "_merges", lambda ids, scores: sound(ids, [0.0] * len(scores)))
    with pytest.raises(AssertionError):
        test_a_sentencepiece_vocabulary_joins_as_it_is_defined()


def test_the_space_before_a_text_may_be_left_out() -> None:
    read = tokenizer_of(sentencepiece(add_space_prefix=False, add_bos_token=False))
    assert read.encode("cat").tokens == ["cat"]
    assert read.decode(read.encode(" cat").ids) == " cat"


# --- words -----------------------------------------------------------------------------------------------

PROBE = "I'LL 12345½ fooBar e\u0301日本 한국어 x-a+=/\n\n   b"
# What the rules give, after 2,000 texts were compared with llama.cpp; `words.py` says where it differs.
PROBED = {
    "default": "I|'|LL| |123|45½| fooBar| e|\u0301|日本| 한국어| x|-|a|+=/|\n\n  | b",
    "gpt-2 olmo": "I|'|LL| 12345½| fooBar| e|\u0301|日本| 한국어| x|-|a|+=/|\n\n  | b",
    "smollm command-r": "I|'|LL| |1|2|3|4|5|½| fooBar| e|\u0301|日本| 한국어| x|-|a|+=/|\n\n  | b",
    "llama-bpe dbrx glm4 minicpm5 jais-2": "I|'LL| |123|45½| fooBar| e|\u0301日本| 한국어| x|-a|+=/\n\n|  | b",
    "qwen2 stablelm2 ufakzeka bailingmoe": "I|'LL| |1|2|3|4|5|½| fooBar| e|\u0301日本| 한국어| x|-a|+=/\n\n|  | b",
    "laguna seed-coder": "I|'LL| |1|2|3|4|5|½| fooBar| e|\u0301日本| 한국어| x|-a|+=/|\n\n|  | b",
    "exaone-moe": "I|'LL| |1|2|3|4|5|½| fooBar e\u0301日本 한국어 x|-a|+=/\n|\n|  | b",
    "qwen35": "I|'LL| |1|2|3|4|5|½| fooBar| e\u0301日本| 한국어| x|-a|+=/\n\n|  | b",
    "tekken": "I|'LL| |1|2|3|4|5|½| foo|Bar| e\u0301日本| 한국어| x|-a|+=/\n\n|  | b",
    "gpt-4o tiny_aya": "I'LL| |123|45½| foo|Bar| e\u0301日本| 한국어| x|-a|+=/\n\n|  | b",
    "kimi-k2": "I'LL| |123|45½| foo|Bar| e\u0301|日本| 한국어| x|-a|+=/\n\n|  | b",
    "youtu": "I'LL| |1|2|3|4|5|½| foo|Bar| e\u0301|日本| |한국어| x|-a|+=/\n\n|  | b",
    "deepseek-llm": "I|'|LL| |1|2|3|4|5|½| fooBar| e|\u0301|日本| |한국어| x|-|a|+=/|\n|\n|  | b",
    "deepseek-coder": "I|'|LL| |1|2|3|4|5|½| fooBar| e|\u0301|日本| |한국어| x|-|a|+=|/|\n|\n|  | b",
    "deepseek-v3": "I|'LL| |123|45½| fooBar| e\u0301|日本| 한국어| x|-a|+=/\n\n|  | b",
    "spark2_5": "I|'LL| |1|2|3|4|5|½| fooBar| e\u0301|日本| 한국어| x|-a|+=/|\n|\n|  | b",
    "afmoe": "I|'LL| |12|345|½| fooBar| e\u0301|日本| |한국어| x|-a|+=/\n\n|  | b",
    "bloom": "I'LL| 12345½| fooBar| e\u0301日本| 한국어| x-a+=/|\n\n  | b",
    "viking": "I'LL| |1|2|3|4|5|½| fooBar| e\u0301日本| 한국어| x-a+=/|\n\n  | b",
    "superbpe": "I'LL |12|345½| fooBar e\u0301日本 한국어 x-a+=/\n\n   b",
}


# what tells rules apart that cut the probe alike
MORE = [
    ("llama-bpe", "a  1", "a| | |1"),
    ("minicpm5", "a  1", "a|  |1"),
    ("jais-2", "a       b", "a|    |  | b"),
    ("qwen2", "x'sy", "x|'s|y"),
    ("ufakzeka", "x'sy", "x|'sy"),
    ("seed-coder", "a \nb", "a| \n|b"),
    ("laguna", "a \nb", "a| |\n|b"),
    ("gpt-4o", "1234 1234a", "123|4| |123|4|a"),
    ("tiny_aya", "1234 1234a", "1|234| |123|4|a"),
    ("exaone-moe", "\n \nb/\n", "\n \n|b|/\n"),
]


def words_of(pre: str, text: str) -> list[str]:
    cutter = tokenizer_of(byte_level(pre)).pre_tokenizer
    assert cutter is not None
    return [word for word, _ in cutter.pre_tokenize_str(text)]


PROBES = [(pre, PROBE, words) for names, words in PROBED.items() for pre in names.split()]


@pytest.mark.parametrize(("pre", "text", "words"), [*PROBES, *MORE])
def test_words_are_those_of_the_rule(pre: str, text: str, words: str) -> None:
    spelling = {byte: character for character, byte in BYTE_LEVEL.items()}
    expected = ["".join(spelling[byte] for byte in word.encode()) for word in words.split("|")]
    assert words_of(pre, text) == expected


def test_falcon_cuts_the_characters_of_bytes() -> None:
    assert words_of("falcon", "\u043c 12345") == ["Ð", "¼", "Ġ", "123", "45"]  # bytes D0 BC; BC is spelt ¼


def test_every_rule_is_tested_and_every_name_has_one_rule() -> None:
    tested = {pre for pre, _, _ in PROBES} | {"falcon", "gemma4", "sarvam-moe"}
    assert all(tested & {*rule.names} for rule in RULES)
    assert len(WORDS) == sum(len(rule.names) for rule in RULES)


def test_the_page_lists_every_name() -> None:
    page = (Path(__file__).parents[2] / "docs/models.md").read_text()
    _, table = page.split("| names that are read |")
    rows = [row.split("|") for row in table.split("\n\n")[0].splitlines()[2:]]
    listed = [name for row in rows for name in re.findall("`([^`]+)`", row[2])]
    assert len(listed) == len(WORDS) and {*listed} == WORDS.keys()


@pytest.mark.parametrize(("pre", "digits"), [("smollm", DIGITS), ("deepseek-v3", DIGIT)])
def test_digits_that_are_cut_otherwise_are_caught(
    pre: str, digits: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = WORDS[pre]
    monkeypatch.setitem(WORDS, pre, dataclasses.replace(rule, patterns=(digits, *rule.patterns[1:])))
    with pytest.raises(AssertionError):
        test_words_are_those_of_the_rule(*next(probe for probe in PROBES if probe[0] == pre))


@pytest.mark.parametrize("pre", ["qwen2", "qwen35", "olmo", "command-r", "tiny_aya"])
def test_texts_are_normalised(pre: str) -> None:
    read = tokenizer_of(byte_level(pre))
    assert read.encode("e\u0301\u212b").ids == read.encode("\u00e9\u00c5").ids


@pytest.mark.parametrize(
    ("pre", "whole"), [("llama-bpe", True), ("tekken", True), ("glm4", True), ("dbrx", False)]
)
def test_a_word_may_be_a_token_without_merges(pre: str, whole: bool) -> None:
    metadata = byte_level(pre)
    tokens, types = metadata[f"{KEY}tokens"], metadata[f"{KEY}token_type"]
    read = tokenizer_of(metadata | {f"{KEY}tokens": [*tokens, "qzq"], f"{KEY}token_type": [*types, 1]})
    assert (read.encode("qzq").ids == [len(tokens)]) is whole


@pytest.mark.parametrize(("pre", "begins"), [("llama-bpe", True), ("tekken", True), ("dbrx", False)])
def test_a_rule_says_whether_texts_begin_with_bos(pre: str, begins: bool) -> None:
    metadata = byte_level(pre, bos_token_id=7)
    del metadata[f"{KEY}add_bos_token"]
    assert (tokenizer_of(metadata).encode("a").ids[0] == 7) is begins


def test_text_is_what_its_tokens_spell() -> None:
    read = tokenizer_of(byte_level("gpt-4o"))
    for text in strings(500):
        assert read.decode(read.encode(text).ids, skip_special_tokens=False) == text
    assert read.encode("a<|end|>b").ids.count(byte_level("gpt-4o")[f"{KEY}eos_token_id"]) == 1


def test_a_vocabulary_over_text_may_list_its_merges() -> None:
    pieces = [SPACE, *"abn", f"{SPACE}a", f"a{SPACE}a", "\n", "\n\n"]
    metadata = sentencepiece(
        tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces],
        token_type=[2, 3, 3, *[6] * 256, *[1] * len(pieces)],
        merges=["\n \n", f"{SPACE} a", f"a {SPACE}a"],
        model="gemma4",
    )
    for changes in ({}, {f"{KEY}model": "gpt2", f"{KEY}pre": "gemma4"}):
        read = tokenizer_of(metadata | changes)
        assert read.encode("a ab\n\n\u00e9").tokens == ["<s>", f"a{SPACE}a", "b", "\n\n", "<0xC3>", "<0xA9>"]
        assert read.decode(read.encode("a ab\n\n\u00e9").ids) == "a ab\n\n\u00e9"


# --- special tokens, templates, refusals -------------------------------------------------------------------


def test_no_vocabulary_is_no_error() -> None:
    assert vocabulary_of({}) is None
    assert vocabulary_of({f"{KEY}model": "no_vocab"}) is None


PIECES, WORDS_OF = sentencepiece, partial(byte_level, pre="gpt-2")
# the places of the last one's merges are so many that their texts take gigabytes
TOO_LONG = {"tokens": ["<unk>", "a", "a" * 60_000], "scores": [0.0] * 3, "token_type": [2, 1, 1]}
REFUSED = [
    (PIECES, {"model": "t5"}, "kind 't5', which is not supported"),
    (PIECES, {"tokens": []}, "without tokens"),
    (PIECES, {"tokens": [*sentencepiece()[f"{KEY}tokens"][:-1], "a"]}, "twice|more than one id"),
    (PIECES, TOO_LONG, "token 2 of 60,000 characters; at most 1,000"),
    (PIECES, {"scores": [0.0]}, "without a score for each token"),
    (PIECES, {"token_type": [1]}, "without a type for each token"),
    (PIECES, {"precompiled_charsmap": [1]}, "precompiled_charsmap, which is not supported"),
    (PIECES, {"bos_token_id": 2**32 - 1}, "adds a token bos to texts, and does not say which it is"),
    (WORDS_OF, {"pre": "other"}, "the pre-tokenizer 'other', which is not supported"),
    (WORDS_OF, {"pre": "qwen-2"}, "Did you mean 'qwen2'"),
    (WORDS_OF, {"pre": None}, "the pre-tokenizer None, which is not supported"),
    (WORDS_OF, {"merges": []}, "without merges"),
    (WORDS_OF, {"merges": ["a"]}, "without merges"),
]


@pytest.mark.parametrize(("made", "changes", "says"), REFUSED)
def test_what_cannot_be_reproduced_is_refused(
    made: Callable[..., dict[str, Any]], changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(UnreadableVocabularyError, match=says):
        vocabulary_of(made(**changes))


# --- which tokens end a text --------------------------------------------------------------------------------

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4


def special_tokens(tokens: dict[str, int], **changes: Any) -> dict[str, Any]:
    """Return metadata with tokens, given by their types, after one that is ordinary."""
    found = {"model": "gpt2", "tokens": ["a", *tokens], "token_type": [NORMAL, *tokens.values()]}
    return {KEY + name: value for name, value in (found | changes).items()}


def test_ids_are_named_or_those_of_sentencepiece() -> None:
    assert special_ids(sentencepiece()) == {"bos": 1, "eos": 2, "unk": 0}
    assert special_ids({f"{KEY}model": "llama"}) == {"bos": 1, "eos": 2, "unk": 0}
    assert special_ids({f"{KEY}model": "gpt2", f"{KEY}bos_token_id": 2**32 - 1}) == {}
    named = dict.fromkeys(("<|im_end|>", "b", "c"), CONTROL)
    assert end_ids(special_tokens(named, eos_token_id=1, eot_token_id=2, eom_token_id=3)) == [1, 2, 3]


ENDS = ["<|im_end|>", "<end_of_turn>", "<|eot_id|>", "<|endoftext|>", "<｜end▁of▁sentence｜>", "<eos>"]


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("kind", [CONTROL, USER_DEFINED])
def test_ends_are_found_by_their_texts(end: str, kind: int) -> None:
    assert end_ids(special_tokens({"<|im_start|>": CONTROL, end: kind}, eos_token_id=0)) == [0, 2]


OTHERS = ["</s>", "<|file_sep|>", "<|im_start|>"]
WITHIN = [("<|return|>", "<|call|>"), ("<|calls|>", "<|flush|>")]  # ends within a turn, which end nothing


@pytest.mark.parametrize(
    ("tokens", "ends"),
    [
        *(({end: NORMAL}, []) for end in ("<|im_end|>", "<eos>")),
        *(({token: USER_DEFINED}, []) for token in OTHERS),
        *(({"<|end|>": CONTROL, **dict.fromkeys(parts, CONTROL)}, [2, 3]) for parts in WITHIN),
        *(({"<|end|>": CONTROL, first: CONTROL}, [1, 2]) for first, _ in WITHIN),
    ],
    ids=str,
)
def test_other_tokens_end_nothing(tokens: dict[str, int], ends: list[int]) -> None:
    assert end_ids(special_tokens(tokens)) == ends


def test_lost_texts_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "ENDS", frozenset())
    with pytest.raises(AssertionError):
        test_ends_are_found_by_their_texts("<|im_end|>", CONTROL)


# --- the classes of transformers ----------------------------------------------------------------------------

CLASSES = {
    "gpt-2": GPT2Tokenizer,
    "olmo": GPTNeoXTokenizer,
    "mpt": GPTNeoXTokenizer,
    "command-r": CohereTokenizer,
    "qwen2": Qwen2Tokenizer,
    "qwen35": Qwen3_5Tokenizer,
}
STRINGS = [text for text in strings(2000) if "<" not in text]  # the classes add special tokens of their own


def check_class(pre: str) -> None:
    metadata = byte_level(pre)
    kinds = metadata[f"{KEY}token_type"]
    tokens = [token for token, kind in zip(metadata[f"{KEY}tokens"], kinds, strict=True) if kind == 1]
    reference = CLASSES[pre](
        vocab={token: id for id, token in enumerate(tokens)},
        merges=[tuple(merge.split(" ")) for merge in metadata[f"{KEY}merges"]],
        add_prefix_space=False,
    )
    read = tokenizer_of(metadata)
    for text in STRINGS:
        expected = reference.backend_tokenizer.encode(text, add_special_tokens=False).ids
        assert read.encode(text).ids == expected, text


@pytest.mark.parametrize("pre", CLASSES)
def test_a_rule_is_that_of_its_class(pre: str) -> None:
    check_class(pre)


@pytest.mark.parametrize("pre", ["gpt-2", "olmo", "command-r", "qwen2"])
def test_another_rule_is_caught(pre: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {
        "gpt-2": {"patterns": (r"\p{N}", GPT2)},
        "olmo": {"normalizer": None},
        "command-r": {"patterns": (DIGITS, GPT2)},
        "qwen2": {"patterns": WORDS["llama-bpe"].patterns},
    }[pre]
    monkeypatch.setitem(WORDS, pre, dataclasses.replace(WORDS[pre], **wrong))
    with pytest.raises(AssertionError):
        check_class(pre)


def test_llama_3_has_the_rule_of_its_converter() -> None:
    assert WORDS["llama-bpe"].patterns == (TikTokenConverter().pattern,)


# --- Gemma -----------------------------------------------------------------------------------------------

RUNS = {"\n\n": "\n\n", "  ": SPACE * 2, "   ": SPACE * 3, "    ": SPACE * 4, "<h1>": "<h1>"}


def test_a_vocabulary_with_runs_of_spaces_is_read_as_gemmas_class_reads_it() -> None:
    alphabet = [SPACE, *"abcdehtinrows1_<>h", "\n", "\t", "\u00e9", "\u65e5"]
    words = [*"_t _a he _the in or wor word __a".replace("_", SPACE).split(), "t\n"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    pieces, unscored = [*dict.fromkeys(alphabet), *words], len(special) + len(RUNS)
    metadata = {
        f"{KEY}model": "llama",
        f"{KEY}tokens": [*special, *RUNS, *bytes_, *pieces],
        f"{KEY}token_type": [*[3] * len(special), *[4] * len(RUNS), *[6] * 256, *[1] * len(pieces)],
        f"{KEY}scores": [-1000.0] * unscored + [0.0] * 256 + [-float(at) for at in range(len(pieces))],
        f"{KEY}bos_token_id": 2,
        f"{KEY}eos_token_id": 1,
        f"{KEY}unknown_token_id": 3,
        f"{KEY}add_space_prefix": False,
        f"{KEY}add_bos_token": False,
    }
    vocab = {token: id for id, token in enumerate([*special, *RUNS.values(), *bytes_, *pieces])}
    scores = dict.fromkeys(RUNS.values(), 0.0) | {token: -float(at) for at, token in enumerate(pieces)}
    reference = GemmaTokenizer(vocab=vocab, merges=generate_merges(vocab, scores, skip_tokens=special))
    reference.add_tokens([AddedToken(token, normalized=False, special=False) for token in RUNS.values()])
    read = tokenizer_of(metadata)
    for text in [*strings(2000), "a  the", f"a {SPACE}the", f"  {SPACE}  a", "a      b\n\n\n t\n"]:
        expected = reference.backend_tokenizer.encode(text, add_special_tokens=False).ids
        assert read.encode(text).ids == expected, text
        if SPACE not in text and not any(token in text for token in special):
            assert read.decode(read.encode(text).ids) == text


split_first = around(lambda split, metadata, tokens, *, spell_spaces=False: split(metadata, tokens))


@around
def merged_last(merges: Function, ids: dict[str, int], scores: list[float]) -> list[list[str]]:
    found = merges(ids, scores)
    runs = [pair for pair in found if not "".join(pair).strip(SPACE)]
    return [pair for pair in found if pair not in runs] + runs


gemma = test_a_vocabulary_with_runs_of_spaces_is_read_as_gemmas_class_reads_it
MUTANTS = [
    defect("runs of spaces cut out first", vocabulary._split, split_first, gemma),
    defect("runs of spaces merged last", vocabulary._merges, merged_last, gemma),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_defect_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(mutant, monkeypatch)
