"""The CPU: its description, for the keys of what depends on it, and its instruction sets."""

from __future__ import annotations

import itertools
import platform

import torch

__all__ = ["cpu_flags", "describe_cpu"]


def describe_cpu() -> list[str]:
    """Return the CPU's model and instruction sets, as the system names them."""
    named = ("model name", "flags", "Features", "CPU part")
    return [
        platform.machine(),
        platform.processor(),
        torch.backends.cpu.get_cpu_capability(),
        *(line for line in _first_core() if line.startswith(named)),
    ]


def cpu_flags() -> frozenset[str]:
    """Return the CPU's instruction sets that the system allows, in Linux's names; none on other systems."""
    return frozenset(
        flag for line in _first_core() if line.startswith("flags") for flag in line.partition(":")[2].split()
    )


def _first_core() -> list[str]:
    """Return the lines of /proc/cpuinfo for the first core, which stands for all."""
    try:
        with open("/proc/cpuinfo") as info:
            return [line.strip() for line in itertools.takewhile(str.strip, info)]
    except OSError:
        return []
