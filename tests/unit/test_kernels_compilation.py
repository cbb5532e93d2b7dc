"""The kernels are compiled once, and kept in the user's cache; `unavailable_because` says why there are none."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foredraft import ConfigError, kernels, loading, user_cache
from foredraft.kernels import building, compilation
from foredraft.loading import load
from foredraft.model.runner import compiled
from foredraft.model.runner.native import check
from tests.support.checkpoints import save_checkpoint
from tests.support.compiling import QUICK, copying_compiler
from tests.support.foreign import NOT_PRIVATE, replace_document

# compiles an empty library, whatever it is asked for; the object file is never read
EMPTY_LIBRARY = """case "$*" in *-shared*) while [ "$1" != -o ]; do shift; done; echo | cc -shared -fPIC -x c - -o "$2";; esac"""

pytestmark = pytest.mark.skipif(kernels.library() is None, reason="no C compiler")


@pytest.fixture(scope="module")
def compiled_before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a compiler that has compiled the kernels before."""
    return copying_compiler(tmp_path_factory.mktemp("compiler"), building.NATIVE.flags).parent


@pytest.fixture(autouse=True)
def fresh_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compiled_before: Path) -> Iterator[None]:
    """Give each test an empty cache folder, and an installation without kernels of which none are loaded."""
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(compiled_before), prepend=os.pathsep)
    monkeypatch.setattr(building, "FLAGS", (*building.FLAGS, QUICK))
    monkeypatch.setattr(building, "LIBRARIES", tmp_path / "none")
    fresh = compilation.functools.cache(compilation._loaded.__wrapped__)
    monkeypatch.setattr(compilation, "_loaded", fresh)
    yield
    check.unserved_because.cache_clear()


def program(tmp_path: Path, lines: str) -> Path:
    path = tmp_path / "compiler"
    path.write_text(f"#!/bin/sh\n{lines}\n")
    path.chmod(0o700)
    return path


