"""The tokenizer, and streams of text: pieces join to the decoded text, and no partial character is returned.

The reference is the `tokenizers` library, which decodes all ids at once, while a stream gets one after another.
Seen to fail on: an incomplete character returned at once, no left context (a word after a special token loses
its space), a run of byte tokens returned as it grows, an endless run held back for good, the prompt's last run of
byte tokens counted as output.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, normalizers

from foredraft.errors import CheckpointError
from foredraft.model.tokenizer import BYTE_LEVEL as TABLE
from foredraft.model.tokenizer import Tokenizer, token_bytes
from tests.support.checkpoints import TEXT, tiny_tokenizer
from tests.support.decoded import decoded


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    loaded = Tokenizer.from_folder(folder)
    assert loaded is not None
    return loaded


BYTE_LEVEL = Tokenizer(tiny_tokenizer())


def sentencepiece() -> Tokenizer:
    """Return a tokenizer like Llama 2's: spaces as ▁, byte tokens, the first space stripped."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "a",
        "b",
        "▁a",
        "▁b",
        "é",
    ]
    inner = Inner(
        models.BPE({p: i for i, p in enumerate(pieces)}, [("▁", "a"), ("▁", "b")], byte_fallback=True)
    )
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(inner)


SENTENCEPIECE = sentencepiece()


def streamed(
    tokenizer: Tokenizer, ids: list[int], after: Sequence[int] = (), skip_special: bool = True
) -> list[str]:
    stream = tokenizer.detokenizer(after, skip_special=skip_special)
    return [*(stream.push([id]) for id in ids), stream.pending()]


def whole(tokenizer: Tokenizer, ids: list[int], skip_special: bool = True) -> str:
    """Return the text of ids, decoded by the library at once."""
    return tokenizer.text(ids, skip_special)


def byte_ids(*values: int) -> list[int]:
    """Return the byte tokens of `SENTENCEPIECE`."""
    return [3 + value for value in values]


HAN = byte_ids(0xE6, 0xBC, 0xA2)  # 漢
BAD = "\N{REPLACEMENT CHARACTER}"
A, B = 262, 263  # "▁a", "▁b"


