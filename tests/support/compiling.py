"""Replace the C kernels by ones compiled from changed sources or with other flags."""

from __future__ import annotations

import ctypes
import functools
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest

from foredraft.kernels import building, compilation, pool
from foredraft.model.runner.native import check, products

QUICK = "-O0"


def plant(monkeypatch: pytest.MonkeyPatch, folder: Path, old: str, new: str) -> None:
    """Run the kernels with one occurrence of `old` replaced by `new`, without optimisation: a tenth of the time."""
    change_sources(folder, old, new)
    monkeypatch.setattr(building, "HERE", folder)
    compile_anew(monkeypatch, folder, QUICK)


def change_sources(folder: Path, old: str, new: str) -> None:
    """Copy the kernels' sources to a folder, with one occurrence of `old` replaced by `new`."""
    _copy_sources(folder)
    path = _holding(folder, old)
    path.write_text(path.read_text().replace(old, new))


def _copy_sources(folder: Path) -> None:
    for name in building.SOURCES:
        shutil.copy(building.HERE / name, folder / name)


def _holding(folder: Path, old: str) -> Path:
    """Return the source that holds `old`, exactly once. Where none does, adapt the defect; do not drop it."""
    holding = [folder / name for name in building.SOURCES if old in (folder / name).read_text()]
    assert len(holding) == 1, f"the kernels no longer hold {old!r}"
    assert holding[0].read_text().count(old) == 1, f"the kernels hold {old!r} more than once"
    return holding[0]


def compile_anew(monkeypatch: pytest.MonkeyPatch, folder: Path, *flags: str) -> None:
    """Compile the kernels with further flags, and run them in place of the loaded ones."""
    monkeypatch.setattr(building, "FLAGS", (*building.FLAGS, *flags))
    _run_with(monkeypatch, _compiled(folder))


def _compiled(folder: Path) -> ctypes.CDLL:
    command = building.compiler()
    return compilation._build(command, folder / "kernels.so", compilation._level_of(command))


def _run_with(monkeypatch: pytest.MonkeyPatch, built: ctypes.CDLL) -> None:
    for module in (compilation, check, products, pool):
        monkeypatch.setattr(module, "library", lambda: built)
    monkeypatch.setattr(compilation, "_declared", {})  # functions of the library before


# A function of the sources: its type, name, parameters and body.
FUNCTION = re.compile(
    r"^(?P<type>\w(?:[\w *]|\(+\w+\)+ )*(?<=[ *]))"
    r"(?P<name>NAME\(\w+\)|\w+)"
    r"\((?P<parameters>[^;{}]*)\) \{"
    r"(?P<body>\n.*?^|[^\n]*)\}\n",
    re.MULTILINE | re.DOTALL,
)


class Defects:
    """Planted defects of the kernels' sources, compiled once behind a switch.

    Of the function that a defect changes there is a copy with it; the function itself calls that copy, where the
    defect is planted, and otherwise a copy without one.
    """

    def __init__(self, edits: Iterable[Sequence[str]]) -> None:
        """Take the defects as pairs: what stands in a function of the sources, once, and what takes its place."""
        self._edits = [tuple(edit) for edit in edits]
        self._passed: set[Callable[[], object]] = set()

    @functools.cached_property
    def _library(self) -> ctypes.CDLL:
        with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
            folder = Path(place)
            _copy_sources(folder)
            sources: dict[Path, dict[str, list[int]]] = {}
            for number, (old, _) in enumerate(self._edits):
                path = _holding(folder, old)
                holding = [f for f in FUNCTION.finditer(path.read_text()) if old in f["body"]]
                assert len(holding) == 1, f"{old!r} is not within one function"
                sources.setdefault(path, {}).setdefault(holding[0][0], []).append(number)
            for path, functions in sources.items():
                text = path.read_text()
                for function, numbers in functions.items():
                    text = text.replace(function, self._switched(function, numbers))
                path.write_text(text)
            main = folder / building.SOURCES[0]
            main.write_text(f"int planted_defect = -1;\n{main.read_text()}")
            patch.setattr(building, "HERE", folder)
            patch.setattr(building, "FLAGS", (*building.FLAGS, QUICK))
            return _compiled(folder)

    def _switched(self, function: str, numbers: list[int]) -> str:
        found = FUNCTION.match(function)
        given = ", ".join(re.findall(r"(\w+)(?=,|$)", found["parameters"]))
        head = f"{found['type']}{found['name']}({found['parameters']}) {{\n"

        def copy(name: str, body: str) -> str:
            return f"{found['type']}{name}({found['parameters']}) {{{body}}}\n"

        def named(suffix: str) -> str:
            return re.sub(r"(\w+)(\)?)$", rf"\1_{suffix}\2", found["name"])

        copies = [copy(named("sound"), found["body"])]
        copies += [copy(named(f"defect_{n}"), found["body"].replace(*self._edits[n])) for n in numbers]
        calls = [f"if (planted_defect == {n}) return {named(f'defect_{n}')}({given});\n" for n in numbers]
        return "".join([*copies, head, *calls, f"return {named('sound')}({given});\n}}\n"])

    def assert_caught(
        self, check: Callable[[], object], edit: Sequence[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Run a check, the first time also without a defect, where it must pass, and then with it, where it must fail."""
        _run_with(monkeypatch, self._library)
        switch = ctypes.c_int.in_dll(self._library, "planted_defect")
        if check not in self._passed:
            check()  # which loads its models, too
            self._passed.add(check)
        monkeypatch.setattr(switch, "value", self._edits.index(tuple(edit)))
        with pytest.raises(AssertionError):
            check()


def copying_compiler(folder: Path, target: tuple[str, ...]) -> Path:
    """Compile the kernels once, and write a compiler that gives their object file for whatever it is to compile."""
    [real, *arguments] = building.compiler() or ()
    objects, source, program = folder / "kernels.o", building.HERE / building.SOURCES[0], folder / "cc"
    command = [real, *arguments, *building.FLAGS, QUICK, *target, "-c", str(source), "-o", str(objects)]
    subprocess.run(command, check=True)
    copying = f'while [ "$1" != -o ]; do shift; done; exec cp {objects} "$2"'
    program.write_text(f'#!/bin/sh\ncase " $* " in *" -c "*) {copying};; esac\nexec {real} "$@"\n')
    program.chmod(0o700)
    return program
