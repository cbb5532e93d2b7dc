"""Bytes of ids, kept in the user's cache, and ids of texts, for every kind of tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, processors

from foredraft.model import byte_codec as module
from foredraft.model.byte_codec import ByteCodec, characters, kept_bytes
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


# --- in the user's cache ------------------------------------------------------------------------------------

TABLE = [b"a", None, b"", b"\xc3", "いろ".encode(), None]
ALPHABET, SPACED = TOKENIZERS["byte-level"], TOKENIZERS["sentencepiece"]
CHANGED = alphabets.changed(alphabets.sentencepiece(), lambda content: content["decoder"]["decoders"].pop())
OTHER_DECODER, SMALLER = Tokenizer(CHANGED), Tokenizer(alphabets.byte_level(), model_vocab_size=5)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path))
    monkeypatch.setattr(module, "MIN_IDS", 1)
    return tmp_path / module.KIND


def made(table: Iterable[bytes | None] = TABLE) -> Callable[[], Iterable[bytes | None]]:
    return lambda: table


def not_made() -> Iterable[bytes | None]:
    pytest.fail("the table was made again")


def test_a_table_is_read_back_as_it_was_made_or_made_again(cache: Path) -> None:
    assert kept_bytes(ALPHABET, 6, made()) == kept_bytes(ALPHABET, 6, not_made) == TABLE
    [file] = cache.glob(f"*{module.SUFFIX}")
    file.write_bytes(file.read_bytes()[:-9])
    assert kept_bytes(ALPHABET, 6, made([b"new"] * 6)) == kept_bytes(ALPHABET, 6, not_made) == [b"new"] * 6


def test_other_bytes_are_another_table(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of other tokens, of fewer, of another size, decoder, rule or version of the library."""
    assert SPACED.fingerprint == OTHER_DECODER.fingerprint
    others = [(ALPHABET, 6), (TOKENIZERS["coarse byte-level"], 6), (SMALLER, 6), (ALPHABET, 7)]
    for number, (tokenizer, size) in enumerate([*others, (SPACED, 6), (OTHER_DECODER, 6)]):
        table = [b"%d" % number] * size
        assert kept_bytes(tokenizer, size, made(table)) == table
    for owner, name, value in ((module, "RULE", -1), (tokenizers, "__version__", "0.0.0")):
        monkeypatch.setattr(owner, name, value)
        assert kept_bytes(ALPHABET, 6, made([b"other"] * 6)) == [b"other"] * 6


def test_only_the_newest_tables_are_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TABLES", 3)
    for size in range(1, 7):
        kept_bytes(ALPHABET, size, made([b"x"] * size))
    assert len([*cache.glob(f"*{module.SUFFIX}")]) == len([*cache.glob("*.json")]) == 3
    for size in (4, 5, 6):
        kept_bytes(ALPHABET, size, not_made)


def test_small_tables_are_not_kept_nor_is_any_without_a_cache(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(module, "MIN_IDS", 7)
        assert kept_bytes(ALPHABET, 6, made()) == TABLE
        assert not cache.exists()
    cache.write_text("a file where the folder would be")
    for folder in (str(cache.parent), ""):
        monkeypatch.setenv("FOREDRAFT_CACHE", folder)
        for table in (TABLE, TABLE[::-1]):
            assert kept_bytes(ALPHABET, 6, made(table)) == table


@pytest.mark.parametrize("name", alphabets.KINDS)
def test_a_codec_has_the_bytes_that_the_library_decodes(name: str, cache: Path) -> None:
    """Of every id: made one by one, made at once, and read from the cache."""
    tokenizer, size = TOKENIZERS[name], 700
    fresh, at_once, kept = (ByteCodec(tokenizer) for _ in range(3))
    table = at_once.table(size)
    assert table == kept.table(size) == [fresh.of(id) or b"" for id in range(size)]
    assert [at_once.of(id) for id in range(size)] == [kept.of(id) for id in range(size)]
    context = fresh.encode("a")
    before = tokenizer.text(context, False)
    for id in range(tokenizer.inner.get_vocab_size()):
        after = tokenizer.text([*context, id], False)
        if id not in tokenizer.special and "\N{REPLACEMENT CHARACTER}" not in after:
            assert table[id].decode() == after[len(before) :]
