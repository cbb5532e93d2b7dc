"""Coding agents drive the server by their default settings: a question, a file that they read, and an edit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

import foredraft
from foredraft import LLM, demo
from tests.clients.install import installed, node_program
from tests.clients.scripting import Call, Say, Script, Scripted
from tests.support.checkpoints import save_checkpoint
from tests.support.serving import TEMPLATE, serving

pytestmark = pytest.mark.agents
MODEL = "demo"  # the server names a model by its folder
POSITIONS = 1 << 16  # Claude Code begins with some 28,000 tokens in the demo's vocabulary
BEFORE, AFTER = "one zebra\n", "one yak\n"
QUESTION, ANSWER = "Which animal is in a.txt? Then make it a yak.", "It was a zebra, and is a yak now."
SECONDS = 240


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tmp_path_factory.mktemp("agents") / MODEL
    config = json.loads((demo.target_path() / "config.json").read_text())
    kept = {name: config[name] for name in ("vocab_size", "bos_token_id", "eos_token_id")}
    save_checkpoint(
        folder, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1,
        max_position_embeddings=POSITIONS, **kept,
    )  # fmt: skip
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo.target_path() / name, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return foredraft.load(folder, policy="fixed", max_batch=2, max_length=POSITIONS)


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "a.txt").write_text(BEFORE)
    return folder


@contextmanager
def scripted(llm: LLM, script: Script, work: Path) -> Iterator[str]:
    with serving(llm, prepare=lambda app: app.add_middleware(Scripted, script=script)) as served:
        yield served.url
    assert not script.steps, f"never asked for: {script.steps}"
    assert {status for _, _, status in script.seen} == {200}
    assert (work / "a.txt").read_text() == AFTER
    assert not script.with_tools or "one zebra" in json.dumps(script.seen[-1][1])


def run(command: list[Any], work: Path, **environment: str) -> str:
    home = work.parent / "home"
    home.mkdir(exist_ok=True)
    names = ("PATH", "LANG", "TMPDIR")
    known = {name: os.environ[name] for name in names if name in os.environ} | {"HOME": str(home)}
    ran = subprocess.run(
        [*map(str, command)], cwd=work, env=known | environment, stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-8000:]
    return ran.stdout


def replacing(read: str, edit: str, file: dict[str, str], old: str, new: str) -> Script:
    return Script([Call(read, file), Call(edit, file | {old: "zebra", new: "yak"}), Say(ANSWER)])


def test_claude_code(llm: LLM, work: Path) -> None:
    claude, file = node_program("claude"), {"file_path": str(work / "a.txt")}
    with scripted(llm, replacing("Read", "Edit", file, "old_string", "new_string"), work) as url:
        command = [claude, "-p", QUESTION, "--permission-mode", "acceptEdits", "--model", MODEL]
        said = run(command, work, ANTHROPIC_BASE_URL=url, ANTHROPIC_AUTH_TOKEN="none")
    assert said.strip() == ANSWER


def test_codex(llm: LLM, work: Path) -> None:
    codex = node_program("codex")
    home = work.parent / "codex"
    home.mkdir()
    patch = "sed -i s/zebra/yak/ a.txt"
    script = Script(
        [Call("exec_command", {"cmd": "cat a.txt"}), Call("exec_command", {"cmd": patch}), Say(ANSWER)]
    )
    with scripted(llm, script, work) as url:
        (home / "config.toml").write_text(
            f'model = "{MODEL}"\nmodel_provider = "here"\n[model_providers.here]\nname = "here"\n'
            f'base_url = "{url}/v1"\nwire_api = "responses"\n'
        )
        command = [codex, "exec", "--skip-git-repo-check", "-s", "danger-full-access", QUESTION]
        said = run(command, work, CODEX_HOME=str(home))
    assert said.strip().endswith(ANSWER)


def test_opencode(llm: LLM, work: Path) -> None:
    opencode, file = node_program("opencode"), {"filePath": str(work / "a.txt")}
    with scripted(llm, replacing("read", "edit", file, "oldString", "newString"), work) as url:
        provider = {
            "npm": "@ai-sdk/openai-compatible", "name": "here", "options": {"baseURL": f"{url}/v1"},
            "models": {MODEL: {}},
        }  # fmt: skip
        (work / "opencode.json").write_text(json.dumps({"provider": {"here": provider}}))
        said = run([opencode, "run", "--model", f"here/{MODEL}", QUESTION], work)
    assert ANSWER in said


def test_aider(llm: LLM, work: Path) -> None:
    aider = installed("aider/bin/aider")
    edit = f"a.txt\n```\n<<<<<<< SEARCH\n{BEFORE}=======\n{AFTER}>>>>>>> REPLACE\n```\n"
    script = Script([Say(edit)], with_tools=False)
    with scripted(llm, script, work) as url:
        command = [
            aider, "--model", f"openai/{MODEL}", "--edit-format", "diff", "--no-git", "--yes-always",
            "--no-check-update", "--no-show-release-notes", "--analytics-disable", "--no-show-model-warnings",
            "--message", QUESTION, "a.txt",
        ]  # fmt: skip
        variables = {"OPENAI_API_BASE": f"{url}/v1", "OPENAI_API_KEY": "none"}
        run(command, work, LITELLM_LOCAL_MODEL_COST_MAP="True", **variables)
