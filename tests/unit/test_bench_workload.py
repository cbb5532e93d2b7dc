"""The sources of a benchmark's prompts, the files that are refused, and the workloads that are shipped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foredraft import ConfigError, demo
from foredraft.bench import workload
from foredraft.bench.workload import Workload, load_workloads
from foredraft.model.tokenizer import Tokenizer
from recipes.demo.corpus import PACKAGES

GOOD = '{"prompt": "def f():", "kind": "free"}\n'


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with two shipped workloads instead of the real one."""
    folder = tmp_path / "bench" / "workloads"
    folder.mkdir(parents=True)
    monkeypatch.setattr(workload, "__file__", str(tmp_path / "bench" / "workload.py"))
    for name in ("tables", "edits"):
        lines = [json.dumps({"prompt": f"{name} {number}"}) for number in range(10)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_shipped_workloads_are_found_by_name(package: Path) -> None:
    tables = Workload("tables", tuple(f"tables {number}" for number in range(10)))
    assert load_workloads(("tables",)) == [tables]
    assert [found.name for found in load_workloads(("all",))] == ["edits", "tables"]
    assert load_workloads(("tables", "all", "tables"))[0] == tables
    assert len(load_workloads(("tables", "all", "tables"))) == 2


def test_a_checkout_reads_its_own_workloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "benchmarks" / "workloads"
    folder.mkdir(parents=True)
    (folder / "tables.jsonl").write_text(GOOD)
    monkeypatch.setattr(workload, "__file__", str(tmp_path / "src" / "foredraft" / "bench" / "workload.py"))
    assert load_workloads(("all",)) == [Workload("tables", ("def f():",))]


def test_a_subset_of_prompts_is_spread_evenly(package: Path) -> None:
    (found,) = load_workloads(("tables",), prompts=3)
    assert found.prompts == ("tables 0", "tables 3", "tables 6")
    assert len(load_workloads(("tables",), prompts=99)[0].prompts) == 10


def test_a_file_is_named_by_its_stem_unless_that_is_taken(package: Path) -> None:
    for folder in ("here", "there"):
        (package / folder).mkdir()
        (package / folder / "mine.jsonl").write_text(GOOD)
    (package / "tables.jsonl").write_text("\n" + GOOD + "\n")
    names = [str(package / name) for name in ("here/mine.jsonl", "there/mine.jsonl", "tables.jsonl")]
    found = load_workloads((*names, "tables"))
    assert [one.name for one in found] == ["mine", *names[1:], "tables"]
    assert found[2].prompts == ("def f():",) and len(found[3].prompts) == 10


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD + "{", r"line 2 of .*w.jsonl is not JSON \(.*double quotes.*\); give lines like"),
        (GOOD + "\n" + "[1]", r'line 3 of .*w.jsonl has no "prompt"; give'),
        ('{"text": "x"}', r'line 1 of .*w.jsonl has no "prompt"; give'),
        ("[" * 100_000, r"line 1 of .*w.jsonl is not JSON \(lists and objects are nested more than 50"),
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


def test_an_unknown_workload_is_refused_with_the_known_names(package: Path) -> None:
    with pytest.raises(ConfigError, match="workload is 'nought'; give a file, or one of all, edits, tables"):
        load_workloads(("tables", "nought"))
    with pytest.raises(ConfigError, match="workload is ''"):
        load_workloads(("",))


def test_a_package_without_workloads_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "__file__", str(tmp_path / "a" / "b" / "c" / "workload.py"))
    with pytest.raises(ConfigError, match="no workloads come with this copy"):
        load_workloads(("all",))


# --- what is shipped: cut from held-out modules only, and short enough for the demo models ------------------

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FILES = sorted((BENCHMARKS / "workloads").glob("*.jsonl"))
KINDS = "complete-function write-docstring edit-file fill-table write-tests free".split()
POSITIONS, NEW_TOKENS = 1024, 128
LICENCES = {licence for _, licence, _ in PACKAGES}


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


LINES = {file.stem: lines_of(file) for file in FILES}


def test_six_workloads_have_at_least_twenty_prompts_each_of_which_no_two_are_equal() -> None:
    assert sorted(LINES) == sorted(KINDS)
    assert all(len(several) >= 20 for several in LINES.values())
    prompts = [line["prompt"] for several in LINES.values() for line in several]
    assert len(set(prompts)) == len(prompts)


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_are_of_held_out_modules_and_end_within_a_line(kind: str) -> None:
    """The tokenizer would join a line break with the indentation of the next line."""
    heldout = {line["module"] for line in lines_of(BENCHMARKS / "prompts" / "heldout.jsonl")}
    for line in LINES[kind]:
        assert set(line) == {"prompt", "kind", "module", "name", "licence"}
        assert line["kind"] == kind and line["licence"] in LICENCES and line["module"] in heldout
        assert not line["prompt"].endswith(("\n", " "))
    modules = [line["module"] for line in LINES[kind]]
    assert max(map(modules.count, modules)) <= len(modules) // 3, "a module gives a third at most"


def test_a_prompt_and_its_continuation_fit_half_the_positions() -> None:
    tokenizer = Tokenizer.from_folder(demo.target_path())
    assert tokenizer is not None
    longest = max(len(tokenizer.encode(line["prompt"])) for each in LINES.values() for line in each)
    assert longest + NEW_TOKENS <= POSITIONS // 2
