"""Fixtures of the real models; what is made of them is shared by the processes of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import real_models


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.real)


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """Return the folder of the files that tests make of the models."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "real"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return real_models.smollm2()


@pytest.fixture(scope="session")
def gemma(made: Path) -> Path:
    return real_models.gemma(made)
