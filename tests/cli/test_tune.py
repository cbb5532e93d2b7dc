"""`foredraft tune` on a small model: its report, the plan it saves, and the mistakes it refuses."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import foredraft
from foredraft.bench.forward_costs import measure_costs
from foredraft.cli import main
from foredraft.cli.progress import STAGES, ProgressLines
from foredraft.drafters.plan_files import find_plan, model_hash, read_plan
from foredraft.drafters.skips import Skips
from foredraft.llm.loaded import Loaded
from foredraft.model.runner import Runner
from foredraft.model.tokenizer import Tokenizer
from foredraft.tune import calibration, finals
from foredraft.tune import run as run_module
from foredraft.tune.calibration import CalibrationText, CalibrationTexts
from foredraft.tune.exit_costs import ExitCosts
from foredraft.tune.plan_costs import measure_plan_costs
from foredraft.tune.tune_records import Finalist
from tests.support.checkpoints import save_pair
from tests.support.command import without_progress
from tests.support.loaded import engine_of

TEMPLATE = "{% for message in messages %}<{{ message.role }}> {{ message.content }} {% endfor %}"
QUICK = (
    *("--tokens", "48", "--trials", "16", "--max-draft", "3"),
    *("--new-tokens", "6", "--repeats", "1"),
)


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_pair(tmp_path_factory.mktemp("models")) / "big")


@pytest.fixture
def command(big: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"def accept{word}(draft, p, q)\n" for word in "abcdefgh"))
    return ["tune", "--model", big, "--no-kernels", "--json", "--prompts", str(prompts), *QUICK]


@pytest.fixture(autouse=True)
def few_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time every cost a few times only, since no test here asks for exact ones."""
    monkeypatch.setattr(run_module, "measure_plan_costs", partial(measure_plan_costs, repeats=3))
    monkeypatch.setattr(finals, "measure_costs", partial(measure_costs, repeats=3))


