"""The folder of a GGUF file: one race, no room and no right to write cost nothing but time."""

from __future__ import annotations

import errno
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf")

from foredraft.errors import CheckpointError
from foredraft.model.gguf import folder as folders
from foredraft.model.gguf import vocabulary
from foredraft.model.gguf.folder import checkpoint_folder
from foredraft.model.gguf.tensors import RECORD, open_tensors
from tests.support.checkpoints import save_checkpoint
from tests.support.gguf_files import write_gguf


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    save_checkpoint(tmp_path / "model", "llama", tokenizer=True)
    return write_gguf(tmp_path / "model", tmp_path / "model.gguf", "F32")


def test_sixteen_at_once_get_one_folder(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All have made its files before one of them writes: each rename but one loses."""
    barrier, files = threading.Barrier(16), folders._files

    def at_once(*of: Any) -> Any:
        made = files(*of)
        barrier.wait(60)
        return made

    monkeypatch.setattr(folders, "_files", at_once)
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(checkpoint_folder, [file] * 16))
    assert len(set(found)) == 1 and (found[0] / "config.json").is_file()
    assert "cache" in str(found[0])
    assert [path.name for path in found[0].parent.iterdir()] == [found[0].name], "nothing is left over"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_cache_that_cannot_be_written_gives_a_temporary_folder(
    number: int, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Path.write_text

    def refuse(self: Path, *given: Any, **more: Any) -> int:
        if (tmp_path / "cache") in self.parents:
            raise OSError(number, "refused", str(self))
        return write(self, *given, **more)

    monkeypatch.setattr(Path, "write_text", refuse)
    found = checkpoint_folder(file)
    assert tmp_path not in found.parents and (found / "config.json").is_file()
    assert checkpoint_folder(file) == found
    monkeypatch.setattr(
        Path, "write_text", lambda *_, **__: (_ for _ in ()).throw(OSError(number, "refused"))
    )
    other = write_gguf(tmp_path / "model", tmp_path / "other.gguf", "F32")
    with pytest.raises(CheckpointError, match=r"cannot be written \(refused\); make room there"):
        checkpoint_folder(other)


@pytest.mark.parametrize(
    "record", [{}, {"file": 3, "identity": []}, {"file": "/x"}, {"file": "/x", "identity": 3}]
)
def test_a_record_that_names_no_file_is_one_error(record: dict[str, Any], tmp_path: Path) -> None:
    import torch

    (tmp_path / RECORD).write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match="does not say which GGUF file"):
        open_tensors(tmp_path, torch.device("cpu"))


def test_a_token_as_long_as_a_book_is_refused() -> None:
    """The places of its merges are so many that their texts take gigabytes."""
    metadata = {
        f"tokenizer.ggml.{name}": value
        for name, value in {
            "model": "llama", "tokens": ["<unk>", "a", "a" * 60_000], "scores": [0.0, -1.0, -2.0],
            "token_type": [2, 1, 1], "unknown_token_id": 0,
        }.items()
    }  # fmt: skip
    with pytest.raises(
        vocabulary.UnreadableVocabularyError, match="token 2 of 60,000 characters; at most 1,000"
    ):
        vocabulary.vocabulary_of(metadata)
