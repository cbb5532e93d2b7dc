"""Clients drive the server: each program of `programs/` asserts what its user sees, and the guide names its version."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from foredraft import demo
from foredraft.llm import LLM
from tests.clients.install import installed
from tests.support.serving import Served

PROGRAMS = Path(__file__).parent / "programs"
CLIENTS = sorted(path.stem.removeprefix("client_") for path in PROGRAMS.glob("client_*.py"))
MESSAGES = [{"role": "user", "content": "def add(a, b):"}]
GREEDY: dict[str, Any] = {"temperature": 0, "drafter": "none"}
CHOICES = [
    {"question": "def add(a, b):\n    return", "choices": [" a + b", " a - b", " None"], "gold": 0},
    {"question": "for i in", "choices": [" range(3):", " while", " import"], "gold": 0},
    {"question": "import numpy as", "choices": [" np", " pd"], "gold": 0},
]
TEXTS = [{"text": "def f(x):\n    return x\n"}, {"text": "import os\n"}]


def run(client: str, served: Served, want: dict[str, Any]) -> str:
    ran = subprocess.run(
        [str(installed("python/bin/python")), str(PROGRAMS / f"client_{client}.py"), served.url],
        input=json.dumps(want), capture_output=True, text=True, timeout=240, check=False,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": "", "NO_COLOR": "1"},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-8000:]
    return ran.stdout


def wanted(llm: LLM) -> dict[str, Any]:
    [chat] = llm.chat(MESSAGES, max_new_tokens=24, logprobs=2, **GREEDY)
    [plain] = llm.generate("def f(", max_new_tokens=24, **GREEDY)
    assert chat.logprobs is not None
    return {
        "text": chat.text, "prompt_tokens": chat.prompt_tokens, "plain": plain.text,
        "logprobs": [score.logprob for score in chat.logprobs],
    }  # fmt: skip


@pytest.mark.heavy
@pytest.mark.parametrize("client", [name for name in CLIENTS if name != "lm_eval"])
def test_its_user_sees_the_library_s_text(client: str, served: Served, llm: LLM) -> None:
    run(client, served, wanted(llm))
    served.wait(served.idle, 5)


def tasks(folder: Path) -> list[dict[str, Any]]:
    common: dict[str, Any] = {"dataset_path": "json", "test_split": "test", "num_fewshot": 0}
    made = []
    for name, docs in (("choices", CHOICES), ("texts", TEXTS)):
        file = folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
        data = {"data_files": {"test": str(file)}, "cache_dir": str(folder / "cache")}
        made.append(common | {"task": name, "dataset_kwargs": data})
    made[0] |= {
        "output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}",
        "doc_to_target": "gold", "target_delimiter": "", "metric_list": [{"metric": "acc"}],
    }  # fmt: skip
    made[1] |= {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}],
    }  # fmt: skip
    return made


def scored(llm: LLM, ids: list[int], first: int) -> tuple[float, bool]:
    """Return the log-likelihood of the tokens from the `first` on, and whether each is the likeliest."""
    [output] = llm.generate([ids], max_new_tokens=0, prompt_logprobs=1)
    scores = [score for score in (output.prompt_logprobs or [])[first:] if score is not None]
    return sum(score.logprob for score in scores), all(score.logprob == score.top[0][1] for score in scores)


@pytest.mark.heavy
def test_lm_eval_scores_as_the_library_does(
    served: Served, llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    short: dict[str, Any] = {"max_new_tokens": 12, "stop": ["\n\n"]} | GREEDY
    [plain], [chat] = llm.generate("def add(a, b):", **short), llm.chat(MESSAGES, **short)
    want = {
        "folder": str(demo.target_path()), "tasks": tasks(tmp_path), "short_plain": plain.text,
        "short_text": chat.text,
    }  # fmt: skip
    tokenizer = llm.tokenizer
    assert tokenizer is not None

    def of_choice(question: str, choice: str) -> list[object]:
        whole = tokenizer.encode(question + choice, False)
        return [*scored(llm, whole, len(tokenizer.encode(question, False)))]

    begin = llm.loaded.spec.bos_token_id or 0
    texts = [scored(llm, [begin, *tokenizer.encode(doc["text"], False)], 1)[0] for doc in TEXTS]
    choices = [[of_choice(str(doc["question"]), choice) for choice in doc["choices"]] for doc in CHOICES]
    for found in json.loads(run("lm_eval", served, want)):
        assert found == {"choices": choices, "texts": [[score] for score in texts]}


def node(program: str, folder: Path, *arguments: str, given: str = "") -> str:
    copy = installed("npm/node_modules").parent / program
    copy.write_text((PROGRAMS / program).read_text())
    ran = subprocess.run(
        ["node", str(copy), *arguments], cwd=folder, input=given, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr[-8000:]
    return ran.stdout


@pytest.mark.agents
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


@pytest.mark.agents
def test_ai_sdk(served: Served, llm: LLM, tmp_path: Path) -> None:
    node("ai_sdk.mjs", tmp_path, served.url, given=json.dumps(wanted(llm)))
    served.wait(served.idle, 5)


HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "guides" / "clients.md"
# Packages of npm -> names on the page; None: the clients of the page come with it or load it.
NAMES = {
    "@anthropic-ai/claude-code": "Claude Code", "@openai/codex": "Codex CLI", "opencode-ai": "opencode", "ai": "AI SDK",
    "openai": "(Python),", "@ai-sdk/anthropic": None, "@ai-sdk/openai-compatible": None, "zod": None,
}  # fmt: skip


def test_the_page_names_the_versions_of_the_tests() -> None:
    wanted = {}
    for file in ("requirements.txt", "aider.txt"):
        for line in (HERE / file).read_text().splitlines():
            name, version = re.fullmatch(r"([\w-]+)(?:\[[\w,]+\])?==([\w.]+)", line).groups()  # type: ignore[union-attr]
            if name != "transformers":  # lm-eval loads it
                wanted[name.removesuffix("-chat")] = version
    packages = json.loads((HERE / "package.json").read_text())["dependencies"]
    wanted |= {shown: packages[name] for name, shown in NAMES.items() if shown is not None}
    assert packages.keys() == NAMES.keys()
    rows = PAGE.read_text()
    missing = [f"{name} {version}" for name, version in wanted.items() if f"{name} {version}" not in rows]
    assert not missing
