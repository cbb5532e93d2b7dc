"""CPUs: how many of the machine's this process may really use, and how many cores they are.

- **Affinity** names the logical CPUs that the process may run on; a cpuset of a control group narrows it.
- **A quota** of a control group, its own or a parent's, limits the CPU time in each period (mostly 100 ms):
  `cpu.max` in version 2 (https://docs.kernel.org/admin-guide/cgroup-v2.html), `cpu.cfs_quota_us` and
  `cpu.cfs_period_us` in version 1 (https://docs.kernel.org/scheduler/sched-bwc.html).
- **Cores** run one or two logical CPUs each
  (https://docs.kernel.org/admin-guide/cputopology.html). On hybrid CPUs all cores count, fast and slow.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from foredraft.loading.control_groups import groups_of

__all__ = ["Cpus", "usable_cpus"]

ROOT = Path("/")
SIBLINGS = ("core_cpus_list", "thread_siblings_list")  # the CPUs of one core; the second is the older name
# Physical cores in macOS's words: of the fast kind on Apple's chips, of the only kind elsewhere.
SYSCTLS = ("hw.perflevel0.physicalcpu", "hw.physicalcpu")


@dataclass(frozen=True, slots=True)
class Cpus:
    """The CPUs that this process may use.

    Attributes:
        allowed: Ids of the logical CPUs that affinity allows; at least one.
        cores: Physical cores among them.
        quota: CPUs whose time the control groups grant; None without a quota.
    """

    allowed: tuple[int, ...]
    cores: int
    quota: float | None = None

    @property
    def logical(self) -> int:
        """Threads for all logical CPUs."""
        return self._within_quota(len(self.allowed))

    @property
    def physical(self) -> int:
        """Threads for the physical cores."""
        return self._within_quota(self.cores)

    def _within_quota(self, threads: int) -> int:
        """Return the threads that never use up the quota, but at least one.

        A quota that is spent stops all threads of the process until the period ends, those that hold a piece
        of work for the others too. So 1.5 CPUs are one thread that runs without a break: two would spend the
        150 ms of a period of 100 in its first 75, and every token that is due then would wait for 25. Half a
        CPU stays for the threads that tokenise and serve.
        """
        return threads if self.quota is None else max(1, min(threads, int(self.quota)))


def usable_cpus(root: Path | None = None) -> Cpus:
    """Return the CPUs that this process may use.

    Args:
        root: The folder that holds proc and sys; None is the system's.
    """
    root = ROOT if root is None else root
    allowed = _allowed()
    quota = min(_quotas(root), default=None)
    return Cpus(allowed, _cores(allowed, root), quota)


def _allowed() -> tuple[int, ...]:
    """Return the ids of the logical CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    count = getattr(os, "process_cpu_count", os.cpu_count)()  # the first is new in Python 3.13
    return tuple(range(count or 1))


def _quotas(root: Path) -> Iterator[float]:
    """Yield the CPUs of every control group of this process that has a quota."""
    for kind, folder in groups_of("cpu", root):
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):  # "max", or no such file: no quota
            quota, period = _quota_and_period(kind, folder)
            if quota > 0:  # version 1 says -1 where there is none
                yield quota / period


def _quota_and_period(kind: str, folder: Path) -> tuple[int, int]:
    """Return a group's CPU time and the period that it is for, in microseconds."""
    if kind == "cgroup2":
        quota, period = (folder / "cpu.max").read_text().split()
    else:
        quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
    return int(quota), int(period)


def _cores(allowed: tuple[int, ...], root: Path) -> int:
    """Return the physical cores of these logical CPUs; where the system does not tell, each is one."""
    if sys.platform == "darwin":
        return min(len(allowed), _cores_of_mac() or len(allowed))
    return len({_siblings(cpu, root / f"sys/devices/system/cpu/cpu{cpu}/topology") for cpu in allowed})


def _siblings(cpu: int, topology: Path) -> str:
    """Return the list of the logical CPUs of a CPU's core, as the system writes it."""
    for name in SIBLINGS:
        with contextlib.suppress(OSError):
            if listed := (topology / name).read_text().strip():
                return listed
    return str(cpu)


def _cores_of_mac() -> int | None:
    for name in SYSCTLS:
        with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
            told = subprocess.run(
                ["sysctl", "-n", name], capture_output=True, text=True, timeout=10, check=True
            )
            if (cores := int(told.stdout)) > 0:
                return cores
    return None
