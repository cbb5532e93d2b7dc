"""Memory: how much of it is free on a device, for this very process.

Contract: what is free is what an allocation can still get. On Linux that is MemAvailable, or less where a
control group of this process, or one above it, has a limit: in a container /proc/meminfo tells of the whole
machine. Pages of files that a group holds count as free, for the kernel takes them back. Both versions of
control groups are read (https://docs.kernel.org/admin-guide/cgroup-v2.html and
https://docs.kernel.org/admin-guide/cgroup-v1/memory.html).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

__all__ = ["free_memory"]

ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class _Version:
    """How one version of control groups names its files."""

    limit: str
    usage: str
    files: tuple[str, str]  # keys of memory.stat: pages of files, of the group and those below it


_VERSIONS = {
    "cgroup2": _Version("memory.max", "memory.current", ("inactive_file", "active_file")),
    "cgroup": _Version(
        "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")
    ),
}


def free_memory(device: torch.device) -> int:
    """Bytes that are free on a device."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # by the allocator
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    return min(_available(ROOT), *_left_in_groups(ROOT))


def _available(root: Path) -> int:
    """On the whole machine."""
    try:
        fields = _fields(root / "proc/meminfo")
        return fields["MemAvailable:"] * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _left_in_groups(root: Path) -> Iterator[int]:
    """What this process' groups may still take, each by its own limit; no end of it where none has one."""
    yield 2**63
    for version, folder, top in _groups(root):
        while True:
            with contextlib.suppress(OSError, KeyError, ValueError):  # "max", or no such file: no limit
                yield _left(version, folder)
            if folder == top:
                break
            folder = folder.parent


def _left(version: _Version, folder: Path) -> int:
    limit, usage = (int((folder / name).read_text()) for name in (version.limit, version.usage))
    fields = _fields(folder / "memory.stat")
    return max(0, limit - usage + sum(fields[key] for key in version.files))


def _groups(root: Path) -> Iterator[tuple[_Version, Path, Path]]:
    """The memory groups of this process: the folder of its own, and the uppermost one that can be seen."""
    try:
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
        own = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    # lines are "number:controllers:path"; version 2 names no controllers
    several = (line.split(":", 2) for line in own)
    paths = {name: path for _, names, path in several for name in names.split(",")}
    for mount in mounts:
        left, _, right = mount.partition(" - ")
        kind, *_, options = right.split(" ")
        if kind not in _VERSIONS or (kind == "cgroup" and "memory" not in options.split(",")):
            continue
        path = paths.get("" if kind == "cgroup2" else "memory")
        if path is None:
            continue
        mounted, point = left.split(" ")[3:5]
        top = root / point.lstrip("/")
        # a container may see its own group as the top, under a path that only the host knows
        below = os.path.relpath(path, mounted) if Path(path).is_relative_to(mounted) else "."
        yield _VERSIONS[kind], top / below, top


def _fields(path: Path) -> dict[str, int]:
    """The first number of each line, by the word before it."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1}
