"""`foredraft tune` on a small model: its report, the plan it saves, and the mistakes it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import foredraft
from foredraft.bench.measurement import measure_costs
from foredraft.cli import main
from foredraft.cli.render import STAGES, ProgressLines
from foredraft.drafters.plan_files import Skips, find_plan, model_hash, read_plan
from foredraft.llm.loaded import Loaded
from foredraft.tune import finals
from foredraft.tune import run as run_module
from foredraft.tune import teacher_forced as calibration
from foredraft.tune.teacher_forced import CalibrationText, CalibrationTexts
from foredraft.tune.tune_records import ExitCosts, Finalist, measure_plan_costs
from tests.cli.conftest import ChatModel, Cli, Words, document
from tests.support.checkpoints import save_pair
from tests.support.loaded import engine_of

QUICK = {"tokens": 48, "trials": 16, "max_draft": 3, "new_tokens": 6, "repeats": 1}
ONE = {"finalists": 1}


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_pair(tmp_path_factory.mktemp("models")) / "big")


@pytest.fixture
def words(big: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Words:
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"def accept{word}(draft, p, q)\n" for word in "abcdefgh"))
    return Words("tune --no-kernels", {"model": big, "prompts": prompts} | QUICK)


@pytest.fixture(autouse=True)
def few_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time every cost a few times only, since no test here asks for exact ones."""
    monkeypatch.setattr(run_module, "measure_plan_costs", partial(measure_plan_costs, repeats=3))
    monkeypatch.setattr(finals, "measure_costs", partial(measure_costs, repeats=3))


def let_win(monkeypatch: pytest.MonkeyPatch, place: int | None = 0) -> None:
    """Let the plan with the best prediction win, or none: speeds of a model this small are noise."""
    monkeypatch.setattr(run_module, "_winner", lambda finalists: place)


def tune(cli: Cli, words: list[str]) -> dict[str, Any]:
    code = main([*words, "--json"])
    printed = cli.capsys.readouterr()
    assert code in (0, 1), printed.err
    return document(printed.out)


