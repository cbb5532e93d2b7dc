"""The record of a loaded model, which `LLM` wraps and Foredraft's programs read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import foredraft
from foredraft.llm import LLM
from foredraft.llm.loaded import Loaded

ROOT = Path(__file__).parents[2]
FILES = [
    file
    for place in ("src", "tests", "benchmarks", "recipes", "examples")
    for file in (ROOT / place).rglob("*.py")
]


@pytest.fixture(scope="module")
def llm() -> LLM:
    options = {"weights": "int8", "deterministic": False}
    return foredraft.load(drafter="lookup", policy="fixed", max_length=99, **options)


@pytest.mark.heavy
def test_the_record_holds_what_was_loaded(llm: LLM) -> None:
    loaded = llm.loaded
    assert loaded.runner is loaded.engine.target and loaded.spec == loaded.runner.decoder.spec
    assert (loaded.model, loaded.weights, loaded.default_drafter) == ("demo", "int8", "lookup")
    assert (loaded.max_length, loaded.deterministic) == (99, False)
    for name in Loaded.__slots__:
        assert getattr(llm, name, getattr(loaded, name)) == getattr(loaded, name)


def test_no_other_room_reaches_into_a_model(llm: LLM) -> None:
    own = {name for name in (*vars(LLM), *vars(llm)) if name.startswith("_") and not name.endswith("__")}
    assert {"_thread", "_loaded", "_open_thread"} <= own
    reach = re.compile(rf"\b(?:llm|\w+_llm|loaded\([^()]*\)|load\([^()]*\))\.(?:{'|'.join(own)})\b")
    room = (ROOT / "src/foredraft/llm", *(ROOT / "tests/unit").glob("test_llm*.py"))
    found = [
        f"{file.relative_to(ROOT)}: {line.strip()}"
        for file in FILES
        if not any(file.is_relative_to(place) for place in room)
        for line in file.read_text().splitlines()
        if reach.search(line)
    ]
    assert FILES and found == []
