"""Studies: what is kept, what is resumed, and what cannot be."""

from __future__ import annotations

import json
import shutil
import signal
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foredraft.drafters.skips import Skips
from foredraft.errors import ConfigError
from foredraft.tune import search as search_module
from foredraft.tune import storage as storage_module
from foredraft.tune import study as study_module
from foredraft.tune.costs import PlanCosts
from foredraft.tune.exits import ExitCosts
from foredraft.tune.expected_rounds import Rounds
from foredraft.tune.options import SAMPLERS, Options
from foredraft.tune.search import Deadline, Search, best_of
from foredraft.tune.study import StudyPlace, optuna, sqlalchemy
from tests.support.searching import (
    COSTS,
    LAYERS,
    MOMENTS,
    WARM,
    FakeTeacher,
    child,
    days_later,
    kept,
    searched,
    silent,
    sqlite,
)  # fmt: skip

WARM_STARTS = search_module.warm_starts  # itself, which the tests do without


@pytest.fixture(autouse=True)
def warm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_module, "warm_starts", lambda *_: dict(WARM))


def test_a_search_begins_with_the_plans_it_is_given_and_tries_as_many_as_asked(tmp_path: Path) -> None:
    teacher = FakeTeacher()
    trials = searched(sqlite(tmp_path), teacher).trials()
    assert len(trials) == 12
    assert [(trial.origin, trial.skips) for trial in trials[:2]] == [
        (origin, str(skips)) for origin, skips in WARM.items()
    ]
    assert teacher.trials == len({trial.skips for trial in trials})  # no plan is computed twice


def test_the_objective_is_the_predicted_speedup_at_its_best_draft_length(tmp_path: Path) -> None:
    for trial in searched(sqlite(tmp_path)).trials():
        plan = Skips.spelled(trial.skips).plan(LAYERS)
        c = 0.05 + 0.1 * sum(plan.attention) + 0.13 * sum(plan.mlp)
        gains = [tau / (k * c + COSTS.verifying[k - 1]) for k, tau in enumerate(trial.taus, start=1)]
        assert trial.predicted == pytest.approx(max(gains))
        assert trial.draft == 1 + int(np.argmax(gains))


EXITS = replace(COSTS, verifying=(1.2, 1.22, 1.24), exit=ExitCosts((0.05, 0.2), ((1.0, 0.0),) * 3))
SLOW = replace(COSTS, exit=ExitCosts((9.0, 0.0), ((9.0, 0.0),) * 3))


@pytest.mark.parametrize(
    ("costs", "way"), [(EXITS, "exit:2"), (SLOW, "skip:attn=2-3/mlp=2-3"), (COSTS, "skip:attn=2-3/mlp=2-3")]
)
def test_a_plan_without_its_last_layers_runs_as_an_exit_where_that_is_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, costs: PlanCosts, way: str
) -> None:
    warm = {"nothing": Skips(), "exit 2": Skips(exit=2)}
    monkeypatch.setattr(search_module, "warm_starts", lambda *_: warm)
    found = searched(sqlite(tmp_path), costs=costs, trials=3)
    trial = {trial.origin: trial for trial in found.trials()}["exit 2"]
    assert trial.skips == way
    assert trial.predicted == pytest.approx(costs.speedups(Skips.spelled(way), np.array(trial.taus)).max())
    again = searched(sqlite(tmp_path), trials=3)
    assert again.costs == costs
    assert not kept(sqlite(tmp_path), "WAITING"), "it was tried, by whatever name"


def test_plans_that_are_exits() -> None:
    assert Skips((2, 3), (2, 3)).as_exit(4) == Skips(exit=2)
    for skips in (Skips(), Skips((2, 3), (3,)), Skips((1, 2), (1, 2)), Skips((0, 1, 2, 3), (0, 1, 2, 3))):
        assert skips.as_exit(4) is None


