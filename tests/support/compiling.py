"""Replace the C kernels by ones compiled from changed sources or with other flags."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest

from foredraft.kernels import building, compilation, pool
from foredraft.model.runner.native import check, linear
from foredraft.model.runner.native import native_backend as backend

QUICK = "-O0"


def plant(monkeypatch: pytest.MonkeyPatch, folder: Path, old: str, new: str) -> None:
    """Run the kernels with one occurrence of `old` in their sources replaced by `new`.

    They are compiled without optimisation, which takes a tenth of the time and gives the same values. The
    function fails where the sources no longer hold `old` exactly once. Adapt the defect then; do not drop it.
    """
    for name in building.SOURCES:
        shutil.copy(building.HERE / name, folder / name)
    holding = [folder / name for name in building.SOURCES if old in (folder / name).read_text()]
    assert len(holding) == 1, f"the kernels no longer hold {old!r}"
    source = holding[0].read_text()
    assert source.count(old) == 1, f"the kernels hold {old!r} more than once"
    holding[0].write_text(source.replace(old, new))
    monkeypatch.setattr(building, "HERE", folder)
    compile_anew(monkeypatch, folder, QUICK)


def compile_anew(monkeypatch: pytest.MonkeyPatch, folder: Path, *flags: str) -> None:
    """Compile the kernels with further flags, and run them in place of the loaded ones."""
    command = building.compiler()
    assert command is not None
    monkeypatch.setattr(building, "FLAGS", (*building.FLAGS, *flags))
    built: ctypes.CDLL = compilation._build(command, folder / "kernels.so")
    for module in (backend, check, linear, pool):
        monkeypatch.setattr(module, "library", lambda: built)
    monkeypatch.setattr("foredraft.kernels.vocab.library", lambda: built)
