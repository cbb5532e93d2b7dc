"""The code that the scripts of benchmarks/ share."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import workload


def test_heldout_prompts_can_start_anywhere() -> None:
    assert workload.heldout(3, 2) == workload.heldout(5)[2:]
    assert len(workload.heldout(3, 2)) == 3
    assert workload.heldout(3, 10**6) == []


def test_the_index_lists_every_script() -> None:
    index = (workload.HERE / "README.md").read_text(encoding="utf-8")
    assert {file.stem for file in workload.HERE.glob("[!_]*.py")} == {
        name for name in re.findall(r"`(\w+)`", index) if (workload.HERE / f"{name}.py").exists()
    }


def test_a_result_is_written_and_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(workload, "HERE", tmp_path)
    workload.write("found", {"machine": workload.machine()})
    (file,) = (tmp_path / "results").iterdir()
    assert file.name == "found.json"
    assert json.loads(file.read_text()) == json.loads(capsys.readouterr().out.splitlines()[-1])
