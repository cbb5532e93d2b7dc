"""`--json` and `--out` of every command: one JSON document on stdout, or in a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foredraft.cli import main

GENERATE = ["generate", "def accept", "--max-new-tokens", "8", "--temperature", "0"]
VERIFY = ["verify", "def accept", "--tokens", "4", "--samples", "64", "--seed", "1"]


@pytest.fixture
def pair(models: Path) -> list[str]:
    return ["--model", str(models / "big"), "--draft", str(models / "small"), "--device", "cpu"]


@pytest.mark.parametrize(("command", "code"), [(GENERATE, 0), (VERIFY, 3)], ids=["generate", "verify"])
def test_the_document_is_printed_alone_and_written_beside_the_text(
    command: list[str], code: int, pair: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "document.json"
    assert main([*command, *pair, "--json"]) == code
    [printed] = capsys.readouterr().out.splitlines()
    assert main([*command, *pair, "--out", str(file)]) == code
    text = capsys.readouterr().out
    assert text and "{" not in text.splitlines()[-1]
    assert json.loads(file.read_text()).keys() == json.loads(printed).keys()
    assert [found.name for found in tmp_path.iterdir()] == ["document.json"]


def test_the_file_has_what_json_prints(
    pair: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "document.json"
    assert main([*GENERATE, *pair, "--json", "--out", str(file), "--logprobs", "1"]) == 0
    assert file.read_text() == capsys.readouterr().out


def test_log_probabilities_go_to_the_file(
    pair: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "document.json"
    assert main([*GENERATE, *pair, "--out", str(file), "--logprobs", "1"]) == 0
    assert len(json.loads(file.read_text())["outputs"][0]["logprobs"]) == 8


@pytest.mark.parametrize(
    "command", [GENERATE, VERIFY, ["bench"], ["tune"], ["info"]], ids=lambda words: words[0]
)
@pytest.mark.parametrize(
    ("file", "problem"),
    [
        ("-", "which is stdout, not a file; give --json instead"),
        ("no/x", "give a file in a folder that exists"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    command: list[str], file: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--out", file]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert f"--out is '{file}'" in captured.err and problem in captured.err


def test_the_trace_page_is_not_written_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GENERATE, "--trace", "-"]) == 2
    assert "--trace is '-', which is stdout, not a file; give a file" in capsys.readouterr().err


def test_one_file_is_not_written_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "x")
    assert main([*GENERATE, "--out", file, "--trace", file]) == 2
    assert "and so is --out; give each a file of its own" in capsys.readouterr().err
