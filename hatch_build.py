"""Compile the C kernels into the wheel, one library for each level of CPUs, where there is a C compiler.

Without a compiler, or on another system, the wheel is pure Python, and the kernels are compiled where they
run. An editable installation carries none either, because its sources may change. FOREDRAFT_WHEEL_TARGET
names a system that the wheel is for in place of this one; the package ziglang then compiles for it.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

KERNELS = "src/foredraft/kernels"
TARGET = "FOREDRAFT_WHEEL_TARGET"  # a name of SYSTEMS in building.py


class KernelsHook(BuildHookInterface[Any]):
    """Add the libraries to the wheel, and tag it with the platform that they are for."""

    _folder: Path | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "standard":
            return
        building = _load(Path(self.root) / KERNELS / "building.py")
        target, command = os.environ.get(TARGET), building.compiler()
        if target and target not in building.SYSTEMS:
            raise ValueError(f"{TARGET} is {target!r}; give one of {', '.join(building.SYSTEMS)}")
        if target and importlib.util.find_spec("ziglang") is None:
            raise ValueError(f"{TARGET} is {target!r}, which needs the package ziglang; install it")
        system = building.SYSTEMS[target] if target else building.this_system()
        if system is None:
            self._pure("they are for Linux and macOS on x86-64 and ARM64")
        elif not target and command is None:
            self._pure("there is no C compiler")
        else:
            os.environ.setdefault("MACOSX_DEPLOYMENT_TARGET", "11.0")  # as the tags of macOS say
            self._folder = Path(tempfile.mkdtemp(prefix="foredraft-wheel-"))
            try:
                files = building.build_levels(self._folder, system, None if target else command)
            except (OSError, subprocess.SubprocessError) as error:
                reason = f"compiling them failed ({getattr(error, 'stderr', None) or error})"
                if target:
                    raise ValueError(f"{TARGET} is {target!r}, but {reason}") from error
                self._pure(reason)
                return
            place = building.LIBRARIES.relative_to(Path(self.root) / "src")
            build_data["force_include"].update({str(file): f"{place}/{file.name}" for file in files})
            build_data["pure_python"] = False
            # What this machine's compiler links may need the C library of this machine.
            here = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"py3-none-{system.tag if target or sys.platform == 'darwin' else here}"

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
