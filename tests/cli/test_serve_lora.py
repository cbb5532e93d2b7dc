"""`foredraft serve --lora` as a user runs it: the demo target with a LoRA that PEFT made, and its own adapter."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from foredraft import demo
from foredraft.cli import main
from tests.cli.test_lora import MADE_FOR_BASE
from tests.support.command import started_server
from tests.support.loras import save_lora

pytest.importorskip("fastapi")
PROMPT = "def fibonacci(n):"


def generated(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    options = ["--temperature", "0", "--max-new-tokens", "24", "--policy", "fixed", "--json"]
    assert main(["generate", PROMPT, *options, *words]) == 0
    text: str = json.loads(capsys.readouterr().out)["outputs"][0]["text"]
    return text


def test_it_serves_the_text_of_generate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The adapter of the demo target was trained without the LoRA: it drafts, and one line says so."""
    lora = save_lora(demo.target_path(), tmp_path / "lora", target_modules=["q_proj", "down_proj"], r=4)
    merged, plain = generated(capsys, "--lora", str(lora)), generated(capsys)
    assert merged != plain
    sent = {"model": "demo", "prompt": PROMPT, "temperature": 0, "max_tokens": 24, "drafter": "kangaroo"}
    with started_server("--lora", str(lora), "--drafter", "kangaroo") as (_, address, said):
        assert said.count(MADE_FOR_BASE) == 1
        found = httpx.post(f"{address}/v1/completions", json=sent, timeout=60).json()
        metrics = httpx.get(f"{address}/metrics").text
    assert found["choices"][0]["text"] == merged
    [drafted] = [line for line in metrics.splitlines() if line.startswith("foredraft_draft_tokens_total")]
    assert float(drafted.split()[-1]) > 0
