"""`--help` shows examples and the options that most people need, and `--help-all` every option."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from foredraft.cli.bench import BENCH, TUNE
from foredraft.cli.commands import COMMANDS, app
from foredraft.cli.options import (
    BOUNDS,
    CONSTRAINTS,
    DRAFT,
    DRAFTED,
    DRAFTER,
    PREFIXES,
    REQUEST,
    TARGET,
    TEXTS,
    ChatOptions,
    DocumentOptions,
    OutputOptions,
    PromptOptions,
)
from foredraft.cli.verify import VERIFY
from foredraft.cli.words import made_ready
from foredraft.kinds.tables import DRAFTERS, POLICIES, RULES
from tests.cli.conftest import Cli

Shown = Callable[[str], list[str]]


def names(*groups: type[Any]) -> list[str]:
    return [field.name for group in groups for field in fields(group)]


OPTIONS: dict[str, list[str]] = {
    "generate": [
        *(TARGET | BOUNDS | DRAFT | DRAFTED | DRAFTER | TEXTS | PREFIXES | REQUEST | CONSTRAINTS),
        *names(ChatOptions, OutputOptions),
    ],
    "bench": [*(TARGET | BOUNDS | DRAFT | DRAFTED | BENCH), *names(PromptOptions, DocumentOptions)],
    "tune": [*(TARGET | BOUNDS | TUNE), *names(PromptOptions, DocumentOptions)],
    "info": [*(TARGET | DRAFT), *names(DocumentOptions)],
    "doctor": [*(TARGET | DRAFT), "dry_run", *names(DocumentOptions)],
    "verify": [
        *(TARGET | BOUNDS | DRAFT | DRAFTED | DRAFTER | VERIFY),
        *names(PromptOptions, DocumentOptions),
    ],
}
# of a page of --help on a terminal of 80 columns, where every drafter takes a line or two
MAX_LINES, MAX_OPTIONS = 68, 10


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> Shown:
    """Return the lines of a command on a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    return lambda line: cli(line).out.splitlines()


def options_in(lines: list[str]) -> list[str]:
    """Return the options of a page, those that begin a row of a panel."""
    return [found[1] for line in lines if (found := re.match(r"│ (--[\w-]+)", line))]


@pytest.mark.parametrize("command", OPTIONS)
def test_help_is_short_and_begins_with_examples(command: str, shown: Shown) -> None:
    lines = shown(f"{command} --help")
    assert len(lines) <= MAX_LINES
    assert lines[0].startswith(f"Usage: foredraft {command} ")
    assert all(line.startswith("  foredraft ") and len(line) <= 80 for line in lines[2:5])
    assert 4 <= len(options_in(lines)) <= MAX_OPTIONS
    assert {"--model", "--device", "--json"} <= {*options_in(lines)}
    assert any("All options: --help-all" in line for line in lines)
    assert shown(f"{command} -h") == lines


@pytest.mark.parametrize("command", OPTIONS)
def test_help_all_has_every_option_once(command: str, shown: Shown) -> None:
    lines = shown(f"{command} --help-all")
    assert sorted(options_in(lines)) == sorted(f"--{name.replace('_', '-')}" for name in OPTIONS[command])
    assert not any("─ Options ─" in line for line in lines)
    assert {*options_in(shown(f"{command} --help"))} <= {*options_in(lines)}


def test_each_policy_and_each_drafter_begins_a_line_and_the_lossy_rule_is_marked(shown: Shown) -> None:
    lines = shown("generate --help-all")
    text = " ".join(" ".join(lines).replace("│", " ").split())
    assert f"bild: {RULES['bild'].summary} (not lossless)" in text
    for name in (*POLICIES, *DRAFTERS):
        assert any(re.match(rf"│ +• {name}: ", line) for line in lines), name


@pytest.mark.parametrize("line", [line for each in COMMANDS.values() for line in each.usage.splitlines()[1:]])
def test_each_example_is_a_valid_command(line: str) -> None:
    app.parse_args(
        made_ready(shlex.split(line.partition("  #")[0])[1:], app), print_error=False, exit_on_error=False
    )


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("generate x y", "generate has no place for 'y'; put a prompt of several words in quotes"),
        ("generate a b c --json", "generate has no place for 'b c'; put a prompt of several"),
        ("bench report.html", "bench has no place for 'report.html'; give options as --name value"),
    ],
)
def test_too_many_arguments_are_refused_with_the_remedy(line: str, says: str, cli: Cli) -> None:
    assert cli.refused(line).startswith(says)


def test_the_list_of_commands_has_the_first_line_of_each_help() -> None:
    for command, each in COMMANDS.items():
        function = getattr(importlib.import_module(f"foredraft.cli.{each.module}"), command.split()[-1])
        assert function.__doc__.splitlines()[0] == each.summary, command


def test_a_process_does_not_walk_over_its_imports_for_garbage() -> None:
    """Nor when it ends, whatever the exit code."""
    told = "import atexit, gc; atexit.register(lambda: print(gc.get_threshold()[0], gc.get_freeze_count() > 9_999))"
    for words, code in ((["--version"], 0), (["nosuch"], 2)):
        script = (
            f"{told}; import sys; from foredraft.cli import main; sys.argv[1:] = {words}; sys.exit(main())"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
        assert done.returncode == code and done.stdout.endswith("50000 True\n")
