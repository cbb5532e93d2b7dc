"""Commands that measure say at once what they do; threads of PyTorch's operators sleep soon where they wait."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from foredraft import load
from foredraft.cli import SPINS, main
from foredraft.cli.render import ProgressBars
from foredraft.kernels import building, compilation
from tests.support.running import environment


@pytest.mark.parametrize(
    ("command", "heavy"), [("bench", "bench.bench_run"), ("tune", "tune.run"), ("verify", "loading")]
)
def test_the_first_line_comes_before_pytorch_is_imported(
    command: str, heavy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, f"foredraft.{heavy}", None)  # its import fails
    with pytest.raises(ImportError):
        main([command])
    assert capsys.readouterr().err == "foredraft: Importing PyTorch\n"


def test_the_first_bar_makes_way_for_the_next_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    bars = ProgressBars()
    bars.show("start", 0, 1)
    assert list(bars._tasks) == ["start"]
    bars.show("load", 0, 2)
    assert list(bars._tasks) == ["load"]
    bars.clear()


@pytest.mark.skipif(building.compiler() is None, reason="no C compiler")
def test_compiling_the_kernels_is_a_stage_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stages: list[tuple[str, int, int]] = []
    monkeypatch.setattr("foredraft.loading.runners.must_compile", lambda: True)
    load(progress=lambda *at: stages.append(at), max_batch=1, max_length=64, device="cpu", drafter="none")
    assert stages[:2] == [("kernels", 0, 1), ("kernels", 1, 1)]
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path))
    assert not compilation.must_compile(), "this process has loaded them"
    compilation._loaded.cache_clear()
    assert compilation.must_compile(), "an empty cache folder has none"
    monkeypatch.undo()
    compilation.library()


# --- threads that wait ----------------------------------------------------------------------------


PROGRAM = (
    "import os, sys; from foredraft.cli import main; code = main(); "
    "print(code, os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"
)


@pytest.mark.parametrize(
    ("given", "spins"),
    [({}, SPINS), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
    ids=["by default", "as a user says", "a policy of the user's"],
)
def test_the_command_line_bounds_how_long_operators_spin(given: dict[str, str], spins: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, "--version"],
        env=environment(**given),
        capture_output=True,
        encoding="utf-8",
        timeout=60,
    )
    assert run.stdout.splitlines()[-1] == f"0 {spins} False", run.stderr
