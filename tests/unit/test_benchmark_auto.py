"""The benchmark of the policy `auto` with good and bad drafters, on one prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import auto, workload


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(workload, "HERE", tmp_path)
    prompts = ["def add(a, b):\n", "import os\n"]
    monkeypatch.setattr(auto, "heldout", lambda count: prompts[:count])
    (tmp_path / "results").mkdir()
    return tmp_path / "results"


def test_drafters_are_right_exactly_where_the_case_says(results: Path) -> None:
    options = "--prompts 1 --new-tokens 24 --repeats 1 --lengths 3 --loads 1 --name small"
    auto.main(["--cases", "random,alternate,dear", *options.split()])
    found = json.loads((results / "small.json").read_text(), parse_constant=pytest.fail)
    cases: dict[str, dict[str, Any]] = {
        case["case"]: {each["name"]: each for each in case["contenders"]} for case in found["cases"]
    }
    for contenders in cases.values():
        assert set(contenders) == {"plain", "plain, again", "auto, first request", "auto", "fixed 3"}
        assert all(each["identical_to_plain"] for each in contenders.values())
        assert contenders["plain"]["mean_accepted_length"] == 1
    assert cases["random"]["fixed 3"]["mean_accepted_length"] == 1
    # the target corrects a wrong token, so the next draft starts with a right one
    assert 1 < cases["alternate"]["fixed 3"]["mean_accepted_length"] <= 2
    assert cases["dear"]["fixed 3"]["mean_accepted_length"] > 3
