"""A client of the hub on 127.0.0.1, in this process or, where a model is loaded, in one of its own."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from huggingface_hub import constants, hf_api

from foredraft.cli import main
from foredraft.errors import CheckpointError
from foredraft.model.locate import resolve
from tests.support.hub_server import Hub
from tests.support.running import forked, run_code


@dataclass
class Client:
    hub: Hub
    home: Path

    @contextlib.contextmanager
    def reading(self, environment: dict[str, str]) -> Iterator[None]:
        """Let `huggingface_hub`, which reads its settings at import, have those of an environment."""
        self.hub.log.clear()
        with pytest.MonkeyPatch.context() as patch:
            try:
                wanted = self.hub.environment(self.home, **environment)
                for name in os.environ.keys() - wanted.keys():
                    patch.delenv(name)
                for name, value in wanted.items():
                    patch.setenv(name, value)
                importlib.reload(constants)
                patch.setattr(hf_api.api, "endpoint", constants.ENDPOINT)
                yield
            finally:
                patch.undo()
                importlib.reload(constants)

    def run(self, script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        self.hub.log.clear()
        return forked(run_code, script, *arguments, env=self.hub.environment(self.home, **environment))

    def info(self, *arguments: str, **environment: str) -> tuple[int, str, str]:
        """Run `foredraft info`, and return its exit code, what it writes and what it says beside that."""
        out, err = io.StringIO(), io.StringIO()
        with self.reading(environment), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(["info", *arguments])
        return code, out.getvalue(), err.getvalue()

    def resolve(self, *arguments: str, **environment: str) -> Path:
        with self.reading(environment):
            return resolve(*arguments).path

    def refused(self, *arguments: str, **environment: str) -> str:
        """Return the message of the CheckpointError that `resolve` raises."""
        with self.reading(environment), pytest.raises(CheckpointError) as caught:
            resolve(*arguments)
        message = str(caught.value)
        assert "\n" not in message
        return message
