"""Client processes of the hub on 127.0.0.1, because `huggingface_hub` reads its settings at import."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.support.hub_server import Hub
from tests.support.running import forked, run_code

__all__ = ["INSPECT", "RESOLVE", "Client"]

RESOLVE = """
import json, sys
from foredraft.errors import ForedraftError
from foredraft.model.hub import resolve
reports = []
try:
    result = "folder", str(resolve(sys.argv[1], *sys.argv[2:], report=lambda *report: reports.append(report)))
except ForedraftError as error:
    result = type(error).__name__, str(error)
print(json.dumps([*result, reports]))
"""
INSPECT = """
import sys
from foredraft.cli import main
sys.exit(main(["info", *sys.argv[1:]]))
"""


@dataclass
class Client:
    """Client processes that share one cache."""

    hub: Hub
    home: Path

    def run(self, script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run code in a process that reads the hub's address from its environment."""
        self.hub.log.clear()
        return forked(run_code, script, *arguments, env=self.hub.environment(self.home, **environment))

    def resolve(self, *arguments: str, **environment: str) -> Path:
        kind, folder, _ = json.loads(self.run(RESOLVE, *arguments, **environment).stdout)
        assert kind == "folder", folder
        return Path(folder)

    def refused(self, *arguments: str, **environment: str) -> str:
        """Return the message of the CheckpointError that `resolve` raises."""
        done = self.run(RESOLVE, *arguments, **environment)
        kind, message, _ = json.loads(done.stdout)
        assert (kind, "\n" in message) == ("CheckpointError", False)
        assert done.stderr == ""
        return str(message)