def test_a_search_goes_on_where_it_was(tmp_path: Path) -> None:
    first = searched(sqlite(tmp_path), trials=5).trials()
    costs = PlanCosts(2e-3, 0.5, (0.5,) * LAYERS, 0.5, (1.0, 1.1, 1.2))
    teacher = FakeTeacher()
    other = Search(
        StudyPlace(sqlite(tmp_path)), "a study", Options(trials=9, sampler="random"), teacher, lambda: costs,
        Deadline(None),
    )  # fmt: skip
    assert other.costs == COSTS  # those of the study: all its trials are held against the same ones
    other.begin()
    other.run(silent)
    trials = other.trials()
    assert len(trials) == 9 and trials[:5] == first
    assert teacher.trials <= 4
    other.run(silent)
    assert len(other.trials()) == 9


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_search_loses_no_trial_that_ended(tmp_path: Path, moment: str) -> None:
    url = sqlite(tmp_path)
    assert child(url, moment=moment).wait(timeout=100) == -signal.SIGKILL
    before = kept(url)
    assert before and len(kept(url, "RUNNING")) == (moment != "between two")
    days_later(url)
    found = searched(url, trials=len(before) + 4)
    after = kept(url)
    assert after.items() >= before.items() and len(after) == len(before) + 4
    assert not kept(url, "RUNNING")
    assert {trial.origin for trial in found.trials()} >= set(WARM)


def test_a_trial_that_died_before_its_first_heartbeat_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study_module, "FIRST", 0.0)
    place = StudyPlace(sqlite(tmp_path))
    study = place.study("a study")
    study.enqueue_trial({"attention.0": True}, user_attrs={"warm start": "nothing"})
    with pytest.warns(UserWarning, match="Heartbeat"):
        unborn, alive = study.ask(), study.ask()
    place.storage.record_heartbeat(alive._trial_id)
    place.give_up_unborn(study)
    assert set(kept(sqlite(tmp_path), "RUNNING")) == {unborn.number, alive.number}, "both have just begun"
    days_later(sqlite(tmp_path))
    with pytest.warns(UserWarning, match="Heartbeat"):
        young = study.ask()
    place.give_up_unborn(study)
    place.give_up_unborn(study)
    assert set(kept(sqlite(tmp_path), "FAIL")) == {unborn.number}
    assert set(kept(sqlite(tmp_path), "RUNNING")) == {alive.number, young.number}
    [again] = [trial for trial in study.trials if trial.state is optuna.trial.TrialState.WAITING]
    assert again.system_attrs["fixed_params"] == {"attention.0": True}
    assert again.user_attrs == {"warm start": "nothing"}


def test_two_processes_share_a_study(tmp_path: Path) -> None:
    url = sqlite(tmp_path)
    searched(url, trials=1)
    both = [child(url, 0.2, 14, seed) for seed in (1, 2)]
    assert [process.wait(timeout=100) for process in both] == [0, 0]
    assert 14 <= len(kept(url)) <= 15  # the other may be about to end one


@pytest.mark.parametrize(
    "error",
    [
        sqlalchemy.exc.OperationalError(
            "CREATE TABLE studies", {}, Exception("table studies already exists")
        ),
        sqlalchemy.exc.IntegrityError(
            "INSERT INTO alembic_version", {}, Exception("UNIQUE constraint failed")
        ),
    ],
)
def test_a_database_that_another_process_is_making_is_opened_once_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    storage, errors = storage_module.Storage, [error, error]

    def racing(*given: Any, **options: Any) -> Any:
        if errors:
            raise errors.pop()
        return storage(*given, **options)

    monkeypatch.setattr(storage_module, "Storage", racing)
    monkeypatch.setattr(storage_module.time, "sleep", lambda _: None)
    assert StudyPlace(sqlite(tmp_path)).study("a study").trials == []
    errors.extend([error] * 100)
    with pytest.raises(ConfigError, match="cannot be used"):
        StudyPlace(sqlite(tmp_path))


def test_of_two_processes_that_want_a_trial_at_once_one_gets_it(tmp_path: Path) -> None:
    ours, theirs = StudyPlace(sqlite(tmp_path)), StudyPlace(sqlite(tmp_path))
    study = ours.study("a study")
    study.enqueue_trial({"attention.0": True})
    [waiting] = study.trials
    running = optuna.trial.TrialState.RUNNING
    got = []

    def quicker(*statement: Any) -> None:
        """The other process begins it when ours is about to write that it has."""
        if "UPDATE trials" in statement[2] and not got:
            got.append(theirs.storage.set_trial_state_values(waiting._trial_id, running))

    sqlalchemy.event.listen(ours.storage.engine, "before_cursor_execute", quicker)
    got.append(ours.storage.set_trial_state_values(waiting._trial_id, running))
    assert got == [True, False]
    [begun] = study.trials
    assert begun.state is running and begun.datetime_start is not None


