"""Studies: trials that are stored, resumed and shared; storages that are refused."""

from __future__ import annotations

import json
import shutil
import signal
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foredraft.bench.settings import SAMPLERS, TuneSettings, silent
from foredraft.drafters.plan_files import Skips
from foredraft.errors import ConfigError
from foredraft.tune import search as search_module
from foredraft.tune import study as study_module
from foredraft.tune.search import Deadline, HillClimbingSampler, Search, SeedsFirst, best_trials
from foredraft.tune.study import StudyStorage, optuna, run_trial
from foredraft.tune.teacher_forced import ExpectedRounds
from foredraft.tune.tune_records import ExitCosts, PlanCosts, Trial
from tests.support.foreign import as_another_user
from tests.support.searching import (
    COSTS,
    KILL_POINTS,
    LAYERS,
    SEED_PLANS,
    FakeTeacherForced,
    make_search,
    open_database,
    run_child,
    run_search,
    sqlite_url,
    stored_trials,
)  # fmt: skip

REAL_SEED_PLANS = search_module.seed_plans  # before the fixture replaces it


@pytest.fixture(autouse=True)
def fake_seed_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_module, "seed_plans", lambda *_: dict(SEED_PLANS))


@pytest.fixture
def url(tmp_path: Path) -> str:
    return sqlite_url(tmp_path)


@pytest.mark.heavy
def test_a_search_tries_the_seed_plans_first_and_then_as_many_plans_as_asked(url: str) -> None:
    teacher_forced = FakeTeacherForced()
    trials = run_search(url, teacher_forced).trials()
    assert len(trials) == 12
    assert [(trial.origin, trial.skips) for trial in trials[:2]] == [
        (origin, str(skips)) for origin, skips in SEED_PLANS.items()
    ]
    assert teacher_forced.trials == len({trial.skips for trial in trials})  # no plan is scored twice


def test_the_objective_is_the_predicted_speedup_at_its_best_draft_length(url: str) -> None:
    for trial in run_search(url).trials():
        plan = Skips.parse(trial.skips).plan(LAYERS)
        c = 0.05 + 0.1 * sum(plan.attention) + 0.13 * sum(plan.mlp)
        gains = [tau / (k * c + COSTS.verifying[k - 1]) for k, tau in enumerate(trial.taus, start=1)]
        assert trial.predicted == pytest.approx(max(gains))
        assert trial.draft == 1 + int(np.argmax(gains))


EXITS = replace(COSTS, verifying=(1.2, 1.22, 1.24), exit=ExitCosts((0.05, 0.2), ((1.0, 0.0),) * 3))
SLOW = replace(COSTS, exit=ExitCosts((9.0, 0.0), ((9.0, 0.0),) * 3))


@pytest.mark.parametrize(
    ("costs", "form"), [(EXITS, "exit:2"), (SLOW, "skip:attn=2-3/mlp=2-3"), (COSTS, "skip:attn=2-3/mlp=2-3")]
)
def test_a_plan_without_its_last_layers_runs_as_an_exit_where_that_is_faster(
    url: str, monkeypatch: pytest.MonkeyPatch, costs: PlanCosts, form: str
) -> None:
    plans = {"nothing": Skips(), "exit 2": Skips(exit=2)}
    monkeypatch.setattr(search_module, "seed_plans", lambda *_: plans)
    found = run_search(url, costs=costs, trials=3)
    trial = {trial.origin: trial for trial in found.trials()}["exit 2"]
    assert trial.skips == form
    assert trial.predicted == pytest.approx(costs.speedups(Skips.parse(form), np.array(trial.taus)).max())
    again = run_search(url, trials=3)
    assert again.costs == costs
    assert not stored_trials(url, "WAITING"), "the plan was tried in one of its two forms"


def test_only_plans_without_their_last_layers_are_exits() -> None:
    assert Skips((2, 3), (2, 3)).as_exit(4) == Skips(exit=2)
    for skips in (Skips(), Skips((2, 3), (3,)), Skips((1, 2), (1, 2)), Skips((0, 1, 2, 3), (0, 1, 2, 3))):
        assert skips.as_exit(4) is None


