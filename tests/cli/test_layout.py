"""Tables, sentences and help fit a narrow terminal without cutting a word."""

from __future__ import annotations

import re
import sys

import pytest

from foredraft.cli.bench import BY_POLICY, METHODS
from foredraft.cli.render import Painter
from foredraft.cli.words import fitted, table, terminal_width
from tests.support.running import environment, forked, run_code

ROWS = [
    ("workload", "method", "tokens/s", "over plain", "quartiles", "identical"),
    ("prose", "plain", "123.4", "1.00", "1.00-1.00", "8 of 8"),
    ("prose", "llama.cpp", "decodes at batch size 1 only", "", "", ""),
]


def test_a_table_that_fits_is_one_table() -> None:
    assert table(ROWS[:2], 80, keys=2) == table(ROWS[:2]) == [
        "workload  method  tokens/s  over plain  quartiles  identical",
        "prose     plain   123.4     1.00        1.00-1.00  8 of 8",
    ]  # fmt: skip


def test_columns_that_do_not_fit_follow_below_the_same_keys() -> None:
    assert table(ROWS[:2], 40, keys=2) == [
        "workload  method  tokens/s  over plain",
        "prose     plain   123.4     1.00",
        "",
        "workload  method  quartiles  identical",
        "prose     plain   1.00-1.00  8 of 8",
    ]


def test_a_cell_that_is_too_wide_is_broken_between_words() -> None:
    shown = table(ROWS, 40, keys=2)
    assert shown[:4] == [
        "workload  method     tokens/s",
        "prose     plain      123.4",
        "prose     llama.cpp  decodes at batch",
        "                     size 1 only",
    ]
    assert max(map(len, shown)) <= 40


@pytest.mark.parametrize(("columns", "keys"), [(METHODS, 3), (BY_POLICY, 4)])
def test_the_tables_of_bench_fit_60_columns(columns: tuple[str, ...], keys: int) -> None:
    values = ("complete-function", "1", "draft-model", *("adaptive-exit" if keys == 4 else "1234.5",))
    rows = [columns, values + ("8 of 8",) * (len(columns) - 4)]
    shown = table(rows, 60, keys=keys)
    assert max(map(len, shown)) <= 60
    found = {cell for line in shown for cell in re.split("  +", line)}
    assert found >= {cell for row in rows for cell in row}


def test_sentences_break_between_words_and_keep_their_indentation() -> None:
    assert fitted(["  one two-three four", "five"], 13) == ["  one", "  two-three", "  four", "five"]
    assert fitted(["a " + 20 * "x"], 10) == ["a", 20 * "x"], "a long word stays whole"
    assert fitted(["one two three"], None) == ["one two three"]


def test_only_a_terminal_has_a_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "61")
    assert terminal_width(sys.stdout) is None
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert terminal_width(sys.stdout) == 61


def test_the_legend_has_a_line_for_each_colour_where_one_line_is_too_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    for columns, count in ((300, 1), (60, 3)):
        monkeypatch.setenv("COLUMNS", str(columns))
        Painter(sys.stdout, color=True).print_legend()
        shown = re.sub("\x1b\\[[0-9]*m", "", capsys.readouterr().err).splitlines()
        assert len(shown) == count and max(map(len, shown)) <= columns


@pytest.mark.parametrize("command", [[], ["generate"], ["bench"], ["tune"], ["verify"]], ids=" ".join)
def test_help_on_60_columns_cuts_no_word(command: list[str]) -> None:
    def shown(columns: int) -> str:
        code = f"from foredraft.cli import main; main({[*command, '--help']})"
        done = forked(run_code, code, env=environment(COLUMNS=str(columns)))
        return re.sub("[│╭╮╰╯─]", " ", done.stdout)

    narrow = shown(60)
    assert 0 < max(map(len, narrow.splitlines())) <= 60
    assert set(narrow.split()) <= set(shown(500).split())