@pytest.mark.parametrize("moment", ["rounds", "tell"])
def test_a_trial_that_another_process_gave_up_does_not_end_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    url = sqlite(tmp_path)
    others = StudyPlace(url).study("a study")
    teacher = FakeTeacher()
    owner = teacher if moment == "rounds" else optuna.storages.RDBStorage
    name = "rounds" if moment == "rounds" else "set_trial_state_values"
    method, calls = getattr(owner, name), []

    def late(*given: Any) -> Any:
        calls.append(given)
        if len(calls) == 3:
            [number] = kept(url, "RUNNING")
            others.tell(number, state=optuna.trial.TrialState.FAIL)
        return method(*given)

    monkeypatch.setattr(owner, name, late)
    trials = searched(url, teacher, trials=6).trials()
    assert len(trials) == 6 and not kept(url, "RUNNING")
    assert len(kept(url, "FAIL")) == 1


def test_an_error_within_a_trial_ends_the_trial_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> Rounds:
        raise ValueError("broken")

    monkeypatch.setattr(FakeTeacher, "rounds", broken)
    with pytest.raises(ValueError, match="broken"):
        searched(sqlite(tmp_path))
    assert len(kept(sqlite(tmp_path), "FAIL")) == 1 and not kept(sqlite(tmp_path), "RUNNING")


class HurriedTeacher(FakeTeacher):
    """A trial's ten passes take so many seconds of a clock of its own; between them it asks for the time."""

    def __init__(self, trial: float) -> None:
        super().__init__()
        self.trial, self.now = trial, 0.0
        self.deadline = Deadline(None)

    def monotonic(self) -> float:
        return self.now

    def rounds(self, plan: Any) -> Rounds:
        for _ in range(10):
            self.deadline.check()
            self.now += self.trial / 10
        return super().rounds(plan)


def hurried(folder: Path, seconds: float, trial: float, monkeypatch: pytest.MonkeyPatch) -> Search:
    """A search with so many seconds left, whose trials take so long."""
    teacher = HurriedTeacher(trial)
    monkeypatch.setattr(search_module, "time", teacher)
    teacher.deadline = Deadline(seconds)
    made = Search(
        StudyPlace(sqlite(folder)), "a study", Options(trials=500, sampler="random", timeout=seconds),
        teacher, lambda: COSTS, teacher.deadline,
    )  # fmt: skip
    made.begin()
    teacher.now += 1000  # what comes before the trials does not count
    return made


def test_time_that_is_up_ends_a_search_and_keeps_what_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = hurried(tmp_path, 3.05, 0.4, monkeypatch)
    made.run(silent)
    ended = {trial.skips for trial in made.trials()}
    assert len(ended) == 7, "3.05 seconds, at 0.4 for a plan"
    assert len(kept(sqlite(tmp_path), "FAIL")) == 1, "the eighth was given up"


@pytest.mark.parametrize(
    ("seconds", "expected"), [(36e3, ["", "6 h", "6 h"]), (200.0, ["", "3 min", "2 min", "80 s"])]
)
def test_a_search_says_how_long_it_will_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, expected: list[str]
) -> None:
    """500 trials of 40 seconds, or as many as there is time for; an earlier run's took none of this one's."""
    for _ in ("begun", "gone on with"):
        made = hurried(tmp_path, seconds, 40.0, monkeypatch)
        told: list[str] = []

        def tell(stage: str, done: int, total: int, note: str = "", /, *, told: list[str] = told) -> None:
            told.append(note)
            if len(told) == len(expected):
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            made.run(tell)
        assert [note.partition(", about ")[2].removesuffix(" left") for note in told] == expected
        assert all(note.startswith("best predicted speed-up ") for note in told[1:])


