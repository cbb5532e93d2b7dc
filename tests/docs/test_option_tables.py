"""The tables of options in the guides are those that their declarations make."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.option_tables import PAGES, brought_up_to_date

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", PAGES)
def test_the_tables_of_a_page_are_up_to_date(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert "<!-- options: " in text
    assert brought_up_to_date(text) == text, "run python -m recipes.option_tables"
