"""`resolve` returns a folder unchanged; every name that leads to no model has a message of its own."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import huggingface_hub
import pytest
from huggingface_hub.errors import RepositoryNotFoundError

from foredraft.errors import CheckpointError, ConfigError
from foredraft.model.locate import resolve


def test_a_folder_is_returned_unchanged_and_a_file_refused(tmp_path: Path) -> None:
    assert resolve(tmp_path).path == resolve(str(tmp_path)).path == tmp_path
    (tmp_path / "model.bin").touch()
    with pytest.raises(CheckpointError, match="is a file, but not a GGUF file"):
        resolve(tmp_path / "model.bin")


NAMES = [*"nowhere ./no/where /no/where a/b/c owner/ owner/name@ @main owner@main".split(), "owner/name@a b"]
LONG = ["n" * 300, "o/" + "n" * 300, "o" * 300 + "/n", "n/" * 5000]
IMPOSSIBLE = [*LONG, "~nosuchuser/x", "~nosuchuser", "a\0b", "o/a--b"]


@pytest.mark.parametrize("name", NAMES + IMPOSSIBLE)
def test_a_name_that_is_neither_a_folder_nor_a_hub_name_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="neither a folder nor a (hub name|name that)") as caught:
        resolve(name)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


def test_a_local_folder_with_a_revision_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a local folder, which has no revision 'v1'; leave"):
        resolve(tmp_path, "v1")
    for name in ("owner/name@v1", "owner/name:Q8_0"):  # a folder may have such a name
        (tmp_path / name).mkdir(parents=True)
        assert resolve(tmp_path / name).path == tmp_path / name
    with pytest.raises(ConfigError, match="owner/name@v1 names another revision than 'v2'; give one"):
        resolve("owner/name@v1", "v2")


def unknown() -> RepositoryNotFoundError:
    """Bypass the constructor, which takes a response of an http client that differs between versions."""
    error = RepositoryNotFoundError.__new__(RepositoryNotFoundError)
    Exception.__init__(error, "404\nmany lines")
    return error


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (unknown(), "neither a local folder nor a model on the hub"),
        (type("ReadTimeout", (Exception,), {})("timed out\nmany lines"), "(timed out)"),
        (type("ConnectError", (Exception,), {})(), "(ConnectError)"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (ValueError("\nodd"), "(odd)"),
    ],
    ids=["unknown", "http client", "no message", "disk", "empty line"],
)
def test_any_error_of_the_download_is_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch, error: Exception, shown: str
) -> None:
    """Errors of the http client derive from Exception only; the client differs between versions."""
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Mock(side_effect=error))
    with pytest.raises(CheckpointError, match="local folder") as caught:
        resolve("owner/name")
    assert shown in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_interrupt_passes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        resolve("owner/name")
