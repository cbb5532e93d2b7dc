"""The number of threads of a process: what decides, what is said, and what a second load changes."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import foredraft
from foredraft import user_cache
from foredraft.cli import main
from foredraft.cli.words import as_flag
from foredraft.errors import ConfigError
from foredraft.kernels.compilation import library
from foredraft.loading import machine_limits
from foredraft.loading.machine_limits import Cpus, choose_threads, use_threads
from foredraft.profiling import host
from foredraft.profiling.host import faster_threads, known_faster
from foredraft.profiling.others import Load
from foredraft.quantise import quantise_checkpoint
from tests.support.checkpoints import save_checkpoint

FOUR = Cpus((0, 1, 2, 3), 4)
PAIRED = Cpus(tuple(range(8)), 4)  # each core runs two
SMALL: dict[str, Any] = {"device": "cpu", "drafter": "none", "max_length": 32, "max_batch": 1}


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No load before, no variable, four CPUs with a core each, and PyTorch's own number for them."""
    before = torch.get_num_threads()
    monkeypatch.setattr(machine_limits, "_used", None)
    for name in ("FOREDRAFT_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    machine(monkeypatch, FOUR)
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    yield
    torch.set_num_threads(before)


def machine(monkeypatch: pytest.MonkeyPatch, cpus: Cpus) -> None:
    monkeypatch.setattr(machine_limits, "usable_cpus", lambda: cpus)
    monkeypatch.setattr(os, "cpu_count", lambda: len(cpus.allowed))
    torch.set_num_threads(len(cpus.allowed))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("model"), tokenizer=True)


