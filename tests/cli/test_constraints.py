"""Constraints on the command line: files, refusals before a model is loaded, and what a text then contains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Cli

NO_MODEL = ("generate", "--model", "/nowhere", "x")  # a refusal that names a folder comes too late


@pytest.mark.parametrize(
    ("option", "content", "says"),
    [
        ("--ban-file", b"ab\xff\n", "--ban-file is {file}, which is not UTF-8 text (byte 2); convert it first"),
        ("--ban-file", b"", "--ban-file is {file}, which is empty; give one text a line"),
        ("--ban-file", None, "--ban-file is {file}, which cannot be read (No such file or directory)"),
        ("--json-schema", b"3", "--json-schema is 3; give a JSON schema that allows some text"),
        ("--json-schema", b"false", "--json-schema is False; give a JSON schema that allows some text"),
        ("--json-schema", b'{"$ref": "#/nowhere"}', "Pointer '/nowhere' does not exist"),
        ("--json-schema", b'{"minimum": 36893488147419103232}', "a number beyond 64 bits"),
        ("--json-schema", b'{"oneOf": [{"type": "string"}, {"minLength": 3}]}', "oneOf is supported only where"),
        ("--grammar", b"\xff", "--grammar is {file}, which is not UTF-8 text (byte 0); convert it first"),
        ("--grammar", b'start: "a" foo', "foo"),
    ],
)  # fmt: skip
def test_wrong_files_fail(tmp_path: Path, option: str, content: bytes | None, says: str, cli: Cli) -> None:
    file = tmp_path / "file"
    if content is not None:
        file.write_bytes(content)
    assert says.format(file=repr(str(file))) in cli.refused(*NO_MODEL, option, file)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--regex", "[a-"], "--regex is refused: unclosed character class, at character 1 of '[a-'"),
        (["--ban="], "--ban is ['']; give a string or several, none of them empty"),
        (["--ban-mode", "mask"], "--ban-mode has nothing to ban; give --ban"),
        (["--choice="], "--choice is ['']; give a string or several, none of them empty"),
        (["--json-schema", ' {"type": "array", "uniqueItems": true}'], 'Unimplemented keys: ["uniqueItems"]'),
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_wrong_option_is_refused_before_the_load(arguments: list[str], says: str, cli: Cli) -> None:
    assert says in cli(*NO_MODEL, *arguments, code=2).err


def test_the_text_keeps_to_the_options(tmp_path: Path, cli: Cli) -> None:
    def text(*words: object) -> str:
        found = cli.document("generate --temperature 0 --max-new-tokens 40", *words)
        return str(found["outputs"][0]["text"])

    banned = tmp_path / "banned"
    banned.write_text("return\n\nelse\n", encoding="utf-8")
    written = text("--ban-file", banned, "--ban", "if ", "def fibonacci(n):\n")
    assert written and not any(each in written for each in ("return", "else", "if "))
    schema = tmp_path / "schema"
    schema.write_text('{"enum": ["caf\u00e9", 12]}', encoding="utf-8")
    assert json.loads(text("--json-schema", schema, "x = ")) in ("caf\u00e9", 12)
    assert json.loads(text("--json-schema", '{"enum": ["//", 12]}', "x = ")) in ("//", 12)
    choices = ("caf\u00e9 (a|b)", "-1.5")
    assert text(*(word for each in choices for word in ("--choice", each)), "x = ") in choices
