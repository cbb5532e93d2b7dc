"""What this process may really use of the machine: CPUs, memory, and the number of threads that compute.

Affinity names the logical CPUs of the process. A control group's quota, its own or a parent's, limits the CPU
time in each period (https://docs.kernel.org/admin-guide/cgroup-v2.html,
https://docs.kernel.org/scheduler/sched-bwc.html). Cores run one or two logical CPUs each
(https://docs.kernel.org/admin-guide/cputopology.html). Free memory is MemAvailable, or less where a group has
a limit; cached file pages of a group count as free
(https://docs.kernel.org/admin-guide/cgroup-v1/memory.html).

The first of these that is given decides: `threads` of `load` or `--threads`; FOREDRAFT_THREADS; a call of
`torch.set_num_threads` before; OMP_NUM_THREADS; what the process may really use (`machine_limits`): physical
cores, or all logical CPUs where these were measured to be faster. A later load with another number changes it
for every model of the process, and the log says so.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from foredraft.errors import ConfigError, Option, Text, join_text, python_spelling, shortened
from foredraft.kernels.compilation import describe_cpu
from foredraft.kinds.load_options import THREADS
from foredraft.model.runner import Runner
from foredraft.profiling.host import faster_threads, known_faster
from foredraft.profiling.timing import BareForwards

logger = logging.getLogger(__name__)


def groups_of(controller: str, root: Path) -> Iterator[tuple[str, Path]]:
    """Yield this process's groups, its own first, then the parents: "cgroup2" or "cgroup", and the folder."""
    try:
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
        own = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    # lines are "number:controllers:path"; version 2 names no controllers
    entries = (line.split(":", 2) for line in own)
    paths = {name: path for _, names, path in entries for name in names.split(",")}
    for mount in mounts:
        left, _, right = mount.partition(" - ")
        kind, *_, options = right.split(" ")
        if kind != "cgroup2" and (kind != "cgroup" or controller not in options.split(",")):
            continue
        path = paths.get("" if kind == "cgroup2" else controller)
        if path is None:
            continue
        mounted, point = left.split(" ")[3:5]
        top = root / point.lstrip("/")
        # a container may see its own group at the top
        inside = ".." not in Path(path).parts and Path(path).is_relative_to(mounted)
        folder = top / (os.path.relpath(path, mounted) if inside else ".")
        yield kind, folder
        while folder != top:
            folder = folder.parent
            yield kind, folder


ROOT = Path("/")
SIBLINGS = ("core_cpus_list", "thread_siblings_list")  # the CPUs of one core; the second is the older name
# Physical cores in macOS's words: of the fast kind on Apple's chips, of the only kind elsewhere.
SYSCTLS = ("hw.perflevel0.physicalcpu", "hw.physicalcpu")


@dataclass(frozen=True, slots=True)
class Cpus:
    """The CPUs that this process may use."""

    allowed: tuple[int, ...]  # ids of the logical CPUs that affinity allows; at least one
    cores: int  # physical cores among them
    quota: float | None = None  # CPUs whose time the control groups grant; None without a quota

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

        A quota that is spent stops all threads until the period ends, those that hold work for the others
        too.
        """
        return threads if self.quota is None else max(1, min(threads, int(self.quota)))


def usable_cpus(root: Path | None = None) -> Cpus:
    root = ROOT if root is None else root
    if hasattr(os, "sched_getaffinity"):
        allowed = tuple(sorted(os.sched_getaffinity(0)))
    else:  # the first is new in Python 3.13
        allowed = tuple(range(getattr(os, "process_cpu_count", os.cpu_count)() or 1))
    quotas = list[float]()
    for kind, folder in groups_of("cpu", root):
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):  # "max", or no such file: no quota
            if kind == "cgroup2":
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            if int(quota) > 0:  # version 1 says -1 where there is none
                quotas.append(int(quota) / int(period))
    return Cpus(allowed, _cores(allowed, root), min(quotas, default=None))


def _cores(allowed: tuple[int, ...], root: Path) -> int:
    """Return the physical cores of these logical CPUs; where the system does not tell, each is one."""

    def siblings(cpu: int) -> str:
        for name in SIBLINGS:
            with contextlib.suppress(OSError):
                if listed := (root / f"sys/devices/system/cpu/cpu{cpu}/topology" / name).read_text().strip():
                    return listed
        return str(cpu)

    if sys.platform == "darwin":
        for name in SYSCTLS:
            command = ["sysctl", "-n", name]
            with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
                told = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
                if (cores := int(told.stdout)) > 0:
                    return min(len(allowed), cores)
        return len(allowed)
    return len({siblings(cpu) for cpu in allowed})


# Version of control groups -> the files of limit and usage, and the keys of cached file pages in memory.stat.
_MEMORY = {
    "cgroup2": (("memory.max", "memory.current"), ("inactive_file", "active_file")),
    "cgroup": (
        ("memory.limit_in_bytes", "memory.usage_in_bytes"), ("total_inactive_file", "total_active_file"),
    ),
}  # fmt: skip


def free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # by the allocator
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    try:
        found = [_fields(ROOT / "proc/meminfo")["MemAvailable:"] * 1024]
    except (OSError, KeyError, ValueError):  # half of the machine's memory
        found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2]
    for kind, folder in groups_of("memory", ROOT):
        with contextlib.suppress(OSError, KeyError, ValueError):  # "max", or no such file: no limit
            files, cached_keys = _MEMORY[kind]
            limit, usage = (int((folder / name).read_text()) for name in files)
            fields = _fields(folder / "memory.stat")
            found.append(max(0, limit - usage + sum(fields[key] for key in cached_keys)))
    return min(found)


def _fields(path: Path) -> dict[str, int]:
    """Return the first number of each line, keyed by the first word of the line."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1}


