"""The code that the scripts of benchmarks/ share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import workload


def test_heldout_prompts_can_start_anywhere() -> None:
    assert workload.heldout(3, 2) == workload.heldout(5)[2:]
    assert len(workload.heldout(3, 2)) == 3
    assert workload.heldout(3, 10**6) == []


def test_a_result_is_written_and_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(workload, "HERE", tmp_path)
    workload.write("found", {"machine": workload.machine()})
    (file,) = (tmp_path / "results").iterdir()
    assert file.name == "found.json"
    assert json.loads(file.read_text()) == json.loads(capsys.readouterr().out.splitlines()[-1])
