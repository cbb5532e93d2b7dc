"""Tables of measured figures say what the committed results say."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import figures

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", figures.PAGES)
def test_tables_say_what_the_results_say(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert figures.brought_up_to_date(text) == text, "run python benchmarks/figures.py --write"


def test_every_table_stands_somewhere() -> None:
    found = [
        match["name"]
        for page in figures.PAGES
        for match in figures.BLOCK.finditer((ROOT / page).read_text(encoding="utf-8"))
    ]
    assert sorted(found) == sorted(figures.TABLES)


def test_an_old_figure_is_found_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for page in figures.PAGES:
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / page).write_text((ROOT / page).read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(figures, "HERE", tmp_path / "benchmarks")  # results that were read are remembered
    assert figures.main([]) == 0
    whole = (tmp_path / "README.md").read_text(encoding="utf-8")
    line = next(line for line in figures.speed() if line.startswith("| draft model ÷ own"))
    (tmp_path / "README.md").write_text(whole.replace(line, line.replace(".", ".9")), encoding="utf-8")
    assert figures.main([]) == 1
    assert capsys.readouterr().out == "README.md: does not say what the results say\n"
    assert figures.main(["--write"]) == 0
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == whole


def test_a_table_that_there_is_not() -> None:
    with pytest.raises(KeyError, match="no such"):
        figures.brought_up_to_date("<!-- figures: no such -->\n<!-- /figures -->\n")
