"""Compile guard.cpp once for each PyTorch, and load it before PyTorch looks for CUDA."""

from __future__ import annotations

import ctypes
import getpass
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("guard.cpp")


def _compiled(torch_folder: Path) -> Path:
    """Return the compiled guard, which needs g++ and PyTorch's headers."""
    version = (torch_folder / "version.py").read_bytes()
    key = hashlib.sha256(SOURCE.read_bytes() + version + str(torch_folder).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"foredraft-rehearsal-{getpass.getuser()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    made = folder / f"guard-{key}.so"
    if not made.exists():
        ours = made.with_suffix(f".{os.getpid()}")
        command = ["g++", "-std=c++20", "-O1", "-fPIC", "-shared", f"-I{torch_folder / 'include'}"]
        command += [str(SOURCE), "-o", str(ours), f"-L{torch_folder / 'lib'}", "-lc10", "-ltorch_cpu"]
        subprocess.run(command, check=True)
        ours.replace(made)
    return made


def _loaded() -> ctypes.CDLL:
    if "torch" in sys.modules:
        raise RuntimeError("the rehearsal has to be loaded before torch: pytest -p tests.rehearsal.plugin")
    found = importlib.util.find_spec("torch")
    folder = Path(found.origin).parent
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(folder / "lib" / name), ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(_compiled(folder)))


GUARD = _loaded()
