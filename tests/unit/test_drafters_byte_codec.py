"""Bytes of ids and ids of texts, of every kind of tokenizer."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors

from foredraft.drafters.byte_codec import ByteCodec, characters
from foredraft.model.tokenizer import Tokenizer
from tests.support import alphabets
from tests.support.checkpoints import TEXT

SPELLINGS = {name: ByteCodec(alphabets.make(name)) for name in alphabets.KINDS}
TEXTS = st.text(
    st.one_of(st.sampled_from("ab \n,;Zwölf ß🙂<s>Съешьいろ\t"), st.characters(codec="utf-8")), max_size=30
)


@pytest.mark.parametrize("name", SPELLINGS)
@given(text=TEXTS)
@settings(max_examples=150)
def test_a_spelling_has_the_very_bytes_of_its_text(name: str, text: str) -> None:
    spelling = SPELLINGS[name]
    assert spelling.join(spelling.spell(text)) == text.encode()


@pytest.mark.parametrize("name", SPELLINGS)
@given(text=TEXTS)
@settings(max_examples=100)
def test_bytes_of_ids_add_up_to_the_decoded_text(name: str, text: str) -> None:
    spelling, tokenizer = SPELLINGS[name], alphabets.make(name)
    ids = spelling.encode(text)
    joined = b"".join(spelling.of(id) or b"" for id in ids).decode()
    assert joined == " " * spelling.pads * bool(ids) + text or (spelling.pads and joined == text)
    assert tokenizer.decode(ids) == joined.removeprefix(" " * spelling.pads)


def test_what_stands_around_a_text() -> None:
    assert {name: spelling.pads for name, spelling in SPELLINGS.items()} == {
        "byte-level": False, "coarse byte-level": False, "sentencepiece": True, "metaspace": True,
    }  # fmt: skip
    assert all(spelling.prefix == [1] for spelling in SPELLINGS.values())
    assert SPELLINGS["byte-level"].specials == {"<pad>": 0, "<s>": 1, "</s>": 2}


@pytest.mark.parametrize("name", SPELLINGS)
def test_special_tokens_are_no_text_and_their_names_are(name: str) -> None:
    spelling = SPELLINGS[name]
    assert spelling.of(1) is None
    assert spelling.of(10**6) is None
    ids = spelling.spell("a<s>b")
    assert 1 not in ids
    assert spelling.join([*ids[:1], 1, *ids[1:]]) == spelling.join(ids[:1]), "up to what is no text"


def test_part_of_a_character_has_its_bytes() -> None:
    for name in SPELLINGS:
        spelling = SPELLINGS[name]
        ids = spelling.spell("🙃")  # in no training text, so of one byte each, or little more
        parts = [spelling.of(id) for id in ids]
        assert len(parts) > 1
        assert b"".join(part or b"" for part in parts) == "🙃".encode()


def test_a_tokenizer_that_changes_texts_spells_as_far_as_it_can() -> None:
    spelling = ByteCodec(Tokenizer(alphabets.word_piece()))
    ids = spelling.spell(" the target checks\nall")
    assert spelling.join(ids) == b" the target checks"
    assert spelling.spell("The") == []


def test_whole_characters() -> None:
    data = (TEXT[:20] + "🙂").encode()
    assert [characters(data[: len(data) - cut]) for cut in range(5)] == [TEXT[:20] + "🙂"] + [TEXT[:20]] * 4
    assert characters(b"\x9f\x98ab") == ""
    assert characters(b"ab\xffcd") == "ab"


@pytest.mark.parametrize("name", alphabets.KINDS)
def test_no_id_is_beyond_the_models(name: str) -> None:
    """Added tokens that lie there are text: neither spelled, read nor carried over, nor put in front."""
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
