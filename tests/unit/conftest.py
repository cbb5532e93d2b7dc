"""A target and texts for tests of training."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.training import random_words, save_target


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "data.txt"
    file.write_text(random_words(3000))
    return file
