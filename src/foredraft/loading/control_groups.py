"""Control groups: folders whose files limit what this process may use, in both versions of Linux's groups.

A group's limits hold for all groups below it, so a process is bound by its own group and by every parent
(https://docs.kernel.org/admin-guide/cgroup-v2.html, https://docs.kernel.org/admin-guide/cgroup-v1/cgroups.html).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["groups_of"]


def groups_of(controller: str, root: Path) -> Iterator[tuple[str, Path]]:
    """Yield this process's groups: the type of their file system, "cgroup2" or "cgroup", and their folder.

    Its own group comes first, then the parents as far as they are visible.

    Args:
        controller: "memory" or "cpu". Version 1 has a hierarchy for each; version 2 has one for all.
        root: The folder that holds proc and sys.
    """
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
        folder = top / _below(path, mounted)
        yield kind, folder
        while folder != top:
            folder = folder.parent
            yield kind, folder


def _below(path: str, mounted: str) -> str:
    """Return where a group lies below the group that is mounted.

    A container may see its own group at the top, under a path that exists only on the host; a path with ".."
    lies outside of what the container sees.
    """
    inside = ".." not in Path(path).parts and Path(path).is_relative_to(mounted)
    return os.path.relpath(path, mounted) if inside else "."
