"""Contenders that are processes of their own: one works at a time, and those that wait sleep.

A script that is its own worker calls `answer` when it was started with `WORKER`; the parent starts it as a
`Contender`, and asks it. Requests and answers are JSON, a line each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["TREE", "WORKER", "Contender", "answer"]

WORKER = "--worker"
TREE = Path(__file__).resolve().parents[1]


def answer(to: Callable[[Any], Any]) -> None:
    """Say that this process is ready, then answer the requests on stdin until it is closed."""
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print(json.dumps(to(json.loads(line))), flush=True)


class Contender:
    """A process that answers requests.

    Args:
        module: Of this folder; started with `WORKER` and the options in JSON.
        options: The process reads them as JSON from its last argument.
        folders: Where Python looks for packages first, such as the sources of another version.
    """

    def __init__(self, module: str, options: dict[str, Any], *folders: str | Path) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        path = os.pathsep.join(map(str, folders))
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, WORKER, json.dumps(options)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, env=environment | {"PYTHONPATH": path}, cwd=TREE,
        )  # fmt: skip
        self.result()

    def ask(self, request: Any) -> Any:
        """Return the answer to a request."""
        self.start(request)
        return self.result()

    def start(self, request: Any) -> None:
        """Send a request, and do not wait."""
        assert self.process.stdin is not None
        print(json.dumps(request), file=self.process.stdin, flush=True)

    def result(self) -> Any:
        """Return the answer to the request that was sent."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a contender ended with exit code {self.process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
