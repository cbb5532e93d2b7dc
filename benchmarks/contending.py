"""Contenders that are processes of their own, of which one works at a time, and busy processes beside them.

A script that is its own worker calls `answer` when it was started with `WORKER`; the parent starts it as a
`Contender`, and asks it. Requests and answers are JSON, a line each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WORKER = "--worker"
TREE = Path(__file__).resolve().parents[1]


def answer(to: Callable[[Any], Any]) -> None:
    """Say that this process is ready, then answer the requests on stdin until it is closed."""
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print(json.dumps(to(json.loads(line))), flush=True)


class Contender:
    """A process that runs a module of this folder with `WORKER` and the options, and answers requests.

    Python looks for packages in `folders` first, such as the sources of another version.
    """

    def __init__(
        self,
        module: str,
        options: dict[str, Any],
        *folders: str | Path,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        environment |= {**(variables or {}), "PYTHONPATH": os.pathsep.join(map(str, folders))}
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, WORKER, json.dumps(options)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, env=environment, cwd=TREE,
        )  # fmt: skip
        self._answer()

    def ask(self, request: Any) -> Any:
        """Return the answer to a request."""
        assert self.process.stdin is not None
        print(json.dumps(request), file=self.process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a contender ended with exit code {self.process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Run so many processes beside that never wait."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()
