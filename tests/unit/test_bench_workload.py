"""Where a benchmark's prompts come from, and which files are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foredraft import ConfigError
from foredraft.bench import workload
from foredraft.bench.workload import Workload, load_workloads

GOOD = '{"prompt": "def f():", "kind": "free"}\n'


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with two shipped workloads, in place of the real one."""
    folder = tmp_path / "bench" / "workloads"
    folder.mkdir(parents=True)
    monkeypatch.setattr(workload, "__file__", str(tmp_path / "bench" / "workload.py"))
    for name in ("tables", "edits"):
        lines = [json.dumps({"prompt": f"{name} {number}"}) for number in range(10)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_shipped_ones_are_known_by_name(shelf: Path) -> None:
    tables = Workload("tables", tuple(f"tables {number}" for number in range(10)))
    assert load_workloads(("tables",)) == [tables]
    assert [found.name for found in load_workloads(("all",))] == ["edits", "tables"]
    assert load_workloads(("tables", "all", "tables"))[0] == tables
    assert len(load_workloads(("tables", "all", "tables"))) == 2


def test_a_checkout_has_them_among_its_benchmarks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "benchmarks" / "workloads"
    folder.mkdir(parents=True)
    (folder / "tables.jsonl").write_text(GOOD)
    monkeypatch.setattr(workload, "__file__", str(tmp_path / "src" / "foredraft" / "bench" / "workload.py"))
    assert load_workloads(("all",)) == [Workload("tables", ("def f():",))]


def test_some_prompts_are_spread_over_all(shelf: Path) -> None:
    (found,) = load_workloads(("tables",), prompts=3)
    assert found.prompts == ("tables 0", "tables 3", "tables 6")
    assert len(load_workloads(("tables",), prompts=99)[0].prompts) == 10


def test_a_file_goes_by_its_own_name_unless_that_is_taken(shelf: Path) -> None:
    for folder in ("here", "there"):
        (shelf / folder).mkdir()
        (shelf / folder / "mine.jsonl").write_text(GOOD)
    (shelf / "tables.jsonl").write_text("\n" + GOOD + "\n")
    names = [
        str(shelf / "here" / "mine.jsonl"),
        str(shelf / "there" / "mine.jsonl"),
        str(shelf / "tables.jsonl"),
    ]
    found = load_workloads((*names, "tables"))
    assert [one.name for one in found] == ["mine", *names[1:], "tables"]
    assert found[2].prompts == ("def f():",) and len(found[3].prompts) == 10


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD + "{", r"line 2 of .*w.jsonl is not JSON \(.*double quotes.*\); give lines like"),
        (GOOD + "\n" + "[1]", r'line 3 of .*w.jsonl has no "prompt"; give'),
        ('{"text": "x"}', r'line 1 of .*w.jsonl has no "prompt"; give'),
        ('{"prompt": 3}', r'line 1 of .*w.jsonl has no "prompt"; give'),
        ('{"prompt": ""}', r'line 1 of .*w.jsonl has no "prompt"; give'),
        ("\n \n", "w.jsonl holds no prompts; give"),
        (b"\xff", r"w.jsonl is not UTF-8 text \(byte 0\)"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, text: str | bytes, message: str) -> None:
    file = tmp_path / "w.jsonl"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=message) as caught:
        load_workloads((str(file),))
    assert "\n" not in str(caught.value)


def test_what_is_not_there_is_named_with_what_is(shelf: Path) -> None:
    with pytest.raises(ConfigError, match="workload is 'nought'; give a file, or one of all, edits, tables"):
        load_workloads(("tables", "nought"))
    with pytest.raises(ConfigError, match="workload is ''"):
        load_workloads(("",))


def test_a_copy_without_workloads_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "__file__", str(tmp_path / "a" / "b" / "c" / "workload.py"))
    with pytest.raises(ConfigError, match="no workloads come with this copy"):
        load_workloads(("all",))