def test_a_search_resumes_with_the_costs_and_trials_of_its_study(url: str) -> None:
    first = run_search(url, trials=5).trials()
    costs = PlanCosts(2e-3, 0.5, (0.5,) * LAYERS, 0.5, (1.0, 1.1, 1.2))
    teacher_forced = FakeTeacherForced()
    other = make_search(url, teacher_forced, costs, TuneSettings(trials=9))
    assert other.costs == COSTS
    other.find_seed_plans()
    other.run_trials(silent)
    trials = other.trials()
    assert len(trials) == 9 and trials[:5] == first
    assert teacher_forced.trials <= 4
    other.run_trials(silent)
    assert len(other.trials()) == 9


@pytest.mark.heavy
@pytest.mark.parametrize("kill_point", KILL_POINTS)
def test_a_killed_search_loses_no_completed_trial(url: str, kill_point: str) -> None:
    assert run_child(url, kill_point=kill_point) == -signal.SIGKILL
    before = stored_trials(url)
    assert before and len(stored_trials(url, "RUNNING")) == 1
    found = run_search(url, trials=len(before) + 4)
    after = stored_trials(url)
    assert after.items() >= before.items() and len(after) == len(before) + 4
    assert {trial.origin for trial in found.trials()} >= set(SEED_PLANS)


def test_a_study_of_an_earlier_version_is_continued(url: str) -> None:
    """It put its seed plans into a queue; here one of three was tried before that version was stopped."""
    study = StudyStorage(url).open_study("a study")
    plans = SEED_PLANS | {"exit 2": Skips(exit=2)}
    study.set_user_attr("begin with", json.dumps({name: str(skips) for name, skips in plans.items()}))
    for name, skips in plans.items():
        plan = skips.plan(LAYERS)
        params = {
            f"{kind}.{layer}": not runs
            for kind in ("attention", "mlp")
            for layer, runs in enumerate(getattr(plan, kind))
        }
        study.enqueue_trial(params, user_attrs={"warm start": name})
    run_search(url, trials=1)
    assert len(stored_trials(url, "WAITING")) == 2
    trials = run_search(url, trials=6).trials()
    assert [trial.origin for trial in trials] == [*plans, None, None, None]
    assert len({trial.skips for trial in trials}) == 6


def test_a_plan_whose_process_died_is_tried_once_all_others_are(url: str) -> None:
    """Its trial runs for ever; the plan may also run in another process, so it comes last."""
    made = make_search(url, FakeTeacherForced())
    made.find_seed_plans()
    seeds = [made._params(skips.plan(LAYERS)) for skips in SEED_PLANS.values()]
    made.study.sampler = SeedsFirst([*seeds[0]], seeds, HillClimbingSampler(0))
    dead = made.study.ask()
    assert made._objective(dead) and dead.params == seeds[0]
    for _ in range(3):
        run_trial(made.study, made._objective, ValueError)
    complete = [trial.params for trial in made.study.trials if trial.value is not None]
    assert complete[:2] == seeds[::-1] and complete[2] not in seeds


@pytest.mark.heavy
def test_a_trial_that_another_process_ended_does_not_end_the_search(url: str) -> None:
    others = StudyStorage(url).open_study("a study")

    class Ended(FakeTeacherForced):
        def rounds(self, plan: Any) -> ExpectedRounds:
            if self.trials == 3:
                [number] = stored_trials(url, "RUNNING")
                others.tell(number, state=optuna.trial.TrialState.FAIL)
            return super().rounds(plan)

    assert len(run_search(url, Ended(), trials=6).trials()) == 6
    assert len(stored_trials(url, "FAIL")) == 1


@pytest.mark.heavy
def test_two_processes_create_and_share_a_study(url: str) -> None:
    with ThreadPoolExecutor() as pool:
        both = [pool.submit(run_child, url, 0.1, 10, seed) for seed in (1, 2)]
    assert [process.result() for process in both] == [0, 0]
    assert 10 <= len(stored_trials(url)) <= 11  # the other process may be about to complete one
    with open_database(url) as storage:
        trials = optuna.load_study(study_name="a study", storage=storage).trials
    assert len({trial.user_attrs["skips"] for trial in trials}) >= 8, "they hardly repeat each other's plans"


