"""`--json` and `--out` of every command: one JSON document on stdout, or in a file."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from foredraft.cli import main
from tests.support.running import forked

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


NOWHERE = ["--model", "/nowhere"]  # refused later than a file
TRAIN = [*NOWHERE, "--data", "/nowhere"]
# Every option of every command that names a file or a folder to write.
FILES = [
    *(([*GENERATE, *NOWHERE], option) for option in ("--out", "--trace")),
    *((["bench", *NOWHERE], option) for option in ("--out", "--html")),
    *((["tune", *NOWHERE], option) for option in ("--out", "--html", "--plan-out")),
    ([*VERIFY, *NOWHERE], "--out"),
    (["info", *NOWHERE], "--out"),
]
FOLDERS = [
    (["quantise", *NOWHERE], "--out"),
    *((["train", "adapter", *TRAIN], option) for option in ("--out", "--work")),
    (["train", "draft", *TRAIN], "--out"),
]


def _run_on_a_full_disk(arguments: list[str]) -> None:
    """Run a command that cannot write a file of a kilobyte."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, resource.RLIM_INFINITY))
    sys.exit(main(arguments))


@pytest.mark.parametrize(("command", "option"), [*FILES, *FOLDERS])
def test_a_full_disk_is_found_before_the_work(command: list[str], option: str, tmp_path: Path) -> None:
    done = forked(_run_on_a_full_disk, *command, option, str(tmp_path / "x"))
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert (
        line == f"foredraft: error: {option} is '{tmp_path / 'x'}', which cannot be written (File too large)"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the device that is always full")
@pytest.mark.parametrize(("command", "option"), FILES)
def test_a_device_that_takes_nothing_is_refused_before_the_work(
    command: list[str], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, option, "/dev/full"]) == 2
    line = f"foredraft: error: {option} is '/dev/full', which cannot be written (No space left on device)\n"
    assert capsys.readouterr().err == line


@pytest.mark.parametrize(("command", "option"), FOLDERS)
def test_a_file_in_the_place_of_a_folder_is_refused_before_the_work(
    command: list[str], option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x").write_text("mine")
    for place, problem in (("x", "which is no folder"), ("x/y", "which cannot be written (Not a directory)")):
        assert main([*command, option, str(tmp_path / place)]) == 2
        assert f"{option} is '{tmp_path / place}', {problem}" in capsys.readouterr().err
    assert (tmp_path / "x").read_text() == "mine"


def test_a_stdout_on_a_full_disk_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with (tmp_path / "text").open("w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        monkeypatch.setattr(os, "fstatvfs", lambda _: SimpleNamespace(f_blocks=9, f_bavail=0))
        assert main([*GENERATE, *NOWHERE]) == 2
    line = "stdout cannot be written (No space left on device); redirect it to another file"
    assert capsys.readouterr().err == f"foredraft: error: {line}\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the device that is always full")
@pytest.mark.parametrize("options", [[], ["--n", "2"], ["--json"]], ids=" ".join)
def test_a_stdout_that_takes_no_text_is_one_line(
    pair: list[str], options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full = open("/dev/full", "w")  # noqa: SIM115
    monkeypatch.setattr(sys, "stdout", full)
    assert main([*GENERATE, *pair, *options]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith("stdout cannot be written (No space left on device); redirect it to another file")
    with suppress(OSError):
        full.close()
