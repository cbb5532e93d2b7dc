"""What other programs take beside a measurement: by made-up counters, and turns that are repeated for it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from foredraft.profiling import others as module

TICK = 1 / os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 0.01
linux = pytest.mark.skipif(not Path("/proc/stat").exists(), reason="no /proc/stat")


class System:
    """A pretended /proc with two CPUs that the process may use and one that it may not, and a clock."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        # user nice system idle iowait irq softirq steal guest ..
        self.ticks = {cpu: [1000] * 10 for cpu in range(3)}
        self.clock, self.own, self.waited = 50.0, 7.0, 0.0
        (root / "proc/self/task/1").mkdir(parents=True)
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 2}, raising=False)
        monkeypatch.setattr("foredraft.profiling.others.time.perf_counter", lambda: self.clock)
        monkeypatch.setattr("foredraft.profiling.others.time.process_time", lambda: self.own)
        monkeypatch.setattr(os, "times", lambda: os.times_result((0.0, 0.0, self.waited, 0.0, 0.0)))

    def read(self) -> module.Counters | None:
        lines = [f"cpu{cpu} {' '.join(map(str, fields))}" for cpu, fields in self.ticks.items()]
        (self.root / "proc/stat").write_text("\n".join(["cpu 9 9 9 9 9 9 9 9 9 9", *lines, "intr 5", ""]))
        return module.read_counters(self.root)

    def children(self, *processes: int, of: str = "self") -> None:
        task = self.root / "proc" / of / "task" / "1"
        task.mkdir(parents=True, exist_ok=True)
        (task / "children").write_text(" ".join(map(str, processes)))

    def process(self, number: int, *ticks: int) -> None:
        """Write the ticks of a process: user, system, and the same of its children that it waited for."""
        folder, before = self.root / f"proc/{number}", " ".join(["S", *map(str, range(10))])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "stat").write_text(f"{number} (a ) name) {before} {' '.join(map(str, ticks))} 20 0")

    def watched(self, seconds: float) -> module.Watch:
        watch = module.Watch(self.read)
        self.clock += seconds
        return watch


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> System:
    return System(tmp_path, monkeypatch)


@linux
class TestCounters:
    def test_what_this_process_did_not_use_others_took(self, system: System) -> None:
        watch = system.watched(2.0)
        for field, ticks in ((0, 100), (1, 10), (2, 20), (5, 3), (6, 4), (7, 30)):  # all but idle and iowait
            system.ticks[0][field] += ticks
        system.ticks[2][0] += 33
        system.own += 120 * TICK
        load = watch.load()
        assert load is not None and load.seconds == 2.0
        assert load.others == pytest.approx((100 + 10 + 20 + 3 + 4 + 30 + 33 - 120) * TICK / 2.0)

    @pytest.mark.parametrize("own", [0.0, 3.0])  # ticks lag behind
    def test_idle_time_and_forbidden_cpus_do_not_count(self, system: System, own: float) -> None:
        watch = system.watched(1.0)
        for field in (3, 4, 8):  # guest time is part of user time
            system.ticks[0][field] += 77
        system.ticks[1] = [9999] * 10
        system.own += own
        load = watch.load()
        assert load is not None and (load.seconds, load.others) == (1.0, 0.0)

    def test_children_are_its_own_at_every_depth_before_and_after_they_end(self, system: System) -> None:
        system.children(21, 22)
        system.children(23, of="22")
        for number in (21, 22, 23):
            system.process(number, 10, 10, 10, 10)
        watch = system.watched(1.0)
        system.ticks[0][0] += 60
        system.process(21, 20, 10, 10, 10)
        system.process(22, 10, 20, 10, 10)
        system.process(23, 10, 10, 20, 20)
        load = watch.load()
        assert load is not None and load.others == pytest.approx(20 * TICK)
        # 99 has just ended, 22 has ended, with what it waited for, and was waited for
        system.children(21, 99)
        system.waited += 110 * TICK
        load = watch.load()
        assert load is not None and load.others == pytest.approx(20 * TICK)

    @pytest.mark.parametrize("content", ["", "cpu 1 2 3\nintr 4\n", "cpu0 a b c\n", "cpu0 1\ncpu2 1\n"])
    def test_counters_that_say_nothing_are_unknown(self, system: System, content: str) -> None:
        (system.root / "proc/stat").write_text(content)
        assert module.read_counters(system.root) is module.read_counters(system.root / "none") is None
        assert module.Watch(lambda: module.read_counters(system.root)).load() is None
        assert module.Watch(iter([module.Counters(1.0, 0.0, 0.0), None]).__next__).load() is None

    def test_the_real_counters_go_on(self) -> None:
        watch, until = module.Watch(), time.perf_counter() + 0.1
        while time.perf_counter() < until:
            pass
        load = watch.load()
        assert load is not None and load.seconds >= 0.1 and 0 <= load.others <= (os.cpu_count() or 1) + 1


