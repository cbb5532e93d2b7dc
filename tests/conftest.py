"""Conditions of every test: no network, a cache apart from the user's, repeatable examples, GPU tests only where
there is a GPU."""

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


def pytest_configure(config: pytest.Config) -> None:
    from hypothesis import settings

    settings.register_profile("repeatable", derandomize=True, deadline=None)
    settings.load_profile("repeatable")


def pytest_collection_finish() -> None:
    """Leave modules and collected tests out of garbage collection: `LLM.close` and `verify` collect often."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    wanting = [item for item in items if item.get_closest_marker("gpu")]
    if not wanting:
        return
    import torch

    if not torch.cuda.is_available():
        for item in wanting:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
