"""Conditions of every test: no network, a cache apart from the user's, repeatable examples, GPU tests only where
there is a GPU, and of a test with many cases a few, spread over its table, unless `--cases` asks for more."""

from __future__ import annotations

import gc
import getpass
import os
import tempfile

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
# the user's own is left alone; what is compiled once serves all workers and runs
os.environ["FOREDRAFT_CACHE"] = os.path.join(tempfile.gettempdir(), f"foredraft-tests-{getpass.getuser()}")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the workers share the cores


FEW, MORE = 3, 12  # cases of one test


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cases", choices=("few", "more", "others", "all"), default="few",
        help=f"of each test with more than {FEW} cases: {FEW} of them, more up to {MORE}, all others, or all",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    from hypothesis import settings

    settings.register_profile("repeatable", derandomize=True, deadline=None)
    settings.load_profile("repeatable")


def pytest_collection_finish() -> None:
    """Leave modules and collected tests out of garbage collection: `LLM.close` and `verify` collect often."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)  # of the tests that -k and -m leave
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _skip_without_gpu(items)
    asked = config.getoption("--cases")
    if asked == "all":
        return
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    few = {item for each in cases.values() for item in _spread(each, FEW)}
    more = {item for each in cases.values() for item in _spread(each, MORE)}
    chosen = {"few": few, "more": more - few, "others": {*items} - few}[asked]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def _spread(cases: list[pytest.Item], count: int) -> list[pytest.Item]:
    """Return the cases of a test that stand for it: the first one, the last one, and some between."""
    if len(cases) <= count:
        return cases
    return [cases[place * (len(cases) - 1) // (count - 1)] for place in range(count)]


def _skip_without_gpu(items: list[pytest.Item]) -> None:
    wanting = [item for item in items if item.get_closest_marker("gpu")]
    if not wanting:
        return
    import torch

    if not torch.cuda.is_available():
        for item in wanting:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
