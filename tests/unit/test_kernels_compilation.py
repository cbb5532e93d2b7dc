"""Where the kernels are compiled and kept, and what is said where they cannot be."""

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

pytestmark = pytest.mark.skipif(kernels.library() is None, reason="no C compiler")


@pytest.fixture(autouse=True)
def anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Nothing is compiled yet, and nothing kept; afterwards all is as before."""
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(compilation, "_found", compilation.functools.cache(compilation._found.__wrapped__))
    yield
    check.unserved_because.cache_clear()


def program(tmp_path: Path, lines: str) -> Path:
    path = tmp_path / "compiler"
    path.write_text(f"#!/bin/sh\n{lines}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def count_compilations(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    built: list[Path] = []
    real = compilation._built
    monkeypatch.setattr(
        compilation, "_built", lambda command, path: (built.append(path), real(command, path))[1]
    )
    return built


def test_they_are_compiled_once_and_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    built, command = count_compilations(monkeypatch), compilation.compiler()
    assert command is not None
    compilation._load(command)
    [kept] = (tmp_path / "cache" / "kernels").iterdir()
    kept.unlink()  # not overwritten: it is in use
    kept.write_bytes(b"broken")
    for _ in range(2):
        assert compilation._load(command).foredraft_argmax is not None
        assert len(built) == 2
    assert [kept] == list((tmp_path / "cache" / "kernels").iterdir())


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_a_cache_that_cannot_be_written_to_is_no_hindrance(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert compilation.library() is not None


def test_a_cache_that_is_a_file_is_no_hindrance(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    assert compilation.library() is not None


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ("echo one; echo 'x.c: error: no such thing' >&2; exit 1", "x.c: error: no such thing"),
        ("printf '\\377\\n'; printf '\\377 error\\n' >&2; exit 1", "\ufffd error"),
        ("echo a warning >&2; exec sleep 20", "timed out"),
        ("exit 0", "cannot be compiled"),
    ],
)
def test_a_compiler_that_fails(lines: str, why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compilation, "SECONDS", 0.5)
    monkeypatch.setenv("CC", str(program(tmp_path, lines)))
    assert compilation.library() is None
    assert why in (compilation.unavailable_because() or "")


def test_cc_may_have_arguments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = compilation.compiler()
    assert found is not None
    through = program(tmp_path, 'exec "$@"')
    monkeypatch.setenv("CC", f"{through} {found[0]}")
    assert compilation.library() is not None


def test_a_cc_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler -m64")
    assert compilation.unavailable_because() == "CC is 'no-such-compiler -m64', which is no program"


@pytest.mark.parametrize("options", [{"kernels": False}, {"compile": True}])
def test_nothing_is_compiled_for_a_model_that_does_without(
    options: dict[str, bool], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = save_checkpoint(tmp_path / "model", "llama")
    check.unserved_because.cache_clear()
    monkeypatch.setattr(loading.runners, "check_compiler", lambda device: None)
    monkeypatch.setattr(loading.runners, "make_runner", refuse_to_read)
    with pytest.raises(ConfigError, match="read no further"):
        load(folder, device="cpu", **options)  # type: ignore[arg-type]
    assert not compilation._found.cache_info().currsize


def refuse_to_read(*_: Any, **__: Any) -> None:
    raise ConfigError("read no further")
