"""`foredraft bench` on tiny random checkpoints: its document, tables, files and errors."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import signal
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foredraft import LLM
from foredraft.bench import bench_run as run
from foredraft.bench import forward_costs
from foredraft.bench import machine_record as machine
from foredraft.bench.bench_records import Bandwidth, BenchReport, Cost, ForwardCosts, ModelRecord, Spread
from foredraft.bench.contender import Timing
from foredraft.bench.contenders import resolve_policies
from foredraft.bench.foredraft_contender import ForedraftContender
from foredraft.cli import main
from foredraft.cli.bench import lines as report_lines
from foredraft.cli.bench import listed, options_of
from foredraft.cli.measuring import BenchOptions
from foredraft.cli.progress import STAGES
from foredraft.kinds import POLICIES
from foredraft.model.tokenizer import Tokenizer
from tests.support.command import without_progress

TEMPLATE = "{% for message in messages %}<{{ message.role }}> {{ message.content }} {% endfor %}"
QUICK = {"--new-tokens": "4", "--repeats": "1", "--methods": "lookup,draft-model", "--device": "cpu"}


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("workloads") / "words.jsonl"
    file.write_text("".join(f'{{"prompt": "def accept(draft, {word}):"}}\n' for word in ("p", "q", "r")))
    return file


class Words(dict[str, str]):
    """A command's options, by name."""

    def command(self, **changes: str) -> list[str]:
        spelled = {f"--{name.replace('_', '-')}": value for name, value in changes.items()}
        return ["bench", *(word for pair in {**self, **spelled}.items() for word in pair)]


@pytest.fixture
def words(models: Path, workload: Path, monkeypatch: pytest.MonkeyPatch) -> Words:
    monkeypatch.setattr(machine, "BYTES", 2**20)
    monkeypatch.setattr(machine, "TRIES", 2)
    monkeypatch.setattr(forward_costs, "REPEATS", 2)
    pair = {"--model": str(models / "big"), "--draft": str(models / "small")}
    return Words(pair | {"--workload": str(workload)} | QUICK)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """The file of --out."""
    return tmp_path / "report.json"


def document(text: str) -> dict[str, Any]:
    def refuse(name: str) -> None:
        raise AssertionError(name)

    found: dict[str, Any] = json.loads(text, parse_constant=refuse)
    return found


