"""Every command and program in the README, the quick start, the losslessness page and the guides runs unchanged."""

from __future__ import annotations

import io
import re
import runpy
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from foredraft.cli import main
from tests.support.pages import EXECUTED, Page
from tests.support.running import ROOT

SETUP = (  # lines of the README
    "python3 -m venv .venv && . .venv/bin/activate",
    "pip install -c constraints.txt .",
    "pip install -c constraints.txt -e '.[dev]'",
    "python -m pytest -n auto",
)
LANGUAGES = {"python", "sh", "text"}  # text is not run: output, or commands that need the network or hours


def commands() -> list[object]:
    """Return one case per distinct command. The word "minutes" in a command's comment marks the case as slow."""
    cases: dict[tuple[str, ...], object] = {}
    for page in EXECUTED:
        for number, line in page.shell:
            if line.startswith("foredraft "):
                marks = [pytest.mark.slow, pytest.mark.timeout(3600)] if "minutes" in line else []
                case = pytest.param(line, id=f"{page.name}:{number}", marks=marks)
                cases.setdefault(tuple(shlex.split(line, comments=True)), case)
    return list(cases.values())


@pytest.mark.parametrize("line", commands())
def test_command_exits_as_its_comment_says(
    line: str, models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shlex.split(line, comments=True)
    monkeypatch.chdir(models)
    stdin = b""
    if "<" in words:
        *words, _, file = words
        stdin = Path(file).read_bytes()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
    code = main(words[1:])
    output = capsys.readouterr()
    expected = re.search(r"#.*\bexit (\d+)$", line)
    assert code == (int(expected[1]) if expected else 0), output.err
    assert output.err if code == 2 else output.out


@pytest.fixture
def ran(
    models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    def ran(file: Path, *words: str) -> str:
        monkeypatch.chdir(models)
        monkeypatch.setattr(sys, "argv", [str(file), *words])
        runpy.run_path(str(file), run_name="__main__")
        return capsys.readouterr().out

    return ran


@pytest.mark.parametrize("page", [page for page in EXECUTED if page.python], ids=lambda page: page.name)
def test_python_blocks_of_a_page_are_one_program(page: Page, ran: Callable[..., str], tmp_path: Path) -> None:
    program = tmp_path / f"page_{page.path.stem}.py"
    program.write_text(page.python, encoding="utf-8")
    assert ran(program)


@pytest.mark.parametrize("file", ["chat.py", "compare_drafters.py"])
def test_examples_with_model_arguments_run_with_two_models(file: str, ran: Callable[..., str]) -> None:
    assert ran(ROOT / "examples" / file, "big", "small")


@pytest.mark.parametrize("page", EXECUTED, ids=lambda page: page.name)
def test_every_block_is_run_or_is_plain_text(page: Page) -> None:
    """The set-up commands are the exception: `.ci/run` runs them."""
    assert {block.language for block in page.blocks} <= LANGUAGES
    assert page.text.count("```") == 2 * len(page.blocks)
    for _, line in page.shell:
        assert line.startswith("foredraft ") or (page.name == "README.md" and line in SETUP), line