@pytest.mark.parametrize("message", ["table studies already exists", "UNIQUE constraint failed: version"])
def test_a_database_under_creation_is_opened(url: str, monkeypatch: pytest.MonkeyPatch, message: str) -> None:
    errors = 2 * [message]

    class Racing(optuna.storages.RDBStorage):  # type: ignore[misc,name-defined]
        def __init__(self, *given: Any, **options: Any) -> None:
            if errors:
                raise RuntimeError(errors.pop())
            super().__init__(*given, **options)

    monkeypatch.setattr(optuna.storages, "RDBStorage", Racing)
    monkeypatch.setattr(study_module.time, "sleep", lambda _: None)
    assert StudyStorage(url).open_study("a study").trials == []
    errors.extend(100 * [message])
    with pytest.raises(ConfigError, match="cannot be used"):
        StudyStorage(url)


def test_an_exception_fails_its_trial_and_is_raised(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> ExpectedRounds:
        raise ValueError("broken")

    monkeypatch.setattr(FakeTeacherForced, "rounds", broken)
    with pytest.raises(ValueError, match="broken"):
        run_search(url)
    assert len(stored_trials(url, "FAIL")) == 1 and not stored_trials(url, "RUNNING")


class SlowTeacherForced(FakeTeacherForced):
    """A trial has ten passes and takes this many seconds of a fake clock; before each pass it checks the time."""

    def __init__(self, trial: float) -> None:
        super().__init__()
        self.trial, self.now = trial, 0.0
        self.deadline = Deadline(None)

    def monotonic(self) -> float:
        return self.now

    def rounds(self, plan: Any) -> ExpectedRounds:
        for _ in range(10):
            self.deadline.check()
            self.now += self.trial / 10
        return super().rounds(plan)


def search_with_clock(url: str, seconds: float, trial: float, monkeypatch: pytest.MonkeyPatch) -> Search:
    teacher_forced = SlowTeacherForced(trial)
    monkeypatch.setattr(search_module, "time", teacher_forced)
    teacher_forced.deadline = Deadline(seconds)
    made = make_search(url, teacher_forced, COSTS, TuneSettings(trials=500, timeout=seconds))
    made.deadline = teacher_forced.deadline
    made.find_seed_plans()
    teacher_forced.now += 1000  # time before the trials does not count
    return made


@pytest.mark.heavy
def test_a_timeout_ends_a_search_and_keeps_whole_trials(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = search_with_clock(url, 3.05, 0.4, monkeypatch)
    made.run_trials(silent)
    assert len({trial.skips for trial in made.trials()}) == 7, "3.05 s, at 0.4 s per plan"
    assert len(stored_trials(url, "FAIL")) == 1, "the eighth was abandoned"


@pytest.mark.parametrize("before", ["nothing", "an earlier run"])
@pytest.mark.parametrize(
    ("seconds", "expected"), [(36e3, ["", "6 h", "6 h"]), (200.0, ["", "3 min", "2 min", "80 s"])]
)
def test_a_search_reports_the_time_that_is_left(
    url: str, monkeypatch: pytest.MonkeyPatch, seconds: float, expected: list[str], before: str
) -> None:
    """500 trials of 40 s, or the timeout; trials of an earlier run do not count."""
    notes: list[str] = []

    def record(stage: str, done: int, total: int, note: str = "", /) -> None:
        notes.append(note)
        if len(notes) == len(expected):
            raise KeyboardInterrupt

    for _ in range(1 + (before != "nothing")):
        notes.clear()
        with pytest.raises(KeyboardInterrupt):
            search_with_clock(url, seconds, 40.0, monkeypatch).run_trials(record)
    assert [note.partition(", about ")[2].removesuffix(" left") for note in notes] == expected
    assert all(note.startswith("best predicted speed-up ") for note in notes[1:])


def test_a_timeout_before_any_trial_is_done_is_an_error(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "timeout is 0.05, but no trial was completed in that time; raise timeout or lower"
    with pytest.raises(ConfigError, match=said):
        search_with_clock(url, 0.05, 60.0, monkeypatch).run_trials(silent)
    origins = {trial.origin for trial in run_search(url, trials=3).trials()}
    assert origins >= set(SEED_PLANS)  # abandoned trials are tried again


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_sampler_proposes_plans(sampler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREDRAFT_CACHE", "")  # the study is in memory
    trials = run_search(None, sampler=sampler, trials=14).trials()
    assert len({trial.skips for trial in trials}) > 5


def test_importance_finds_the_sub_layers_that_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREDRAFT_CACHE", "")
    sets = [[layer for layer in range(LAYERS) if number >> layer & 1] for number in range(2**LAYERS)]
    plans = {f"{a} {b}": Skips(tuple(a), tuple(b)) for a in sets for b in sets}
    monkeypatch.setattr(search_module, "seed_plans", lambda *_: plans)
    found = run_search(None, trials=len(plans))
    shares = found.importance()
    assert sum(shares.values()) == pytest.approx(1)
    assert set(sorted(shares, key=shares.__getitem__)[-2:]) == {"attention.0", "mlp.0"}
    assert best_trials(found.trials(), 3)[0].predicted == max(trial.predicted for trial in found.trials())
    assert len({trial.skips for trial in best_trials(found.trials(), 5)}) == 5


def test_a_plan_that_leaves_nothing_out_is_no_finalist_but_of_a_copy() -> None:
    trials = [Trial(0, str(Skips()), 1.4, 2, (1.5,)), Trial(1, "skip:attn=1", 1.2, 2, (1.5,))]
    assert [trial.number for trial in best_trials(trials, 3)] == [1]
    assert [trial.number for trial in best_trials(trials, 3, of_copy=True)] == [0, 1]


NO_DRIVER = "driver is not installed; run `pip install 'foredraft[postgres]'`"
POSTGRES = "refused" if find_spec("psycopg") else NO_DRIVER
NO_FILE = ("sqlite://", "sqlite:///", "sqlite:///:memory:", "sqlite:///file:x?mode=memory&uri=true")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("sqlite:////no/such/folder/study.db", "unable to open database file"),
        ("sqlite:////no/such/folder/{file}.db", "unable to open database file"),
        ("", "which is not a URL"),
        ("nonsense", "storage is 'nonsense', which is not a URL; give sqlite:///FILE"),
        ("nonsense://me:hush@host/db", "storage is 'nonsense:***', which cannot be used (Can't load plugin"),
        ("postgresql:/me:hush@host/db", "'postgresql:***', which is not a URL; give sqlite"),
        ("postgresql://me:hush@host:port/db", "'postgresql:***', which cannot be used"),
        ("postgresql://me:hush[x]", "'postgresql:***', which cannot be used"),
        *((url, "which names no file; give sqlite:///FILE") for url in NO_FILE),
        ("postgresql://me:hush@127.0.0.1:9/db", POSTGRES),
        ("postgresql://127.0.0.1:9/db?password=hush", POSTGRES),
    ],
)
def test_a_storage_that_cannot_be_used_is_refused_in_one_line(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match="^storage is ") as refused:
        StudyStorage(url)
    assert message in str(refused.value)
    assert "hush" not in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_a_database_is_left_unchanged(tmp_path: Path, url: str) -> None:
    file = tmp_path / "study.db"
    file.write_text("my notes, which are no database\n" * 50)
    before = file.read_bytes()
    with pytest.raises(ConfigError, match="file is not a database"):
        StudyStorage(url)
    assert file.read_bytes() == before


FOREIGN = {
    "a table with the name of a study's": "CREATE TABLE studies (id INTEGER, title TEXT)",
    "tables of its own": "CREATE TABLE notes (text TEXT)",
    "a revision table": "CREATE TABLE alembic_version (version_num TEXT)",
    "a version table": "CREATE TABLE version_info (version TEXT)",
}


@pytest.mark.parametrize("statement", FOREIGN.values(), ids=FOREIGN.keys())
def test_a_database_of_another_program_is_left_unchanged(tmp_path: Path, url: str, statement: str) -> None:
    file = tmp_path / "study.db"
    with closing(sqlite3.connect(file)) as connection:
        connection.execute(statement)
    before = file.read_bytes()
    said = r"belongs to another program .*and is left unchanged; give a file that"
    with pytest.raises(ConfigError, match=said):
        StudyStorage(url)
    assert file.read_bytes() == before and [*tmp_path.iterdir()] == [file]


def test_a_half_created_database_is_completed(tmp_path: Path, url: str) -> None:
    """The process that created its tables died, or is not done yet."""
    StudyStorage(url).storage.engine.dispose()
    with closing(sqlite3.connect(tmp_path / "study.db")) as connection:
        for table in ("alembic_version", "version_info", "trial_values"):
            connection.execute(f"DROP TABLE {table}")
    assert len(run_search(url, trials=2).trials()) == 2


def test_a_read_only_database_is_refused_at_once(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run_search(url, trials=2)
    connect = sqlite3.connect

    def read_only(file: str, **options: Any) -> sqlite3.Connection:
        """Open as the system opens a file without permission to write, which root has anyway."""
        return connect(f"file:{file}?mode=ro", uri=True, **options)

    monkeypatch.setattr(sqlite3, "connect", read_only)
    with pytest.raises(ConfigError, match="readonly database"):
        StudyStorage(url)


def test_braces_in_a_file_name_are_kept(tmp_path: Path) -> None:
    assert len(run_search(f"sqlite:///{tmp_path}/a{{b}}.db", trials=2).trials()) == 2
    assert (tmp_path / "a{b}.db").is_file()


def delete_study(folder: Path) -> None:
    with closing(sqlite3.connect(folder / "study.db")) as connection:
        connection.execute("PRAGMA foreign_keys=OFF")
        for table in ("studies", "trials"):
            connection.execute(f"DELETE FROM {table}")
        connection.commit()


@pytest.mark.parametrize("lose", [shutil.rmtree, delete_study])
def test_a_lost_storage_is_reported_in_one_line(tmp_path: Path, lose: Callable[[Path], None]) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()

    class Losing(FakeTeacherForced):
        def rounds(self, plan: Any) -> ExpectedRounds:
            if self.trials == 3:
                lose(folder)
            return super().rounds(plan)

    made = make_search(sqlite_url(folder), Losing())
    said = r"lost during the search \(.+\), so no plan was written; restore it"
    with pytest.raises(ConfigError, match=said) as refused, made.storage.loss_reported():
        made.run_trials(silent)
    assert "\n" not in str(refused.value)


def test_other_exceptions_are_not_reported_as_a_lost_storage(url: str) -> None:
    with pytest.raises(KeyError, match="planted"), StudyStorage(url).loss_reported():
        raise KeyError("planted")


def test_a_search_ends_once_all_plans_were_tried(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeTeacherForced.runner.decoder.spec, "layers", 2)
    monkeypatch.setattr(search_module, "seed_plans", lambda *_: {"nothing": Skips()})
    costs = replace(COSTS, attention=(0.1,) * 2)
    teacher_forced, calls = FakeTeacherForced(), list[tuple[int, int, str]]()
    made = make_search(url, teacher_forced, costs, TuneSettings(trials=400))
    assert not made.exhausted
    made.find_seed_plans()
    for _ in ("new", "resumed"):
        made.run_trials(lambda stage, done, total, note="": calls.append((done, total, note)))
        trials = made.trials()
        assert made.exhausted and teacher_forced.trials == 16 == len({trial.skips for trial in trials})
        assert calls[-1] == (len(trials), len(trials), "all 16 plans were tried")
    assert len(trials) == 16


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_seed_plans_of_small_models_differ(monkeypatch: pytest.MonkeyPatch, layers: int) -> None:
    monkeypatch.setattr(FakeTeacherForced.runner.decoder.spec, "layers", layers)
    numbers = range(2 * layers)
    monkeypatch.setattr(search_module, "greedy", lambda *_: [*numbers])
    programmed = [numbers[:size] for size in range(2 * layers + 1)]
    monkeypatch.setattr(search_module, "clasp", lambda _, most, __: programmed[: most + 1])
    found = REAL_SEED_PLANS(FakeTeacherForced())  # type: ignore[arg-type]
    assert found["nothing"] == Skips() and len(set(found.values())) == len(found)


def test_the_default_storage_is_a_file_or_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path))
    assert [len(run_search(None, trials=trials).trials()) for trials in (3, 5)] == [3, 5]
    assert (tmp_path / "studies" / "studies.db").is_file()
    monkeypatch.setenv("FOREDRAFT_CACHE", "")
    assert StudyStorage(None).shown == "memory"
    assert len(run_search(None, trials=2).trials()) == 2


# --- studies in the cache folder, and hill climbing -----------------------------------------------


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "studies" / "studies.db"


def names() -> set[str]:
    opened = StudyStorage(None).storage
    found = {study.study_name for study in opened.get_all_studies()}
    opened.engine.dispose()
    return found


def store(name: str) -> None:
    storage = StudyStorage(None)
    storage.open_study(name)
    storage.storage.engine.dispose()


def set_aside(database: Path) -> list[str]:
    return sorted(path.name for path in database.parent.iterdir() if ".broken" in path.name)


def overwrite(database: Path) -> None:
    database.write_bytes(b"no database" * 1000)


def cut(database: Path) -> None:
    database.write_bytes(database.read_bytes()[: database.stat().st_size // 2])


def spoil_a_page(database: Path) -> None:
    """Overwrite the pages past the schema, which opening the database does not read."""
    content = bytearray(database.read_bytes())
    content[-4096 * 8 :] = b"\xff" * (4096 * 8)
    database.write_bytes(content)


def open_to_others(database: Path) -> None:
    database.chmod(0o646)


@pytest.mark.parametrize("change", [overwrite, cut, spoil_a_page, open_to_others])
def test_damage_is_set_aside(database: Path, caplog: pytest.LogCaptureFixture, change: object) -> None:
    assert callable(change)
    store("first")
    assert names() == {"first"}
    change(database)
    with caplog.at_level("WARNING", "foredraft"):
        store("second")
    [told] = [record.getMessage() for record in caplog.records]
    assert "the cached studies are set aside" in told
    assert names() == {"second"} and "studies.db.broken" in set_aside(database)


def test_a_locked_or_empty_database_is_not_damaged(database: Path) -> None:
    store("first")
    with closing(sqlite3.connect(database)) as other:
        other.execute("BEGIN EXCLUSIVE")
        from foredraft.tune.study import _unusable_because

        assert _unusable_because(database) is None
    database.write_bytes(b"")
    store("second")
    assert names() == {"second"} and not set_aside(database)


@pytest.mark.parametrize("variable", ["FOREDRAFT_CACHE", "XDG_CACHE_HOME"])
def test_a_folder_whose_path_is_too_long_is_one_line(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FOREDRAFT_CACHE", raising=False)
    monkeypatch.setenv(variable, "/" + "x" * 5000)
    with pytest.raises(ConfigError, match=r"no studies can be written to .* \(File name too long") as error:
        StudyStorage(None)
    assert len(str(error.value)) < 300


def test_a_folder_that_others_can_write_is_refused(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store("first")
    database.parent.chmod(0o777)
    with pytest.raises(ConfigError, match="studies can be written by other users; set FOREDRAFT_CACHE to"):
        StudyStorage(None)
    database.parent.chmod(0o700)
    as_another_user(monkeypatch)
    with pytest.raises(ConfigError, match="belongs to another user; set FOREDRAFT_CACHE to"):
        StudyStorage(None)


# --- hill climbing ------------------------------------------------------------------------------------------

NAMES = [f"mlp.{layer}" for layer in range(6)]


def propose(trials: int, seed: int = 0, best: tuple[bool, ...] = (True, False) * 3) -> list[tuple[bool, ...]]:
    study = optuna.create_study(direction="maximize", sampler=HillClimbingSampler(seed))

    def objective(trial: Any) -> float:
        plan = [trial.suggest_categorical(name, [False, True]) for name in NAMES]
        return sum(a == b for a, b in zip(plan, best, strict=True))

    study.optimize(objective, n_trials=trials)
    return [tuple(trial.params[name] for name in NAMES) for trial in study.trials]


def distance(a: tuple[bool, ...], b: tuple[bool, ...]) -> int:
    return sum(x != y for x, y in zip(a, b, strict=True))


def test_plans_are_proposed_once_by_their_distance_from_the_best_one() -> None:
    """Which single flips reach."""
    best = (True, False) * 3
    plans = propose(2 ** len(NAMES), best=best)
    assert len(set(plans)) == len(plans)
    top = plans.index(best)
    assert top <= 36
    after = [distance(plan, best) for plan in plans[top + 1 :]]
    assert after[:3] == [1, 1, 1] and all(a <= b for a, b in pairwise(after))
    assert sum(distance(plan, best) == 1 for plan in plans) == 6


def test_proposals_depend_on_the_seed_only() -> None:
    assert propose(12, seed=1) != propose(12, seed=2) and propose(12, seed=1) == propose(12, seed=1)
