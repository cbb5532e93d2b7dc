"""What a machine refuses is one line on the command line, not a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from foredraft import ConfigError
from foredraft.cli import main
from foredraft.errors import CheckpointError
from foredraft.model.config import read_json
from foredraft.model.tokenizer import Tokenizer
from foredraft.train.texts import Reader
from tests.support.checkpoints import save_checkpoint
from tests.support.limits import no_more_bytes

FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize(
    "words",
    [["generate", "hi", "--max-new-tokens", "4", "--policy", "fixed"], ["info"], ["--help"]],
    ids=" ".join,
)
def test_a_full_stdout_is_one_line(words: list[str]) -> None:
    with FULL.open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "foredraft", *words], stdout=full, stderr=subprocess.PIPE, text=True,
            check=False,
        )  # fmt: skip
    errors = [line for line in done.stderr.splitlines() if "error" in line.lower()]
    assert done.returncode == 2 and "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    assert len(errors) == 1 and "stdout cannot be" in errors[0]


def test_quantising_on_a_full_disk_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_checkpoint(tmp_path / "model", "llama", tokenizer=True, hidden_size=64, intermediate_size=96)
    out = tmp_path / "out" / "few"
    out.parent.mkdir()
    with no_more_bytes(70_000):
        code = main(["quantise", "--model", str(model), "--out", str(out)])
    error = capsys.readouterr().err
    assert code == 2 and "--out is" in error and "which cannot be written (File too large)" in error
    assert list(out.parent.iterdir()) == []


LITTLE = """
import resource, sys, foredraft
load, error_of_options = foredraft.load, foredraft.ConfigError  # imported before the limit
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (int(sys.argv[2]) << 20),) * 2)
try:
    load(sys.argv[1], device="cpu", max_length=64)
except error_of_options as error:
    print(error)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's count of a process's memory")
@pytest.mark.parametrize("more", [30, 60])
def test_too_little_memory_is_one_error(more: int, tmp_path: Path) -> None:
    """Where the weights cannot be mapped, and where they cannot be packed."""
    model = save_checkpoint(tmp_path, "llama", tokenizer=True, hidden_size=64, intermediate_size=40_000)
    done = subprocess.run(
        [sys.executable, "-c", LITTLE, str(model), str(more)], capture_output=True, text=True, check=False
    )
    assert "for which the system gives too little memory; lower max_length" in done.stdout, done.stderr


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    found = Tokenizer.from_folder(save_checkpoint(tmp_path_factory.mktemp("m"), "llama", tokenizer=True))
    assert found is not None
    return found


def test_a_table_of_what_is_no_utf8_is_one_error(tokenizer: Tokenizer, tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    bytes_ = arrow.array([b"\xff\xfe bad"], arrow.binary())
    text = arrow.Array.from_buffers(arrow.string(), 1, bytes_.buffers())
    parquet.write_table(arrow.table({"text": text}), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="which is not UTF-8 text"):
        Reader(tokenizer, None, 64).corpus([tmp_path / "a.parquet"])


def test_lines_with_a_byte_order_mark_are_read(tokenizer: Tokenizer, tmp_path: Path) -> None:
    line = '{"text": "the target"}\n'
    (tmp_path / "a.jsonl").write_text(line)
    (tmp_path / "b.jsonl").write_text("\N{ZERO WIDTH NO-BREAK SPACE}" + line, encoding="utf-8")
    one, other = (Reader(tokenizer, None, 64).corpus([tmp_path / f"{name}.jsonl"]) for name in "ab")
    assert one == other


def test_a_pipe_is_never_waited_for(tokenizer: Tokenizer, tmp_path: Path) -> None:
    from foredraft.drafters.adapter_files import read_adapter

    for name in ("config.json", "data.jsonl"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match="it is no file"):
        read_json(tmp_path / "config.json")
    with pytest.raises(ConfigError, match="which is no file"):
        read_adapter(tmp_path)
    given: Any = [tmp_path / "data.jsonl"]
    with pytest.raises(ConfigError, match="which is no file"):
        Reader(tokenizer, None, 64).corpus(given)
