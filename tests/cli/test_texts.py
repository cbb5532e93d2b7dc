"""Texts of earlier requests on the command line: kept by `generate`, in a conversation and by `serve`."""

from __future__ import annotations

import signal
from pathlib import Path

import httpx
import pytest

from foredraft.cli import main
from tests.cli.test_chat import chatty
from tests.support.command import foredraft, started_server
from tests.support.terminal import TerminalSession

__all__ = ["chatty"]  # a fixture

GREEDY = ["--temperature", "0", "--max-new-tokens", "24", "--ignore-eos"]


@pytest.fixture(scope="module")
def generate(models: Path) -> list[str]:
    return ["generate", "--model", str(models / "big"), "--drafter", "suffix", "--policy", "fixed", *GREEDY]


def accepted_length(text: str) -> float:
    """Return the mean accepted length of the last line."""
    return float(text.splitlines()[-1].rsplit(" ", 1)[1])


def test_generate_saves_texts_and_drafts_by_them(generate: list[str], tmp_path: Path) -> None:
    kept = ["--texts-file", str(tmp_path / "texts")]
    first, again = (foredraft(*generate, "one text", *kept) for _ in range(2))
    assert first.returncode == again.returncode == 0, first.stderr + again.stderr
    assert (tmp_path / "texts").is_file()
    assert accepted_length(again.stdout) > accepted_length(first.stdout)
    assert first.stdout.splitlines()[:-1] == again.stdout.splitlines()[:-1]


def test_a_damaged_file_of_texts_is_one_line(generate: list[str], tmp_path: Path) -> None:
    foredraft(*generate, "one text", "--texts-file", str(tmp_path / "texts"))
    whole = (tmp_path / "texts").read_bytes()
    (tmp_path / "texts").write_bytes(whole[:-1])
    done = foredraft(*generate, "one text", "--texts-file", str(tmp_path / "texts"))
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == (
        f"foredraft: error: --texts-file is '{tmp_path / 'texts'}', which is damaged; remove it, or give another"
        " one\n"
    )
    assert (tmp_path / "texts").read_bytes() == whole[:-1]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["--drafter", "suffix", "--recent-texts", "8", "--compare"],
            "--recent-texts would copy the text of the run before; leave it out, or --compare",
        ),
        (["--drafter", "lookup", "--recent-texts", "8"], "--recent-texts has no effect with drafter lookup"),
        (["--recent-texts", "-1"], "--recent-texts is -1; give MiB, 0 or more"),
        (["--texts-file", "missing/texts"], "--texts-file is 'missing/texts'; give a file in a folder that"),
    ],
)
def test_what_has_no_effect_is_refused(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "text", *words]) == 2
    assert says in capsys.readouterr().err


def test_a_conversation_saves_texts_however_it_is_left(chatty: list[str], tmp_path: Path) -> None:
    file = tmp_path / "texts"
    texts = ["--drafter", "suffix", "--recent-texts", "1", "--texts-file", str(file)]
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


def test_serve_saves_texts_at_its_end(models: Path, tmp_path: Path) -> None:
    file = tmp_path / "texts"
    options = ["--model", str(models / "big"), "--drafter", "suffix", "--texts-file", str(file)]
    body = {"model": "big", "prompt": "one text", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    found = []
    for _ in range(2):
        with started_server(*options) as (process, address, _):
            reply = httpx.post(f"{address}/v1/completions", json=body, timeout=60).json()
            found.append((reply["choices"][0]["text"], reply["metrics"]["speculative_decoding"]))
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
            assert file.is_file()
    (text, first), (same, later) = found
    assert text == same and first != later