class TestDisturbed:
    def test_the_limit_is_per_second_and_beyond_what_the_counters_may_be_off(self) -> None:
        assert not module.Load(10.0, module.DISTURBED, 0.03).disturbed
        assert module.Load(10.0, module.DISTURBED + 0.01, 0.03).disturbed
        # in 0.06 seconds half a CPU more is what the counters may be off
        assert not module.Load(0.059, module.DISTURBED + 0.5, 0.03).disturbed
        assert module.Load(0.061, module.DISTURBED + 0.5, 0.03).disturbed

    @linux
    def test_more_cpus_may_be_off_by_more(self, system: System, monkeypatch: pytest.MonkeyPatch) -> None:
        two = system.read()
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
        one = system.read()
        assert two is not None and one is not None and two.unsure == 2 * one.unsure > 0

    def test_the_worst_is_a_disturbed_one_before_a_short_one(self) -> None:
        noisy, disturbed = module.Load(0.001, 5.0, 0.03), module.Load(10.0, 0.5, 0.03)
        assert module.worst([noisy, None, disturbed]) == disturbed and module.worst([None]) is None


class Attempts:
    """A turn whose attempts find these loads, in order; its result is the attempt's number."""

    def __init__(self, *others: float | None) -> None:
        self.others, self.taken = list(others), 0

    def __call__(self) -> tuple[int, module.Load | None]:
        others = self.others[min(self.taken, len(self.others) - 1)]
        self.taken += 1
        return self.taken - 1, None if others is None else module.Load(10.0, others)


class TestQuietTurns:
    @pytest.mark.parametrize(
        ("loads", "result", "discarded", "counts"),
        [
            ((0.1,), 0, [], (1, 0, 0)),
            ((None,), 0, [], (1, 0, 0)),  # unknown
            ((0.9, 0.1), 1, [0], (1, 1, 0)),
            ((0.9, 0.8, 0.1), 2, [0, 1], (1, 2, 0)),
            ((0.9, 0.5, 0.8), 1, [0, 2], (1, 2, 1)),  # never quiet: the least disturbed counts
        ],
    )
    def test_a_disturbed_turn_is_repeated(
        self, loads: tuple[float | None, ...], result: int, discarded: list[int], counts: tuple[int, int, int]
    ) -> None:
        quiet, turn = module.QuietTurns(9), Attempts(*loads)
        assert quiet.take(turn) == (result, discarded) and turn.taken == len(loads)
        assert (quiet.kept, quiet.repeated, quiet.disturbed) == counts

    @pytest.mark.parametrize("turns", [1, 5, 12])
    def test_no_more_turns_are_repeated_than_were_planned(self, turns: int) -> None:
        quiet, turn = module.QuietTurns(turns), Attempts(2.0)
        for _ in range(turns):
            quiet.take(turn)
        assert turn.taken == min(2 * turns, module.ATTEMPTS * turns)
        assert (quiet.kept, quiet.repeated, quiet.disturbed) == (turns, turn.taken - turns, turns)
