"""What a machine refuses is one line on the command line, not a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import foredraft
from foredraft import ConfigError
from foredraft.drafters.kangaroo import read_adapter
from foredraft.drafters.plan_files import read_plan
from foredraft.errors import CheckpointError, ForedraftError
from foredraft.files import is_no_file
from foredraft.model.config import read_json
from foredraft.model.gguf.file import GGUFFile
from foredraft.model.safetensors_file import SafetensorsFile
from foredraft.model.tokenizer import Tokenizer
from foredraft.train.preparation import RunKey
from foredraft.train.texts import DocumentReader
from foredraft.train.training_options import AdapterOptions
from tests.cli.conftest import Cli
from tests.support.checkpoints import save_checkpoint
from tests.support.limits import no_more_bytes

FULL = Path("/dev/full")


@pytest.mark.heavy
@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("words", [["info"], ["--help"]], ids=" ".join)
def test_a_full_stdout_is_one_line(words: list[str]) -> None:
    with FULL.open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "foredraft", *words], stdout=full, stderr=subprocess.PIPE, text=True,
            check=False,
        )  # fmt: skip
    errors = [line for line in done.stderr.splitlines() if "error" in line.lower()]
    assert done.returncode == 2 and "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    assert len(errors) == 1 and "stdout cannot be" in errors[0]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "model"
    return save_checkpoint(folder, "llama", tokenizer=True, hidden_size=64, intermediate_size=96)


def test_quantising_on_a_full_disk_leaves_nothing(model: Path, tmp_path: Path, cli: Cli) -> None:
    with no_more_bytes(70_000):
        told = cli("quantise --model", model, "--out", tmp_path / "few", code=2).err
    assert "--out is" in told and "which cannot be written (File too large)" in told
    assert list(tmp_path.iterdir()) == []


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


@pytest.mark.heavy
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's count of a process's memory")
@pytest.mark.parametrize("more", [30, 60])
def test_too_little_memory_is_one_error(more: int, tmp_path: Path) -> None:
    """Where the weights cannot be mapped, and where they cannot be packed."""
    model = save_checkpoint(tmp_path, "llama", tokenizer=True, hidden_size=64, intermediate_size=40_000)
    words = [sys.executable, "-c", LITTLE, str(model), str(more)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert "for which the system gives too little memory; lower max_length" in done.stdout, done.stderr


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    found = Tokenizer.from_folder(model)
    assert found is not None
    return found


def corpus(tokenizer: Tokenizer, file: Path) -> object:
    return DocumentReader(tokenizer, None, 64).corpus([file])


def test_a_table_of_what_is_no_utf8_is_one_error(tokenizer: Tokenizer, tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    bytes_ = arrow.array([b"\xff\xfe bad"], arrow.binary())
    text = arrow.Array.from_buffers(arrow.string(), 1, bytes_.buffers())
    parquet.write_table(arrow.table({"text": text}), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="which is not UTF-8 text"):
        corpus(tokenizer, tmp_path / "a.parquet")


def test_lines_with_a_byte_order_mark_are_read(tokenizer: Tokenizer, tmp_path: Path) -> None:
    line = '{"text": "the target"}\n'
    (tmp_path / "a.jsonl").write_text(line)
    (tmp_path / "b.jsonl").write_text("\N{ZERO WIDTH NO-BREAK SPACE}" + line, encoding="utf-8")
    one, other = (corpus(tokenizer, tmp_path / f"{name}.jsonl") for name in "ab")
    assert one == other


# a file's name -> its reader there, and the reader's own error
READERS: dict[str, tuple[Callable[[Path, Tokenizer], object], type[ForedraftError], str]] = {
    "config.json": (lambda file, _: read_json(file), CheckpointError, "config.json is not readable JSON"),
    "adapter/config.json": (lambda file, _: read_adapter(file.parent), ConfigError, "adapter is .*no file"),
    "plan.json": (lambda file, _: read_plan(file), ConfigError, "plan is .*which is no file"),
    "data.jsonl": (lambda file, own: corpus(own, file), ConfigError, "data is .*no file"),
    "run.txt": (lambda file, _: RunKey.of(AdapterOptions(data=(file,)), ""), ConfigError, "data is .* no"),
    "m.safetensors": (lambda file, _: SafetensorsFile(file), CheckpointError, "cannot be read .it is no"),
    "m.gguf": (lambda file, _: GGUFFile(file), CheckpointError, "cannot be read .it is no file"),
    "m": (lambda file, _: foredraft.load(str(file)), ForedraftError, "m"),
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
@pytest.mark.parametrize("name", READERS)
def test_what_is_no_file_is_never_opened(name: str, kind: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """A pipe would be waited for; a device might never end."""
    read, error, message = READERS[name]
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    else:
        file.symlink_to("/dev/zero")
    with pytest.raises(error, match=message):
        read(file, tokenizer)


def test_what_cannot_be_examined_is_named_by_its_reader(tokenizer: Tokenizer, tmp_path: Path) -> None:
    for name in ("x" * 300, "a/b/c"):
        assert not is_no_file(tmp_path / name)
        with pytest.raises(ConfigError, match=r"which cannot be read \((File name too long|No such file)"):
            corpus(tokenizer, tmp_path / name)