def test_stdout_is_one_json_document(words: Words, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    assert main([*words.command(batch="1,2", out=str(file)), "--json"]) == 0
    stdout, stderr = capfd.readouterr()
    assert len(stdout.splitlines()) == 1 and without_progress(stderr) == []
    begun = [STAGES[stage] for stage in ("start", "load", "methods", "bandwidth")]
    shown = [line.removeprefix("foredraft: ") for line in stderr.splitlines()]
    assert [line for line in shown if line not in (STAGES["kernels"], STAGES["profile"])] == [
        *begun, "words, plain outputs",
        *(f"words, batch {batch}{stage}" for batch in (1, 2) for stage in (", warm-up", "")),
    ]  # fmt: skip
    report = BenchReport.from_dict(document(stdout))
    assert document(file.read_text()) == document(stdout)
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.json"]
    assert [(row.workload, row.batch, row.contender) for row in report.rows] == [
        ("words", batch, name) for batch in (1, 2) for name in ("plain", "lookup", "draft-model")
    ]
    assert all(row.exactness is not None and row.exactness.holds for row in report.rows)
    assert report.bandwidth is not None
    assert re.match(r"read: float32 sum, \d threads?,", report.bandwidth.method)
    assert report.options["methods"] == ["lookup", "draft-model"] and report.options["batch"] == [1, 2]


def test_prompts_become_chats_on_request(
    words: Words,
    models: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = Path(shutil.copytree(models / "big", tmp_path / "chat"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    encode, given = LLM.encode, list[Any]()
    monkeypatch.setattr(LLM, "encode", lambda self, prompts: given.append(prompts) or encode(self, prompts))
    command = words.command(model=str(folder), prompts="1", repeats="1")
    assert main([*command, "--chat", "--json"]) == 0
    assert document(capsys.readouterr().out)["options"]["chat"] is True
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    message = {"role": "user", "content": "def accept(draft, p):"}
    assert [tokenizer.encode_chat([message])] in given


def test_stdout_has_a_table_without_json(words: Words, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.command(prompts="2", repeats="2", out=str(out))) == 0
    captured = capsys.readouterr().out.splitlines()
    assert not any(line.startswith("{") for line in captured)
    report = BenchReport.from_dict(document(out.read_text()))
    captured = [line for line in captured if not line.startswith("WARNING: ")]
    assert "temperature 0, 4 tokens, 2 repeats" in captured[0] and "a bare step takes" in captured[0]
    assert captured[2].split()[:3] == ["workload", "batch", "method"]
    for line, row in zip(captured[3:6], report.rows, strict=True):
        cells = line.split()
        assert row.tokens_per_second is not None and row.speedup is not None
        assert cells[:3] == ["words", "1", row.contender]
        assert cells[3:5] == [f"{row.tokens_per_second.median:.1f}", f"{row.speedup.median:.2f}"]
        assert "2 of 2" in line
        if row.measured_over_predicted is not None and row.predicted is not None:
            ratios = [row.predicted.median, row.measured_over_predicted.median]
            assert cells[7:9] == [f"{ratio:.2f}" for ratio in ratios]
        assert cells[6] == ("-" if row.others is None else f"{row.others.median:.2f}")
    assert any("repeats under 30% of its 4-grams" in line for line in captured)
    assert report.turns_remark in captured if report.turns_remark is not None else not report.turns


def test_a_terminal_shows_doubts_first_and_explains_a_share_above_one() -> None:
    costs = ForwardCosts(1, 5, (Cost(1, 1.0, Spread(0.01, 0.01, 0.01, 3)),), {}, 1.1)
    made = BenchReport(
        {"temperature": 0.0, "new_tokens": 4, "repeats": 2, "model": "x", "max_repeated": 0.3, "deterministic": True},
        {"cpu": "a CPU", "cores": 2, "threads": 2, "torch": "2", "highest_load": 3.5},
        (ModelRecord("target", "x", 1, 1, "float32"),), Bandwidth(1e9, "read"), (costs,), (),
    )  # fmt: skip
    load, repeats, about, *rest = report_lines(made)
    assert load.startswith("WARNING: The load rose to 3.5 on 2 cores") and "a bare step takes" in about
    assert repeats.startswith("WARNING: Every method ran only twice")
    assert made.bandwidth_remark is not None and made.bandwidth_remark in rest


def test_a_table_by_policy_follows_the_table_by_method(
    words: Words, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.command(prompts="2", policy="fixed", policies="all", out=str(out))) == 0
    captured = capsys.readouterr()
    shown = captured.out.splitlines()
    report = BenchReport.from_dict(document(out.read_text()))
    shown = [line for line in shown if not line.startswith("WARNING: ")]
    assert [line.split()[2] for line in shown[3:6]] == ["plain", "lookup", "draft-model"]
    assert shown[6] == "" and shown[7].split()[:4] == ["workload", "batch", "method", "policy"]
    assert {row.policy for row in report.policies} == set(POLICIES)
    for line, row in zip(shown[8:], report.policies, strict=False):
        cells = line.split()
        assert row.speedup is not None and row.drafting is not None
        assert cells[:4] == ["words", "1", row.contender, row.policy]
        assert cells[5] == f"{row.speedup.median:.2f}"
        assert f"{row.drafting.mean_draft_length:.2f}" in cells and "2 of 2" in line
    assert len(report.policies) == 4 + 7  # lookup has no draft probabilities for the other three
    note = "foredraft: left out: lookup cannot follow confidence, adaptive-exit, fallback"
    assert without_progress(captured.err) == [note]


def test_a_table_by_policy_is_shown_for_a_single_policy(
    words: Words, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.command(prompts="1", policies="auto")) == 0
    shown = capsys.readouterr().out.splitlines()
    shown = [line for line in shown if not line.startswith("WARNING: ")]
    assert [line.split()[:4] for line in shown[7:10]] == [
        ["workload", "batch", "method", "policy"],
        ["words", "1", "lookup", "auto"],
        ["words", "1", "draft-model", "auto"],
    ]


def test_a_lossy_method_is_labelled(
    words: Words, out: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    html = tmp_path / "x.html"
    options = {"methods": "draft-model,bild", "prompts": "1", "policy": "fixed", "max-draft": "2"}
    assert main(words.command(html=str(html), out=str(out), **options)) == 0
    captured = capsys.readouterr()
    shown = captured.out.splitlines()
    shown = [line for line in shown if not line.startswith("WARNING: ")]
    assert ["lossy" in line for line in shown[3:6]] == [False, False, True]
    assert any(line.endswith("lossy: the text is not the model's own.") for line in shown)
    assert (
        "bild is lossy: its output does not have the model&#39;s own distribution. It reaches"
        in html.read_text()
    )
    row = BenchReport.from_dict(document(out.read_text())).rows[2]
    assert (row.contender, row.lossless, row.policy) == ("bild", False, "fallback")
    assert row.drafting is not None and len(row.drafting.acceptance_by_position) <= 2
    assert without_progress(captured.err) == ["foredraft: bild keeps to policy fallback"]


def test_policy_options_of_fallback_apply_to_bild(words: Words, capsys: pytest.CaptureFixture[str]) -> None:
    command = words.command(methods="bild", prompts="1", policy="fallback")
    lengths = []
    for threshold in ("0", "1"):
        assert main([*command, "--json", "--policy-option", f"threshold={threshold}"]) == 0
        captured = capsys.readouterr()
        assert without_progress(captured.err) == []
        drafting = BenchReport.from_dict(document(captured.out)).rows[1].drafting
        assert drafting is not None
        lengths.append(drafting.mean_draft_length)
    assert lengths[0] > lengths[1] == 0


def test_spaces_around_commas_are_ignored(workload: Path) -> None:
    given = BenchOptions(methods="lookup, plain", policies=" all ,fixed", batch="1, 8")
    options = options_of(given, {})
    assert options.methods == ("lookup", "plain") and options.batch == (1, 8)
    assert resolve_policies(options.policies) == tuple(POLICIES)
    assert listed(f"{workload}, edit-file") == (str(workload), "edit-file")


def test_differing_tokens_are_reported_and_fail(
    words: Words, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = ForedraftContender.run

    def altering(self: ForedraftContender, prompts: list[list[int]], new_tokens: int) -> Timing:
        timing = ran(self, prompts, new_tokens)
        other = tuple((*ids[:-1], ids[-1] ^ 1) for ids in timing.tokens)
        return replace(timing, tokens=other) if self.name == "lookup" else timing

    monkeypatch.setattr(ForedraftContender, "run", altering)
    assert main(words.command()) == 1
    out = capsys.readouterr().out
    assert "lookup on words, batch 1: the tokens DIFFER from plain decoding's" in out
    assert "draft-model on words" not in out
    assert main([*words.command(), "--no-deterministic"]) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"methods": "hope"},
            "--methods is 'hope', but there is no 'hope'; give all, or some of plain, lookup,",
        ),
        ({"methods": "all,hope"}, "--methods is 'all,hope', but there is no 'hope'; give all, or some of"),
        ({"policies": "all, hope"}, "--policies is 'all,hope', but there is no 'hope'; give all, or some of"),
        (
            {"policies": "fixed,hope"},
            "--policies is 'fixed,hope', but there is no 'hope'; give all, or some of",
        ),
        (
            {"policies": "confidence", "methods": "lookup"},
            "--policies is 'confidence', but none of the methods can follow it; give others",
        ),
        (
            {"policy": "confidence", "methods": "lookup,plain"},
            "--policy is 'confidence', but none of the methods can follow it; leave it out",
        ),
        (
            {"policy": "confidence", "methods": "lookup,draft-model"},
            "lookup cannot follow --policy confidence; give another --policy",
        ),
        (
            {"policy": "fixed", "methods": "bild"},
            "--policy is 'fixed', but none of the methods can follow it; leave it out",
        ),
        (
            {"policy": "fixed", "methods": "plain"},
            "--policy is 'fixed', but none of the methods can follow it; leave it out",
        ),
        (
            {"max-draft": "3", "methods": "plain,transformers"},
            "--max-draft is 3, but none of the methods drafts; leave it out",
        ),
        ({"workload": "nought"}, "--workload is 'nought'; give a file, or one of all"),
        ({"batch": "1,two"}, "--batch is '1,two'; give whole numbers, as in 1,8"),
        ({"batch": "0"}, "--batch is '0'; give sizes of 1 or more"),
        ({"prompts": "0"}, "--prompts is 0; give 1 or more"),
        ({"repeats": "0"}, "--repeats is 0; give 1 or more"),
        ({"new-tokens": "1"}, "--new-tokens is 1; give 2 or more"),
        ({"temperature": "-1"}, "--temperature is -1.0; give 0 or more"),
        ({"batch": "4", "max-batch": "2"}, "--max-batch is 2, but --batch asks for 4; leave it out"),
        ({"out": "nowhere/x.json"}, "--out is 'nowhere/x.json'; give a file in a folder that exists"),
        ({"html": "."}, "--html is '.'; give a file in a folder that exists"),
        ({"out": "same", "html": "same"}, "--html is 'same', and so is --out; give each a file of its own"),
        ({"out": "x" * 254}, "which cannot be written (File name too long)"),
        ({"out": "-"}, "--out is '-', which is stdout, not a file; give --json instead"),
        ({"html": "-"}, "--html is '-', which is stdout, not a file; give a file"),
        ({"methods": "retokenize"}, "retokenize needs a draft model with another tokenizer; give --draft"),
        ({"drafter": "lookup"}, "Unknown option: --drafter"),
        ({"max-draft": "0"}, "--max-draft is 0; give a whole number, 1 or more"),
    ],
)
def test_a_wrong_option_is_refused_in_one_line(
    words: Words,
    changes: dict[str, str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words.command(**changes)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    [line] = without_progress(captured.err)
    assert line.startswith("foredraft: error: ") and message in line


def test_a_broken_line_of_a_workload_is_named(
    words: Words, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt": "x"}\n{"prompt"}\n')
    assert main(words.command(workload=str(file))) == 2
    captured = capsys.readouterr().err
    assert (
        captured.startswith(f"foredraft: error: line 2 of {file} is not JSON (") and captured.count("\n") == 1
    )


def test_notes_are_written_to_stderr(
    words: Words, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = BenchReport({"deterministic": True}, {}, (), None, (), (), ("left out: lookup",))
    monkeypatch.setattr(run, "bench", lambda *given, **named: made)
    assert main([*words.command(), "--json"]) == 0
    captured = capsys.readouterr()
    assert without_progress(captured.err) == ["foredraft: left out: lookup"]
    assert BenchReport.from_dict(document(captured.out)) == made


def test_an_interrupt_shows_the_finished_rows(
    words: Words, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    made = BenchReport({"deterministic": True}, {}, (), None, (), (), finished=False)
    monkeypatch.setattr(run, "bench", lambda *given, **named: made)
    assert main([*words.command(out=str(tmp_path / "part.json")), "--json"]) == 130
    captured = capsys.readouterr()
    assert without_progress(captured.err) == ["foredraft: interrupted; the rows above were done"]
    assert (
        document(captured.out)["finished"]
        is document((tmp_path / "part.json").read_text())["finished"]
        is False
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_files_are_written_if_stdout_fails(
    words: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = words.command(
        out=str(tmp_path / "a.json"), html=str(tmp_path / "a.html"), prompts="1", methods="lookup"
    )
    full = open("/dev/full", "w")  # noqa: SIM115
    monkeypatch.setattr(sys, "stdout", full)
    assert main(command) == 2
    with suppress(OSError):  # the text that could not be written is still in the file's buffer
        full.close()
    assert without_progress(capsys.readouterr().err) == [
        "foredraft: error: stdout cannot be written (No space left on device); redirect it to another file"
    ]
    assert document((tmp_path / "a.json").read_text())["finished"]
    assert (tmp_path / "a.html").read_text().startswith("<!doctype html>")


def test_an_interrupt_before_the_first_row_writes_nothing(
    words: Words, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    ran, count = ForedraftContender.run, itertools.count()

    def interrupted(self: ForedraftContender, prompts: list[list[int]], new_tokens: int) -> Timing:
        if next(count) == 5:
            signal.raise_signal(signal.SIGINT)
        return ran(self, prompts, new_tokens)

    monkeypatch.setattr(ForedraftContender, "run", interrupted)
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a background process would ignore the signal
    try:
        assert main(words.command(out=str(tmp_path / "x.json"))) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    captured = capsys.readouterr()
    assert (captured.out, without_progress(captured.err)) == ("", ["foredraft: interrupted"])
    assert list(tmp_path.iterdir()) == []
