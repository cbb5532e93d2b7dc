"""The pytest plugin: `python -m pytest -p tests.rehearsal.plugin` runs with a pretended GPU, or `--gpus 2` of them.

It has to be named on the command line, because PyTorch must not be loaded before the guard.
"""

from __future__ import annotations

import pytest

from tests.rehearsal.guard import GUARD  # before torch

# isort: split
from tests.rehearsal.graphs import Graph
from tests.rehearsal.ledger import LEDGER
from tests.rehearsal.pretending import pretend

assert GUARD is not None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpus", type=int, default=1, help="pretended GPUs, at most 8")


def pytest_configure(config: pytest.Config) -> None:
    pretend(config.getoption("--gpus"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip cases that compile: torch.compile runs no function on tensors that pretend."""
    for item in items:
        callspec = getattr(item, "callspec", None)
        if callspec is not None and callspec.params.get("compile"):
            item.add_marker(pytest.mark.skip(reason="torch.compile takes no pretended tensors"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"pretended GPU: {Graph.made} graphs, {Graph.replays} replays")
    if terminalreporter.config.get_verbosity() > 0:
        terminalreporter.write_line(LEDGER.report())
