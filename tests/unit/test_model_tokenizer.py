"""The tokenizer: its files, and streams beside those of test_model_tokenizer_streams.py: long runs, and prompts."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, normalizers

from foredraft.errors import CheckpointError, RequestError
from foredraft.model.tokenizer import Tokenizer, token_bytes
from tests.support.checkpoints import TEXT, tiny_tokenizer
from tests.support.running import forked, run_code


def sentencepiece() -> Tokenizer:
    """Return a tokenizer like Llama 2's: spaces as ▁, byte tokens, the first space stripped."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁ a b ▁a ▁b é".split()]
    merges = [("▁", "a"), ("▁", "b")]
    inner = Inner(models.BPE({piece: id for id, piece in enumerate(pieces)}, merges, byte_fallback=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(inner)


BYTE_LEVEL, SENTENCEPIECE = Tokenizer(tiny_tokenizer()), sentencepiece()


def streamed(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    stream = tokenizer.detokenizer()
    return [*(stream.push([id]) for id in ids), stream.pending()]


def byte_ids(*values: int) -> list[int]:
    return [3 + value for value in values]


HAN = byte_ids(0xE6, 0xBC, 0xA2)  # 漢
BAD = "\N{REPLACEMENT CHARACTER}"
A, B = 262, 263  # "▁a", "▁b"


def test_text_survives_a_round_trip_and_special_tokens_are_added() -> None:
    ids = BYTE_LEVEL.encode(TEXT)
    assert ids[0] == 1  # the post-processor puts <s> first
    assert BYTE_LEVEL.encode(TEXT, add_special_tokens=False) == ids[1:]
    assert BYTE_LEVEL.decode(ids) == TEXT
    assert BYTE_LEVEL.decode(ids, skip_special=False) == "<s>" + TEXT
    assert BYTE_LEVEL.decode([*ids, 10**6]) == TEXT  # an id without a token


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
    assert (
        "".join(pieces) == SENTENCEPIECE.decode(ids) == SENTENCEPIECE.text([*start, *HAN * 99], True) + rest
    )
    waits = "".join("x" if piece else " " for piece in pieces).split("x")
    assert max(map(len, waits)) < 36


INVALID = next(id for id in range(3, 259) if BYTE_LEVEL.encode("ÿ", False)[:1] == [id])
WORD = BYTE_LEVEL.encode("x漢", False)
STREAMS: dict[str, tuple[Tokenizer, list[int], list[str]]] = {
    "an incomplete character is left out": (
        BYTE_LEVEL,
        [*WORD, *WORD[:-1]],
        ["x", "", "", "漢", "x", "", "", ""],
    ),
    "an invalid byte comes with the next id": (BYTE_LEVEL, [INVALID] * 9, ["", *[BAD] * 8, ""]),
    # the library turns the character before the invalid byte into U+FFFD too, after it was returned
    "text goes on behind an invalid byte": (
        SENTENCEPIECE,
        [A, *HAN, *byte_ids(0xFF), *[A, B] * 3],
        ["a", "", "", "", BAD * 4, *[" a", " b"] * 3, ""],
    ),
    "an invalid run comes at once": (SENTENCEPIECE, [A, *byte_ids(0xFF), *HAN * 50], ["a", *[BAD] * 151, ""]),
}


@pytest.mark.parametrize("name", STREAMS)
def test_pieces_come_as_soon_as_they_are_final(name: str) -> None:
    loaded, ids, pieces = STREAMS[name]
    assert streamed(loaded, ids) == pieces
    assert loaded.decode(ids) == "".join(pieces)


def test_the_first_new_word_keeps_its_space_and_a_prompt_may_end_in_byte_tokens() -> None:
    newline = [A, *byte_ids(0x0A)]
    for prompt in ([1, A], [A, B] * 3, [A, 2, 1, 2, 1, 2], newline, [B, *HAN * 40], HAN * 11):
        assert SENTENCEPIECE.decode([B], prompt) == " b" and SENTENCEPIECE.decode([], prompt) == "", prompt
    assert SENTENCEPIECE.decode([B], []) == SENTENCEPIECE.decode([B], [2, 1]) == "b", "the first of a text"
    assert SENTENCEPIECE.decode(byte_ids(0x0A, 0x0A), newline) == "\n\n"
    assert SENTENCEPIECE.decode(byte_ids(0xFF), newline) == BAD
    assert SENTENCEPIECE.decode([B], [A, *HAN[:2]]) == " b"
    assert SENTENCEPIECE.decode([HAN[2], B], [A, *HAN[:2]]) == "漢 b"
    cut = BYTE_LEVEL.encode("x漢y", add_special_tokens=False)
    assert BYTE_LEVEL.decode(cut[3:], cut[:3]) == "漢y"
    assert BYTE_LEVEL.decode(cut[4:], cut[:3]) == "y"


def test_fingerprints_differ_between_vocabularies() -> None:
    assert Tokenizer(tiny_tokenizer()).fingerprint == BYTE_LEVEL.fingerprint
    assert Tokenizer(tiny_tokenizer(300)).fingerprint != BYTE_LEVEL.fingerprint
    renamed = tiny_tokenizer()
    renamed.add_special_tokens(["<|im_end|>"])
    assert Tokenizer(renamed).fingerprint != BYTE_LEVEL.fingerprint
    composed = tiny_tokenizer()
    composed.normalizer = normalizers.NFC()
    other = Tokenizer(composed)
    assert other.digest != BYTE_LEVEL.digest and other.has_ids_of(BYTE_LEVEL), "ids mean the same"


def test_equal_files_are_read_once(tmp_path: Path) -> None:
    """A tokenizer that two models share has one set of tables, and its own number of ids in each."""
    tiny_tokenizer().save(str(tmp_path / "tokenizer.json"))
    one = Tokenizer.from_folder(tmp_path)
    shared = Tokenizer.from_folder(tmp_path, 100, like=one)
    assert one is not None and shared is not None
    assert shared.inner is one.inner and shared.model_vocab_size == 100
    tiny_tokenizer(300).save(str(tmp_path / "tokenizer.json"))
    other = Tokenizer.from_folder(tmp_path, 100, like=one)
    assert other is not None and other.inner is not one.inner and other.size != one.size
    assert not other.has_ids_of(one)


def test_bytes_of_byte_level_tokens_are_those_of_the_table_or_of_plain_text() -> None:
    assert token_bytes("Ġa") == b" a" and token_bytes("Ġ a") == "Ġ a".encode() and token_bytes("") == b""


def test_truncation_in_the_file_is_switched_off(tmp_path: Path) -> None:
    assert Tokenizer.from_folder(tmp_path) is None
    inner = tiny_tokenizer()
    inner.enable_truncation(4)
    inner.save(str(tmp_path / "tokenizer.json"))
    loaded = Tokenizer.from_folder(tmp_path)
    assert loaded is not None and len(loaded.encode(TEXT)) > 4


PIECE = next(piece for piece, id in tiny_tokenizer().get_vocab().items() if id == 300)


@pytest.mark.parametrize(
    ("listed", "problem"),
    [
        ({"1": "<s>", "2": "</s>"}, None),
        ({"384": "<tool>"}, "no added token '<tool>' with the id 384"),
        ({"2": "</s>", "3": "<s>"}, "no added token '<s>' with the id 3"),
        ({"300": PIECE}, f"no added token {PIECE!r} with the id 300"),
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


# --- broken files: panics become errors, and what would end the process is refused ---------------------


PLAIN: dict[str, Any] = {
    "version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": None, "post_processor": None,
    "decoder": None,
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [], "unk_token": "a"},
}  # fmt: skip


def written(folder: Path, content: dict[str, Any]) -> Path:
    (folder / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False))
    return folder


def processor(*single: dict[str, Any]) -> dict[str, Any]:
    return {"type": "TemplateProcessing", "single": list(single), "pair": [], "special_tokens": {}}


STRIP = {"type": "Strip", "content": "a", "start": 0, "stop": 5}
BROKEN: dict[str, dict[str, Any]] = {
    "a model": {"model": 1},
    # the library panics at these
    "a decoder": {"decoder": STRIP},
    "a template": {"post_processor": processor({"Sequence": {"id": "B", "type_id": 0}})},
    "a special token": {"post_processor": processor({"SpecialToken": {"id": "B", "type_id": 0}})},
    "a charsmap": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}},
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_tokenizer_that_is_broken_or_panics_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not a readable tokenizer"):
        Tokenizer.from_folder(written(tmp_path, PLAIN | BROKEN[name]))


def test_a_panic_on_some_text_is_the_error_of_its_request(tmp_path: Path) -> None:
    """The tokens that the try at loading decodes are long enough for this decoder; others are not."""
    content = PLAIN | {"decoder": STRIP}
    content["model"] = PLAIN["model"] | {"vocab": {"aaaaaa": 0, "a": 1}, "unk_token": "aaaaaa"}
    tokenizer = Tokenizer.from_folder(written(tmp_path, content))
    assert tokenizer is not None
    with pytest.raises(RequestError, match=r"tokenizer cannot decode token ids \(.*download it again"):
        tokenizer.text([1], False)
    with pytest.raises(RequestError, match="tokenizer cannot decode tokens"):
        tokenizer.text_of(["a"])


def test_a_prefix_that_ends_the_process_is_refused(tmp_path: Path) -> None:
    """The library cuts the prefix off within a character, and aborts: seen from beside."""
    merges = {"vocab": {"a": 0, "é": 1, "aé": 2}, "merges": [["a", "é"]], "continuing_subword_prefix": "x"}
    folder = written(tmp_path, PLAIN | {"model": PLAIN["model"] | merges})
    code = f"from foredraft.model.tokenizer import Tokenizer as T; T.from_folder(__import__('pathlib').Path({str(folder)!r}))"
    done = forked(run_code, code)
    assert done.returncode == 1 and "whose second part lacks the prefix 'x'" in done.stderr


def test_a_panic_while_a_server_loads_ends_the_wait() -> None:
    """It is no `Exception`: the app must not say for ever that the model is being loaded."""
    state = pytest.importorskip("foredraft.serve.state")

    class PanicException(BaseException):
        pass

    def load() -> Any:
        raise PanicException("index out of bounds")

    with pytest.raises(RuntimeError, match="loading failed: index out of bounds"):
        asyncio.run(asyncio.wait_for(state._in_a_daemon(load), 20))