class TestOrder:
    def test_the_first_that_is_given_decides(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert choose_threads(None).describe() == "4 threads: the CPUs that this process may use"
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
        torch.set_num_threads(3)  # as PyTorch does by itself
        assert choose_threads(None).describe() == "3 threads: given by OMP_NUM_THREADS"
        torch.set_num_threads(2)
        assert choose_threads(None).describe() == "2 threads: given by torch.set_num_threads"
        monkeypatch.setenv("FOREDRAFT_THREADS", "7")
        assert choose_threads(None).describe() == "7 threads: given by FOREDRAFT_THREADS"
        assert choose_threads(1).describe() == "1 thread: given by threads=1"
        assert choose_threads(1).describe(as_flag) == "1 thread: given by --threads 1"

    def test_pytorchs_own_number_is_not_the_programs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        machine(monkeypatch, PAIRED)
        for number, program in ((3, True), (4, False), (6, False), (8, False), (9, True)):
            torch.set_num_threads(number)
            assert ("set_num_threads" in choose_threads(None).describe()) == program, number
        monkeypatch.setenv("MKL_NUM_THREADS", "3")
        torch.set_num_threads(3)
        assert choose_threads(None).number == 4

    def test_an_empty_variable_is_none_and_a_list_its_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FOREDRAFT_THREADS", "")
        monkeypatch.setenv("OMP_NUM_THREADS", " ")
        assert choose_threads(None).number == 4
        monkeypatch.setenv("OMP_NUM_THREADS", "2,4")
        torch.set_num_threads(2)
        assert choose_threads(None).describe() == "2 threads: given by OMP_NUM_THREADS"

    def test_the_largest_number_is_taken(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert choose_threads(1024).number == 1024
        monkeypatch.setenv("FOREDRAFT_THREADS", "1024")
        assert choose_threads(None).number == 1024


class TestReasons:
    @pytest.mark.parametrize(
        ("cpus", "said"),
        [
            (Cpus((0,), 1), "1 thread: the CPUs that this process may use"),
            (Cpus(tuple(range(64)), 64, 1.5), "1 thread: of 64 CPUs, its cgroup grants 1.5"),
            (Cpus(tuple(range(64)), 32, 0.25), "1 thread: of 64 CPUs, its cgroup grants 0.25"),
            (Cpus(tuple(range(64)), 32, 20.0), "20 threads: of 64 CPUs, its cgroup grants 20"),
            (Cpus((0, 1), 2, 9.0), "2 threads: the CPUs that this process may use"),
            (Cpus(tuple(range(16)), 8), "8 threads: physical cores of 16 CPUs; --threads changes it"),
            (Cpus(tuple(range(64)), 32, 40.0), "32 threads: physical cores of 64 CPUs; --threads changes it"),
        ],
    )
    def test_the_line_says_why(self, monkeypatch: pytest.MonkeyPatch, cpus: Cpus, said: str) -> None:
        machine(monkeypatch, cpus)
        assert choose_threads(None).describe(as_flag) == said

    def test_info_and_the_log_of_a_load_say_it(
        self, model: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
    ) -> None:
        line = "4 threads: the CPUs that this process may use"
        assert main(["info", str(model), "--device", "cpu"]) == 0
        assert line in capsys.readouterr().out.splitlines()
        assert main(["info", str(model), "--device", "cpu", "--threads", "3", "--json"]) == 0
        [document] = capsys.readouterr().out.splitlines()
        assert json.loads(document)["threads"] == {"number": 3, "why": "3 threads: given by --threads 3"}
        with caplog.at_level(logging.INFO, "foredraft"):
            foredraft.load(model, **SMALL)
        assert line in caplog.messages


class TestMistakes:
    @pytest.mark.parametrize("value", [0, -1, 1025, 1.5, True, "2"])
    def test_an_option_is_refused_before_the_model_is_looked_for(self, value: Any) -> None:
        with pytest.raises(ConfigError) as error:
            foredraft.load("./nowhere", threads=value)
        assert str(error.value) == f"threads is {value!r}; give a whole number from 1 to 1,024"

    @pytest.mark.parametrize("name", ["FOREDRAFT_THREADS", "OMP_NUM_THREADS"])
    @pytest.mark.parametrize("value", ["0", "-1", "many", "1025", "1.5", "٣", "9" * 5000])
    def test_wrong_variables_are_named(self, monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
        monkeypatch.setenv(name, value)
        with pytest.raises(ConfigError) as error:
            foredraft.load("./nowhere", threads=2)
        shown = repr(value) if len(value) < 99 else repr(value)[:77] + "..."
        assert str(error.value) == (
            f"the environment variable {name} is {shown}; give a whole number from 1 to 1,024, or unset it"
        )

    @pytest.mark.parametrize(
        ("value", "said"),
        [
            ("0", "--threads is 0; give a whole number from 1 to 1,024"),
            ("-1", "--threads is -1; give a whole number from 1 to 1,024"),
            ("1025", "--threads is 1025; give a whole number from 1 to 1,024"),
            ("many", "'many' is no whole number; give one, as in --threads 4"),
        ],
    )
    @pytest.mark.parametrize("command", ["info", "generate x", "quantise --out ./new"])
    def test_the_command_line_says_it_in_one_line(
        self, capsys: pytest.CaptureFixture[str], command: str, value: str, said: str
    ) -> None:
        assert main([*command.split(), f"--threads={value}"]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and "--threads" in err and said in err


class TestProcess:
    def test_pytorch_follows(self, model: Path, tmp_path: Path) -> None:
        foredraft.load(model, threads=3, **SMALL)
        assert torch.get_num_threads() == 3
        quantise_checkpoint(str(model), "int8", tmp_path / "coded", threads=2)
        assert torch.get_num_threads() == 2

    def test_a_later_number_wins_with_one_line(self, model: Path, caplog: pytest.LogCaptureFixture) -> None:
        first = foredraft.load(model, threads=3, **SMALL)
        foredraft.load(model, **SMALL)
        assert torch.get_num_threads() == 3 and not warnings(caplog)
        foredraft.load(model, threads=2, **SMALL)
        assert torch.get_num_threads() == 2
        assert warnings(caplog) == [
            "2 threads: given by threads=2; every model of this process computes with so many now, and no"
            " longer with 3"
        ]
        first.generate([[1, 2, 3]], foredraft.SamplingParams(max_new_tokens=2))  # works on
        foredraft.load(model, **SMALL)
        assert torch.get_num_threads() == 2 and len(warnings(caplog)) == 1

    def test_a_program_may_change_it_between_loads(self, caplog: pytest.LogCaptureFixture) -> None:
        use_threads(3)
        torch.set_num_threads(2)
        assert use_threads(None).describe() == "2 threads: given by torch.set_num_threads"
        assert use_threads(None).number == 2 and not warnings(caplog)

    def test_a_default_is_asked_for_anew(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert use_threads(None).number == 4
        monkeypatch.setattr(machine_limits, "usable_cpus", lambda: Cpus((0, 1), 2))
        assert use_threads(None).number == torch.get_num_threads() == 2


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno == logging.WARNING]


def step_of(seconds: dict[int, float]) -> tuple[Callable[[int], None], list[int]]:
    """Return a step that takes so many seconds with each number of threads, and a list of the numbers that it got."""
    taken: list[int] = []

    def step(number: int) -> None:
        taken.append(number)
        time.sleep(seconds[number])

    return step, taken


def other_programs(monkeypatch: pytest.MonkeyPatch, others: float) -> None:
    monkeypatch.setattr(host, "Watch", lambda: SimpleNamespace(load=lambda: Load(10.0, others)))


class TestHyperthreads:
    @pytest.fixture(autouse=True)
    def quiet(self, monkeypatch: pytest.MonkeyPatch) -> None:
        other_programs(monkeypatch, 0.0)

    @pytest.mark.parametrize(
        ("on_cores", "on_all", "faster"), [(0.02, 0.002, 8), (0.002, 0.02, 4), (0.01, 0.01, 4)]
    )
    def test_the_faster_number_is_kept(self, on_cores: float, on_all: float, faster: int) -> None:
        assert known_faster(4, 8, ["cpu"]) is None
        step, taken = step_of({4: on_cores, 8: on_all})
        assert faster_threads(4, 8, ["cpu"], step) == faster and set(taken) == {4, 8}
        taken.clear()
        assert faster_threads(4, 8, ["cpu"], step) == known_faster(4, 8, ["cpu"]) == faster
        assert not taken
        assert known_faster(4, 8, ["another"]) is None and known_faster(4, 6, ["cpu"]) is None

    def test_nothing_is_measured_where_both_numbers_are_equal(self) -> None:
        step, taken = step_of({4: 1.0})
        assert faster_threads(4, 4, ["cpu"], step) == 4 and not taken

    @pytest.mark.parametrize(("seconds", "steps"), [(0.05, 2), (0.11, 1)])
    def test_a_step_that_takes_long_is_not_measured_and_nothing_is_kept(
        self, monkeypatch: pytest.MonkeyPatch, seconds: float, steps: int
    ) -> None:
        monkeypatch.setattr(host, "SECONDS", 0.1)
        step, taken = step_of({4: seconds, 8: 0.001})
        assert faster_threads(4, 8, ["cpu"], step) == 4 and taken == [4] * steps
        assert known_faster(4, 8, ["cpu"]) is None

    def test_beside_other_programs_the_cores_are_taken(self, monkeypatch: pytest.MonkeyPatch) -> None:
        other_programs(monkeypatch, 1.0)
        assert faster_threads(4, 8, ["cpu"], step_of({4: 0.02, 8: 0.002})[0]) == 4
        assert known_faster(4, 8, ["cpu"]) is None

    @pytest.mark.parametrize("kept", [5, "8", None, [8]])
    def test_a_kept_answer_that_is_no_candidate_is_measured_anew(self, kept: Any) -> None:
        user_cache.write(host.KIND, host._key(4, 8, ["cpu"]), kept)
        assert known_faster(4, 8, ["cpu"]) is None

    @pytest.mark.skipif(library() is None, reason="no C compiler")
    def test_a_load_measures_and_the_next_knows(self, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        machine(monkeypatch, Cpus((0, 1), 1))
        asked: list[tuple[int, int]] = []

        def measured(physical: int, logical: int, machine: Any, step: Any) -> int:
            asked.append((physical, logical))
            for number in (physical, logical):  # what is timed is a pass of the model
                step(number)
                assert torch.get_num_threads() == number
            user_cache.write(host.KIND, host._key(physical, logical, machine), logical)
            return logical

        monkeypatch.setattr(machine_limits, "faster_threads", measured)
        assert "1 thread: physical cores of 2 CPUs" in choose_threads(None).describe()
        foredraft.load(model, kernels=False, **SMALL)
        assert asked == [] and torch.get_num_threads() == 1  # without kernels bits depend on the number
        foredraft.load(model, **SMALL)
        assert asked == [(1, 2)] and torch.get_num_threads() == 2
        assert choose_threads(None).describe() == "2 threads: the CPUs that this process may use"
        foredraft.load(model, threads=1, **SMALL)
        assert asked == [(1, 2)] and torch.get_num_threads() == 1

    @pytest.mark.skipif(library() is None, reason="no C compiler")
    def test_a_failed_measuring_leaves_cores(self, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        machine(monkeypatch, Cpus((0, 1), 1))

        def failing(physical: int, logical: int, machine: Any, step: Any) -> int:
            step(logical)
            raise KeyboardInterrupt

        monkeypatch.setattr(machine_limits, "faster_threads", failing)
        with pytest.raises(KeyboardInterrupt):
            foredraft.load(model, **SMALL)
        assert torch.get_num_threads() == 1
