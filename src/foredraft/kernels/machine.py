"""A description of the CPU, for the keys of what depends on it."""

from __future__ import annotations

import platform

import torch

__all__ = ["describe_cpu"]


def describe_cpu() -> list[str]:
    """Return the CPU's model and instruction sets, as the system names them."""
    lines = [platform.machine(), platform.processor(), torch.backends.cpu.get_cpu_capability()]
    try:
        with open("/proc/cpuinfo") as info:
            for line in info:
                if not line.strip():
                    break  # the first core stands for all
                if line.startswith(("model name", "flags", "Features", "CPU part")):
                    lines.append(line.strip())
    except OSError:
        pass
    return lines