def test_time_that_is_up_before_a_trial_ended_is_a_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = hurried(tmp_path, 0.05, 60.0, monkeypatch)
    with pytest.raises(ConfigError, match="timeout is 0.05, in which not one trial ended; give more seconds"):
        made.run(silent)
    origins = {trial.origin for trial in searched(sqlite(tmp_path), trials=3).trials()}
    assert origins >= set(WARM)  # what was given up is tried again


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_samplers_propose_plans(sampler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREDRAFT_CACHE", "")  # in memory
    trials = searched(None, sampler=sampler, trials=14).trials()
    assert len({trial.skips for trial in trials}) > 5


def test_importance_finds_the_layer_that_must_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREDRAFT_CACHE", "")
    found = searched(None, trials=80)
    shares = found.importance()
    assert sum(shares.values()) == pytest.approx(1)
    assert set(sorted(shares, key=shares.__getitem__)[-2:]) == {"attention.0", "mlp.0"}
    assert best_of(found.trials(), 3)[0].predicted == max(trial.predicted for trial in found.trials())
    assert len({trial.skips for trial in best_of(found.trials(), 5)}) == 5


POSTGRES = (
    "refused" if find_spec("psycopg") else "driver is not installed; run `pip install 'foredraft[postgres]'`"
)


MEMORY = (
    "sqlite://",
    "sqlite:///",
    "sqlite:///:memory:",
    "sqlite:///file::memory:?uri=true",
    "sqlite:///file:x?mode=memory&uri=true",
)


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("sqlite:////no/such/folder/study.db", "unable to open database file"),
        ("", "which is no URL"),
        ("nonsense", "which is no URL; give sqlite:///FILE"),
        (
            "nonsense://me:hush@host/db",
            "which is no kind that keeps trials; give sqlite:///FILE, or the URL of a",
        ),
        ("postgresql:/me:hush@host/db", "'postgresql:/***@host/db', which is no URL; give sqlite"),
        ("postgresql://me:hush@host:port/db", "which is no URL"),
        ("postgresql://me:hush[x]", "which is no URL"),
        ("postgresql://host/db?password=hush", "password=***"),
        ("sqlite:////no/such/folder/{file}.db", "unable to open database file"),
        *((url, "in memory, which a search's threads cannot share") for url in MEMORY),
        ("postgresql://me:hush@127.0.0.1:9/db", POSTGRES),
    ],
)
def test_a_storage_that_cannot_be_used_is_told(url: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match="^storage is ") as told:
        StudyPlace(url)
    assert complaint in str(told.value)
    assert "hush" not in str(told.value)
    assert "\n" not in str(told.value)


def test_a_file_that_is_no_database_stays_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "study.db"
    file.write_text("my notes, which are no database\n" * 50)
    before = file.read_bytes()
    with pytest.raises(ConfigError, match="file is not a database"):
        StudyPlace(sqlite(tmp_path))
    assert file.read_bytes() == before


FOREIGN = {
    "of a table called like one of a study's": ("CREATE TABLE studies (id INTEGER, title TEXT)",),
    "of tables of its own": ("CREATE TABLE notes (text TEXT)",),
    "that counts its revisions likewise": ("CREATE TABLE alembic_version (version_num TEXT)",),
    "that counts its versions itself": ("CREATE TABLE version_info (version TEXT)",),
}


@pytest.mark.parametrize("statements", FOREIGN.values(), ids=FOREIGN.keys())
def test_a_database_of_another_program_stays_as_it_is(tmp_path: Path, statements: tuple[str, ...]) -> None:
    with closing(sqlite3.connect(tmp_path / "study.db")) as connection:
        for statement in statements:
            connection.execute(statement)
    before = (tmp_path / "study.db").read_bytes()
    with pytest.raises(ConfigError, match=r"a database of another program's.*; it stays as it is"):
        StudyPlace(sqlite(tmp_path))
    assert (tmp_path / "study.db").read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["study.db"]


def test_a_database_whose_tables_are_half_made_is_made_whole(tmp_path: Path) -> None:
    """Who made them died, or is not yet done."""
    StudyPlace(sqlite(tmp_path)).storage.engine.dispose()
    with closing(sqlite3.connect(tmp_path / "study.db")) as connection:
        for table in ("alembic_version", "version_info", "trial_heartbeats"):
            connection.execute(f"DROP TABLE {table}")
    assert len(searched(sqlite(tmp_path), trials=2).trials()) == 2


def test_a_database_that_may_only_be_read_is_told_at_once(tmp_path: Path) -> None:
    searched(sqlite(tmp_path), trials=2)
    with pytest.raises(ConfigError, match="readonly database"):
        StudyPlace(f"sqlite:///file:{tmp_path / 'study.db'}?mode=ro&uri=true")


def test_braces_in_a_name_are_braces(tmp_path: Path) -> None:
    assert len(searched(f"sqlite:///{tmp_path}/a{{b}}.db", trials=2).trials()) == 2
    assert (tmp_path / "a{b}.db").is_file()


def gone(folder: Path) -> None:
    shutil.rmtree(folder)


def emptied(folder: Path) -> None:
    """Another process deletes the study."""
    with closing(sqlite3.connect(folder / "study.db")) as connection:
        connection.execute("PRAGMA foreign_keys=OFF")
        for table in ("studies", "trials"):
            connection.execute(f"DELETE FROM {table}")
        connection.commit()


