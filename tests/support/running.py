"""Run Python on this tree's source in a process of its own.

`forked` takes its processes from a server that has imported the library and computed nothing: importing takes longer
than most programs of these tests.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TIMEOUT = 240  # seconds
STREAMS = ("stdin", "stdout", "stderr")
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    ["foredraft.cli.commands", "foredraft.loading", "foredraft.tune", "foredraft.bench"]
)

Program = Callable[[list[str]], object]


def environment(**changes: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    inherited = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    # One thread, because the models are tiny and the machine may be busy.
    return inherited | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"} | changes


def python(*arguments: str, **options: Any) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        env=environment(), capture_output=True, encoding="utf-8", timeout=TIMEOUT, **options,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def script(file: Path, *arguments: str, cwd: Path) -> str:
    done = forked(run_file, str(file), *arguments, cwd=cwd)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def forked(
    program: Program,
    *arguments: str,
    input: str = "",
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Call a function with a list of these arguments in a forked process, to its end, or kill it after TIMEOUT.

    A module that the server has imported does not read the environment anew.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "stdin").write_text(input, encoding="utf-8")
        given = (program, list(arguments), folder, cwd or Path.cwd(), env or environment())
        process = SERVER.Process(target=_call, args=given)
        process.start()
        process.join(TIMEOUT)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(arguments, TIMEOUT)
        out, err = ((folder / name).read_text(encoding="utf-8") for name in STREAMS[1:])
        return subprocess.CompletedProcess(arguments, process.exitcode, out, err)


def _call(program: Program, arguments: list[str], folder: Path, cwd: Path, env: dict[str, str]) -> None:
    import torch

    # PyTorch took its number of threads from the server's environment.
    torch.set_num_threads(int(env.get("OMP_NUM_THREADS", "1")))
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    for number, name in enumerate(STREAMS):
        os.dup2(os.open(folder / name, os.O_RDWR | os.O_CREAT, 0o600), number)
        setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8"))  # noqa: SIM115
    program(arguments)


def run_file(arguments: list[str]) -> None:
    sys.argv = arguments
    sys.path[0] = str(Path(arguments[0]).parent)
    runpy.run_path(arguments[0], run_name="__main__")


def run_code(arguments: list[str]) -> None:
    sys.argv = ["-c", *arguments[1:]]
    exec(compile(arguments[0], "<code>", "exec"), {"__name__": "__main__"})
