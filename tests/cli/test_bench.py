"""`foredraft bench` on tiny random checkpoints: its document, tables, files and errors."""

from __future__ import annotations

import itertools
import re
import signal
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foredraft import LLM
from foredraft.bench import bench_run as run
from foredraft.bench.bench_records import Bandwidth, BenchReport, Cost, ForwardCosts, ModelRecord, Spread
from foredraft.bench.contender import ForedraftContender, Timing
from foredraft.bench.contenders import resolve_policies
from foredraft.cli import main
from foredraft.cli.bench import lines as report_lines
from foredraft.cli.bench import listed, options_of
from foredraft.cli.render import STAGES
from foredraft.kinds.tables import POLICIES
from tests.cli.conftest import ChatModel, Cli, Words, document
from tests.support.command import without_progress
from tests.support.interrupting import handler_of_sigint

QUICK = {"new_tokens": 4, "repeats": 1, "methods": "lookup,draft-model", "device": "cpu"}


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("workloads") / "words.jsonl"
    file.write_text("".join(f'{{"prompt": "def accept(draft, {word}):"}}\n' for word in ("p", "q", "r")))
    return file


@pytest.fixture
def words(models: Path, workload: Path, quick_bench: None) -> Words:
    pair = {"model": models / "big", "draft": models / "small", "workload": workload}
    return Words("bench", pair | QUICK)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "report.json"


def tables(text: str) -> list[str]:
    """Return the lines without doubts of this machine."""
    return [line for line in text.splitlines() if not line.startswith("WARNING: ")]


def read(file: Path) -> BenchReport:
    return BenchReport.from_dict(document(file.read_text()))


def test_stdout_is_one_json_document(words: Words, out: Path, cli: Cli) -> None:
    stdout, stderr = cli(*words(batch="1,2", out=out), "--json")
    assert without_progress(stderr) == []
    begun = [STAGES[stage] for stage in ("start", "load", "methods", "bandwidth")]
    shown = [line.removeprefix("foredraft: ") for line in stderr.splitlines()]
    assert [line for line in shown if line not in (STAGES["kernels"], STAGES["profile"])] == [
        *begun, "words, plain outputs",
        *(f"words, batch {batch}{stage}" for batch in (1, 2) for stage in (", warm-up", "")),
    ]  # fmt: skip
    report = BenchReport.from_dict(document(stdout))
    assert out.read_text() == stdout and [*out.parent.iterdir()] == [out]
    assert [(row.workload, row.batch, row.contender) for row in report.rows] == [
        ("words", batch, name) for batch in (1, 2) for name in ("plain", "lookup", "draft-model")
    ]
    assert all(row.exactness is not None and row.exactness.holds for row in report.rows)
    assert report.bandwidth is not None
    assert re.match(r"read: float32 sum, \d threads?,", report.bandwidth.method)
    assert report.options["methods"] == ["lookup", "draft-model"] and report.options["batch"] == [1, 2]