@pytest.fixture
def wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the plan with the best prediction win: speeds of a model this small are noise."""
    monkeypatch.setattr(run_module, "_winner", lambda finalists: 0)


def with_options(command: list[str], *arguments: str) -> list[str]:
    """The command with these options; they replace its own."""
    own = dict(zip(command[5::2], command[6::2], strict=True))  # after `tune --model DIR --no-kernels --json`
    return [
        *command[:5],
        *(
            word
            for pair in (own | dict(zip(arguments[::2], arguments[1::2], strict=True))).items()
            for word in pair
        ),
    ]


def document(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_winning_plan_is_saved_where_generate_finds_it(
    command: list[str], big: str, tmp_path: Path, wins: None, capsys: pytest.CaptureFixture[str]
) -> None:
    out, html = tmp_path / "plan.json", tmp_path / "report.html"
    assert main(with_options(command, "--plan-out", str(out), "--html", str(html))) == 0
    report = document(capsys)
    assert report["finished"] and len(report["trials"]) == 16 and len(report["finalists"]) == 3
    for finalist in report["finalists"]:
        assert finalist["identical"] is True
        assert finalist["tau"] == pytest.approx(finalist["predicted_tau"], rel=1e-9)
        assert finalist["speedup"]["count"] == finalist["prompts"] == 4
    plan = read_plan(out)
    saved = find_plan(model_hash(Path(big)))
    assert saved == plan and str(plan.skips) == report["finalists"][0]["skips"]
    assert (plan.max_draft, plan.dtype, plan.device) == (report["finalists"][0]["draft"], "float32", "cpu")
    assert report["plan_files"][0] == str(out) and len(report["plan_files"]) == 2 and report["notes"] == []
    llm = foredraft.load(big, drafter="layer-skip", policy="fixed", kernels=False, max_length=64)
    [output] = llm.generate("def accept", foredraft.SamplingParams(temperature=0, max_new_tokens=8))
    assert output.stats.drafted > 0
    page = html.read_text()
    assert "The best plans in real decoding" in page and page.count("<svg") == 3


def test_stdout_has_a_table_and_out_has_the_document(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "report.json"
    command = with_options(command, "--trials", "2", "--finalists", "1", "--out", str(out))
    assert main([word for word in command if word != "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    report = json.loads(out.read_text())
    lines = [line for line in lines if not line.startswith("WARNING: The load rose")]
    assert lines[0].startswith(f"{report['model']}: 2 trials of ")
    assert lines[2].split()[:4] == ["plan", "draft", "over", "plain"]
    assert lines[3].split()[0] == report["finalists"][0]["skips"]
    assert not any(line.startswith("{") for line in lines)


def test_a_plan_file_holds_its_temperature_and_the_report_names_the_replaced_plan(
    command: list[str], tmp_path: Path, wins: None, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    for temperature in (0, 1):
        more = (
            "--temperature",
            str(temperature),
            "--trials",
            "2",
            "--finalists",
            "1",
            "--plan-out",
            str(out),
        )
        before = read_plan(out) if temperature else None
        assert main(with_options(command, *more)) == 0
        assert read_plan(out).temperature == temperature
        report = document(capsys)["notes"]
        assert report == ([] if before is None else [
            f"The winner replaces the earlier plan {before.skips}, measured at temperature 0 at"
            f" {before.speedup:.2f} x plain decoding on {before.date}."
        ])  # fmt: skip


def test_an_early_exit_that_wins_is_saved_and_used(
    command: list[str], big: str, tmp_path: Path, wins: None, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Costs are faked, so that early exits are the cheapest plans."""
    measure = run_module.measure_plan_costs
    cheap = ExitCosts((0.01, 0.01), ((1.0, 0.0),) * 3)
    monkeypatch.setattr(
        run_module,
        "measure_plan_costs",
        lambda *given, **named: replace(measure(*given, **named), verifying=(9.0,) * 3, exit=cheap),
    )
    out, html = tmp_path / "plan.json", tmp_path / "report.html"
    assert main(with_options(command, "--plan-out", str(out), "--html", str(html))) == 0
    report = document(capsys)
    assert {trial["origin"] for trial in report["trials"]} >= {"exit 1", "exit 2"}
    won = report["finalists"][0]
    assert won["identical"] is True and won["tau"] == pytest.approx(won["predicted_tau"], rel=1e-9)
    plan = read_plan(out)
    assert str(plan.skips) == won["skips"] == f"exit:{plan.exit}" and plan.exit in (1, 2)
    assert main(["generate", "def accept", "--model", big, "--drafter", "layer-skip", "--policy", "fixed",
                 "--no-kernels", "--max-new-tokens", "8", "--temperature", "0", "--json"]) == 0  # fmt: skip
    assert document(capsys)["stats"]["drafted"] > 0
    assert (
        engine_of(foredraft.load(big, drafter="layer-skip", kernels=False)).drafters["layer-skip"].skips
        == plan.skips
    )


