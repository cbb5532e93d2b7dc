"""What a process may use, by affinity, cores and control groups, on pretended and real systems; its number of threads:
what decides, what is said, and what a second load changes."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
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
from foredraft.loading.machine_limits import Cpus, choose_threads, free_memory, usable_cpus, use_threads
from foredraft.profiling import host
from foredraft.profiling.host import faster_threads, known_faster
from foredraft.profiling.others import Load
from foredraft.quantise import quantise_checkpoint
from tests.support.checkpoints import save_checkpoint
from tests.support.running import environment

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


# --- CPUs and memory ----------------------------------------------------------------------------------------

V1, V2 = "sys/fs/cgroup/cpu,cpuacct", "sys/fs/cgroup"
MOUNT1 = f"35 31 0:32 {{}} /{V1} rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
MOUNT2 = f"31 23 0:28 {{}} /{V2} rw,relatime - cgroup2 cgroup2 rw,nsdelegate\n"
MOUNTS = "22 1 0:5 / / rw shared:1 - ext4 /dev/vda1 rw\n36 31 0:33 / /x rw - cgroup cgroup rw,cpuset\n"
TOPOLOGY = "sys/devices/system/cpu/cpu{}/topology"
COUNT = "import os, foredraft.loading.machine_limits as c; print(c.usable_cpus().physical, len(os.sched_getaffinity(0)))"


def v1(quota: int, period: int = 100_000, at: str = V1) -> dict[str, str]:
    return {f"{at}/cpu.cfs_quota_us": f"{quota}\n", f"{at}/cpu.cfs_period_us": f"{period}\n"}


def v2(quota: str, period: int = 100_000, at: str = V2) -> dict[str, str]:
    return {f"{at}/cpu.max": f"{quota} {period}\n"}


def pretend(
    monkeypatch: pytest.MonkeyPatch,
    root: Path,
    count: int = 64,
    cgroup: str = "0::/\n",
    mounts: str = "",
    files: dict[str, str] | None = None,
) -> None:
    """Pretend a machine whose process may run on `count` CPUs, and whose system files are these."""
    system = {"proc/self/cgroup": cgroup, "proc/self/mountinfo": MOUNTS + mounts} | (files or {})
    for name, content in system.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(count)), raising=False)
    monkeypatch.setattr(machine_limits, "ROOT", root)


@pytest.mark.parametrize(
    ("cgroup", "mounts", "files", "quota", "threads"),
    [
        ("0::/\n", "", {}, None, 64),  # no groups
        ("0::/\n", MOUNT2.format("/"), {}, None, 64),  # the machine's own root has no cpu.max
        ("0::/\n", MOUNT2.format("/"), v2("max"), None, 64),
        ("0::/\n", MOUNT2.format("/"), v2("150000"), 1.5, 1),  # a container with its own namespace
        ("0::/\n", MOUNT2.format("/"), v2("50000"), 0.5, 1),
        ("0::/\n", MOUNT2.format("/"), v2("20000", 10_000), 2.0, 2),
        ("0::/\n", MOUNT2.format("/"), v2("790000"), 7.9, 7),
        ("0::/\n", MOUNT2.format("/"), v2("9900000"), 99.0, 64),  # more than affinity allows
        ("0::/a/b\n", MOUNT2.format("/"), v2("max", at=f"{V2}/a/b") | v2("300000", at=f"{V2}/a"), 3.0, 3),
        ("0::/a/b\n", MOUNT2.format("/"), v2("200000", at=f"{V2}/a/b") | v2("300000", at=f"{V2}/a"), 2.0, 2),
        ("0::/a/b\n", MOUNT2.format("/"), v2("400000", at=f"{V2}/a/b") | v2("300000", at=f"{V2}/a"), 3.0, 3),
        ("0::/d/c1\n", MOUNT2.format("/d/c1"), v2("200000"), 2.0, 2),  # mounted at the group itself
        ("0::/d/c1\n", MOUNT2.format("/d/other"), v2("200000"), 2.0, 2),  # the host's path, unknown here
        ("0::/../x\n", MOUNT2.format("/"), v2("200000") | v2("100000", at=f"{V2}/x"), 2.0, 2),
        ("0::/a\n", MOUNT2.format("/"), {f"{V2}/a/cpu.max": "nonsense\n"}, None, 64),
        ("0::/a\n", MOUNT2.format("/"), v2("100000", 0, at=f"{V2}/a"), None, 64),
        ("4:cpu,cpuacct:/\n0::/\n", MOUNT1.format("/"), v1(150_000), 1.5, 1),
        ("4:cpu,cpuacct:/\n0::/\n", MOUNT1.format("/"), v1(-1), None, 64),
        ("4:cpuacct,cpu:/a/b\n", MOUNT1.format("/"), v1(-1, at=f"{V1}/a/b") | v1(250_000, at=f"{V1}/a"), 2.5, 2),
        ("4:cpu,cpuacct:/docker/f00\n", MOUNT1.format("/docker/f00"), v1(300_000), 3.0, 3),
        ("4:cpu,cpuacct:/docker/f00\n", MOUNT1.format("/"), v1(300_000), 3.0, 3),  # its folder is not visible
        ("4:cpu:/\n0::/a\n", MOUNT1.format("/") + MOUNT2.format("/"), v1(300_000) | v2("200000", at=f"{V2}/a"), 2.0, 2),
        ("5:cpuset:/\n0::/\n", MOUNT1.format("/"), v1(100_000), None, 64),  # no group of this controller
    ],
)  # fmt: skip
def test_the_smallest_quota_of_a_group_and_its_parents_counts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cgroup: str,
    mounts: str,
    files: dict[str, str],
    quota: float | None,
    threads: int,
) -> None:
    pretend(monkeypatch, tmp_path, 64, cgroup, mounts, files)
    found = usable_cpus()
    assert found == Cpus(tuple(range(64)), 64, quota)
    assert (found.physical, found.logical) == (threads, threads)


def test_files_that_cannot_be_read_are_no_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, tmp_path, 4, "0::/a\n", MOUNT2.format("/"))
    (tmp_path / V2 / "a" / "cpu.max").mkdir(parents=True)  # an OSError for every user, the super-user too
    topology = tmp_path / TOPOLOGY.format(0) / "core_cpus_list"
    topology.mkdir(parents=True)
    assert usable_cpus() == Cpus((0, 1, 2, 3), 4)
    (tmp_path / "proc/self/mountinfo").unlink()
    assert usable_cpus() == Cpus((0, 1, 2, 3), 4)


MEMORY1 = MOUNT1.replace("cpu,cpuacct", "memory")
GIB = 2**30


def memory1(limit: int, at: str = "") -> dict[str, str]:
    """Return the files of a group that uses 6 GiB, of which 3 are cached files."""
    stat = f"cache 9\ntotal_cache 9\ntotal_inactive_file {2 * GIB}\ntotal_active_file {GIB}\n"
    files = {"limit_in_bytes": limit * GIB, "usage_in_bytes": 6 * GIB, "stat": stat}
    return {f"sys/fs/cgroup/memory{at}/memory.{name}": f"{content}\n" for name, content in files.items()}


def memory2(limit: int | None, at: str = "") -> dict[str, str]:
    most, stat = (
        "max" if limit is None else limit * GIB,
        f"anon 1\ninactive_file {2 * GIB}\nactive_file {GIB}\n",
    )
    files = {"max": most, "current": 6 * GIB, "stat": stat}
    return {f"{V2}{at}/memory.{name}": f"{content}\n" for name, content in files.items()}


@pytest.mark.parametrize(
    ("cgroup", "mounts", "files", "free"),
    [
        ("0::/\n", "", {}, 100),  # no groups
        ("0::/\n", MOUNT2.format("/"), memory2(16), 13),
        ("0::/\n", MOUNT2.format("/"), memory2(None), 100),
        ("0::/\n", MOUNT2.format("/"), memory2(2), 0),  # a limit below the usage
        ("0::/\n", MOUNT2.format("/"), memory2(500), 100),  # more than the machine has
        ("0::/a/b\n", MOUNT2.format("/"), memory2(30, "/a/b") | memory2(20, "/a"), 17),
        ("4:memory:/\n0::/\n", MEMORY1.format("/"), memory1(16), 13),
        ("4:memory:/docker/f00\n", MEMORY1.format("/"), memory1(16), 13),  # its own folder is not visible
        ("4:memory:/\n", MEMORY1.format("/"), memory1(8 * 2**30 - 1), 100),  # version 1's "no limit"
        ("4:memory:/\n0::/\n", MEMORY1.format("/") + MOUNT2.format("/"), memory1(16) | memory2(13), 10),
    ],
)
def test_free_memory_respects_the_limits_of_control_groups(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cgroup: str,
    mounts: str,
    files: dict[str, str],
    free: int,
) -> None:
    told = {"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable:   {100 * 2**20} kB\n"}
    pretend(monkeypatch, tmp_path, cgroup=cgroup, mounts=mounts, files=told | files)
    assert free_memory(torch.device("cpu")) == free * GIB


def test_free_memory_without_control_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the machine's without /proc; on a GPU what the allocator caches is free, too."""
    monkeypatch.setattr(machine_limits, "ROOT", tmp_path)
    half = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    assert free_memory(torch.device("cpu")) == half > 0
    for name, value in (("memory_reserved", 7), ("memory_allocated", 3), ("mem_get_info", (10, 99))):
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert free_memory(torch.device("cuda")) == 14


