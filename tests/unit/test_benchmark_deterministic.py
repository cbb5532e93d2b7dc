"""The benchmark of the `deterministic` option, on three prompts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import deterministic, workload
from foredraft.profiling import others


def test_both_sides_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "HERE", tmp_path)
    monkeypatch.setattr(others, "ATTEMPTS", 1)  # a turn that other programs disturb is not repeated
    monkeypatch.setattr(
        deterministic, "heldout", lambda count: ["def add(a, b):\n", "x = 1\n", "import os\n"][:count]
    )
    turns: list[tuple[bool, int, str]] = []
    decode = deterministic.decode

    def noted(llm: Any, prompts: list[list[int]], drafter: str, new_tokens: int) -> Any:
        turns.append((llm.deterministic, len(prompts), drafter))
        return decode(llm, prompts, drafter, new_tokens)

    monkeypatch.setattr(deterministic, "decode", noted)
    deterministic.main("--rows 1,3 --new-tokens 6 --repeats 2 --max-draft 2 --name small".split())
    found = json.loads((tmp_path / "results" / "small.json").read_text())
    assert [(run["rows"], run["drafter"]) for run in found["runs"]] == [
        (rows, drafter) for rows in (1, 3) for drafter in ("none", "draft-model")
    ]
    for run in found["runs"]:
        assert run["equal_to_plain_alone"]["on"] == run["prompts"] == run["rows"]
        assert run["on_over_off"]["count"] == 2
        on, off = (run["tokens_per_second"][side]["median"] for side in ("on", "off"))
        assert on > 0 and off > 0
    several = [side for side, count, drafter in turns if (count, drafter) == (3, "draft-model")]
    assert several == [False, True, True, False] * 2  # two warm-up turns, two timed turns


def test_ratios_are_taken_within_a_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    done = SimpleNamespace(token_ids=[1, 2])
    speeds = {True: iter([9.0, 9.0, 9.0, 4.0, 6.0, 8.0]), False: iter([9.0, 9.0, 2.0, 2.0, 2.0])}
    monkeypatch.setattr(deterministic, "decode", lambda llm, *_: (next(speeds[llm]), [done]))
    found = deterministic.compare({True: True, False: False}, [[1]], "none", 2, 3)  # type: ignore[dict-item]
    assert found["on_over_off"]["median"] == 3
    assert found["tokens_per_second"]["on"]["median"] == 6