@pytest.mark.parametrize("lost", [gone, emptied])
def test_a_storage_that_is_lost_is_one_line(tmp_path: Path, lost: Callable[[Path], None]) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()

    class Losing(FakeTeacher):
        def rounds(self, plan: Any) -> Rounds:
            if self.trials == 3:
                lost(folder)
            return super().rounds(plan)

    one_line = pytest.raises(ConfigError, match=r"lost during the search \(.+\); no plan was written")
    with one_line as told, StudyPlace(sqlite(tmp_path)).watched():
        searched(sqlite(folder), Losing(), trials=50)
    assert "\n" not in str(told.value)


def test_what_no_database_failed_in_is_not_taken_for_that(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="planted"), StudyPlace(sqlite(tmp_path)).watched():
        raise KeyError("planted")


def test_a_sign_of_life_that_cannot_be_given_is_no_error(tmp_path: Path) -> None:
    place = StudyPlace(sqlite(tmp_path))
    (tmp_path / "study.db").unlink()
    place.storage.engine.dispose()
    place.storage.record_heartbeat(1)


@pytest.mark.parametrize("sampler", ["flips", "random"])
def test_a_search_ends_when_all_plans_were_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sampler: str
) -> None:
    monkeypatch.setattr(FakeTeacher.runner.decoder.spec, "layers", 2)
    monkeypatch.setattr("searching.LAYERS", 2)
    monkeypatch.setattr(search_module, "warm_starts", lambda *_: {"nothing": Skips()})
    costs = replace(COSTS, attention=(0.1,) * 2)
    teacher, told = FakeTeacher(), list[tuple[int, int, str]]()
    made = Search(
        StudyPlace(sqlite(tmp_path)), "a study", Options(trials=400, sampler=sampler),  # type: ignore[arg-type]
        teacher, lambda: costs, Deadline(None),
    )  # fmt: skip
    assert not made.exhausted
    made.begin()
    for _ in ("begun", "gone on with"):
        made.run(lambda stage, done, total, note="": told.append((done, total, note)))
        trials = made.trials()
        assert made.exhausted and teacher.trials == 16 == len({trial.skips for trial in trials})
        assert told[-1] == (len(trials), len(trials), "all 16 plans were tried")
    assert sampler == "random" or len(trials) == 16


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_there_are_plans_to_begin_with_for_few_layers(monkeypatch: pytest.MonkeyPatch, layers: int) -> None:
    monkeypatch.setattr(FakeTeacher.runner.decoder.spec, "layers", layers)
    numbers = range(2 * layers)
    monkeypatch.setattr(search_module, "greedy", lambda *_: [*numbers])
    monkeypatch.setattr(
        search_module, "clasp", lambda teacher, most, _: [numbers[:size] for size in range(most + 1)]
    )
    found = WARM_STARTS(FakeTeacher())  # type: ignore[arg-type]
    assert found["nothing"] == Skips() and len(set(found.values())) == len(found)


def test_the_default_is_a_file_in_the_cache_folder_or_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path))
    assert len(searched(None, trials=3).trials()) == 3
    assert len(searched(None, trials=5).trials()) == 5
    assert (tmp_path / "studies" / "studies.db").is_file()
    monkeypatch.setenv("FOREDRAFT_CACHE", "")
    assert StudyPlace(None).shown == "memory"
    assert len(searched(None, trials=2).trials()) == 2


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"trials": 0}, "trials is 0; give 1 or more"),
        ({"timeout": 0.0}, "timeout is 0.0; give seconds, more than 0"),
        ({"timeout": float("nan")}, "timeout is nan"),
        ({"sampler": "grid"}, "sampler is 'grid'; give one of tpe, gp, flips, random"),
        ({"temperature": -1.0}, "temperature is -1.0; give 0 or more"),
        ({"max_draft": 0}, "max_draft is 0; give 1 or more"),
        ({"new_tokens": 1}, "new_tokens is 1; give 2 or more"),
        ({"seed": -1}, "seed is -1; give a whole number"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError) as told:
        Options(**options)
    assert complaint in str(told.value)


def test_costs_are_kept_as_they_were(tmp_path: Path) -> None:
    kept = searched(sqlite(tmp_path), trials=1).study.user_attrs["costs"]
    assert json.loads(kept)["mlp"] == 0.13
