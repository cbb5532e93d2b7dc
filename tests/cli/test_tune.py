"""`foredraft tune` from end to end, on a small model: what it says, what it keeps, and what it refuses."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import foredraft
from foredraft.cli import main
from foredraft.cli.progress import STAGES
from foredraft.cli.tune import ProgressLines
from foredraft.drafters.plan_files import find_plan, model_hash, read_plan
from foredraft.model.runner import Runner
from foredraft.tune import run as run_module
from foredraft.tune.calibration import CalibrationTexts, Text
from foredraft.tune.exits import ExitCosts
from foredraft.tune.records import Finalist
from tests.support.checkpoints import save_pair

QUICK = (
    *("--tokens", "48", "--trials", "16", "--sampler", "random", "--max-draft", "3"),
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
    return ["tune", "--model", big, "--no-kernels", "--prompts", str(prompts), *QUICK]


@pytest.fixture
def wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speeds of a model this small are noise: the best plan by prediction wins, whatever the clock said."""
    monkeypatch.setattr(run_module, "_winner", lambda finalists: 0)


def given(command: list[str], *arguments: str) -> list[str]:
    """The command with these options, in place of those that it has."""
    own = dict(zip(command[4::2], command[5::2], strict=True))  # after: tune --model DIR --no-kernels
    return [
        *command[:4],
        *(
            word
            for pair in (own | dict(zip(arguments[::2], arguments[1::2], strict=True))).items()
            for word in pair
        ),
    ]


