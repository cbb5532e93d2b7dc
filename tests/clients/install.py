"""Install the clients of these tests: python -m tests.clients.install FOLDER [--agents]."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).parent
ENVIRONMENTS = {"python": "requirements.txt", "aider": "aider.txt"}


def install(folder: Path, *, agents: bool) -> None:
    for name in ENVIRONMENTS if agents else ("python",):
        venv.create(folder / name, with_pip=True)
        command = [folder / name / "bin" / "pip", "install", "--quiet", "-r", HERE / ENVIRONMENTS[name]]
        subprocess.run(command, check=True)
    if agents:
        (folder / "npm").mkdir(parents=True, exist_ok=True)
        shutil.copy(HERE / "package.json", folder / "npm")
        subprocess.run(
            ["npm", "install", "--silent", "--no-fund", "--no-audit"], cwd=folder / "npm", check=True
        )


def installed(path: str) -> Path:
    """Return a file of the folder that CLIENTS names; skip the test without it."""
    import pytest  # not there yet where the clients are installed first

    folder = os.environ.get("CLIENTS")
    found = None if folder is None else Path(folder).absolute() / path
    if found is None or not found.exists():
        pytest.skip(f"CLIENTS names no folder with {path}; see tests/clients/__init__.py")
    return found


def node_program(name: str) -> Path:
    return installed(f"npm/node_modules/.bin/{name}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--agents", action="store_true")
    given = parser.parse_args(sys.argv[1:])
    install(given.folder, agents=given.agents)
