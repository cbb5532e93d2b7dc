"""`--help` shows examples and the options that most people need, and `--help-all` every option."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields
from typing import Any

import pytest

from foredraft.cli import main
from foredraft.cli.commands import app
from foredraft.cli.constraint_options import CONSTRAINTS
from foredraft.cli.help import EXAMPLES
from foredraft.cli.measuring import BenchOptions, PromptOptions, TuneOptions, VerifyOptions
from foredraft.cli.options import (
    BOUNDS,
    DRAFT,
    DRAFTED,
    DRAFTER,
    REQUEST,
    TARGET,
    TEXTS,
    ChatOptions,
    DocumentOptions,
    OutputOptions,
)
from foredraft.cli.words import made_ready
from foredraft.kinds import DRAFTERS, POLICIES


def names(*groups: type[Any]) -> list[str]:
    return [field.name for group in groups for field in fields(group)]


OPTIONS: dict[str, list[str]] = {
    "generate": [
        *(TARGET | BOUNDS | DRAFT | DRAFTED | DRAFTER | TEXTS | REQUEST | CONSTRAINTS),
        *names(ChatOptions, OutputOptions),
    ],
    "bench": [*(TARGET | BOUNDS | DRAFT | DRAFTED), *names(BenchOptions, PromptOptions, DocumentOptions)],
    "tune": [*(TARGET | BOUNDS), *names(TuneOptions, PromptOptions, DocumentOptions)],
    "info": [*(TARGET | DRAFT), *names(DocumentOptions)],
    "doctor": [*(TARGET | DRAFT), "dry_run", *names(DocumentOptions)],
    "verify": [
        *(TARGET | BOUNDS | DRAFT | DRAFTED | DRAFTER),
        *names(VerifyOptions, PromptOptions, DocumentOptions),
    ],
}
# of a page of --help on a terminal of 80 columns, where every drafter takes a line or two
MAX_LINES, MAX_OPTIONS = 68, 10


def shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> list[str]:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*words]) == 0
    return capsys.readouterr().out.splitlines()


def options_in(lines: list[str]) -> list[str]:
    """Return the options of a page, those that begin a row of a panel."""
    return [found[1] for line in lines if (found := re.match(r"│ (--[\w-]+)", line))]


@pytest.mark.parametrize("command", OPTIONS)
def test_help_is_short_and_begins_with_examples(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = shown(capsys, monkeypatch, command, "--help")
    assert len(lines) <= MAX_LINES
    assert lines[0].startswith(f"Usage: foredraft {command} ")
    assert all(line.startswith("  foredraft ") and len(line) <= 80 for line in lines[2:5])
    assert 4 <= len(options_in(lines)) <= MAX_OPTIONS
    assert {"--model", "--device", "--json"} <= {*options_in(lines)}
    assert any("All options: --help-all" in line for line in lines)
    assert shown(capsys, monkeypatch, command, "-h") == lines


@pytest.mark.parametrize("command", OPTIONS)
def test_help_all_has_every_option_once(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = shown(capsys, monkeypatch, command, "--help-all")
    assert sorted(options_in(lines)) == sorted(f"--{name.replace('_', '-')}" for name in OPTIONS[command])
    assert not any("─ Options ─" in line for line in lines)
    common = options_in(shown(capsys, monkeypatch, command, "--help"))
    assert {*common} <= {*options_in(lines)}


def test_each_policy_and_each_drafter_begins_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = shown(capsys, monkeypatch, "generate", "--help-all")
    for name in (*POLICIES, *DRAFTERS):
        assert any(re.match(rf"│ +• {name}: ", line) for line in lines), name


@pytest.mark.parametrize("line", [line for _, examples in EXAMPLES.values() for line, _ in examples])
def test_each_example_is_a_valid_command(line: str) -> None:
    app.parse_args(made_ready(shlex.split(line)[1:], app), print_error=False, exit_on_error=False)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["generate", "def", "fibonacci"],
            "generate has no place for 'fibonacci'; put a prompt of several words in quotes",
        ),
        (["generate", "a", "b", "c", "--json"], "generate has no place for 'b c'; put a prompt of several"),
        (["bench", "report.html"], "bench has no place for 'report.html'; give options as --name value"),
    ],
)
def test_too_many_arguments_are_refused_with_the_remedy(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith(f"foredraft: error: {message}")
