"""Hostile tokenizer files: panics become the house's errors, and no rule multiplies text without bound."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import foredraft
from foredraft.errors import CheckpointError, RequestError
from foredraft.model.tokenizer import Tokenizer
from tests.support.checkpoints import save_checkpoint

BASE: dict[str, Any] = {
    "version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": None, "post_processor": None,
    "decoder": None,
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [], "unk_token": "a"},
}  # fmt: skip


def write(folder: Path, content: dict[str, Any]) -> Path:
    (folder / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False))
    return folder


def replace(wanted: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: wanted}, "content": content}


def template(*single: dict[str, Any]) -> dict[str, Any]:
    return {"type": "TemplateProcessing", "single": list(single), "pair": [], "special_tokens": {}}


STRIP = {"type": "Strip", "content": "a", "start": 0, "stop": 5}
PANICS: dict[str, dict[str, Any]] = {
    "a decoder": {"decoder": STRIP},
    "a template": {"post_processor": template({"Sequence": {"id": "B", "type_id": 0}})},
    "a special token": {"post_processor": template({"SpecialToken": {"id": "B", "type_id": 0}})},
    "a charsmap": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}},
}


@pytest.mark.parametrize("name", PANICS)
def test_a_tokenizer_that_panics_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a readable tokenizer"):
        Tokenizer.from_folder(write(tmp_path, BASE | PANICS[name]))


def test_a_panic_on_some_text_is_the_error_of_its_request(tmp_path: Path) -> None:
    """The tokens that the try at loading decodes are long enough for this decoder; others are not."""
    content = BASE | {"decoder": STRIP}
    content["model"] = BASE["model"] | {"vocab": {"aaaaaa": 0, "a": 1}, "unk_token": "aaaaaa"}
    tokenizer = Tokenizer.from_folder(write(tmp_path, content))
    assert tokenizer is not None
    with pytest.raises(RequestError, match=r"tokenizer cannot decode token ids \(.*download it again"):
        tokenizer.text([1], False)
    with pytest.raises(RequestError, match="tokenizer cannot decode tokens"):
        tokenizer.text_of(["a"])


def test_a_prefix_that_ends_the_process_is_refused(tmp_path: Path) -> None:
    """The library cuts the prefix off within a character, and aborts: seen from beside."""
    merges = {"vocab": {"a": 0, "é": 1, "aé": 2}, "merges": [["a", "é"]], "continuing_subword_prefix": "x"}
    folder = write(tmp_path, BASE | {"model": BASE["model"] | merges})
    code = f"from foredraft.model.tokenizer import Tokenizer as T; T.from_folder(__import__('pathlib').Path({str(folder)!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "whose second part lacks the prefix 'x'" in done.stderr


@pytest.mark.parametrize(
    "rules",
    [
        [replace("a", "a" * 10)] * 3,
        [replace("a", "b" * 10), replace("b", "c" * 10)],
        [replace("é", "x" * 100)],
        [replace(".", "aaaaaaaaaa", "Regex")] * 2,
        [{"type": "Prepend", "prepend": "a" * 64}],
        [{"type": "Sequence", "normalizers": [replace("a", "b" * 65)]}],
        [replace("a", "bb"), replace("b", "aa")] * 4,
        [replace("a", "b")] * 1001,
    ],
    ids=["of itself", "of another's", "once", "expressions", "prepended", "nested", "in turns", "many"],
)
@pytest.mark.parametrize("escaped", [False, True])
def test_rules_that_multiply_text_are_refused(rules: list[Any], escaped: bool, tmp_path: Path) -> None:
    """Before the library reads them: it normalises added tokens while it loads them."""
    folder = write(tmp_path, BASE | {"normalizer": {"type": "Sequence", "normalizers": rules}})
    if escaped:
        file = folder / "tokenizer.json"
        file.write_text(file.read_text().replace('"normalizer"', '"normali\\u007aer"'))
    with pytest.raises(
        CheckpointError, match=r"has a normalizer and pre_tokenizer that can make|rules in a row"
    ):
        Tokenizer.from_folder(folder)
    decoders = {"type": "Sequence", "decoders": [each for each in rules if each["type"] == "Replace"]}
    if len(decoders["decoders"]) > 1:
        with pytest.raises(CheckpointError, match=r"has a decoder that can make|rules in a row"):
            Tokenizer.from_folder(write(tmp_path, BASE | {"decoder": decoders}))


def table(*texts: str) -> dict[str, Any]:
    """Return a table of characters that writes these texts, with an empty index."""
    content = struct.pack("<I", 0) + b"".join(text.encode() + b"\0" for text in texts)
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(content).decode()}


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
BERT = {
    "type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None,
    "lowercase": True,
}  # fmt: skip
CTC = {"type": "CTC", "pad_token": "x", "word_delimiter_token": "", "cleanup": True}
WITHOUT_TYPE = {"pattern": {"String": "a"}, "content": "a" * 9}
HIDDEN: dict[str, dict[str, list[Any]]] = {
    "of no type": {"normalizer": [WITHOUT_TYPE] * 2},
    "prepended, of no type": {"normalizer": [{"prepend": "a" * 9}] * 2},
    "nothing sought": {"normalizer": [replace("", "a")] * 7},
    "an expression that matches nothing": {"normalizer": [replace("", "a", "Regex")] * 7},
    "bytes of bytes": {"normalizer": [BYTES] * 7},
    "bytes of bytes before the vocabulary": {"pre_tokenizer": [BYTES] * 7},
    "bytes after a normaliser": {"normalizer": [replace("a", "b" * 40)], "pre_tokenizer": [BYTES]},
    "characters that Unicode writes out": {"normalizer": [replace("ل", "ﷺ"), {"type": "NFKD"}] * 3},
    "capitals that become two characters": {
        "normalizer": [replace("i", "İ"), replace("\N{COMBINING DOT ABOVE}", "İ"), {"type": "Lowercase"}] * 7
    },
    "spaces around characters": {"normalizer": [BERT] * 4},
    "a table": {"normalizer": [table("a", "b" * 65)]},
    "tables": {"normalizer": [table("a" * 9)] * 2},
    "a table after a rule": {"normalizer": [replace("a", "b" * 9), table("a" * 9)]},
    "an empty suffix": {"decoder": [{"type": "BPEDecoder", "suffix": ""}] * 7},
    "an empty suffix of no type": {"decoder": [{"suffix": ""}] * 7},
    "an empty delimiter": {"decoder": [CTC] * 7},
    "a space before each token": {"decoder": [{"type": "WordPiece", "prefix": "##", "cleanup": True}] * 7},
}
PARTS = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders"}


@pytest.mark.parametrize("name", HIDDEN)
def test_rules_that_multiply_text_in_other_ways_are_refused(name: str, tmp_path: Path) -> None:
    content = {key: {"type": "Sequence", PARTS[key]: rules} for key, rules in HIDDEN[name].items()}
    with pytest.raises(CheckpointError, match=r"that can make [\d,]+ characters of one, more than 64"):
        Tokenizer.from_folder(write(tmp_path, BASE | content))


def test_the_bound_holds_for_rules_that_pass(tmp_path: Path) -> None:
    """A text of each Unicode form's longest characters, through as many rules as are let through."""
    text = "ﷺİéل漢ai"
    for name, (key, rules) in ((name, next(iter(found.items()))) for name, found in HIDDEN.items()):
        for count in range(1, len(rules)):
            content = BASE | {key: {"type": "Sequence", PARTS[key]: rules[:count]}}
            try:
                loaded = Tokenizer.from_folder(write(tmp_path, content))
            except CheckpointError:
                break
            assert loaded is not None, name
            inner = loaded.inner
            for each in text:
                if key == "normalizer":
                    long = len(inner.normalizer.normalize_str(each))
                elif key == "pre_tokenizer":
                    long = sum(len(piece) for piece, _ in inner.pre_tokenizer.pre_tokenize_str(each))
                else:
                    long = len(inner.decoder.decode([each] * 8)) // 8
                assert long <= 64 * 18, (name, count, each)