@pytest.mark.parametrize("name", ["core_cpus_list", "thread_siblings_list"])
@pytest.mark.parametrize(
    ("allowed", "siblings", "cores"),
    [
        ((0, 1, 2, 3), {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}, 2),
        ((0, 1, 2, 3), {0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3"}, 2),
        ((0, 1, 2, 3), {0: "0", 1: "1", 2: "2", 3: "3"}, 4),
        ((0, 2), {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}, 1),  # affinity allows both threads of one core
        ((0, 1), {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}, 2),  # and here one of each
        ((0, 1, 2, 3, 4, 5), {0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3", 4: "4", 5: "5"}, 4),  # hybrid: 2 fast, 2 slow
        ((0, 1, 2), {0: "0-1", 1: "0-1"}, 2),  # the third is not told
        ((0, 1, 2), {}, 3),
    ],
)  # fmt: skip
def test_cores_are_counted_by_their_logical_cpus(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    allowed: tuple[int, ...],
    siblings: dict[int, str],
    cores: int,
) -> None:
    files = {f"{TOPOLOGY.format(cpu)}/{name}": f"{listed}\n" for cpu, listed in siblings.items()}
    pretend(monkeypatch, tmp_path, files=files)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(allowed))
    found = usable_cpus()
    assert found == Cpus(allowed, cores) and (found.physical, found.logical) == (cores, len(allowed))


def test_a_quota_caps_cores_and_logical_cpus_alike() -> None:
    eight = tuple(range(8))
    for quota, physical, logical in ((6.5, 4, 6), (4.0, 4, 4), (2.9, 2, 2)):
        found = Cpus(eight, 4, quota)
        assert (found.physical, found.logical) == (physical, logical), quota


@pytest.mark.parametrize(
    ("says", "cores"),
    [({"hw.perflevel0.physicalcpu": "4"}, 4), ({"hw.physicalcpu": "6"}, 6), ({}, 10), ({"hw.physicalcpu": "x"}, 10)],
)  # fmt: skip
def test_on_macos_sysctl_tells_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: dict[str, str], cores: int
) -> None:
    """A program of that name in a folder of its own stands for the system's."""
    known = "".join(f'[ "$2" = {name} ] && echo {value} && exit 0\n' for name, value in says.items())
    (tmp_path / "sysctl").write_text(f"#!/bin/sh\n{known}exit 1\n")
    (tmp_path / "sysctl").chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 10)
    monkeypatch.setattr(os, "process_cpu_count", lambda: 10, raising=False)
    assert usable_cpus(tmp_path) == Cpus(tuple(range(10)), cores)


@pytest.mark.heavy
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
def test_a_real_process_that_may_run_on_one_cpu_gets_one_thread() -> None:
    first = min(os.sched_getaffinity(0))
    done = subprocess.run(
        [sys.executable, "-c", COUNT], env=environment(), capture_output=True, encoding="utf-8", timeout=240,
        preexec_fn=lambda: os.sched_setaffinity(0, {first}),
    )  # fmt: skip
    assert done.stdout.split() == ["1", "1"], done.stderr