def test_prompts_become_chats_on_request(
    words: Words, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    model = ChatModel(models / "big", tmp_path / "chat")
    encode, given = LLM.encode, list[Any]()
    monkeypatch.setattr(LLM, "encode", lambda self, prompts: given.append(prompts) or encode(self, prompts))
    command = words(model=model.folder, prompts=1, methods="plain")
    assert cli.document(*command, "--chat")["options"]["chat"] is True
    assert [model.encode(user="def accept(draft, p):")] in given


def test_stdout_has_a_table_by_method_and_one_by_policy(words: Words, out: Path, cli: Cli) -> None:
    shown = tables(cli(*words(prompts=2, repeats=2, policies="auto", out=out)).out)
    assert not any(line.startswith("{") for line in shown)
    report = read(out)
    assert "temperature 0, 4 tokens, 2 repeats" in shown[0] and "a bare step takes" in shown[0]
    assert shown[2].split()[:3] == ["workload", "batch", "method"]
    for line, row in zip(shown[3:6], report.rows, strict=True):
        cells = line.split()
        assert row.tokens_per_second is not None and row.speedup is not None
        assert cells[:3] == ["words", "1", row.contender]
        assert cells[3:5] == [f"{row.tokens_per_second.median:.1f}", f"{row.speedup.median:.2f}"]
        assert "2 of 2" in line
        if row.measured_over_predicted is not None and row.predicted is not None:
            ratios = [row.predicted.median, row.measured_over_predicted.median]
            assert cells[7:9] == [f"{ratio:.2f}" for ratio in ratios]
        assert cells[6] == ("-" if row.others is None else f"{row.others.median:.2f}")
    assert [line.split()[:4] for line in shown[7:10]] == [
        ["workload", "batch", "method", "policy"],
        *(["words", "1", method, "auto"] for method in ("lookup", "draft-model")),
    ]
    assert any("repeats under 30% of its 4-grams" in line for line in shown)
    assert report.turns_remark in shown if report.turns_remark is not None else not report.turns


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


def test_a_lossy_method_is_labelled(words: Words, out: Path, cli: Cli) -> None:
    html = out.with_name("x.html")
    options = {"methods": "draft-model,bild", "prompts": 1, "policy": "fixed", "max_draft": 2}
    shown, err = cli(*words(html=html, out=out, **options))
    shown = tables(shown)
    assert ["lossy" in line for line in shown[3:6]] == [False, False, True]
    assert any(line.endswith("lossy: the text is not the model's own.") for line in shown)
    label = "bild is lossy: its output does not have the model&#39;s own distribution. It reaches"
    assert label in html.read_text()
    row = read(out).rows[2]
    assert (row.contender, row.lossless, row.policy) == ("bild", False, "fallback")
    assert row.drafting is not None and len(row.drafting.acceptance_by_position) <= 2
    assert without_progress(err) == ["foredraft: bild keeps to policy fallback"]


def test_policy_options_of_fallback_apply_to_bild(words: Words, cli: Cli) -> None:
    command = words(methods="bild", prompts=1, policy="fallback")
    lengths = []
    for threshold in (0, 1):
        out, err = cli(*command, "--json", "--policy-option", f"threshold={threshold}")
        drafting = BenchReport.from_dict(document(out)).rows[1].drafting
        assert without_progress(err) == [] and drafting is not None
        lengths.append(drafting.mean_draft_length)
    assert lengths[0] > lengths[1] == 0


def test_spaces_around_commas_are_ignored(workload: Path) -> None:
    given = {"methods": "lookup, plain", "policies": " all ,fixed", "batch": "1, 8"}
    options = options_of(given, {})
    assert options.methods == ("lookup", "plain") and options.batch == (1, 8)
    assert resolve_policies(options.policies) == tuple(POLICIES)
    assert listed(f"{workload}, edit-file") == (str(workload), "edit-file")


def test_differing_tokens_are_told_and_fail(words: Words, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    ran = ForedraftContender.run

    def altering(self: ForedraftContender, prompts: list[list[int]], new_tokens: int) -> Timing:
        timing = ran(self, prompts, new_tokens)
        other = tuple((*ids[:-1], ids[-1] ^ 1) for ids in timing.tokens)
        return replace(timing, tokens=other) if self.name == "lookup" else timing

    monkeypatch.setattr(ForedraftContender, "run", altering)
    out = cli(*words(), code=1).out
    assert "lookup on words, batch 1: the tokens DIFFER from plain decoding's" in out
    assert "draft-model on words" not in out
    cli(*words(), "--no-deterministic")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"methods": "all,hope"}, "--methods is 'all,hope', but there is no 'hope'; give all, or some of"),
        ({"policies": "all, hope"}, "--policies is 'all,hope', but there is no 'hope'; give all, or some of"),
        ({"policy": "fixed", "methods": "bild"}, "--policy is 'fixed', but none of the methods can follow"),
        ({"max_draft": "3", "methods": "plain"}, "--max-draft is 3, but none of the methods drafts; leave"),
        ({"batch": "1,two"}, "--batch is '1,two'; give whole numbers, as in 1,8"),
        ({"batch": "0"}, "--batch is '0'; give sizes of 1 or more"),
        ({"prompts": "0"}, "--prompts is 0; give 1 or more"),
        ({"repeats": "0"}, "--repeats is 0; give 1 or more"),
        ({"new_tokens": "1"}, "--new-tokens is 1; give 2 or more"),
        ({"temperature": "-1"}, "--temperature is -1.0; give 0 or more"),
        ({"batch": "4", "max_batch": "2"}, "--max-batch is 2, but --batch asks for 4; leave it out"),
        ({"out": "same", "html": "same"}, "--html is 'same', and so is --out; give each a file of its own"),
        ({"methods": "retokenize"}, "retokenize needs a draft model with another tokenizer; give --draft"),
        ({"drafter": "lookup"}, "Unknown option: --drafter"),
    ],
)
def test_a_wrong_option_is_refused(
    words: Words,
    changes: dict[str, str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cli: Cli,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert says in cli.refused(*words(**changes))


@pytest.mark.parametrize(
    ("finished", "code", "told"),
    [(True, 0, "left out: lookup"), (False, 130, "interrupted; the rows above were done")],
)
def test_notes_and_an_interrupt_are_written_to_stderr_after_the_rows(
    words: Words, out: Path, finished: bool, code: int, told: str, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    notes = (told,) if finished else ()
    made = BenchReport({"deterministic": True}, {}, (), None, (), (), notes, finished=finished)
    monkeypatch.setattr(run, "bench", lambda *given, **named: made)
    printed, err = cli(*words(out=out), "--json", code=code)
    assert without_progress(err) == [f"foredraft: {told}"]
    assert BenchReport.from_dict(document(printed)) == read(out) == made


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_files_are_written_if_stdout_fails(
    words: Words, out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    html = out.with_name("a.html")
    full = open("/dev/full", "w")  # noqa: SIM115
    monkeypatch.setattr(sys, "stdout", full)
    assert main(words(out=out, html=html, prompts=1, methods="lookup")) == 2
    with suppress(OSError):  # the text that could not be written is still in the file's buffer
        full.close()
    assert without_progress(capsys.readouterr().err) == [
        "foredraft: error: stdout cannot be written (No space left on device); redirect it to another file"
    ]
    assert read(out).finished and html.read_text().startswith("<!doctype html>")


def test_an_interrupt_before_the_first_row_writes_nothing(
    words: Words, out: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    ran, count = ForedraftContender.run, itertools.count()

    def interrupted(self: ForedraftContender, prompts: list[list[int]], new_tokens: int) -> Timing:
        if next(count) == 5:
            signal.raise_signal(signal.SIGINT)
        return ran(self, prompts, new_tokens)

    monkeypatch.setattr(ForedraftContender, "run", interrupted)
    with handler_of_sigint():
        printed, err = cli(*words(out=out), code=130)
    assert (printed, without_progress(err)) == ("", ["foredraft: interrupted"])
    assert [*out.parent.iterdir()] == []
