"""The parts of a GGUF file that was split, read as one file.

Contract: the parts lie in one folder, under the names that llama-gguf-split gives them; each of the names
stands for all. A part that is missing, is another's, or holds a tensor that another part holds, too, is a
`CheckpointError` that names it. A file that was not split is its own and only part.

The names and the keys are those of
https://github.com/ggml-org/llama.cpp/blob/master/tools/gguf-split/gguf-split.cpp.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from foredraft.errors import CheckpointError, shortened
from foredraft.model.config import DOWNLOAD_AGAIN
from foredraft.model.gguf.file import GGUFFile, GGUFTensor

__all__ = ["GGUFModel", "identity", "part_names"]

NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE)
NUMBER, COUNT, TENSORS = "split.no", "split.count", "split.tensors.count"
TOGETHER = "put the parts of one model into one folder"


def part_names(name: str) -> list[str]:
    """Return the names of all parts of a file by the name of one of them.

    Examples:
        >>> part_names("m-00002-of-00002.gguf")
        ['m-00001-of-00002.gguf', 'm-00002-of-00002.gguf']
        >>> part_names("m.gguf")
        ['m.gguf']
    """
    found = NAME.fullmatch(name)
    if found is None or not 1 <= int(found[2]) <= int(found[3]):
        return [name]
    return [f"{found[1]}-{number:05}-of-{found[3]}{found[4]}" for number in range(1, int(found[3]) + 1)]


def identity(path: Path) -> list[list[int] | None]:
    """Return what tells the parts of a file from files that replaced them.

    Of each part that is its size, time of change and inode number; None where a part is missing.

    Raises:
        OSError: The file itself is missing.
    """
    path.stat()
    return [_identity(path.with_name(name)) for name in part_names(path.name)]


def _identity(path: Path) -> list[int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return [status.st_size, status.st_mtime_ns, status.st_ino]


class GGUFModel:
    """A GGUF file with all of its parts.

    Attributes:
        path: The file, or its first part.
        parts: The open parts.
        metadata: The metadata, which the first part holds.
        tensors: The tensors of all parts by name.
    """

    def __init__(self, path: Path, *, lists: bool = True) -> None:
        """Open a file, or all parts by the name of one.

        Args:
            path: The file.
            lists: Keep lists of metadata (`GGUFFile`).

        Raises:
            CheckpointError: A part is missing or broken, or the parts do not belong together.
        """
        paths = [path.with_name(name) for name in part_names(path.name)]
        self.path, self._lists = paths[0], lists
        first = self._open(self.path, 1, len(paths))
        count = _whole(first, COUNT, 1) or 1
        if count == 1 and len(paths) > 1:
            if any(path.exists() for path in paths[1:]):
                raise first.error(
                    f"is no part of a model, but its name says part 1 of {len(paths)}", TOGETHER
                )
            paths = paths[:1]
        if count != len(paths):
            raise first.error(
                f"is one of {count} parts, but its name does not end in -00001-of-{count:05}.gguf",
                "give each part the name that llama-gguf-split gave it",
            )
        rest = (self._open(path, number, count) for number, path in enumerate(paths[1:], 2))
        self.parts = (first, *rest)
        self.metadata: dict[str, Any] = first.metadata
        if count > 1:
            for number, part in enumerate(self.parts):
                _check_part(part, number, first)
        self._holders = self._find_tensors()
        self.tensors = {name: part.tensors[name] for name, part in self._holders.items()}
        expected = _whole(first, TENSORS, len(self.tensors))
        if count > 1 and expected != len(self.tensors):
            raise first.error(
                f"and its other parts hold {len(self.tensors)} tensors, but {TENSORS} is {expected}", TOGETHER
            )

    def error(self, problem: str, remedy: str) -> CheckpointError:
        """Return an error of the model."""
        return self.parts[0].error(problem, remedy)

    def holder(self, info: GGUFTensor) -> GGUFFile:
        """Return the part that holds a tensor."""
        return self._holders[info.name]

    def _open(self, path: Path, number: int, count: int) -> GGUFFile:
        if count > 1 and not path.exists():
            raise CheckpointError(f"{path} is missing, part {number} of {count} of a model", remedy=TOGETHER)
        return GGUFFile(path, lists=self._lists)

    def _find_tensors(self) -> dict[str, GGUFFile]:
        """Return the part that holds each tensor."""
        found: dict[str, GGUFFile] = {}
        for part in self.parts:
            for name in part.tensors:
                if name in found:
                    other = found[name].path.name
                    raise part.error(f"has tensor {shortened(name)}, which {other} has, too", TOGETHER)
                found[name] = part
        return found


def _check_part(part: GGUFFile, number: int, first: GGUFFile) -> None:
    """Raise CheckpointError where a file is not the part that its name says, or is another model's.

    Args:
        part: The file.
        number: Which part it has to be, counted from 0.
        first: The first part, whose metadata are the model's.
    """
    count, own, parts = first.metadata[COUNT], _whole(part, NUMBER, None), _whole(part, COUNT, None)
    if own != number or parts != count:
        said = "no part of a model" if own is None or parts is None else f"part {own + 1} of {parts}"
        raise part.error(f"is {said}, but its name says part {number + 1} of {count}", TOGETHER)
    for key in part.metadata.keys() & first.metadata.keys() - {NUMBER}:
        if part.metadata[key] != first.metadata[key]:
            raise part.error(f"has another {shortened(key)} than {first.path.name}", TOGETHER)


def _whole(part: GGUFFile, key: str, default: int | None) -> int | None:
    """Return a whole number of the metadata.

    Raises:
        CheckpointError: It is something else.
    """
    value = part.metadata.get(key, default)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise part.error(f"has the {key} {shortened(value)}", DOWNLOAD_AGAIN)
    return value