def test_calibration_texts_fit_when_few_prompts_are_left(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each prompt gets more new tokens, because half of the prompts are held out."""
    few = tmp_path / "few.txt"
    few.write_text("".join(f"def accept{word}(draft, p, q)\n" for word in "abcd"))
    assert main(with_options(command, "--prompts", str(few), "--tokens", "100", "--trials", "1")) in (0, 1)
    report = document(capsys)
    assert report["tokens"] >= 100
    assert report["importance"] == {}, "one trial is too few"


def test_fewer_tokens_than_asked_for_are_told(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibration, "MIN_TOKENS", 40)
    assert main(with_options(command, "--tokens", "90000", "--trials", "4")) in (0, 1)
    report = document(capsys)
    assert 40 <= report["tokens"] < 90_000
    assert any(
        note.startswith(
            f"The prompts give {report['tokens']:,} calibration tokens without repetition, of the 90,000"
        )
        for note in report["notes"]
    )
    assert all(one["skips"] != str(Skips()) for one in report["finalists"])


def test_prompts_become_chats_on_request(
    command: list[str],
    big: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = Path(shutil.copytree(big, tmp_path / "chat"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    hold_out, given = run_module.hold_out, []
    monkeypatch.setattr(run_module, "hold_out", lambda prompts: given.append(prompts) or hold_out(prompts))
    chat = with_options(command, "--trials", "1", "--system", "Be brief.")
    chat[2] = str(folder)
    assert main([*chat, "--chat"]) in (0, 1)
    options = document(capsys)["options"]
    assert (options["chat"], options["system"]) == (True, "Be brief.")
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    system, user = (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "def accepta(draft, p, q)"},
    )
    assert given[0][0] == tokenizer.encode_chat([system, user])
    assert main(chat) == 2
    assert "--system has no effect without --chat" in capsys.readouterr().err


def test_no_plan_is_written_if_none_wins(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_module, "_winner", lambda finalists: None)
    assert main(with_options(command, "--plan-out", str(tmp_path / "plan.json"))) == 0
    report = document(capsys)
    assert report["winner"] is None and report["plan_files"] == []
    assert not (tmp_path / "plan.json").exists() and not (tmp_path / "cache" / "plans").exists()


def finalist(speedup: float, identical: bool | None, tau: float = 2.0, error: float = 0.0) -> Finalist:
    from foredraft.bench.bench_records import Spread

    spread = Spread(speedup, speedup, speedup, 8)
    return Finalist("skip:attn=1", 2, 1.2, 2.0, tau, 0.9, 0.5, spread, identical, 8, spread, 8, 2.1, error)


@pytest.mark.parametrize(
    ("several", "winner"),
    [
        ([(1.1, True), (1.3, True), (1.2, True)], 1),
        ([(1.1, True), (1.3, False)], 0),  # faster, but with other tokens
        ([(1.1, None)], 0),
        ([(0.99, True), (1.0, True)], None),
        ([(1.1, None), (1.3, None, 2.07), (1.2, None, 1.93)], 0),  # faster, but not with the predicted tau
        ([(1.1, None), (1.3, None, 2.05, 0.015)], 1),
        ([(1.1, None), (1.3, None, 2.0, 0.016)], 0),  # faster, but with an inaccurate tau
        ([], None),
    ],
)
def test_the_fastest_finalist_without_an_objection_wins(
    several: list[tuple[Any, ...]], winner: int | None
) -> None:
    assert run_module._winner([finalist(*one) for one in several]) == winner


def test_a_finalist_holds_the_tau_of_its_trial(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The tau on the calibration texts, which differs from that on the decoded texts."""
    assert main(with_options(command, "--trials", "6")) == 0
    report = document(capsys)
    trials = {trial["skips"]: trial["taus"][trial["draft"] - 1] for trial in report["trials"]}
    assert [finalist["trial_tau"] for finalist in report["finalists"]] == [
        trials[finalist["skips"]] for finalist in report["finalists"]
    ]


def test_a_search_resumes_and_another_temperature_is_another_study(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_texts, temperatures = run_module.write_calibration_texts, []

    def watched(llm: Any, prompts: Any, tokens: int, temperature: float, progress: Any) -> Any:
        temperatures.append(temperature)
        return write_texts(llm, prompts, tokens, temperature, progress)

    monkeypatch.setattr(run_module, "write_calibration_texts", watched)
    assert main(with_options(command, "--trials", "4", "--finalists", "1")) == 0
    first = document(capsys)
    assert main(with_options(command, "--trials", "6", "--finalists", "1")) == 0
    second = document(capsys)
    assert second["study"] == first["study"] and second["trials"][:4] == first["trials"]
    assert len(second["trials"]) == 6 and second["costs"] == first["costs"]
    assert main(with_options(command, "--trials", "3", "--finalists", "1", "--temperature", "1")) == 0
    third = document(capsys)
    assert third["study"] != first["study"] and len(third["trials"]) == 3
    assert third["finalists"][0]["identical"] is None
    assert temperatures == [0.0, 1.0], "a resumed search reads the stored texts"


def test_an_interrupted_search_keeps_its_trials(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rounds, calls = run_module.TeacherForced.rounds, []

    def interrupted(self: Any, plan: Any, **options: Any) -> Any:
        calls.append(plan)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return rounds(self, plan, **options)

    monkeypatch.setattr(run_module.TeacherForced, "rounds", interrupted)
    assert main(with_options(command, "--plan-out", str(tmp_path / "plan.json"))) == 130
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert report["finished"] is False and len(report["trials"]) == 5 and report["finalists"] == []
    assert captured.err.endswith("\nforedraft: interrupted; the same command goes on with the study\n")
    assert not (tmp_path / "plan.json").exists()
    monkeypatch.setattr(run_module.TeacherForced, "rounds", rounds)
    assert main(with_options(command, "--finalists", "1")) == 0
    assert document(capsys)["trials"][:5] == report["trials"]


def test_every_stage_reports_its_progress(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each goes from its start to its end; a resumed search does not repeat trials that the study holds."""
    calls: list[tuple[str, int, int]] = []

    def record(self: object, stage: str, done: int, total: int, note: str = "") -> None:
        calls.append((stage, done, total))

    monkeypatch.setattr(ProgressLines, "show", record)
    assert main(with_options(command, "--trials", "3", "--finalists", "1")) == 0
    stages = list(dict.fromkeys(stage for stage, _, _ in calls))
    assert stages[-6:] == ["calibrate", "read", "costs", "rank", "trials", "decode"]
    for stage in stages[-6:]:
        steps = [(done, total) for own, done, total in calls if own == stage]
        assert stage in STAGES and steps == sorted(steps) and steps[-1][0] == steps[-1][1]
    calls.clear()
    assert main(with_options(command, "--trials", "4", "--finalists", "1")) == 0
    assert not {"costs", "rank"} & {stage for stage, _, _ in calls}


STAGE_LINES = tuple(STAGES.values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trials", "2.9"], "'2.9' is not a whole number"),
        (["--trials", "inf."], "'inf.' is not a whole number"),
        (["--trials", "many"], "'many' is not a whole number"),
        (["--storage", ""], "--storage is ''; give it a value, or leave it out"),
        (["--prompts", ""], "--prompts is ''; give it a value, or leave it out"),
        (["--plan-out", ""], "--plan-out is '' or '.'; give a file in a folder that exists"),
        (["--html", ""], "--html is '' or '.'; give a file in a folder that exists"),
        (
            ["--max-draft", "100000"],
            "--max-draft is 100000, but this model's verifying pass takes 63 at most",
        ),
        (
            ["--new-tokens", "3000"],
            "a prompt of 15 tokens and the 3000 new tokens that the search needs exceed the 2048 positions"
            " available; lower --new-tokens",
        ),
        (
            ["--max-length", "70"],
            "exceed the 70 positions available; shorten the prompt, or give --truncate left, or raise"
            " --max-length up to the model's 2048",
        ),
        (
            ["--max-length", "200", "--tokens", "900"],
            "the 256 new tokens that the search needs exceed the 200 positions available; lower --tokens, or"
            " raise --max-length",
        ),
        (["--trials", "0"], "--trials is 0; give 1 or more"),
        (["--timeout", "0"], "--timeout is 0.0; give seconds, more than 0"),
        (["--timeout", "0.000001"], "--timeout is 1e-06, but no trial was completed in that time; raise"),
        (
            ["--storage", "sqlite:////no/such/file.db"],
            "--storage is 'sqlite:////no/such/file.db', which cannot",
        ),
        (["--storage", "what"], "--storage is 'what', which is not a URL"),
        (["--prompts", "/no/such/file"], "--prompts is '/no/such/file', which cannot be read (No such file"),
        (["--plan-out", "/no/such/folder/plan.json"], "--plan-out is '/no/such/folder/plan.json'"),
        (["--html", "-"], "--html is '-', which is stdout, not a file; give a file"),
        (["--out", "-"], "--out is '-', which is stdout, not a file; give --json instead"),
        (["--max-draft", "0"], "--max-draft is 0; give 1 or more"),
        (["--sampler", "grid"], "grid"),
        (["--revision", "main"], "revision"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_mistakes_are_one_line_and_code_2(
    command: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    assert main(with_options(command, *arguments)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    *stages, line = captured.err.splitlines()
    assert line.startswith("foredraft: error: ") and message in line
    assert stages == [stage for stage in stages if stage.removeprefix("foredraft: ").startswith(STAGE_LINES)]
    assert not (tmp_path / "cache" / "plans").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n \n", "which has no prompts; give one per line"),
        ("only one\n", "--prompts holds a single prompt; give two or more"),
        ("the same\n" * 4, "--prompts holds 4 equal prompts; give two or more different prompts"),
    ],
)
def test_too_few_prompts_are_refused(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    (tmp_path / "prompts.txt").write_text(text)
    assert main(command) == 2
    assert message in capsys.readouterr().err


def test_an_empty_model_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--model", "", "--prompts", "prompts.txt"]) == 2
    assert "--model is ''; give it a value, or leave it out" in capsys.readouterr().err


def test_a_whole_number_may_be_written_with_a_decimal_point(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FOREDRAFT_CACHE", "")
    assert main(with_options(command, "--trials", "2.0", "--finalists", "1")) == 0
    assert len(document(capsys)["trials"]) == 2


def test_without_a_terminal_stderr_has_a_line_per_stage_and_per_tenth_of_the_trials(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(with_options(command, "--trials", "30", "--finalists", "1")) == 0
    lines = [line.removeprefix("foredraft: ") for line in capsys.readouterr().err.splitlines()]
    trials = [line for line in lines if line.startswith("Trials ")]
    assert [line.split()[1].rstrip(",") for line in trials] == [f"{done}/30" for done in range(0, 31, 3)]
    assert all("best predicted speed-up " in line for line in trials[1:])
    others = [line for line in lines if line not in trials]
    stages = ("start", "load", "calibrate", "read", "costs", "rank", "decode")
    assert [line for line in others if line != STAGES["kernels"]] == [STAGES[stage] for stage in stages]


@pytest.mark.parametrize(("file", "what"), [(None, "studies"), ("study.db", "plans")])
def test_a_read_only_cache_folder_is_refused_before_the_model_is_loaded(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    file: str | None, what: str,
) -> None:  # fmt: skip
    (tmp_path / "cache").write_text("no folder")
    monkeypatch.setattr(run_module, "load_for", None)
    storage = () if file is None else ("--storage", f"sqlite:///{tmp_path / file}")
    assert main(with_options(command, *storage)) == 2
    [line] = without_progress(capsys.readouterr().err)
    assert f"no {what} can be written to the cache folder '{tmp_path / 'cache'}' (File exists)" in line
    assert "set FOREDRAFT_CACHE to a writable folder" in line


def test_the_report_is_printed_if_the_plan_cannot_be_written(
    command: list[str], tmp_path: Path, wins: None, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The cache folder is lost while the plans are timed."""
    decode, plans = run_module.decode_finalists, tmp_path / "cache" / "plans"

    def losing(*given: Any) -> Any:
        plans.write_text("no folder")
        return decode(*given)

    monkeypatch.setattr(run_module, "decode_finalists", losing)
    out, html = tmp_path / "plan.json", tmp_path / "report.html"
    assert main(with_options(command, "--trials", "3", "--plan-out", str(out), "--html", str(html))) == 2
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert report["winner"] == 0 and report["plan_files"] == [str(out)] and out.is_file()
    [unwritten] = report["unwritten"]
    assert unwritten.startswith(f"the plan was not written to {plans}/") and "(Not a directory)" in unwritten
    assert captured.err.splitlines()[-1] == f"foredraft: error: {unwritten}"
    assert "the plan was not written" in html.read_text()


def test_an_earlier_plan_is_named_if_none_wins(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_module, "_winner", lambda finalists: 0)
    quick = with_options(command, "--trials", "3", "--finalists", "1")
    assert main(quick) == 0
    first = document(capsys)
    assert first["notes"] == []
    monkeypatch.setattr(run_module, "_winner", lambda finalists: None)
    assert main(quick) == 0
    second = document(capsys)
    [finalist], [note] = second["finalists"], second["notes"]
    assert (
        f"{finalist['skips']} in {first['plan_files'][0]} stays in use; in this search it ran at"
        f" {finalist['speedup']['median']:.2f} x plain decoding" in note
    )
    monkeypatch.setattr(run_module, "decode_finalists", lambda *_: [])
    assert main(quick) == 0
    assert "it was not timed" in document(capsys)["notes"][0]
    Path(first["plan_files"][0]).write_text("{}")
    assert main(quick) == 0
    assert document(capsys)["notes"][0].startswith("An earlier plan cannot be used: plan is ")


def test_a_storage_lost_while_finalists_decode_does_no_harm(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    decode, file = run_module.decode_finalists, tmp_path / "study.db"

    def losing(*given: Any) -> Any:
        file.write_text("lost")
        return decode(*given)

    monkeypatch.setattr(run_module, "decode_finalists", losing)
    assert (
        main(with_options(command, "--trials", "3", "--finalists", "1", "--storage", f"sqlite:///{file}"))
        == 0
    )
    assert len(document(capsys)["trials"]) == 3


def test_a_storage_lost_during_the_trials_is_reported_in_one_line(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rounds, calls, folder = run_module.TeacherForced.rounds, [], tmp_path / "disk"
    folder.mkdir()

    def losing(self: Any, plan: Any, **options: Any) -> Any:
        calls.append(plan)
        if len(calls) == 4:
            shutil.rmtree(folder)
        return rounds(self, plan, **options)

    monkeypatch.setattr(run_module.TeacherForced, "rounds", losing)
    out = tmp_path / "plan.json"
    storage = f"sqlite:///{folder / 'study.db'}"
    assert main(with_options(command, "--storage", storage, "--plan-out", str(out))) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and not out.exists()
    line = captured.err.splitlines()[-1]
    assert line.startswith(f"foredraft: error: --storage is '{storage}', which was lost during the search (")
    assert "Traceback" not in captured.err and "restore it and run the same command again" in line


def test_a_change_of_costs_changes_the_study(big: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The load of the machine does not change it."""
    llm = foredraft.load(big, drafter="none", kernels=False, max_batch=1, max_length=64)
    about, texts = (
        run_module.machine(engine_of(llm).device),
        CalibrationTexts((CalibrationText((1, 2, 3), 1),), 0.0),
    )

    def name(draft_weights: str | None = None, loaded: Loaded = llm.loaded) -> str:
        return run_module._study_name("0" * 64, loaded, texts, 3, draft_weights)

    names = []
    for change in ({}, {"cpu": "another"}, {"threads": 77}, {"device": "a GPU"}, {"load_average": 9.0}):
        monkeypatch.setattr(run_module, "machine", lambda device, change=change: about | change)
        names.append(name())
    assert len(set(names)) == 4 and names[-1] == names[0]
    names.append(name(loaded=replace(llm.loaded, deterministic=not llm.deterministic)))
    for owner, flag in ((llm.loaded.runner, "compiled"), (Runner, "by_kernels")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, flag, not getattr(llm.loaded.runner, flag))
            names.append(name())
    assert len(set(names)) == 7 and name() == names[0]
    assert len({name(weights) for weights in (None, "int4", "int8")}) == 3


def test_all_plans_of_a_one_layer_model_are_tried(
    command: list[str], big: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command[2] = str(Path(big).with_name("small"))
    assert main(with_options(command, "--trials", "40")) == 0
    report = document(capsys)
    assert len({trial["skips"] for trial in report["trials"]}) == 4 and len(report["trials"]) < 40
    assert report["notes"][0] == "All 4 plans of this model were tried, so the search ended early."


def test_prompts_are_required_with_a_model(big: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--model", big]) == 2
    assert (
        "--prompts is required with a model of your own; give a file with one prompt per line"
        in capsys.readouterr().err
    )


def test_an_interrupt_while_finalists_decode_keeps_the_trials(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_module, "decode_finalists", interrupted)
    assert main(with_options(command, "--trials", "3")) == 130
    report = document(capsys)
    assert len(report["trials"]) == 3 and report["finalists"] == [] and report["winner"] is None
