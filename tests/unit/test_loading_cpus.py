"""The CPUs and the memory that a process may use: affinity, cores and the limits of control groups, on pretended and
real systems."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from foredraft.loading import machine_limits
from foredraft.loading.machine_limits import Cpus, free_memory, usable_cpus
from tests.support.running import environment

V1, V2 = "sys/fs/cgroup/cpu,cpuacct", "sys/fs/cgroup"
MOUNT1 = f"35 31 0:32 {{}} /{V1} rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
MOUNT2 = f"31 23 0:28 {{}} /{V2} rw,relatime - cgroup2 cgroup2 rw,nsdelegate\n"
OTHERS = "22 1 0:5 / / rw shared:1 - ext4 /dev/vda1 rw\n36 31 0:33 / /x rw - cgroup cgroup rw,cpuset\n"
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
    system = {"proc/self/cgroup": cgroup, "proc/self/mountinfo": OTHERS + mounts} | (files or {})
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
