"""This machine, as far as what is kept between runs depends on it, and the folder where it is kept.

The folder is $FOREDRAFT_CACHE, else foredraft/ in $XDG_CACHE_HOME or ~/.cache. With an empty FOREDRAFT_CACHE,
nothing is kept.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

__all__ = ["cache_folder", "describe_cpu"]

CACHE = "FOREDRAFT_CACHE"


def cache_folder() -> Path | None:
    """None: nothing is kept."""
    named = os.environ.get(CACHE)
    if named is not None:
        return Path(named) if named else None
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "foredraft"
    except RuntimeError:  # nobody's home
        return None


def describe_cpu() -> list[str]:
    """Its model and what it can do."""
    about = [platform.machine(), platform.processor(), torch.backends.cpu.get_cpu_capability()]
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if not line.strip():
                    break  # the first core speaks for all
                if line.startswith(("model name", "flags", "Features", "CPU part")):
                    about.append(line.strip())
    except OSError:
        pass
    return about
