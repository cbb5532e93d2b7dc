"""Every command and every program in the README, the quick start and the guides runs as it stands."""

from __future__ import annotations

import io
import re
import shlex
import sys
from pathlib import Path

import pytest

from foredraft.cli import main
from tests.support.pages import EXECUTED, Page
from tests.support.running import ROOT, python

LANGUAGES = {"python", "sh", "text"}  # text is not run: what is printed, or what needs the network


def commands() -> list[object]:
    """A case for each command, wherever it stands; what takes minutes says so in its comment: slow here."""
    cases: dict[tuple[str, ...], object] = {}
    for page in EXECUTED:
        for number, line in page.shell:
            if line.startswith("foredraft "):
                marks = [pytest.mark.slow, pytest.mark.timeout(3600)] if "minutes" in line else []
                case = pytest.param(line, id=f"{page.name}:{number}", marks=marks)
                cases.setdefault(tuple(shlex.split(line, comments=True)), case)
    return list(cases.values())


@pytest.mark.parametrize("line", commands())
def test_commands(
    line: str, models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shlex.split(line, comments=True)
    monkeypatch.chdir(models)
    given = b""
    if "<" in words:
        *words, _, file = words
        given = Path(file).read_bytes()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
    code = main(words[1:])
    told = capsys.readouterr()
    expected = re.search(r"#.*\bexit (\d+)$", line)
    assert code == (int(expected[1]) if expected else 0), told.err
    assert told.err if code == 2 else told.out


@pytest.mark.parametrize("page", [page for page in EXECUTED if page.python], ids=lambda page: page.name)
def test_python(page: Page, models: Path, tmp_path: Path) -> None:
    program = tmp_path / f"page_{page.path.stem}.py"
    program.write_text(page.python, encoding="utf-8")
    assert python(str(program), cwd=models).stdout


@pytest.mark.parametrize("file", ["chat.py", "compare_drafters.py"])
def test_the_examples_that_take_a_model_run_with_one(file: str, models: Path) -> None:
    assert python(str(ROOT / "examples" / file), "big", "small", cwd=models).stdout


@pytest.mark.parametrize("page", EXECUTED, ids=lambda page: page.name)
def test_nothing_is_left_out(page: Page) -> None:
    """A block is of a kind that is run here, or is plain text; other commands are those of the README that
    `.ci/run` runs."""
    assert {block.language for block in page.blocks} <= LANGUAGES
    assert page.text.count("```") == 2 * len(page.blocks)
    setup = [line for _, line in Page(ROOT / "README.md").shell if line.startswith("python3 ")]
    assert len(setup) == 2
    for _, line in page.shell:
        assert line.startswith("foredraft ") or line in setup, line
