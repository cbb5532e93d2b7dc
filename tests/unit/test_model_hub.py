"""`resolve` returns a folder unchanged; every name that leads to no model has a message of its own."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import RepositoryNotFoundError

from foredraft.errors import CheckpointError, ConfigError
from foredraft.model.hub import resolve


def test_a_folder_is_returned_unchanged(tmp_path: Path) -> None:
    assert resolve(tmp_path) == tmp_path
    assert resolve(str(tmp_path)) == tmp_path


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(CheckpointError, match="is a file, but not a GGUF file"):
        resolve(tmp_path / "model.bin")


@pytest.mark.parametrize("name", ["nowhere", "./no/where", "/no/where", "a/b/c", "", "owner/"])
def test_a_name_that_is_neither_a_folder_nor_a_hub_name_is_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match="neither a folder nor a hub name"):
        resolve(name if name else "no such folder")


@pytest.mark.parametrize(
    "name", ["n" * 300, "o/" + "n" * 300, "o" * 300 + "/n", "~nosuchuser/x", "~nosuchuser", "a\0b", "o/a--b", "n/" * 5000]
)  # fmt: skip
def test_an_impossible_name_is_refused_in_one_short_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        CheckpointError, match="is neither a folder nor a (hub name|name that the hub)"
    ) as caught:
        resolve(name)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


@pytest.mark.parametrize("name", ["owner/name@", "owner/name@a b", "@main", "owner@main"])
def test_a_malformed_revision_is_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match="neither a folder nor a hub name"):
        resolve(name)


def test_a_local_folder_with_a_revision_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a local folder, which has no revision 'v1'; leave"):
        resolve(tmp_path, "v1")
    named = tmp_path / "owner/name@v1"  # a folder may have such a name
    named.mkdir(parents=True)
    assert resolve(named) == named


def test_two_different_revisions_are_refused() -> None:
    with pytest.raises(ConfigError, match="owner/name@v1 names another revision than 'v2'; give one"):
        resolve("owner/name@v1", "v2")


def test_an_uncached_model_is_refused_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="not in the local hub cache.*HF_HUB_OFFLINE") as caught:
        resolve("foredraft-tests/no-such-model")
    assert "\n" not in str(caught.value)


def test_a_name_that_the_hub_does_not_know_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> str:
        # bypass the constructor, which takes a response of an http client that differs between versions
        error = RepositoryNotFoundError.__new__(RepositoryNotFoundError)
        Exception.__init__(error, "404\nmany lines")
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", missing)
    with pytest.raises(CheckpointError, match="neither a local folder nor a model on the hub") as caught:
        resolve("owner/missing")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (type("ReadTimeout", (Exception,), {})("timed out\nmany lines"), "(timed out)"),
        (type("ConnectError", (Exception,), {})(), "(ConnectError)"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (ValueError("\nodd"), "(odd)"),
    ],
    ids=["http client", "no message", "disk", "empty line"],
)
def test_any_error_of_the_download_is_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch, error: Exception, shown: str
) -> None:
    """Errors of the http client derive from Exception only; the client differs between versions."""

    def broken(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", broken)
    with pytest.raises(CheckpointError, match="give a local folder") as caught:
        resolve("owner/name")
    assert shown in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_interrupt_passes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(huggingface_hub, "snapshot_download", interrupted)
    with pytest.raises(KeyboardInterrupt):
        resolve("owner/name")
