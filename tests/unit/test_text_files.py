"""Texts that people write: a byte order mark, with which editors of Windows begin files, is no part of any."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from foredraft.bench.workload import _read
from foredraft.cli.job import Conversation
from foredraft.cli.prompts import read_prompt, read_prompts, read_text
from foredraft.cli.words import STDIN
from foredraft.model.chat import FILE, ChatTemplate
from foredraft.model.config import read_json
from foredraft.serve.limits import Keys
from foredraft.serve.settings import Settings

SAID = [{"role": "user", "content": "hi"}]


def conversation(file: Path) -> Any:
    made = Conversation(None)
    made.load(file)
    return made.turns


def template(file: Path) -> Any:
    file.rename(file.with_name(FILE))
    made = ChatTemplate.from_folder(file.parent)
    assert made is not None
    return made.templates["default"]


READERS: dict[str, tuple[str, Callable[[Path], Any], Any]] = {
    "an option": ("return\nx", lambda file: read_text("ban_file", file), "return\nx"),
    "prompts": ("a\nb", lambda file: read_prompts((), str(file), "m"), ["a", "b"]),
    "a workload": ('{"prompt": "a"}', _read, ["a"]),
    "a conversation": (json.dumps({"messages": SAID}), conversation, SAID),
    "a config": ('{"a": 1}', read_json, {"a": 1}),
    "a template": ("{{ messages }}", template, "{{ messages }}"),
    "keys": ("alice one\n", lambda file: Keys.of(Settings(api_key_file=file)).check("Bearer one"), "alice"),
}


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["without", "with"])
@pytest.mark.parametrize("kind", READERS)
def test_a_file_is_read_without_its_mark(tmp_path: Path, kind: str, mark: bytes) -> None:
    text, read, want = READERS[kind]
    file = tmp_path / "file.jsonl" if kind == "a workload" else tmp_path / "file"
    file.write_bytes(mark + text.encode())
    assert read(file) == want


def test_stdin_is_read_without_its_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"\xef\xbb\xbfhi\n")))
    assert read_prompt(STDIN, "m") == "hi"
