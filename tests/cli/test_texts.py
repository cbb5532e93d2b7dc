"""Texts of earlier requests on the command line: kept by `generate`, in a conversation and by `serve`."""

from __future__ import annotations

import signal
from pathlib import Path

import httpx
import pytest

from tests.cli.conftest import Cli
from tests.cli.test_chat import chatty
from tests.support.command import started_server
from tests.support.terminal import TerminalSession

__all__ = ["chatty"]  # a fixture

GREEDY = ["--temperature", "0", "--max-new-tokens", "24", "--ignore-eos"]


@pytest.fixture(scope="module")
def generate(models: Path) -> list[str]:
    drafting = ["--drafter", "suffix", "--policy", "fixed"]
    return ["generate", "one text", "--model", str(models / "big"), *drafting, *GREEDY]


def accepted_length(text: str) -> float:
    return float(text.splitlines()[-1].rsplit(" ", 1)[1])


def test_generate_saves_texts_and_drafts_by_them(generate: list[str], tmp_path: Path, cli: Cli) -> None:
    file = tmp_path / "texts"
    first, again = (cli(*generate, "--texts-file", file).out for _ in range(2))
    assert file.is_file()
    assert accepted_length(again) > accepted_length(first)
    assert first.splitlines()[:-1] == again.splitlines()[:-1]
    whole = file.read_bytes()[:-1]
    file.write_bytes(whole)
    damaged = f"--texts-file is '{file}', which is damaged; remove it, or give another one"
    assert cli.refused(*generate, "--texts-file", file) == damaged
    assert file.read_bytes() == whole


def test_a_comparison_keeps_no_texts(cli: Cli) -> None:
    told = "--recent-texts would copy the text of the run before; leave it out, or --compare"
    assert cli.refused("generate text --drafter suffix --recent-texts 8 --compare") == told
    assert "--recent-texts is -1; give MiB, 0 or more" in cli.refused("generate text --recent-texts -1")


@pytest.mark.heavy
def test_a_conversation_saves_texts_however_it_is_left(chatty: list[str], tmp_path: Path) -> None:
    file = tmp_path / "texts"
    texts = ["--drafter", "suffix", "--policy", "fixed", "--recent-texts", "1", "--texts-file", str(file)]
    with TerminalSession(*chatty, *GREEDY, *texts, all_shown=True) as session:
        for line in ("Hello\n", "/clear\n", "Hello\n"):
            session.type(line)
        session.interrupt()
        session.interrupt()
        code, _ = session.wait()
    assert code == 130 and "Traceback" not in session.text_buffer
    assert file.read_bytes().count(b'["", ') == 2
    found = [line for line in session.text_buffer.splitlines() if "mean accepted length" in line]
    first, again = map(accepted_length, found)
    assert again > first


@pytest.mark.heavy
def test_serve_drafts_by_saved_texts(generate: list[str], models: Path, tmp_path: Path, cli: Cli) -> None:
    file = tmp_path / "texts"
    cli(*generate, "--texts-file", file)
    before = file.read_bytes()
    options = ["--model", str(models / "big"), "--drafter", "suffix", "--texts-file", str(file)]
    body = {"model": "big", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    lengths = []
    with started_server(*options) as (process, address, _):
        for prompt in ("one text", "another text"):
            reply = httpx.post(f"{address}/v1/completions", json=body | {"prompt": prompt}, timeout=60).json()
            lengths.append(reply["metrics"]["speculative_decoding"]["mean_acceptance_length"])
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert lengths[0] > lengths[1] and len(file.read_bytes()) > len(before)
