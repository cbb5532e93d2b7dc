"""Commands that measure say at once what they do, on a terminal and elsewhere."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from foredraft.cli import main
from foredraft.cli.progress import STAGES, ProgressBars
from foredraft.kernels import building, compilation
from tests.support.command import without_progress


@pytest.mark.parametrize("command", [["bench"], ["tune"], ["verify"]])
def test_the_first_line_comes_before_pytorch_is_imported(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    heavy = {
        "bench": "foredraft.bench.bench_run",
        "tune": "foredraft.tune.run",
        "verify": "foredraft.loading",
    }
    monkeypatch.setitem(sys.modules, heavy[command[0]], None)  # its import fails
    with pytest.raises(ImportError):
        main(command)
    assert capsys.readouterr().err == "foredraft: Importing PyTorch\n"


def test_the_first_bar_makes_way_for_the_next_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    bars = ProgressBars()
    bars.show("start", 0, 1)
    assert list(bars._tasks) == ["start"]
    bars.show("load", 0, 2)
    assert list(bars._tasks) == ["load"]
    bars.clear()


def test_compiling_the_kernels_is_a_stage_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    from foredraft import load

    if building.compiler() is None:
        pytest.skip("no C compiler")
    stages: list[tuple[str, int, int]] = []
    options: dict[str, Any] = {"max_batch": 1, "max_length": 64, "device": "cpu", "drafter": "none"}
    monkeypatch.setattr("foredraft.loading.runners.must_compile", lambda: True)
    load(progress=lambda *stage: stages.append(stage), **options)
    assert stages[:2] == [("kernels", 0, 1), ("kernels", 1, 1)]
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path))
    assert not compilation.must_compile(), "this process has loaded them"
    compilation._library_or_reason.cache_clear()
    assert compilation.must_compile(), "an empty cache folder has none"
    monkeypatch.undo()
    compilation.library()
    assert set(STAGES) >= {"kernels", "start", "profile", "load"}
    assert without_progress("foredraft: Loading the models\nforedraft: error: x") == ["foredraft: error: x"]