OWN, OPENMP = "FOREDRAFT_THREADS", "OMP_NUM_THREADS"


@dataclass(frozen=True, slots=True)
class Threads:
    """A number of threads, and where it comes from."""

    number: int
    reason: Text  # where it comes from, for people
    kept: bool = False  # a load or the program gave it, so later loads without a number keep it
    unmeasured: Cpus | None = None  # where it is not known whether all are faster than their cores

    def describe(self, spelling: Callable[[Option], str] = python_spelling) -> str:
        """Return the number and the reason as one line, with every option spelled by `spelling`.

        Examples:
            >>> Threads(1, "of 64 CPUs, its cgroup grants 1.5").describe()
            '1 thread: of 64 CPUs, its cgroup grants 1.5'
        """
        return f"{self.number} thread{'s'[: self.number > 1]}: {join_text(self.reason, spelling)}"


_used: Threads | None = None  # by the last load of this process


def use_threads(given: int | None) -> Threads:
    """Let this process compute with the chosen number of threads, and return the choice."""
    threads, before = choose_threads(given), torch.get_num_threads()
    if _used is not None and before != threads.number:
        logger.warning(
            "%s; every model of this process computes with so many now, and no longer with %d",
            threads.describe(), before,
        )  # fmt: skip
    else:
        logger.info("%s", threads.describe())
    _set(threads)
    return threads


def choose_threads(given: int | None) -> Threads:
    """Return the number of threads that a load would use, and why."""
    own, openmp = _variable(OWN), _variable(OPENMP)  # a bad value is refused even where another one decides
    if given is not None:
        return Threads(given, ("given by ", Option("threads", given)), kept=True)
    if _used is not None and _used.kept and torch.get_num_threads() == _used.number:
        return _used
    if own is not None:
        return Threads(own, f"given by {OWN}")
    cpus = usable_cpus()
    if _set_by_program(cpus, openmp):
        return Threads(torch.get_num_threads(), "given by torch.set_num_threads", kept=True)
    if openmp is not None:
        return Threads(openmp, f"given by {OPENMP}")
    return _of_cpus(cpus)


def settle_threads(threads: Threads, target: Runner) -> Threads:
    """Return the choice after it was measured, where needed, whether all CPUs are faster than their cores.

    Only the kernels are measured: without them, shapes were just proved to be exact for the number in use.
    """
    cpus = threads.unmeasured
    if cpus is None or not target.by_kernels:
        return threads
    plain = BareForwards(target, batch=1, context=1, room=1).verify(1)

    def step(number: int) -> object:
        torch.set_num_threads(number)
        return plain()

    try:
        number = faster_threads(cpus.physical, cpus.logical, _machine(cpus), step)
    finally:
        torch.set_num_threads(threads.number)
    settled = _of_cpus(cpus, number)
    if settled.number != threads.number:
        logger.info("%s", settled.describe())
    _set(settled)
    return settled


def _set(threads: Threads) -> None:
    global _used
    torch.set_num_threads(threads.number)
    _used = threads


def _of_cpus(cpus: Cpus, faster: int | None = None) -> Threads:
    """Return the default; `faster` of physical cores and logical CPUs, None as far as it is known."""
    faster = faster or known_faster(cpus.physical, cpus.logical, _machine(cpus))
    number, count = faster or cpus.physical, len(cpus.allowed)
    if cpus.quota is not None and number == max(1, int(cpus.quota)) < count:
        reason: Text = f"of {count:,} CPUs, its cgroup grants {cpus.quota:.4g}"
    elif number == count:
        reason = "the CPUs that this process may use"
    elif number == cpus.cores:
        reason = (f"physical cores of {count:,} CPUs; ", Option("threads"), " changes it")
    else:
        reason = (f"of {count:,} CPUs; ", Option("threads"), " changes it")
    return Threads(number, reason, unmeasured=cpus if faster is None else None)


def _machine(cpus: Cpus) -> list[Any]:
    """Return what decides whether more threads than cores are faster, as JSON."""
    return [describe_cpu(), [*cpus.allowed], cpus.cores, cpus.quota]


def _variable(name: str) -> int | None:
    """Return the number of an environment variable, the first of a list; None where it is not set."""
    value = os.environ.get(name, "").strip()
    if not value:
        return None
    first = value.partition(",")[0].strip() if name == OPENMP else value
    if re.fullmatch("[0-9]{1,9}", first) and THREADS.fits(int(first)):
        return int(first)
    raise ConfigError(
        f"the environment variable {name} is {shortened(value)}",
        remedy=f"{THREADS.remedy(value)}, or unset it",
    )


def _set_by_program(cpus: Cpus, openmp: int | None) -> bool:
    """Return whether the program called `torch.set_num_threads`, which PyTorch itself does not tell.

    By itself PyTorch takes a variable's number, or one between the process's cores and all CPUs of the
    machine.
    """
    number = torch.get_num_threads()
    if _used is not None:
        return number != _used.number
    mkl = os.environ.get("MKL_NUM_THREADS", "")
    by_variable = openmp or (int(mkl) if mkl.isascii() and mkl.isdigit() else 0)
    if by_variable:
        return number != by_variable
    return not min(cpus.cores, len(cpus.allowed)) <= number <= max(os.cpu_count() or 1, len(cpus.allowed))
