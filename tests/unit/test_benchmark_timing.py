"""The timers of the benchmark scripts: disturbed turns are repeated, and every spread says what happened beside.

Seen to fail on: a disturbed turn that is kept; a work's own seconds ignored; a count that goes on to the next
measurement; a load that is measured anew for each spread of one measurement.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks import timing
from foredraft.profiling.others import Counters

CPU = torch.device("cpu")


class Machine:
    """A pretended clock, and other programs that use so many CPUs from now on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.busy, self.others = 100.0, 0.0, 0.0
        monkeypatch.setattr("time.perf_counter", lambda: self.now)
        monkeypatch.setattr("foredraft.profiling.others.read_counters", self.read)
        monkeypatch.setattr(timing, "_beside", timing.Beside())

    def read(self) -> Counters:
        return Counters(self.now, self.busy, 0.0)

    def work(self, seconds: float) -> None:
        self.now += seconds
        self.busy += self.others * seconds


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_a_disturbed_turn_is_repeated_and_counted(machine: Machine) -> None:
    turns = iter([9.0, 2.0, 9.0, 3.0, 4.0])  # the first one warms up

    def work() -> None:
        seconds = next(turns)
        machine.others = 1.0 if seconds == 9.0 else 0.0
        machine.work(seconds)

    seconds = timing.interleaved({"it": work}, CPU, 3, warm=1)
    assert seconds == {"it": [2.0, 3.0, 4.0]}
    found = timing.spread(seconds["it"])
    assert found == {
        "median": 3.0, "lower": 2.5, "upper": 3.5, "count": 3, "others": round(18 / 27, 3), "repeated": 1,
    }  # fmt: skip


def test_all_spreads_of_a_measurement_have_one_load_and_the_next_its_own(machine: Machine) -> None:
    machine.others = 0.5
    machine.work(10.0)
    first = timing.spread([1.0])
    machine.others = 2.0
    machine.work(timing.APART / 2)  # making figures takes a while
    again = timing.spread([2.0])
    assert [found["others"] for found in (first, again)] == [0.5, 0.5]
    machine.others = 0.1
    machine.work(10.0)
    assert timing.spread([1.0])["others"] == pytest.approx(0.1, abs=0.02)


def test_repeated_turns_are_those_of_the_measurement(machine: Machine) -> None:
    machine.others = 1.0
    quiet = timing.Quiet(2)
    assert [quiet.take(lambda at=at: machine.work(1.0) or at) for at in "ab"] == ["a", "b"]  # type: ignore[misc, func-returns-value]
    assert timing.spread([1.0])["repeated"] == 2
    machine.work(1.0)
    assert timing.spread([1.0])["repeated"] == 0


def test_a_work_may_time_a_part_of_itself(machine: Machine) -> None:
    works = {"part": lambda: machine.work(5.0) or timing.OwnSeconds(2.0), "whole": lambda: machine.work(3.0)}  # type: ignore[func-returns-value]
    assert timing.interleaved(works, CPU, 2, warm=1) == {"part": [2.0, 2.0], "whole": [3.0, 3.0]}


def test_without_counters_nothing_is_repeated(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foredraft.profiling.others.read_counters", lambda: None)
    monkeypatch.setattr(timing, "_beside", timing.Beside())
    assert timing.interleaved({"it": lambda: machine.work(1.0)}, CPU, 2, warm=0) == {"it": [1.0, 1.0]}
    found = timing.spread([1.0])
    assert found["others"] is None and found["repeated"] == 0
