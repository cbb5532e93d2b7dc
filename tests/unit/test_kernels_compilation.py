"""The kernels are compiled once, and kept in the user's cache; `unavailable_because` says why there are none."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foredraft import ConfigError, kernels, loading
from foredraft.kernels import compilation
from foredraft.loading import load
from foredraft.model.runner.native import check
from tests.support.checkpoints import save_checkpoint
from tests.support.compiling import QUICK

pytestmark = pytest.mark.skipif(kernels.library() is None, reason="no C compiler")


@pytest.fixture(autouse=True)
def fresh_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Give each test an empty cache folder and kernels that are not loaded."""
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(compilation, "FLAGS", (*compilation.FLAGS, QUICK))
    monkeypatch.setattr(
        compilation,
        "_library_or_reason",
        compilation.functools.cache(compilation._library_or_reason.__wrapped__),
    )
    yield
    check.unserved_because.cache_clear()


def program(tmp_path: Path, lines: str) -> Path:
    path = tmp_path / "compiler"
    path.write_text(f"#!/bin/sh\n{lines}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def count_compilations(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    built: list[Path] = []
    real = compilation._build
    monkeypatch.setattr(
        compilation, "_build", lambda command, path: (built.append(path), real(command, path))[1]
    )
    return built


def test_the_kernels_are_compiled_once_and_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    built, command = count_compilations(monkeypatch), compilation.compiler()
    assert command is not None
    compilation._load(command)
    [kept] = (tmp_path / "cache" / "kernels").iterdir()
    kept.unlink()  # the loaded library still maps this file
    kept.write_bytes(b"broken")
    for _ in range(2):
        assert compilation._load(command).foredraft_argmax is not None
        assert len(built) == 2
    assert [kept] == list((tmp_path / "cache" / "kernels").iterdir())


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_a_cache_that_cannot_be_written_is_no_error(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert compilation.library() is not None


def test_a_cache_folder_that_is_a_file_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    assert compilation.library() is not None


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo one; echo 'x.c: error: no such thing' >&2; exit 1", "x.c: error: no such thing"),
        ("printf '\\377\\n'; printf '\\377 error\\n' >&2; exit 1", "\ufffd error"),
        ("echo a warning >&2; exec sleep 20", "timed out"),
        ("exit 0", "cannot be compiled"),
    ],
)
def test_a_failing_compiler_is_the_reason(
    script: str, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(compilation, "TIMEOUT", 0.5)
    monkeypatch.setenv("CC", str(program(tmp_path, script)))
    assert compilation.library() is None
    assert reason in (compilation.unavailable_because() or "")


def test_cc_may_hold_arguments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = compilation.compiler()
    assert found is not None
    wrapper = program(tmp_path, 'exec "$@"')
    monkeypatch.setenv("CC", f"{wrapper} {found[0]}")
    assert compilation.library() is not None


def test_a_missing_cc_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler -m64")
    assert compilation.unavailable_because() == "CC is 'no-such-compiler -m64', which is not a program"


@pytest.mark.parametrize("options", [{"kernels": False}, {"compile": True}])
def test_a_model_without_kernels_compiles_none(
    options: dict[str, bool], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = save_checkpoint(tmp_path / "model", "llama")
    check.unserved_because.cache_clear()
    monkeypatch.setattr(loading.runners, "check_compiler", lambda device: None)
    monkeypatch.setattr(loading.runners, "make_runner", stop_loading)
    with pytest.raises(ConfigError, match="loading stopped"):
        load(folder, device="cpu", **options)  # type: ignore[arg-type]
    assert not compilation._library_or_reason.cache_info().currsize


def stop_loading(*_: Any, **__: Any) -> None:
    raise ConfigError("loading stopped")