def count_compilations(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    built: list[Path] = []
    real = building.build
    monkeypatch.setattr(
        building, "build", lambda command, path, *to: (built.append(path), real(command, path, *to))[1]
    )
    return built


def start_again() -> Any:
    compilation._loaded.cache_clear()
    return compilation.library()


def kept_library(tmp_path: Path) -> Path:
    [kept] = (tmp_path / "cache" / "kernels").glob(f"*{building.SUFFIX}")
    return kept


@pytest.mark.heavy
def test_the_kernels_are_compiled_once_and_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    built = count_compilations(monkeypatch)
    assert start_again() is not None and start_again() is not None
    assert len(built) == 1
    assert {path.suffix for path in (tmp_path / "cache" / "kernels").iterdir()} == {building.SUFFIX, ".json"}


@pytest.mark.heavy
def test_a_truncated_library_is_compiled_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Loading it would end this process."""
    built = count_compilations(monkeypatch)
    start_again()
    kept = kept_library(tmp_path)
    content = kept.read_bytes()
    kept.unlink()  # the loaded library still maps this file
    kept.write_bytes(content[: len(content) // 2])
    for _ in range(2):
        assert start_again().foredraft_argmax is not None
        assert len(built) == 2
    assert kept_library(tmp_path) == kept


def library_of(tmp_path: Path, source: str) -> Path:
    (tmp_path / "other.c").write_text(source)
    command = [*(building.compiler() or ()), "-shared", "-fPIC", str(tmp_path / "other.c")]
    subprocess.run([*command, "-o", str(tmp_path / "other.so")], check=True)
    return tmp_path / "other.so"


def replace_kept(kept: Path, other: Path) -> None:
    kept.unlink()
    shutil.copy(other, kept)
    replace_document(kept.with_suffix(".json"), hashlib.sha256(kept.read_bytes()).hexdigest())


def test_a_library_that_lacks_functions_is_made_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    built = count_compilations(monkeypatch)
    start_again()
    replace_kept(kept_library(tmp_path), library_of(tmp_path, "int foredraft_argmax(void) { return 0; }\n"))
    assert start_again().foredraft_product_float32 is not None
    assert len(built) == 2


@pytest.mark.parametrize("change", NOT_PRIVATE)
def test_a_library_that_others_could_have_written_is_not_run(
    change: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    user_cache._warn_once.cache_clear()
    start_again()
    kept, ran = kept_library(tmp_path), tmp_path / "ran"
    constructor = f"""#include <fcntl.h>
    __attribute__((constructor)) static void run(void) {{ open("{ran}", O_CREAT, 0600); }}"""
    replace_kept(kept, library_of(tmp_path, constructor))
    built, reason = count_compilations(monkeypatch), NOT_PRIVATE[change](kept, monkeypatch)
    with caplog.at_level("WARNING"):
        assert start_again() is not None
    assert len(built) == 1 and not ran.exists()
    [told] = [record.getMessage() for record in caplog.records]
    assert reason in told


def test_without_a_cache_the_kernels_are_compiled_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("no folder")
    assert compilation.library() is not None


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo one; echo 'x.c: error: no such thing' >&2; exit 1", "x.c: error: no such thing"),
        ("printf '\\377\\n'; printf '\\377 error\\n' >&2; exit 1", "\ufffd error"),
        ("echo a warning >&2; exec sleep 20", "timed out"),
        ("exit 0", "cannot be compiled"),
        (EMPTY_LIBRARY, "has no function foredraft_"),
    ],
)
def test_a_failing_compiler_is_the_reason(
    script: str, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(building, "TIMEOUT", 0.5)
    monkeypatch.setenv("CC", str(program(tmp_path, script)))
    assert compilation.library() is None
    assert reason in (compilation.unavailable_because() or "")


def test_cc_may_hold_arguments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wrapper = program(tmp_path, 'exec "$@"')
    monkeypatch.setenv("CC", f"{wrapper} cc")
    assert compilation.library() is not None


@pytest.mark.parametrize("knows", [True, False])
def test_flags_that_a_compiler_does_not_know_are_left_out(
    knows: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    refuse = "" if knows else 'case "$*" in *-mmove-max*) exit 1;; esac; '
    log = tmp_path / "log"
    monkeypatch.setenv("CC", str(program(tmp_path, f'{refuse}echo "$*" >> {log}; exec cc "$@"')))
    assert compilation.library() is not None
    [compiling] = [line for line in log.read_text().splitlines() if " -c " in line]
    # GCC 12 and later know them, on x86
    asking = ["cc", *building.WHOLE_COPIES, "-E", "-x", "c", "/dev/null"]
    known = subprocess.run(asking, capture_output=True).returncode == 0
    assert ("-mmove-max" in compiling) == (knows and known)


def test_a_missing_cc_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler -m64")
    assert compilation.unavailable_because() == (
        "this installation carries no kernels, and CC is 'no-such-compiler -m64', which is not a program"
    )


@pytest.mark.parametrize("options", [{"kernels": False}, {"compile": True}])
def test_a_model_without_kernels_compiles_none(
    options: dict[str, bool], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def stop_loading(*_: Any, **__: Any) -> None:
        raise ConfigError("loading stopped")

    folder = save_checkpoint(tmp_path / "model", "llama")
    check.unserved_because.cache_clear()
    monkeypatch.setattr(compiled, "check_compiler", lambda device: None)
    monkeypatch.setattr(loading.runners, "make_runner", stop_loading)
    with pytest.raises(ConfigError, match="loading stopped"):
        load(folder, device="cpu", **options)  # type: ignore[arg-type]
    assert not compilation._loaded.cache_info().currsize


def test_a_compiler_that_fails_on_a_full_disk_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The assembler names its file, and the command has dozens of words: the line has the reason alone."""
    full = "Fatal error: can't write 120 bytes to section .text of x.o: 'No space left on device'"
    script = (
        f'case "$*" in *{tmp_path / "cache"}*-c*|*-c*{tmp_path / "cache"}*) echo "/tmp/cc.s: Assembler messages:" >&2;'
        f' echo "{full}" >&2; exit 1;; esac; exec cc "$@"'
    )
    monkeypatch.setenv("CC", str(program(tmp_path, script)))
    assert start_again() is not None  # compiled for this process alone
    [told] = [record.getMessage() for record in caplog.records if "cannot hold them" in record.getMessage()]
    assert told == f"the kernels are compiled at every start: the cache cannot hold them ({full})"
