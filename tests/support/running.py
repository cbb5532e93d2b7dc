"""Run Python in a process of its own, on this tree's source."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def python(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments, and assert that it exits with code 0."""
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], env=env, capture_output=True, encoding="utf-8", timeout=240, **options
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done
