"""The bytes of a vocabulary in the user's cache: read back, made again where the file is not sound, bounded."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from foredraft.model import byte_codec as module
from foredraft.model.byte_codec import ByteCodec, kept_bytes
from foredraft.model.tokenizer import Tokenizer
from tests.support import alphabets

TABLE = [b"a", None, b"", b"\xc3", "いろ".encode(), None]
TOKENIZER = alphabets.make("byte-level")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path))
    monkeypatch.setattr(module, "MIN_IDS", 1)
    return tmp_path / module.KIND


def made(table: Iterable[bytes | None] = TABLE) -> Callable[[], Iterable[bytes | None]]:
    return lambda: table


def not_made() -> Iterable[bytes | None]:
    pytest.fail("the table was made again")


def test_a_table_is_read_back_as_it_was_made_or_made_again(cache: Path) -> None:
    assert kept_bytes(TOKENIZER, 6, made()) == TABLE
    assert kept_bytes(TOKENIZER, 6, not_made) == TABLE
    [file] = cache.glob(f"*{module.SUFFIX}")
    for number, spoil in enumerate(
        (lambda whole: whole[:-1], lambda whole: whole[:-1] + b"?", lambda whole: b"")
    ):
        file.write_bytes(spoil(file.read_bytes()))
        new = [b"%d" % number] * 6
        assert kept_bytes(TOKENIZER, 6, made(new)) == kept_bytes(TOKENIZER, 6, not_made) == new
    for _ in range(2):
        assert kept_bytes(TOKENIZER, 2, made([None, None])) == [None, None]


@pytest.mark.parametrize("lengths", [[2, 2], [5, -2], [1, 1], [3, 2**31 - 1]])
def test_lengths_that_do_not_add_up_are_not_believed(lengths: list[int]) -> None:
    """Not even where the digest says that the file is whole."""
    content = np.array(lengths, dtype="<i4").tobytes() + b"abc"
    assert module._unpacked(content, 2) is None
    assert module._unpacked(np.array([1, 2], dtype="<i4").tobytes() + b"abc", 2) == [b"a", b"bc"]
    assert module._unpacked(content[:7], 2) is None


SPACED = alphabets.make("sentencepiece")
CHANGED = alphabets.changed(alphabets.sentencepiece(), lambda content: content["decoder"]["decoders"].pop())
OTHER_DECODER = Tokenizer(CHANGED)
SMALLER = Tokenizer(alphabets.byte_level(), model_vocab_size=5)


@pytest.mark.parametrize(
    ("one", "other", "size"),
    [
        (TOKENIZER, alphabets.make("coarse byte-level"), 6),
        (TOKENIZER, SMALLER, 6),
        (TOKENIZER, TOKENIZER, 7),
        (SPACED, OTHER_DECODER, 6),
    ],
    ids=["other tokens", "fewer tokens", "another size", "another decoder"],
)
def test_another_key_is_another_table(one: Tokenizer, other: Tokenizer, size: int) -> None:
    assert SPACED.fingerprint == OTHER_DECODER.fingerprint
    kept_bytes(one, 6, made())
    assert kept_bytes(other, size, made([b"other"] * size)) == [b"other"] * size


@pytest.mark.parametrize(
    ("owner", "name", "value"), [(module, "RULE", -1), (tokenizers, "__version__", "0.0.0")]
)
def test_another_rule_or_library_makes_another_table(
    owner: object, name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept_bytes(TOKENIZER, 6, made())
    monkeypatch.setattr(owner, name, value)
    assert kept_bytes(TOKENIZER, 6, made([b"other"] * 6)) == [b"other"] * 6


def test_only_the_newest_tables_are_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TABLES", 3)
    for size in range(1, 7):
        kept_bytes(TOKENIZER, size, made([b"x"] * size))
    assert len([*cache.glob(f"*{module.SUFFIX}")]) == len([*cache.glob("*.json")]) == 3
    for size in (4, 5, 6):
        kept_bytes(TOKENIZER, size, not_made)


def test_small_tables_are_not_kept_nor_is_any_without_a_cache(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(module, "MIN_IDS", 7)
        assert kept_bytes(TOKENIZER, 6, made()) == TABLE
        assert not cache.exists()
    cache.write_text("a file where the folder would be")
    for folder in (str(cache.parent), ""):
        monkeypatch.setenv("FOREDRAFT_CACHE", folder)
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
