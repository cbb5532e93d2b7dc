"""The README's example with a real model runs unchanged; its package is installed already."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from foredraft.cli import main
from tests.support.running import ROOT

EXAMPLE = re.search(
    r"<!-- a real model -->\n\n```text\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL
)


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_the_example_runs(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert EXAMPLE is not None
    lines = [line for line in EXAMPLE[1].splitlines() if line.startswith("foredraft ")]
    assert len(lines) == 3
    for line in lines:
        _, *words = shlex.split(line)
        assert main([word.replace("$MODEL", str(smollm2)) for word in words]) == 0, line
        assert capsys.readouterr().out
