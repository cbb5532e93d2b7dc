"""Kernels compiled with a defect or with other flags, loaded in place of the real ones."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest

from foredraft.kernels import compilation
from foredraft.model.runner.native import check, linear, passes


def plant(monkeypatch: pytest.MonkeyPatch, folder: Path, old: str, new: str) -> None:
    """Have the kernels run with `old` replaced. Where the source has changed under a defect, this fails: plant it
    anew, do not drop it."""
    for name in compilation.SOURCES:
        shutil.copy(compilation.HERE / name, folder / name)
    holding = [folder / name for name in compilation.SOURCES if old in (folder / name).read_text()]
    assert len(holding) == 1, f"the kernels no longer hold {old!r}"
    source = holding[0].read_text()
    assert source.count(old) == 1, f"the kernels hold {old!r} more than once"
    holding[0].write_text(source.replace(old, new))
    monkeypatch.setattr(compilation, "HERE", folder)
    stand_in(monkeypatch, folder)


def stand_in(monkeypatch: pytest.MonkeyPatch, folder: Path, *flags: str) -> None:
    """Have kernels run that are compiled with further flags, too."""
    command = compilation.compiler()
    assert command is not None
    monkeypatch.setattr(compilation, "FLAGS", (*compilation.FLAGS, *flags))
    built: ctypes.CDLL = compilation._built(command, folder / "kernels.so")
    for module in (check, linear, passes):
        monkeypatch.setattr(module, "library", lambda: built)
    monkeypatch.setattr("foredraft.kernels.vocab.library", lambda: built)
