"""The bytes of a vocabulary in the user's cache: read back, made again where the file is not sound, bounded."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from foredraft import user_cache
from foredraft.model import kept_bytes as module
from foredraft.model.byte_codec import ByteCodec
from foredraft.model.kept_bytes import kept_bytes
from foredraft.model.tokenizer import Tokenizer
from tests.support import alphabets

TABLE = [b"a", None, b"", b"\xc3", "いろ".encode(), None]
TOKENIZER = alphabets.make("byte-level")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep tables of any size in a folder of the test's own."""
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path))
    monkeypatch.setattr(module, "MIN_IDS", 1)
    return tmp_path / module.KIND


def made(table: Iterable[bytes | None] = TABLE) -> Callable[[], Iterable[bytes | None]]:
    return lambda: table


def not_made() -> Iterable[bytes | None]:
    pytest.fail("the table was made again")


def file_of(cache: Path) -> Path:
    [file] = cache.glob(f"*{module.SUFFIX}")
    return file


def test_a_table_is_read_back_as_it_was_made() -> None:
    assert kept_bytes(TOKENIZER, 6, made()) == TABLE
    assert kept_bytes(TOKENIZER, 6, not_made) == TABLE


def test_ids_without_any_bytes_are_a_table() -> None:
    for _ in range(2):
        assert kept_bytes(TOKENIZER, 2, made([None, None])) == [None, None]


@pytest.mark.parametrize("cut", [0, 1, 20, -1])
def test_a_cut_file_is_made_again(cache: Path, cut: int) -> None:
    kept_bytes(TOKENIZER, 6, made())
    content = file_of(cache).read_bytes()
    file_of(cache).write_bytes(content[:cut])
    assert kept_bytes(TOKENIZER, 6, made([b"new"] * 6)) == [b"new"] * 6
    assert kept_bytes(TOKENIZER, 6, not_made) == [b"new"] * 6


@pytest.mark.parametrize("at", [0, 3, 24, -1])
def test_a_damaged_file_is_made_again(cache: Path, at: int) -> None:
    kept_bytes(TOKENIZER, 6, made())
    content = bytearray(file_of(cache).read_bytes())
    content[at] ^= 1
    file_of(cache).write_bytes(content)
    assert kept_bytes(TOKENIZER, 6, made([b"new"] * 6)) == [b"new"] * 6


@pytest.mark.parametrize("lengths", [[2, 2], [5, -2], [1, 1], [3, 2**31 - 1]])
def test_lengths_that_do_not_add_up_are_not_believed(lengths: list[int]) -> None:
    """Not even where the digest says that the file is whole."""
    content = np.array(lengths, dtype="<i4").tobytes() + b"abc"
    assert module._unpacked(content, 2) is None
    assert module._unpacked(np.array([1, 2], dtype="<i4").tobytes() + b"abc", 2) == [b"a", b"bc"]
    assert module._unpacked(content[:7], 2) is None


@pytest.mark.parametrize("change", ["tokenizer", "ids", "size", "rule", "library"])
def test_another_key_is_another_table(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept_bytes(TOKENIZER, 6, made())
    tokenizer, size = TOKENIZER, 6
    if change == "tokenizer":
        tokenizer = alphabets.make("coarse byte-level")
    elif change == "ids":
        tokenizer = Tokenizer(alphabets.byte_level(), model_vocab_size=5)
    elif change == "size":
        size = 7
    elif change == "rule":
        monkeypatch.setattr(module, "RULE", module.RULE + 1)
    else:
        monkeypatch.setattr(tokenizers, "__version__", "0.0.0")
    assert kept_bytes(tokenizer, size, made([b"other"] * size)) == [b"other"] * size


def test_a_tokenizer_with_another_decoder_has_another_table() -> None:
    """Its ids mean the same, but they read otherwise."""
    inner = alphabets.changed(alphabets.sentencepiece(), lambda content: content["decoder"]["decoders"].pop())
    one, other = alphabets.make("sentencepiece"), Tokenizer(inner)
    assert one.fingerprint == other.fingerprint
    kept_bytes(one, 6, made())
    assert kept_bytes(other, 6, made([b"other"] * 6)) == [b"other"] * 6


def test_only_the_newest_tables_are_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TABLES", 3)
    for size in range(1, 7):
        kept_bytes(TOKENIZER, size, made([b"x"] * size))
    assert len([*cache.glob(f"*{module.SUFFIX}")]) == len([*cache.glob("*.json")]) == 3
    for size in (4, 5, 6):
        kept_bytes(TOKENIZER, size, not_made)


def test_small_tables_are_not_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MIN_IDS", 7)
    assert kept_bytes(TOKENIZER, 6, made()) == TABLE
    assert not cache.exists()


def test_without_a_cache_every_table_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREDRAFT_CACHE", "")
    for table in (TABLE, TABLE[::-1]):
        assert kept_bytes(TOKENIZER, 6, made(table)) == table


def test_a_cache_that_cannot_be_written_is_no_error(cache: Path) -> None:
    cache.write_text("a file where the folder would be")
    for table in (TABLE, TABLE[::-1]):
        assert kept_bytes(TOKENIZER, 6, made(table)) == table


@pytest.mark.parametrize("name", alphabets.KINDS)
def test_a_codec_has_the_bytes_that_the_library_decodes(name: str) -> None:
    """Of every id: made one by one, made at once, and read from the cache."""
    tokenizer, size = alphabets.make(name), 700
    fresh, at_once, kept = (ByteCodec(tokenizer) for _ in range(3))
    table = at_once.table(size)
    assert table == kept.table(size) == [fresh.of(id) or b"" for id in range(size)]
    assert [at_once.of(id) for id in range(size)] == [kept.of(id) for id in range(size)]
    assert kept.of(1) is None, "a special token has none"
    context = fresh.encode("a")
    before = tokenizer.text(context, False)
    for id in range(tokenizer.inner.get_vocab_size()):
        after = tokenizer.text([*context, id], False)
        if id not in tokenizer.special and "\N{REPLACEMENT CHARACTER}" not in after:
            assert table[id].decode() == after[len(before) :]


def test_the_document_beside_a_table_is_its_digest(cache: Path) -> None:
    kept_bytes(TOKENIZER, 6, made())
    document = json.loads(file_of(cache).with_suffix(".json").read_text())["document"]
    assert len(document) == 64
    user_cache.keep_newest("nothing", ".x", 1)  # a folder that is not there
