"""Vocabularies of GGUF files read as transformers' own classes of these tokenizers read them, on many strings."""

from __future__ import annotations

import dataclasses

import pytest
from tokenizers import AddedToken
from transformers import CohereTokenizer, GPT2Tokenizer, GPTNeoXTokenizer, Qwen2Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter, generate_merges
from transformers.models.gemma.tokenization_gemma import GemmaTokenizer
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

from foredraft.model.gguf import vocabulary
from foredraft.model.gguf.words import DIGITS, GPT2, WORDS
from tests.support.mutation import Mutant, assert_caught, defect
from tests.support.mutations import Function, around
from tests.support.strings import KEY, SPACE, byte_level, strings, tokenizer_of

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