def test_text_survives_a_round_trip_and_special_tokens_are_added(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    assert ids[0] == 1  # the post-processor puts <s> first
    assert tokenizer.encode(TEXT, add_special_tokens=False) == ids[1:]
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.decode(ids, skip_special=False) == "<s>" + TEXT
    assert tokenizer.decode([*ids, 10**6]) == TEXT  # an id without a token


@pytest.mark.parametrize("loaded", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte-level", "sentencepiece"])
def test_streamed_pieces_join_to_the_decoded_text(loaded: Tokenizer) -> None:
    text = "a b aé 漢字 🙂 b" if loaded is SENTENCEPIECE else TEXT
    ids = loaded.encode(text, add_special_tokens=False)
    pieces = streamed(loaded, ids)
    assert "".join(pieces) == loaded.decode(ids) == whole(loaded, ids) == text
    assert not any(BAD in piece for piece in pieces)
    assert pieces[-1] == ""


def test_a_character_is_returned_with_its_last_byte(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("漢", add_special_tokens=False)
    assert len(ids) == 3
    assert streamed(tokenizer, ids) == ["", "", "漢", ""]


def test_an_incomplete_character_is_left_out(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("x漢", add_special_tokens=False)[:-1]
    assert streamed(tokenizer, ids) == ["x", "", "", ""]
    assert tokenizer.decode(ids) == "x"


@given(st.text(max_size=30), st.lists(st.integers(1, 5)))
def test_pushing_several_ids_equals_pushing_one_by_one(text: str, sizes: list[int]) -> None:
    ids = BYTE_LEVEL.encode(text, add_special_tokens=False)
    stream, at, out = BYTE_LEVEL.detokenizer(), 0, ""
    for size in sizes:
        out += stream.push(ids[at : at + size])
        at += size
    out += stream.push(ids[at:]) + stream.pending()
    assert out == "".join(streamed(BYTE_LEVEL, ids)) == BYTE_LEVEL.decode(ids)


@given(st.lists(st.integers(0, 383), max_size=40), st.booleans())
def test_any_byte_level_ids_stream_to_their_decoded_text(ids: list[int], skip_special: bool) -> None:
    """Models generate invalid UTF-8 and special tokens anywhere."""
    text = decoded(BYTE_LEVEL, ids, skip_special)
    assert "".join(streamed(BYTE_LEVEL, ids, (), skip_special)) == text
    assert BYTE_LEVEL.decode(ids, skip_special=skip_special) == text


# Words, special tokens, and byte tokens: whole characters, partial ones, and invalid bytes.
STRETCHES = st.sampled_from(
    [[1], [2], [259], [260], [A], [B], [264], [10**6], HAN, HAN[:1], HAN[:2], HAN[1:]]
    + [byte_ids(*c.encode()) for c in " \nA\N{REPLACEMENT CHARACTER}🙂"]
    + [byte_ids(0xFF), byte_ids(0xE0, 0x80), byte_ids(0xED, 0xA0)]
)
FALLBACK = st.lists(STRETCHES, max_size=10).map(lambda parts: [*chain.from_iterable(parts)])


@given(FALLBACK, st.booleans())
def test_any_byte_tokens_stream_to_their_decoded_text(ids: list[int], skip_special: bool) -> None:
    """Only the first word of a text loses its space; an invalid byte makes its whole run U+FFFD."""
    text = decoded(SENTENCEPIECE, ids, skip_special)
    assert "".join(streamed(SENTENCEPIECE, ids, (), skip_special)) == text
    assert SENTENCEPIECE.decode(ids, skip_special=skip_special) == text


@pytest.mark.parametrize("start", [[], [1], [A]], ids=["bare", "special", "word"])
@pytest.mark.parametrize(
    ("tail", "rest"),
    [([], "漢"), (HAN[:2], "漢"), (byte_ids(0xFF), BAD * 4), ([*HAN[:1], B], BAD * 4 + " b")],
    ids=["whole", "incomplete", "bad", "interrupted"],
)
def test_a_long_run_of_bytes_is_not_held_back(start: list[int], tail: list[int], rest: str) -> None:
    """It is returned in parts of eleven characters; an invalid byte affects only its own part."""
    ids = [*start, *HAN * 100, *tail]
    pieces = streamed(SENTENCEPIECE, ids)
    assert "".join(pieces) == SENTENCEPIECE.decode(ids) == whole(SENTENCEPIECE, [*start, *HAN * 99]) + rest
    waits = "".join("x" if piece else " " for piece in pieces).split("x")
    assert max(map(len, waits)) < 36


def test_text_continues_after_an_invalid_byte() -> None:
    """The library turns the character before the invalid byte into U+FFFD too, after it was returned."""
    ids = [A, *HAN, *byte_ids(0xFF), *[A, B] * 3]
    pieces = streamed(SENTENCEPIECE, ids)
    assert pieces == ["a", "", "", "", BAD * 4, *[" a", " b"] * 3, ""]


def test_bytes_of_an_invalid_run_are_returned_at_once() -> None:
    pieces = streamed(SENTENCEPIECE, [A, *byte_ids(0xFF), *HAN * 50])
    assert pieces == ["a", *[BAD] * 151, ""]


def test_invalid_byte_level_bytes_are_returned_with_the_next_id() -> None:
    (bad,) = [id for id in range(3, 259) if BYTE_LEVEL.encode("ÿ", False)[:1] == [id]]
    pieces = streamed(BYTE_LEVEL, [bad] * 100)
    assert pieces == ["", *[BAD] * 99, ""], "the last one may begin a character"


@pytest.mark.parametrize("loaded", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte-level", "sentencepiece"])
@given(data=st.data())
def test_prompt_and_output_join_at_every_split(loaded: Tokenizer, data: st.DataObject) -> None:
    """The text of the prompt plus that of the output is the whole text, streamed or decoded."""
    text = data.draw(st.text(st.sampled_from("ab é漢🙂\n"), max_size=24))
    ids = loaded.encode(text)
    at = data.draw(st.integers(0, len(ids)))
    prompt, new = ids[:at], ids[at:]
    added = loaded.decode(new, prompt)
    assert "".join(streamed(loaded, new, prompt)) == added
    assert loaded.decode(prompt) + added == whole(loaded, ids), (
        "also where the prompt ends within a character"
    )


@given(FALLBACK, st.lists(st.integers(0, 12), max_size=6), FALLBACK, st.booleans())
def test_every_way_to_push_ids_gives_the_decoded_text(
    ids: list[int], sizes: list[int], prompt: list[int], skip_special: bool
) -> None:
    stream, at, out = SENTENCEPIECE.detokenizer(prompt, skip_special=skip_special), 0, ""
    for size in sizes:
        out += stream.push(ids[at : at + size])
        at += size
    out += stream.push(ids[at:]) + stream.pending()
    assert out == SENTENCEPIECE.decode(ids, prompt, skip_special=skip_special)


@pytest.mark.parametrize(
    "prompt",
    [
        [A],
        [1, A],
        [A, B, A, B, A, B, A, 2],
        [A, 2, 1, 2, 1, 2],
        [A, *byte_ids(0x0A)],
        [B, *HAN * 40],
        HAN * 11,
    ],
)
def test_the_first_new_word_keeps_its_space(prompt: list[int]) -> None:
    assert SENTENCEPIECE.decode([B], prompt) == " b"
    assert SENTENCEPIECE.decode([], prompt) == ""


@pytest.mark.parametrize("prompt", [[], [1], [2, 1]])
def test_the_first_word_of_a_text_loses_its_space(prompt: list[int]) -> None:
    assert SENTENCEPIECE.decode([B], prompt) == "b"


def test_a_prompt_may_end_in_byte_tokens() -> None:
    """Its whole characters are not output; an incomplete one is output once it is complete."""
    newline = [A, *byte_ids(0x0A)]
    assert SENTENCEPIECE.decode(byte_ids(0x0A, 0x0A), newline) == "\n\n"
    assert SENTENCEPIECE.decode(byte_ids(0xFF), newline) == BAD
    assert SENTENCEPIECE.decode([B], [A, *HAN[:2]]) == " b"
    assert SENTENCEPIECE.decode([HAN[2], B], [A, *HAN[:2]]) == "漢 b"
    cut = BYTE_LEVEL.encode("x漢y", add_special_tokens=False)
    assert BYTE_LEVEL.decode(cut[3:], cut[:3]) == "漢y"
    assert BYTE_LEVEL.decode(cut[4:], cut[:3]) == "y"


def test_each_push_decodes_a_bounded_window(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 0
    text = Tokenizer.text

    def recorded(self: Tokenizer, ids: list[int], skip_special: bool) -> str:
        nonlocal most
        most = max(most, len(ids))
        return text(self, ids, skip_special)

    monkeypatch.setattr(Tokenizer, "text", recorded)
    for loaded, ids in (
        (SENTENCEPIECE, [A, 260]),
        (SENTENCEPIECE, HAN),
        (SENTENCEPIECE, byte_ids(0xFF)),
        (BYTE_LEVEL, [7]),
    ):
        assert loaded.decode(ids * 500, [A] * 500)
    assert most < 80


def test_fingerprints_differ_between_vocabularies(tokenizer: Tokenizer) -> None:
    assert Tokenizer(tiny_tokenizer()).fingerprint == tokenizer.fingerprint
    assert Tokenizer(tiny_tokenizer(300)).fingerprint != tokenizer.fingerprint
    renamed = tiny_tokenizer()
    renamed.add_special_tokens(["<|im_end|>"])
    assert Tokenizer(renamed).fingerprint != tokenizer.fingerprint


def test_equal_files_are_read_once(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """A tokenizer that two models share has one set of tables, and its own number of ids in each."""
    tiny_tokenizer().save(str(tmp_path / "tokenizer.json"))
    shared = Tokenizer.from_folder(tmp_path, 100, like=tokenizer)
    assert shared is not None and shared.inner is tokenizer.inner and shared.model_vocab_size == 100
    tiny_tokenizer(300).save(str(tmp_path / "tokenizer.json"))
    other = Tokenizer.from_folder(tmp_path, 100, like=tokenizer)
    assert other is not None and other.inner is not tokenizer.inner and other.size != tokenizer.size
    assert not other.has_ids_of(tokenizer)


def test_ids_mean_the_same_in_equal_vocabularies_of_different_files(tokenizer: Tokenizer) -> None:
    inner = tiny_tokenizer()
    inner.normalizer = normalizers.NFC()
    other = Tokenizer(inner)
    assert other.digest != tokenizer.digest and other.has_ids_of(tokenizer)


def test_what_takes_long_is_computed_once_and_only_when_it_is_asked_for(tmp_path: Path) -> None:
    tiny_tokenizer().save(str(tmp_path / "tokenizer.json"))
    loaded = Tokenizer.from_folder(tmp_path)
    assert loaded is not None and "fingerprint" not in vars(loaded)
    assert loaded.special is loaded.special
    assert loaded.fingerprint is loaded.fingerprint


def test_bytes_of_byte_level_tokens_are_those_of_the_table() -> None:
    table = {chr(code): TABLE.get(chr(code)) for code in range(0x400)}
    for character, byte in table.items():
        assert token_bytes(character) == (character.encode() if byte is None else bytes([byte]))
    assert token_bytes("Ġa") == b" a" and token_bytes("Ġ a") == "Ġ a".encode() and token_bytes("") == b""


def test_truncation_in_the_file_is_switched_off(tmp_path: Path) -> None:
    inner = tiny_tokenizer()
    inner.enable_truncation(4)
    inner.save(str(tmp_path / "tokenizer.json"))
    loaded = Tokenizer.from_folder(tmp_path)
    assert loaded is not None
    assert len(loaded.encode(TEXT)) > 4


def test_an_absent_tokenizer_is_none_and_a_broken_one_is_refused(tmp_path: Path) -> None:
    assert Tokenizer.from_folder(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": 1}))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not a readable tokenizer"):
        Tokenizer.from_folder(tmp_path)


PIECE = next(piece for piece, id in tiny_tokenizer().get_vocab().items() if id == 300)


@pytest.mark.parametrize(
    ("listed", "problem"),
    [
        ({"1": "<s>", "2": "</s>"}, None),
        ({"384": "<tool>"}, "no added token '<tool>' with the id 384"),
        ({"2": "</s>", "3": "<s>"}, "no added token '<s>' with the id 3"),
        (
            {"300": PIECE},
            f"no added token {PIECE!r} with the id 300",
        ),  # in the vocabulary, but not an added token
    ],
    ids=str,
)
def test_added_tokens_of_the_config_must_be_in_the_tokenizer(
    tmp_path: Path, listed: dict[str, str], problem: str | None
) -> None:
    """transformers would add missing ones, and then split texts differently."""
    tiny_tokenizer().save(str(tmp_path / "tokenizer.json"))
    flags = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word", "special"), False)
    tokens = {id: {"content": content, **flags} for id, content in listed.items()}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": tokens}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if problem is None:
        loaded = Tokenizer.from_folder(tmp_path)
        reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
        assert loaded is not None and loaded.encode(TEXT) == reference(TEXT)["input_ids"]
        return
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.from_folder(tmp_path)
    line = str(caught.value)
    assert problem in line and "\n" not in line
    assert str(tmp_path / "tokenizer.json") in line and str(tmp_path / "tokenizer_config.json") in line


@pytest.mark.parametrize("listed", [[1], {"5": "<x>"}, {"5": {"content": 5}}, "x"])
def test_malformed_added_tokens_are_refused(tmp_path: Path, listed: object) -> None:
    tiny_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": listed}))
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: added_tokens_decoder holds"):
        Tokenizer.from_folder(tmp_path)
