"""Bytes of ids and ids of texts, for every kind of tokenizer."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, processors

from foredraft.model.byte_codec import ByteCodec, characters
from foredraft.model.tokenizer import Tokenizer
from tests.support import alphabets
from tests.support.checkpoints import TEXT

TOKENIZERS = {name: alphabets.make(name) for name in alphabets.KINDS}
CODECS = {name: ByteCodec(tokenizer) for name, tokenizer in TOKENIZERS.items()}
TEXTS = st.text(
    st.one_of(st.sampled_from("ab \n,;Zwölf ß🙂<s>Съешьいろ\t"), st.characters(codec="utf-8")), max_size=30
)


@pytest.mark.parametrize("name", CODECS)
@given(text=TEXTS)
@settings(max_examples=60)
def test_bytes_of_ids_add_up_to_the_text(name: str, text: str) -> None:
    codec, tokenizer = CODECS[name], TOKENIZERS[name]
    assert codec.join(codec.spell(text)) == text.encode()
    ids = codec.encode(text)
    joined = b"".join(codec.of(id) or b"" for id in ids).decode()
    assert joined == " " * codec.pads * bool(ids) + text or (codec.pads and joined == text)
    assert tokenizer.decode(ids) == joined.removeprefix(" " * codec.pads)


def test_prefixes_padding_and_special_tokens_are_known() -> None:
    assert {name: codec.pads for name, codec in CODECS.items()} == {
        "byte-level": False, "coarse byte-level": False, "sentencepiece": True, "metaspace": True,
    }  # fmt: skip
    assert all(codec.prefix == [1] for codec in CODECS.values())
    assert CODECS["byte-level"].specials == {"<pad>": 0, "<s>": 1, "</s>": 2}


@pytest.mark.parametrize("name", CODECS)
def test_special_tokens_have_no_bytes_but_their_names_do(name: str) -> None:
    codec = CODECS[name]
    assert codec.of(1) is codec.of(10**6) is None
    ids = codec.spell("a<s>b")
    assert 1 not in ids
    assert codec.join([*ids[:1], 1, *ids[1:]]) == codec.join(ids[:1]), "bytes end at the first id without any"
    parts = [
        codec.of(id) for id in codec.spell("🙃")
    ]  # not in the training text, so each id is about one byte
    assert len(parts) > 1 and b"".join(part or b"" for part in parts) == "🙃".encode()


def test_a_tokenizer_that_changes_text_spells_as_far_as_it_can() -> None:
    codec = ByteCodec(Tokenizer(alphabets.word_piece()))
    ids = codec.spell(" the target checks\nall")
    assert codec.join(ids) == b" the target checks"
    assert codec.spell("The") == []


def test_characters_drops_an_incomplete_character_at_the_end() -> None:
    data = (TEXT[:20] + "🙂").encode()
    assert [characters(data[: len(data) - cut]) for cut in range(5)] == [TEXT[:20] + "🙂"] + [TEXT[:20]] * 4
    assert characters(b"\x9f\x98ab") == ""
    assert characters(b"ab\xffcd") == "ab"


@pytest.mark.parametrize("size", [None, 386])
@pytest.mark.parametrize("name", alphabets.KINDS)
def test_the_tokenizer_of_literal_texts_is_a_copy_without_ids_beyond_the_models(
    name: str, size: int | None
) -> None:
    inner = alphabets.KINDS[name]()
    inner.add_tokens([AddedToken("<plain>", lstrip=True), AddedToken(" up", normalized=True)])
    inner.add_special_tokens(["<tool>"])
    literal = ByteCodec(Tokenizer(inner, model_vocab_size=size))._literal
    content = json.loads(inner.to_str())
    content["added_tokens"] = [each for each in content["added_tokens"] if each["id"] < (size or 10**6)]
    assert json.loads(literal.to_str()) == content
    assert literal.encode_special_tokens and not inner.encode_special_tokens


@pytest.mark.parametrize("name", alphabets.KINDS)
def test_all_ids_are_within_the_models_vocabulary(name: str) -> None:
    """Names of added tokens beyond it are plain text, and such tokens are no prefix and no special token."""
    inner = alphabets.KINDS[name]()
    size = inner.get_vocab_size()
    inner.add_tokens(["<plain>"])
    inner.add_special_tokens(["<tool>"])
    inner.post_processor = processors.TemplateProcessing(
        single="<tool> <s> $A", special_tokens=[("<tool>", size + 1), ("<s>", 1)]
    )
    within, beyond = ByteCodec(Tokenizer(inner, model_vocab_size=size)), ByteCodec(Tokenizer(inner))
    text = "ab <plain> <tool> cd"
    for ids in (within.spell(text), within.encode(text)):
        assert max(ids) < size
        assert within.join(ids).decode().strip() == text
    assert size in beyond.encode(text)
    assert within.specials == {token: id for token, id in beyond.specials.items() if token != "<tool>"}
    assert (beyond.prefix, within.prefix) == ([size + 1, 1], [1])
