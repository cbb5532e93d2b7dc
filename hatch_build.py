"""Compile the C kernels into the wheel, one library for each level of x86-64, where there is a C compiler.

Without a compiler, or on another system, the wheel is pure Python, and the kernels are compiled where they
run. An editable installation carries none either, because its sources may change.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

KERNELS = "src/foredraft/kernels"


class KernelsHook(BuildHookInterface[Any]):
    """Add the libraries to the wheel, and tag it with the platform that they are for."""

    _folder: Path | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "standard":
            return
        building = _load(Path(self.root) / KERNELS / "building.py")
        if not building.has_levels():
            self._pure("they are for Linux on x86-64")
        elif (command := building.compiler()) is None:
            self._pure("there is no C compiler")
        else:
            self._folder = Path(tempfile.mkdtemp(prefix="foredraft-wheel-"))
            try:
                files = building.build_levels(command, self._folder)
            except (OSError, subprocess.SubprocessError) as error:
                self._pure(f"compiling them failed ({getattr(error, 'stderr', None) or error})")
                return
            place = building.LIBRARIES.relative_to(Path(self.root) / "src")
            build_data["force_include"].update({str(file): f"{place}/{file.name}" for file in files})
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _pure(self, reason: str) -> None:
        self.app.display_warning(f"This wheel is pure Python and carries no compiled kernels: {reason}.")


def _load(file: Path) -> Any:
    """Return a module that is not installed yet."""
    spec = importlib.util.spec_from_file_location("foredraft_building", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
