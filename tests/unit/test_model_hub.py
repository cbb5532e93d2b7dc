"""Names of models: folders are taken as they are, and each way to miss one has its own message."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import RepositoryNotFoundError

from foredraft.errors import CheckpointError, ConfigError
from foredraft.model.hub import resolve


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    assert resolve(tmp_path) == tmp_path
    assert resolve(str(tmp_path)) == tmp_path
    with pytest.raises(ConfigError, match="revision 'main'"):
        resolve(tmp_path, "main")


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(CheckpointError, match="is a file"):
        resolve(tmp_path / "model.gguf")


@pytest.mark.parametrize("name", ["nowhere", "./no/where", "/no/where", "a/b/c", "", "owner/"])
def test_neither_folder_nor_hub_name(name: str) -> None:
    with pytest.raises(CheckpointError, match="neither a folder nor a hub name"):
        resolve(name if name else "no such folder")


def test_offline_and_not_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="not in the local hub cache") as caught:
        resolve("foredraft-tests/no-such-model")
    assert "\n" not in str(caught.value)


def test_unknown_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> str:
        # made without its constructor, which wants a response of whichever http client the hub uses
        error = RepositoryNotFoundError.__new__(RepositoryNotFoundError)
        Exception.__init__(error, "404\nmany lines")
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", missing)
    with pytest.raises(CheckpointError, match="neither a local folder nor a model on the hub") as caught:
        resolve("owner/missing")
    assert "\n" not in str(caught.value)


def test_what_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, object] = {}

    def fetch(name: str, **options: object) -> str:
        seen.update(options, name=name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert resolve("owner/name", "v1") == tmp_path
    assert seen == {
        "name": "owner/name",
        "revision": "v1",
        "allow_patterns": ["*.json", "*.safetensors", "*.jinja"],
    }
