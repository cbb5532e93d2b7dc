"""Memory: how much of a device's memory this process can still allocate.

On Linux that is MemAvailable, or less where a control group of this process or a parent group has a limit,
because in a container /proc/meminfo describes the whole machine. Cached file pages of a group count as free,
because the kernel reclaims them (https://docs.kernel.org/admin-guide/cgroup-v1/memory.html).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from foredraft.loading.control_groups import groups_of

__all__ = ["free_memory"]

ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class _Version:
    """The file names of one version of control groups."""

    limit: str
    usage: str
    files: tuple[str, str]  # keys of memory.stat: cached file pages of the group and its children


_VERSIONS = {
    "cgroup2": _Version("memory.max", "memory.current", ("inactive_file", "active_file")),
    "cgroup": _Version(
        "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")
    ),
}


def free_memory(device: torch.device) -> int:
    """Return the free bytes of a device."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # by the allocator
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    return min(_available(ROOT), *_left_in_groups(ROOT))


def _available(root: Path) -> int:
    """Return the free bytes of the whole machine; half of its memory where /proc does not say."""
    try:
        fields = _fields(root / "proc/meminfo")
        return fields["MemAvailable:"] * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _left_in_groups(root: Path) -> Iterator[int]:
    """Yield the free bytes of every control group of this process that has a limit."""
    yield 2**63  # no limit
    for kind, folder in groups_of("memory", root):
        with contextlib.suppress(OSError, KeyError, ValueError):  # "max", or no such file: no limit
            yield _left_in(_VERSIONS[kind], folder)


def _left_in(version: _Version, folder: Path) -> int:
    limit, usage = (int((folder / name).read_text()) for name in (version.limit, version.usage))
    fields = _fields(folder / "memory.stat")
    return max(0, limit - usage + sum(fields[key] for key in version.files))


def _fields(path: Path) -> dict[str, int]:
    """Return the first number of each line, keyed by the first word of the line."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1}
