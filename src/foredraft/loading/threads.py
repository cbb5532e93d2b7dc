"""Threads: how many this process computes with, and why.

The number is the process's: PyTorch's operators, training and the kernels all follow
`torch.set_num_threads`. The first of these that is given decides:

1. `threads` of `load`, `--threads` of a command;
2. the environment variable FOREDRAFT_THREADS;
3. `torch.set_num_threads`, if the program called it before;
4. the environment variable OMP_NUM_THREADS, which PyTorch itself reads;
5. what the process may really use (`cpus.py`): physical cores, or all logical CPUs where these were measured
   to be faster here (`profiling/hyperthreads.py`).

A later load with another number changes it for every model of the process, and the log says so; one without
a number keeps what an earlier load was given. A thread of the program that has computed before keeps its own
number, as PyTorch does.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from foredraft.errors import ConfigError, Option, Text, join_text, python_spelling, shortened
from foredraft.kernels.machine import describe_cpu
from foredraft.kinds.load_options import THREADS
from foredraft.loading.cpus import Cpus, usable_cpus
from foredraft.model.runner import Runner
from foredraft.profiling.forwards import BareForwards
from foredraft.profiling.hyperthreads import faster_threads, known_faster

__all__ = ["Threads", "choose_threads", "settle_threads", "use_threads"]

logger = logging.getLogger(__name__)

OWN, OPENMP = "FOREDRAFT_THREADS", "OMP_NUM_THREADS"


@dataclass(frozen=True, slots=True)
class Threads:
    """A number of threads, and where it comes from.

    Attributes:
        number: The number.
        reason: Where it comes from, for people.
        kept: A load or the program gave it, so later loads without a number keep it.
        unmeasured: The CPUs, where it is not known yet whether all of them are faster than their cores.
    """

    number: int
    reason: Text
    kept: bool = False
    unmeasured: Cpus | None = None

    def describe(self, spelling: Callable[[Option], str] = python_spelling) -> str:
        """Return the number and the reason as one line, with every option spelled by `spelling`.

        Examples:
            >>> Threads(1, "of 64 CPUs, its cgroup grants 1.5").describe()
            '1 thread: of 64 CPUs, its cgroup grants 1.5'
        """
        return f"{self.number} thread{'s'[: self.number > 1]}: {join_text(self.reason, spelling)}"


_used: Threads | None = None  # by the last load of this process


def use_threads(given: int | None) -> Threads:
    """Let this process compute with the chosen number of threads, and return the choice.

    Raises:
        ConfigError: As of `choose_threads`.
    """
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
    """Return the number of threads that a load would use, and why.

    Args:
        given: The option of `load`; None is none.

    Raises:
        ConfigError: A variable is no number of threads.
    """
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

    Only the kernels are measured: their bits do not depend on the number of threads. Without them, the shapes
    of passes were just proved to be exact for the number in use.

    Args:
        threads: The choice in use.
        target: Runs the target.
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
    """Return the number of an environment variable; None where it is not set or empty.

    Of OMP_NUM_THREADS, which may list a number for each level of nested teams, the first one counts
    (https://www.openmp.org/spec-html/5.0/openmpse50.html).

    Raises:
        ConfigError: It is no number of threads.
    """
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

    By itself PyTorch takes the number of a variable, or else one between the cores that the process may use
    and all CPUs of the machine. Another number is the program's.
    """
    number = torch.get_num_threads()
    if _used is not None:
        return number != _used.number
    by_variable = openmp or _digits(os.environ.get("MKL_NUM_THREADS", ""))
    if by_variable:
        return number != by_variable
    return not min(cpus.cores, len(cpus.allowed)) <= number <= max(os.cpu_count() or 1, len(cpus.allowed))


def _digits(value: str) -> int:
    return int(value) if value.isascii() and value.isdigit() else 0
