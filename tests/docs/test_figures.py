"""The tables of measured figures in README and docs match the committed results."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import figures

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", figures.PAGES)
def test_tables_match_the_results(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert figures.brought_up_to_date(text) == text, "run python -m benchmarks.figures --write"


def test_every_table_is_on_a_page() -> None:
    found = [
        match["name"]
        for page in figures.PAGES
        for match in figures.BLOCK.finditer((ROOT / page).read_text(encoding="utf-8"))
    ]
    assert sorted(found) == sorted(figures.TABLES)


def test_an_outdated_figure_is_found_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for page in figures.PAGES:
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / page).write_text((ROOT / page).read_text(encoding="utf-8"), encoding="utf-8")
    assert figures.main([]) == 0  # it keeps the results that it reads
    monkeypatch.setattr(figures, "HERE", tmp_path / "benchmarks")
    assert figures.main([]) == 0
    page = tmp_path / "docs/reproduction.md"
    whole = page.read_text(encoding="utf-8")
    line = next(line for line in figures.speed() if line.startswith("| `draft-model` ÷ plain"))
    page.write_text(whole.replace(line, line.replace(".", ".9")), encoding="utf-8")
    assert figures.main([]) == 1
    assert capsys.readouterr().out == "docs/reproduction.md: tables are out of date\n"
    assert figures.main(["--write"]) == 0
    assert page.read_text(encoding="utf-8") == whole


def test_an_unknown_table_is_refused() -> None:
    with pytest.raises(KeyError, match="no such"):
        figures.brought_up_to_date("<!-- figures: no such -->\n<!-- /figures -->\n")


def test_a_finalist_has_its_measured_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search has its best predicted and its best measured plan; a ranking may find the same plan."""

    def finalist(skips: str, predicted: float, measured: float) -> dict[str, object]:
        measured_figures = {
            "c": 0.2,
            "alpha": 0.9,
            "predicted_tau": 4.5,
            "tau": 4.6,
            "prompts": 16,
            "identical": True,
        }
        return {"skips": skips, "predicted": predicted, "speedup": {"median": measured}, **measured_figures}

    plans = {
        "search": {"skips": "skip:attn=1", "predicted": 2.5},
        "greedy": {"skips": "skip:attn=1", "predicted": 2.5, "plans": 32},
        "clasp": {"skips": "skip:attn=3", "predicted": 2.3, "plans": 32},
        "random of its size": {"skips": "skip:attn=4", "predicted": 1.5, "plans": 1000},
    }
    finalists = [finalist("skip:attn=1", 2.5, 2.6), finalist("skip:attn=2", 2.4, 2.7)]
    made = {"plans": plans, "finalists": finalists, "winner": 1}
    monkeypatch.setattr(figures, "result", lambda name: made)
    measured = "0.20 | 0.90 | 4.50, 4.60"
    assert figures.the_search()[2:] == [
        f"| search, best predicted | `skip:attn=1` | {measured} | 2.50 | 2.60 | 16 of 16 |",
        f"| search, best measured | `skip:attn=2` | {measured} | 2.40 | 2.70 | 16 of 16 |",
        f"| greedy ranking | as search, best predicted | {measured} | 2.50 | 2.60 | 16 of 16 |",
        "| dynamic programme (CLaSp) | `skip:attn=3` |  |  |  | 2.30 |  |  |",
        "| best of 1,000 random plans of the same size | `skip:attn=4` |  |  |  | 1.50 |  |  |",
    ]
    made["winner"] = None
    assert not any("best measured" in line for line in figures.the_search())