def test_nine_nested_rules_of_an_added_token_take_no_memory(tmp_path: Path) -> None:
    token = {"id": 5, "content": "aaaa", "single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": False}  # fmt: skip
    rules = {"type": "Sequence", "normalizers": [replace("a", "a" * 10)] * 9}
    with pytest.raises(CheckpointError, match="can make 1,000,000,000 characters of one"):
        Tokenizer.from_folder(write(tmp_path, BASE | {"normalizer": rules, "added_tokens": [token]}))


def test_a_template_that_repeats_a_text_is_refused(tmp_path: Path) -> None:
    pieces = [{"Sequence": {"id": "A", "type_id": 0}}] * 100
    with pytest.raises(CheckpointError, match="repeats a text 100 times"):
        Tokenizer.from_folder(write(tmp_path, BASE | {"post_processor": template(*pieces)}))


def test_rules_of_known_tokenizers_are_read(tmp_path: Path) -> None:
    """Of SentencePiece, of XLNet and of tables of characters, which do not multiply each other."""
    table = [replace(one, other) for one, other in (("…", "..."), ("½", "1/2"), ("№", "No."), ("℃", "°C"))]
    rules = [
        {"type": "Prepend", "prepend": "▁"}, replace(" ", "▁"), *table * 3, replace(" {2,}", " ", "Regex"),
        {"type": "NFKD"}, {"type": "Lowercase"}, {"type": "NFKC"},
    ]  # fmt: skip
    content = BASE | {"normalizer": {"type": "Sequence", "normalizers": rules}, "pre_tokenizer": BYTES}
    content["model"] = BASE["model"] | {"vocab": {"a": 0, "normalizer": 1, "decoder": 2}}
    assert Tokenizer.from_folder(write(tmp_path, content)) is not None


def test_a_panic_while_a_server_loads_ends_the_wait() -> None:
    """It is no `Exception`: the app must not say for ever that the model is being loaded."""
    state = pytest.importorskip("foredraft.serve.state")

    class PanicException(BaseException):
        pass

    def load() -> Any:
        raise PanicException("index out of bounds")

    with pytest.raises(RuntimeError, match="loading failed: index out of bounds"):
        asyncio.run(asyncio.wait_for(state._in_a_daemon(load), 20))


def test_loading_a_model_with_such_a_tokenizer_is_one_error(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "model", "llama", tokenizer=True)
    content = json.loads((folder / "tokenizer.json").read_text())
    write(folder, content | PANICS["a template"])
    with pytest.raises(CheckpointError, match="is not a readable tokenizer"):
        foredraft.load(folder)
