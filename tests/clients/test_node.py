"""Clients for Node drive the server: OpenAI's own, and the AI SDK."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from foredraft.llm import LLM
from tests.clients.install import installed
from tests.clients.test_python import GREEDY, MESSAGES, PROGRAMS, wanted
from tests.support.serving import Served

pytestmark = pytest.mark.agents


def node(program: str, folder: Path, *arguments: str, given: str = "") -> str:
    """Run a program beside the packages that it imports; return what it prints."""
    copy = installed("npm/node_modules").parent / program
    copy.write_text((PROGRAMS / program).read_text())
    ran = subprocess.run(
        ["node", str(copy), *arguments],
        cwd=folder,
        input=given,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-8000:]
    return ran.stdout


def test_openai_for_node(served: Served, llm: LLM, tmp_path: Path) -> None:
    [free] = llm.generate("def add(a, b):", max_new_tokens=24, **GREEDY)
    stop = str(free.text).split()[1]
    found: dict[str, Any] = json.loads(node("openai_node.js", tmp_path, f"{served.url}/v1", stop))
    [want] = llm.chat(MESSAGES, max_new_tokens=24, logprobs=2, **GREEDY)
    assert want.logprobs is not None
    assert found["whole"] == found["streamed"] == found["response"] == want.text
    assert found["scores"] == [[score.logprob, 2] for score in want.logprobs]
    assert found["usage"]["completion_tokens"] == found["streamedUsage"]["completion_tokens"] == 24
    assert found["reason"] == "length" and found["models"] == ["demo"]
    assert found["stopped"] == [str(free.text).partition(stop)[0], "stop"]
    assert found["wrong"] == [
        {"kind": "BadRequestError", "status": 400, "param": "temperature", "code": None},
        {"kind": "NotFoundError", "status": 404, "param": "model", "code": "model_not_found"},
    ]
    served.wait(served.idle, 5)  # the stream that it left has ended


def test_ai_sdk(served: Served, llm: LLM, tmp_path: Path) -> None:
    node("ai_sdk.mjs", tmp_path, served.url, given=json.dumps(wanted(llm)))
    served.wait(served.idle, 5)
