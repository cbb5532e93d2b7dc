"""The lists of rooms and files are made of the docstrings, and what the architecture names exists."""

from __future__ import annotations

import re
from pathlib import Path

from recipes.room_list import ARCHITECTURE, FILES, brought_up_to_date, list_of_files

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "foredraft"


def test_the_rooms_are_what_the_packages_say_of_themselves() -> None:
    text = (ROOT / ARCHITECTURE).read_text(encoding="utf-8")
    assert "| `decode/` | The loop: " in text
    assert brought_up_to_date(text) == text, "run python -m recipes.room_list"


def test_the_files_are_what_the_modules_say_of_themselves() -> None:
    assert (ROOT / FILES).read_text(encoding="utf-8") == list_of_files(), "run python -m recipes.room_list"


def test_every_file_that_the_architecture_names_exists() -> None:
    named = re.findall(r"`([a-z_/]+\.(?:py|inc))`", (ROOT / ARCHITECTURE).read_text(encoding="utf-8"))
    assert len(named) > 50
    missing = {
        name
        for name in named
        if not (ROOT / name).exists() and not (PACKAGE / name).exists() and not [*PACKAGE.rglob(name)]
    }
    assert not missing
