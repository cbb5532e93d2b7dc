"""`--json` and `--out` of every command: one JSON document on stdout, or in a file."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from foredraft.cli import main
from tests.cli.conftest import Cli, document

GENERATE = ["generate", "def accept", "--max-new-tokens", "8", "--temperature", "0"]
VERIFY = ["verify", "def accept", "--tokens", "4", "--samples", "64", "--seed", "1"]


def test_the_file_has_what_json_prints_and_scores(pair: list[str], tmp_path: Path, cli: Cli) -> None:
    file = tmp_path / "document.json"
    command = [*GENERATE, *pair, "--out", file, "--logprobs", "1"]
    assert cli(*command, "--json").out == file.read_text()
    cli(*command)
    assert len(document(file.read_text())["outputs"][0]["logprobs"]) == 8


@pytest.mark.parametrize("command", [GENERATE, VERIFY, ["bench"], ["tune"], ["info"]], ids=lambda one: one[0])
def test_stdout_is_no_file_for_the_document(command: list[str], cli: Cli) -> None:
    told = cli(*command, "--out", "-", code=2).err  # nothing but the line, which progress would precede
    assert told == "foredraft: error: --out is '-', which is stdout, not a file; give --json instead\n"


def test_the_trace_page_has_a_file_of_its_own(tmp_path: Path, cli: Cli) -> None:
    told = cli.refused(*GENERATE, "--trace", "-")
    assert told == "--trace is '-', which is stdout, not a file; give a file"
    told = cli.refused(*GENERATE, "--out", tmp_path / "x", "--trace", tmp_path / "x")
    assert "and so is --out; give each a file of its own" in told


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


@pytest.fixture
def full_disk() -> Iterator[None]:
    """Let this process write no file of a kilobyte."""
    import resource

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize(("command", "option"), [*FILES, *FOLDERS])
def test_full_disks_fail(command: list[str], option: str, tmp_path: Path, cli: Cli, full_disk: None) -> None:
    told = cli(*command, option, tmp_path / "x", code=2)
    line = f"foredraft: error: {option} is '{tmp_path / 'x'}', which cannot be written (File too large)\n"
    assert (told.out, told.err) == ("", line)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("command", "option"), FOLDERS)
def test_a_file_for_a_folder_is_refused(command: list[str], option: str, tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "x").write_text("mine")
    for place, problem in (("x", "which is no folder"), ("x/y", "which cannot be written (Not a directory)")):
        told = cli(*command, option, tmp_path / place, code=2).err
        assert f"{option} is '{tmp_path / place}', {problem}" in told
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