def document(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_a_plan_that_wins_is_kept_where_generate_finds_it(
    command: list[str], big: str, tmp_path: Path, wins: None, capsys: pytest.CaptureFixture[str]
) -> None:
    out, html = tmp_path / "plan.json", tmp_path / "report.html"
    assert main(given(command, "--out", str(out), "--html", str(html))) == 0
    told = document(capsys)
    assert told["finished"] and len(told["trials"]) == 16 and len(told["finalists"]) == 3
    for one in told["finalists"]:
        assert one["identical"] is True
        assert one["tau"] == pytest.approx(one["predicted_tau"], rel=1e-9)
        assert one["speedup"]["count"] == one["prompts"] == 4
    plan = read_plan(out)
    kept = find_plan(model_hash(Path(big)))
    assert kept == plan and str(plan.skips) == told["finalists"][0]["skips"]
    assert (plan.max_draft, plan.dtype, plan.device) == (told["finalists"][0]["draft"], "float32", "cpu")
    assert told["plan_files"][0] == str(out) and len(told["plan_files"]) == 2 and told["notes"] == []
    llm = foredraft.load(big, drafter="layer-skip", policy="fixed", kernels=False, max_length=64)
    [output] = llm.generate("def accept", foredraft.SamplingParams(temperature=0, max_new_tokens=8))
    assert output.stats.drafted > 0
    page = html.read_text()
    assert "The best plans in real decoding" in page and page.count("<svg") == 3


def test_a_plan_tells_its_temperature_and_whose_place_it_takes(
    command: list[str], tmp_path: Path, wins: None, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    for temperature in (0, 1):
        more = ("--temperature", str(temperature), "--trials", "2", "--finalists", "1", "--out", str(out))
        before = read_plan(out) if temperature else None
        assert main(given(command, *more)) == 0
        assert read_plan(out).temperature == temperature
        told = document(capsys)["notes"]
        assert told == ([] if before is None else [
            f"It takes the place of the plan that was kept before: {before.skips}, measured at temperature 0 at"
            f" {before.speedup:.2f} x plain decoding on {before.date}."
        ])  # fmt: skip


def test_an_early_exit_that_wins_is_kept_and_used(
    command: list[str], big: str, tmp_path: Path, wins: None, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """On a machine where nothing is as cheap."""
    measure = run_module.measure_plan_costs
    cheap = ExitCosts((0.01, 0.01), ((1.0, 0.0),) * 3)
    monkeypatch.setattr(
        run_module,
        "measure_plan_costs",
        lambda *given: replace(measure(*given), verifying=(9.0,) * 3, exit=cheap),
    )
    out, html = tmp_path / "plan.json", tmp_path / "report.html"
    assert main(given(command, "--out", str(out), "--html", str(html))) == 0
    told = document(capsys)
    assert {trial["origin"] for trial in told["trials"]} >= {"exit 1", "exit 2"}
    won = told["finalists"][0]
    assert won["identical"] is True and won["tau"] == pytest.approx(won["predicted_tau"], rel=1e-9)
    plan = read_plan(out)
    assert str(plan.skips) == won["skips"] == f"exit:{plan.exit}" and plan.exit in (1, 2)
    assert main(["generate", "def accept", "--model", big, "--drafter", "layer-skip", "--policy", "fixed",
                 "--no-kernels", "--max-new-tokens", "8", "--temperature", "0", "--json"]) == 0  # fmt: skip
    assert document(capsys)["stats"]["drafted"] > 0
    assert (
        foredraft.load(big, drafter="layer-skip", kernels=False).engine.drafters["layer-skip"].skips
        == plan.skips
    )


def test_there_is_room_for_what_is_written(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """More is asked of each prompt where some are held out."""
    few = tmp_path / "few.txt"
    few.write_text("".join(f"def accept{word}(draft, p, q)\n" for word in "abcd"))
    assert main(given(command, "--prompts", str(few), "--tokens", "100", "--trials", "1")) in (0, 1)
    told = document(capsys)
    assert told["tokens"] >= 100
    assert told["importance"] == {}, "one trial tells nothing"


def test_nothing_is_written_where_plain_decoding_wins(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_module, "_winner", lambda finalists: None)
    assert main(given(command, "--out", str(tmp_path / "plan.json"))) == 0
    told = document(capsys)
    assert told["winner"] is None and told["plan_files"] == []
    assert not (tmp_path / "plan.json").exists() and not (tmp_path / "cache" / "plans").exists()


def finalist(speedup: float, identical: bool | None, tau: float = 2.0, error: float = 0.0) -> Finalist:
    from foredraft.bench.records import Spread

    spread = Spread(speedup, speedup, speedup, 8)
    return Finalist("skip:attn=1", 2, 1.2, 2.0, tau, 0.9, 0.5, spread, identical, 8, spread, 8, 2.1, error)


@pytest.mark.parametrize(
    ("several", "winner"),
    [
        ([(1.1, True), (1.3, True), (1.2, True)], 1),
        ([(1.1, True), (1.3, False)], 0),  # faster, and wrong
        ([(1.1, None)], 0),
        ([(0.99, True), (1.0, True)], None),
        ([(1.1, None), (1.3, None, 2.07), (1.2, None, 1.93)], 0),  # faster, and not as predicted
        ([(1.1, None), (1.3, None, 2.05, 0.015)], 1),
        ([(1.1, None), (1.3, None, 2.0, 0.016)], 0),  # nobody could tell
        ([], None),
    ],
)
def test_the_fastest_wins_if_it_is_faster_and_right_and_as_predicted(
    several: list[tuple[Any, ...]], winner: int | None
) -> None:
    assert run_module._winner([finalist(*one) for one in several]) == winner


def test_a_finalist_tells_its_trials_tau(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Of the texts of the search, which is not that of the texts that were decoded."""
    assert main(given(command, "--trials", "6")) == 0
    told = document(capsys)
    trials = {trial["skips"]: trial["taus"][trial["draft"] - 1] for trial in told["trials"]}
    assert [one["trial_tau"] for one in told["finalists"]] == [
        trials[one["skips"]] for one in told["finalists"]
    ]


def test_a_search_goes_on_and_at_a_temperature_it_is_another(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calibrate, temperatures = run_module.calibrate, []

    def watched(llm: Any, prompts: Any, tokens: int, temperature: float, progress: Any) -> Any:
        temperatures.append(temperature)
        return calibrate(llm, prompts, tokens, temperature, progress)

    monkeypatch.setattr(run_module, "calibrate", watched)
    assert main(given(command, "--trials", "4", "--finalists", "1")) == 0
    first = document(capsys)
    assert main(given(command, "--trials", "6", "--finalists", "1")) == 0
    second = document(capsys)
    assert second["study"] == first["study"] and second["trials"][:4] == first["trials"]
    assert len(second["trials"]) == 6 and second["costs"] == first["costs"]
    assert main(given(command, "--trials", "3", "--finalists", "1", "--temperature", "1")) == 0
    third = document(capsys)
    assert third["study"] != first["study"] and len(third["trials"]) == 3
    assert third["finalists"][0]["identical"] is None
    assert temperatures == [0.0, 1.0], "who goes on reads the texts that were written"


def test_an_interrupt_keeps_the_study(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rounds, calls = run_module.TeacherForced.rounds, []

    def interrupted(self: Any, plan: Any, **options: Any) -> Any:
        calls.append(plan)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return rounds(self, plan, **options)

    monkeypatch.setattr(run_module.TeacherForced, "rounds", interrupted)
    assert main(given(command, "--out", str(tmp_path / "plan.json"))) == 130
    captured = capsys.readouterr()
    told = json.loads(captured.out.splitlines()[-1])
    assert told["finished"] is False and len(told["trials"]) == 5 and told["finalists"] == []
    assert captured.err.endswith("\nforedraft: interrupted; the same command goes on with the study\n")
    assert not (tmp_path / "plan.json").exists()
    monkeypatch.setattr(run_module.TeacherForced, "rounds", rounds)
    assert main(given(command, "--finalists", "1")) == 0
    assert document(capsys)["trials"][:5] == told["trials"]


def test_every_stage_tells_how_far_it_is(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From its beginning to its end; what the study has is not measured again."""
    told: list[tuple[str, int, int]] = []

    def heard(self: object, stage: str, done: int, total: int, note: str = "") -> None:
        told.append((stage, done, total))

    monkeypatch.setattr(ProgressLines, "show", heard)
    assert main(given(command, "--trials", "3", "--finalists", "1")) == 0
    stages = list(dict.fromkeys(stage for stage, _, _ in told))
    assert stages[-6:] == ["calibrate", "read", "costs", "rank", "trials", "decode"]
    for stage in stages[-6:]:
        steps = [(done, total) for own, done, total in told if own == stage]
        assert stage in STAGES and steps == sorted(steps) and steps[-1][0] == steps[-1][1]
    told.clear()
    assert main(given(command, "--trials", "4", "--finalists", "1")) == 0
    assert not {"costs", "rank"} & {stage for stage, _, _ in told}


BEGUN = tuple(STAGES.values())


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--trials", "2.9"], "'2.9' is no whole number"),
        (["--trials", "inf."], "'inf.' is no whole number"),
        (["--trials", "many"], "'many' is no whole number"),
        (["--storage", ""], "--storage is ''; give it a value, or leave it out"),
        (["--prompts", ""], "--prompts is ''; give it a value, or leave it out"),
        (["--out", ""], "--out is '' or '.'; give a file in a folder that there is"),
        (["--html", ""], "--html is '' or '.'; give a file in a folder that there is"),
        (
            ["--max-draft", "100000"],
            "--max-draft is 100000, but this model's verifying pass takes 63 at most",
        ),
        (
            ["--new-tokens", "3000"],
            "a prompt of 15 tokens and the 3000 new ones that the search needs after it exceed the 2048"
            " positions there is room for; lower --new-tokens",
        ),
        (
            ["--max-length", "70"],
            "exceed the 70 positions there is room for; shorten the prompt, or --truncate left, or raise"
            " --max-length up to the model's 2048",
        ),
        (
            ["--max-length", "200", "--tokens", "900"],
            "the 256 new ones that the search needs after it exceed the 200 positions there is room for; lower"
            " --tokens, or raise --max-length",
        ),
        (["--trials", "0"], "--trials is 0; give 1 or more"),
        (["--timeout", "0"], "--timeout is 0.0; give seconds, more than 0"),
        (["--timeout", "0.000001"], "--timeout is 1e-06, in which not one trial ended; give more seconds"),
        (
            ["--storage", "sqlite:////no/such/file.db"],
            "--storage is 'sqlite:////no/such/file.db', which cannot",
        ),
        (["--storage", "what"], "--storage is 'what', which is no URL"),
        (["--prompts", "/no/such/file"], "--prompts /no/such/file cannot be read: No such file"),
        (["--tokens", "99999"], "--tokens is 99999, but these prompts give 1024 new ones"),
        (["--out", "/no/such/folder/plan.json"], "--out is '/no/such/folder/plan.json'"),
        (["--html", "-"], "--html is '-', but the last line of stdout is the document"),
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
    complaint: str,
) -> None:
    assert main(given(command, *arguments)) == 2
    told = capsys.readouterr()
    assert told.out == ""
    *before, line = told.err.splitlines()
    assert line.startswith("foredraft: error: ") and complaint in line
    assert before == [told for told in before if told.removeprefix("foredraft: ").startswith(BEGUN)]
    assert not (tmp_path / "cache" / "plans").exists()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("\n \n", "holds no prompts; give one a line"),
        ("only one\n", "a single prompt is given; give --prompts"),
        ("the same\n" * 4, "all 4 prompts are the same; give --prompts of two or more that differ"),
    ],
)
def test_too_few_prompts(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, complaint: str
) -> None:
    (tmp_path / "prompts.txt").write_text(text)
    assert main(command) == 2
    assert complaint in capsys.readouterr().err


def test_a_model_of_no_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--model", "", "--prompts", "prompts.txt"]) == 2
    assert "--model is ''; give it a value, or leave it out" in capsys.readouterr().err


def test_whole_numbers_are_read_as_ever(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FOREDRAFT_CACHE", "")
    assert main(given(command, "--trials", "2.0", "--finalists", "1")) == 0
    assert len(document(capsys)["trials"]) == 2


def test_where_stderr_is_no_terminal_a_line_tells_each_stage_and_each_tenth_of_the_trials(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(given(command, "--trials", "30", "--finalists", "1")) == 0
    told = [line.removeprefix("foredraft: ") for line in capsys.readouterr().err.splitlines()]
    trials = [line for line in told if line.startswith("Trials ")]
    assert [line.split()[1].rstrip(",") for line in trials] == [f"{done}/30" for done in range(0, 31, 3)]
    assert all("best predicted speed-up " in line for line in trials[1:])
    others = [line for line in told if line not in trials]
    stages = ("load", "calibrate", "read", "costs", "rank", "decode")
    assert others == [STAGES[stage] for stage in stages]


@pytest.mark.parametrize(("file", "what"), [(None, "studies"), ("study.db", "plans")])
def test_a_cache_folder_that_cannot_be_written_is_told_before_the_model_is_loaded(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    file: str | None, what: str,
) -> None:  # fmt: skip
    (tmp_path / "cache").write_text("no folder")
    monkeypatch.setattr(run_module.foredraft, "load", None)
    storage = () if file is None else ("--storage", f"sqlite:///{tmp_path / file}")
    assert main(given(command, *storage)) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"the cache folder is '{tmp_path / 'cache'}', where no {what} can be kept (File exists)" in line
    assert "set FOREDRAFT_CACHE to a folder that can be written" in line


def test_a_plan_that_cannot_be_kept_costs_no_report(
    command: list[str], tmp_path: Path, wins: None, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The cache folder is lost while the plans are timed."""
    finals, plans = run_module.finals, tmp_path / "cache" / "plans"

    def losing(*given: Any) -> Any:
        plans.write_text("no folder")
        return finals(*given)

    monkeypatch.setattr(run_module, "race", losing)
    out, html = tmp_path / "plan.json", tmp_path / "report.html"
    assert main(given(command, "--trials", "3", "--out", str(out), "--html", str(html))) == 2
    captured = capsys.readouterr()
    told = json.loads(captured.out.splitlines()[-1])
    assert told["winner"] == 0 and told["plan_files"] == [str(out)] and out.is_file()
    [unwritten] = told["unwritten"]
    assert (
        unwritten.startswith(f"the plan could not be kept in {plans}/") and "(Not a directory)" in unwritten
    )
    assert captured.err.splitlines()[-1] == f"foredraft: error: {unwritten}"
    assert "could not be kept" in html.read_text()


def test_a_plan_that_was_kept_earlier_is_named_where_none_wins(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_module, "_winner", lambda finalists: 0)
    quick = given(command, "--trials", "3", "--finalists", "1")
    assert main(quick) == 0
    first = document(capsys)
    assert first["notes"] == []
    monkeypatch.setattr(run_module, "_winner", lambda finalists: None)
    assert main(quick) == 0
    second = document(capsys)
    [one], [note] = second["finalists"], second["notes"]
    assert (
        f"{one['skips']} in {first['plan_files'][0]}, which ran at {one['speedup']['median']:.2f} x" in note
    )
    monkeypatch.setattr(run_module, "race", lambda *_: [])
    assert main(quick) == 0
    assert "which was not among those timed now" in document(capsys)["notes"][0]
    Path(first["plan_files"][0]).write_text("{}")
    assert main(quick) == 0
    assert document(capsys)["notes"][0].startswith("An older plan cannot be used: plan is ")


def test_a_storage_that_is_lost_while_plans_are_timed_costs_nothing(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finals, file = run_module.finals, tmp_path / "study.db"

    def losing(*given: Any) -> Any:
        file.write_text("lost")
        return finals(*given)

    monkeypatch.setattr(run_module, "race", losing)
    assert main(given(command, "--trials", "3", "--finalists", "1", "--storage", f"sqlite:///{file}")) == 0
    assert len(document(capsys)["trials"]) == 3


def test_a_storage_that_is_lost_in_mid_search_is_one_line(
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
    assert main(given(command, "--storage", storage, "--out", str(out))) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and not out.exists()
    line = captured.err.splitlines()[-1]
    assert line.startswith(f"foredraft: error: --storage is '{storage}', which was lost during the search (")
    assert "Traceback" not in captured.err and "bring it back, and the same command goes on" in line


def test_what_changes_costs_is_another_study(big: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And how busy the machine is does not."""
    llm = foredraft.load(big, drafter="none", kernels=False, max_batch=1, max_length=64)
    about, texts = run_module.machine(llm.engine.device), CalibrationTexts((Text((1, 2, 3), 1),), 0.0)

    def name() -> str:
        return run_module._study_name("0" * 64, llm, texts, 3)

    names = []
    for change in ({}, {"cpu": "another"}, {"threads": 77}, {"device": "a GPU"}, {"load_average": 9.0}):
        monkeypatch.setattr(run_module, "machine", lambda device, change=change: about | change)
        names.append(name())
    assert len(set(names)) == 4 and names[-1] == names[0]
    for owner, flag in ((llm, "deterministic"), (llm.engine.target, "compiled"), (Runner, "by_kernels")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, flag, not getattr(llm if owner is llm else llm.engine.target, flag))
            names.append(name())
    assert len(set(names)) == 7 and name() == names[0]


def test_a_model_of_one_layer_has_few_plans_and_all_are_tried(
    command: list[str], big: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command[2] = str(Path(big).with_name("small"))
    assert main(given(command, "--trials", "40")) == 0
    told = document(capsys)
    assert len({trial["skips"] for trial in told["trials"]}) == 4 and len(told["trials"]) < 40
    assert told["notes"][0] == "All 4 plans of this model were tried, so the search ended there."


def test_a_model_of_ones_own_needs_prompts(big: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--model", big]) == 2
    assert "--prompts is not given, and only you know what this model is used for" in capsys.readouterr().err


def test_an_interrupt_of_the_last_stage_keeps_the_trials_too(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_module, "race", interrupted)
    assert main(given(command, "--trials", "3")) == 130
    told = document(capsys)
    assert len(told["trials"]) == 3 and told["finalists"] == [] and told["winner"] is None