@pytest.mark.heavy
def test_the_winning_plan_is_saved_where_generate_finds_it(
    words: Words, big: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    let_win(monkeypatch)
    out, html = tmp_path / "plan.json", tmp_path / "report.html"
    report = cli.document(*words(plan_out=out, html=html))
    assert report["finished"] and len(report["trials"]) == 16 and len(report["finalists"]) == 3
    taus = {trial["skips"]: trial["taus"][trial["draft"] - 1] for trial in report["trials"]}
    for finalist in report["finalists"]:
        assert finalist["identical"] is True
        assert finalist["tau"] == pytest.approx(finalist["predicted_tau"], rel=1e-9)
        assert finalist["speedup"]["count"] == finalist["prompts"] == 4
        assert finalist["trial_tau"] == taus[finalist["skips"]], "that on the calibration texts"
    plan = read_plan(out)
    assert find_plan(model_hash(Path(big))) == plan and str(plan.skips) == report["finalists"][0]["skips"]
    assert (plan.max_draft, plan.dtype, plan.device) == (report["finalists"][0]["draft"], "float32", "cpu")
    assert report["plan_files"][0] == str(out) and len(report["plan_files"]) == 2 and report["notes"] == []
    llm = foredraft.load(big, drafter="layer-skip", policy="fixed", kernels=False, max_length=64)
    [output] = llm.generate("def accept", foredraft.SamplingParams(temperature=0, max_new_tokens=8))
    assert output.stats.drafted > 0
    page = html.read_text()
    assert "The best plans in real decoding" in page and page.count("<svg") == 3


@pytest.mark.heavy
def test_stdout_has_a_table_and_out_has_the_document(words: Words, tmp_path: Path, cli: Cli) -> None:
    out = tmp_path / "report.json"
    lines = cli(*words(trials="2.0", out=out, **ONE)).out.splitlines()
    report = json.loads(out.read_text())
    lines = [line for line in lines if not line.startswith("WARNING: The load rose")]
    assert lines[0].startswith(f"{report['model']}: 2 trials of ")
    assert lines[2].split()[:4] == ["plan", "draft", "over", "plain"]
    assert lines[3].split()[0] == report["finalists"][0]["skips"]
    assert not any(line.startswith("{") for line in lines)


@pytest.mark.heavy
def test_a_plan_file_holds_its_temperature_and_the_report_names_the_replaced_plan(
    words: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    let_win(monkeypatch)
    out = tmp_path / "plan.json"
    for temperature in (0, 1):
        before = read_plan(out) if temperature else None
        report = cli.document(*words(temperature=temperature, trials=2, plan_out=out, **ONE))
        assert read_plan(out).temperature == temperature
        assert report["finalists"][0]["identical"] is (True if temperature == 0 else None)
        assert report["notes"] == ([] if before is None else [
            f"The winner replaces the earlier plan {before.skips}, measured at temperature 0 at"
            f" {before.speedup:.2f} x plain decoding on {before.date}."
        ])  # fmt: skip


@pytest.mark.heavy
def test_an_early_exit_that_wins_is_saved_and_used(
    words: Words, big: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    """Costs are faked, so that early exits are the cheapest plans."""
    let_win(monkeypatch)
    measure = run_module.measure_plan_costs
    costs = {"verifying": (9.0,) * 3, "exit": ExitCosts((0.01, 0.01), ((1.0, 0.0),) * 3)}
    monkeypatch.setattr(
        run_module, "measure_plan_costs", lambda *given, **named: replace(measure(*given, **named), **costs)
    )
    out = tmp_path / "plan.json"
    report = cli.document(*words(plan_out=out, html=tmp_path / "report.html", trials=6, **ONE))
    assert {trial["origin"] for trial in report["trials"]} >= {"exit 1", "exit 2"}
    won = report["finalists"][0]
    assert won["identical"] is True and won["tau"] == pytest.approx(won["predicted_tau"], rel=1e-9)
    plan = read_plan(out)
    assert str(plan.skips) == won["skips"] == f"exit:{plan.exit}" and plan.exit in (1, 2)
    greedy = "generate x --drafter layer-skip --policy fixed --no-kernels --max-new-tokens 8 --temperature 0"
    assert cli.document(f"{greedy} --model", big)["stats"]["drafted"] > 0
    loaded = foredraft.load(big, drafter="layer-skip", kernels=False)
    assert engine_of(loaded).drafters["layer-skip"].skips == plan.skips


def test_calibration_texts_fit_when_few_prompts_are_left(words: Words, tmp_path: Path, cli: Cli) -> None:
    """Each prompt gets more new tokens, because half of the prompts are held out."""
    few = tmp_path / "few.txt"
    few.write_text("".join(f"def accept{word}(draft, p, q)\n" for word in "abcd"))
    report = tune(cli, words(prompts=few, tokens=100, trials=1))
    assert report["tokens"] >= 100
    assert report["importance"] == {}, "one trial is too few"


@pytest.mark.heavy
def test_fewer_tokens_than_wanted_are_told(words: Words, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    monkeypatch.setattr(calibration, "MIN_TOKENS", 40)
    report = tune(cli, words(tokens=90_000, trials=4))
    assert 40 <= report["tokens"] < 90_000
    beginning = f"The prompts give {report['tokens']:,} calibration tokens without repetition, of the 90,000"
    assert any(note.startswith(beginning) for note in report["notes"])
    assert all(one["skips"] != str(Skips()) for one in report["finalists"])


def test_prompts_become_chats_on_request(
    words: Words, big: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    model = ChatModel(Path(big), tmp_path / "chat")
    hold_out, given = run_module.hold_out, []
    monkeypatch.setattr(run_module, "hold_out", lambda prompts: given.append(prompts) or hold_out(prompts))
    chat = words(model=model.folder, trials=1, system="Be brief.")
    options = tune(cli, [*chat, "--chat"])["options"]
    assert (options["chat"], options["system"]) == (True, "Be brief.")
    assert given[0][0] == model.encode(system="Be brief.", user="def accepta(draft, p, q)")
    assert "--system has no effect without --chat" in cli.refused(*chat)


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
def test_the_fastest_one_without_objection_wins(several: list[tuple[Any, ...]], winner: int | None) -> None:
    assert run_module._winner([finalist(*one) for one in several]) == winner


@pytest.mark.heavy
def test_an_interrupted_search_keeps_its_trials(
    words: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    rounds, calls = run_module.TeacherForced.rounds, []

    def interrupted(self: Any, plan: Any, **options: Any) -> Any:
        calls.append(plan)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return rounds(self, plan, **options)

    def interrupted_finals(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_module.TeacherForced, "rounds", interrupted)
    monkeypatch.setattr(run_module, "decode_finalists", interrupted_finals)
    command = words(plan_out=tmp_path / "plan.json", trials=8)
    out, err = cli(*command, "--json", code=130)
    report = document(out)
    assert report["finished"] is False and len(report["trials"]) == 5 and report["finalists"] == []
    assert err.endswith("\nforedraft: interrupted; the same command goes on with the study\n")
    later = cli.document(*command, code=130)
    assert later["trials"][:5] == report["trials"] and len(later["trials"]) == 8
    assert later["finalists"] == [] and later["winner"] is None and not (tmp_path / "plan.json").exists()


@pytest.mark.heavy
def test_without_a_terminal_stderr_has_a_line_per_stage_and_per_tenth_of_the_trials(
    words: Words, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    """Each stage goes from its start to its end; a resumed search does not repeat what the study holds."""
    calls: list[tuple[str, int, int]] = []
    show = ProgressLines.show

    def record(self: ProgressLines, stage: str, done: int, total: int, note: str = "") -> None:
        calls.append((stage, done, total))
        show(self, stage, done, total, note)

    monkeypatch.setattr(ProgressLines, "show", record)
    lines = [line.removeprefix("foredraft: ") for line in cli(*words(trials=20, **ONE)).err.splitlines()]
    trials = [line for line in lines if line.startswith("Trials ")]
    assert [line.split()[1].rstrip(",") for line in trials] == [f"{done}/20" for done in range(0, 21, 2)]
    assert all("best predicted speed-up " in line for line in trials[1:])
    others = [line for line in lines if line not in trials]
    stages = ("start", "load", "calibrate", "read", "costs", "rank", "decode")
    assert [line for line in others if line != STAGES["kernels"]] == [STAGES[stage] for stage in stages]
    for stage in ("calibrate", "read", "costs", "rank", "trials", "decode"):
        steps = [(done, total) for own, done, total in calls if own == stage]
        assert steps == sorted(steps) and steps[-1][0] == steps[-1][1], stage
    calls.clear()
    cli(*words(trials=21, **ONE))
    assert not {"costs", "rank"} & {stage for stage, _, _ in calls}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"trials": "2.9"}, "'2.9' is not a whole number"),
        ({"trials": "inf."}, "'inf.' is not a whole number"),
        ({"trials": "many"}, "'many' is not a whole number"),
        ({"storage": ""}, "--storage is ''; give it a value, or leave it out"),
        ({"prompts": ""}, "--prompts is ''; give it a value, or leave it out"),
        ({"model": ""}, "--model is ''; give it a value, or leave it out"),
        ({"plan_out": ""}, "--plan-out is '' or '.'; give a file in a folder that exists"),
        ({"html": ""}, "--html is '' or '.'; give a file in a folder that exists"),
        ({"new_tokens": 3000}, "exceed the 2048 positions available; lower --new-tokens"),
        (
            {"max_length": 70},
            "exceed the 70 positions available; shorten the prompt, or give --truncate left, or raise"
            " --max-length up to the model's 2048",
        ),
        (
            {"max_length": 200, "tokens": 900},
            "the 256 new tokens that the search needs exceed the 200 positions available; lower --tokens, or"
            " raise --max-length",
        ),
        ({"trials": 0}, "--trials is 0; give 1 or more"),
        ({"timeout": 0}, "--timeout is 0.0; give seconds, more than 0"),
        ({"storage": "sqlite:////no/file.db"}, "--storage is 'sqlite:////no/file.db', which cannot"),
        ({"prompts": "/no/such/file"}, "--prompts is '/no/such/file', which cannot be read (No such file"),
        ({"plan_out": "/no/such/folder/plan.json"}, "--plan-out is '/no/such/folder/plan.json'"),
        ({"sampler": "grid"}, "grid"),
        ({"revision": "main"}, "revision"),
    ],
)
def test_mistakes_fail(words: Words, tmp_path: Path, changes: dict[str, object], says: str, cli: Cli) -> None:
    assert says in cli.refused(*words(**changes))
    assert not (tmp_path / "cache" / "plans").exists()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("\n \n", "which has no prompts; give one per line"),
        ("only one\n", "--prompts holds a single prompt; give two or more"),
        ("the same\n" * 4, "--prompts holds 4 equal prompts; give two or more different prompts"),
    ],
)
def test_too_few_prompts_are_refused(words: Words, tmp_path: Path, text: str, says: str, cli: Cli) -> None:
    (tmp_path / "prompts.txt").write_text(text)
    assert says in cli.refused(*words())


def test_prompts_are_required_with_a_model(big: str, cli: Cli) -> None:
    assert cli.refused("tune --model", big).startswith(
        "--prompts is required with a model of your own; give a file with one prompt per line"
    )


@pytest.mark.parametrize(("file", "what"), [(None, "studies"), ("study.db", "plans")])
def test_a_read_only_cache_folder_is_refused_before_the_model_is_loaded(
    words: Words, tmp_path: Path, file: str | None, what: str, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    (tmp_path / "cache").write_text("no folder")
    monkeypatch.setattr(run_module, "load_for", None)
    line = cli.refused(*words(**({} if file is None else {"storage": f"sqlite:///{tmp_path / file}"})))
    assert f"no {what} can be written to the cache folder '{tmp_path / 'cache'}' (File exists)" in line
    assert "set FOREDRAFT_CACHE to a writable folder" in line


@pytest.mark.heavy
def test_the_report_is_printed_if_plan_and_study_are_lost_while_finalists_decode(
    words: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    let_win(monkeypatch)
    decode, plans, study = run_module.decode_finalists, tmp_path / "cache" / "plans", tmp_path / "study.db"

    def losing(*given: Any) -> Any:
        plans.write_text("no folder")
        study.write_text("lost")
        return decode(*given)

    monkeypatch.setattr(run_module, "decode_finalists", losing)
    out, html = tmp_path / "plan.json", tmp_path / "report.html"
    command = words(trials=3, plan_out=out, html=html, storage=f"sqlite:///{study}")
    printed, err = cli(*command, "--json", code=2)
    report = document(printed)
    assert len(report["trials"]) == 3
    assert report["winner"] == 0 and report["plan_files"] == [str(out)] and out.is_file()
    [unwritten] = report["unwritten"]
    assert unwritten.startswith(f"the plan was not written to {plans}/") and "(Not a directory)" in unwritten
    assert err.splitlines()[-1] == f"foredraft: error: {unwritten}"
    assert "the plan was not written" in html.read_text()


@pytest.mark.heavy
def test_an_earlier_plan_is_named_if_none_wins(
    words: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    let_win(monkeypatch, None)
    quick = words(trials=3, **ONE)
    report = cli.document(*quick, "--plan-out", tmp_path / "plan.json")
    assert report["winner"] is None and report["plan_files"] == report["notes"] == []
    assert not (tmp_path / "plan.json").exists() and not (tmp_path / "cache" / "plans").exists()
    let_win(monkeypatch)
    first = cli.document(*quick)
    assert first["notes"] == []
    let_win(monkeypatch, None)
    second = cli.document(*quick)
    [finalist], [note] = second["finalists"], second["notes"]
    assert (
        f"{finalist['skips']} in {first['plan_files'][0]} stays in use; in this search it ran at"
        f" {finalist['speedup']['median']:.2f} x plain decoding" in note
    )
    monkeypatch.setattr(run_module, "decode_finalists", lambda *_: [])
    assert "it was not timed" in cli.document(*quick)["notes"][0]
    Path(first["plan_files"][0]).write_text("{}")
    [note] = cli.document(*quick)["notes"]
    assert note.startswith("An earlier plan cannot be used: plan is ")


def test_costs_and_temperature_decide_the_study(big: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The load of the machine does not change it."""
    llm = foredraft.load(big, drafter="none", kernels=False, max_batch=1, max_length=64)
    about = run_module.machine(engine_of(llm).device)

    def name(draft_weights: str | None = None, loaded: Loaded = llm.loaded, temperature: float = 0) -> str:
        texts = CalibrationTexts((CalibrationText((1, 2, 3), 1),), temperature)
        return run_module._study_name("0" * 64, loaded, texts, 3, draft_weights)

    names = []
    for change in ({}, {"cpu": "another"}, {"threads": 77}, {"device": "a GPU"}, {"load_average": 9.0}):
        monkeypatch.setattr(run_module, "machine", lambda device, change=change: about | change)
        names.append(name())
    assert len(set(names)) == 4 and names[-1] == names[0]
    assert name(temperature=1.0) not in names
    names.append(name(loaded=replace(llm.loaded, deterministic=not llm.deterministic)))
    for owner, flag in ((llm.loaded.runner, "compiled"), (llm.loaded.runner, "by_kernels")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, flag, not getattr(llm.loaded.runner, flag))
            names.append(name())
    assert len(set(names)) == 7 and name() == names[0]
    assert len({name(weights) for weights in (None, "int4", "int8")}) == 3


def test_all_plans_of_a_one_layer_model_are_tried(words: Words, big: str, cli: Cli) -> None:
    report = cli.document(*words(model=Path(big).with_name("small"), trials=40))
    assert len({trial["skips"] for trial in report["trials"]}) == 4 and len(report["trials"]) < 40
    assert report["notes"][0] == "All 4 plans of this model were tried, so the search ended early."
