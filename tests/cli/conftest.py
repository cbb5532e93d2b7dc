from __future__ import annotations

from pathlib import Path

import pytest

from checkpoints import save_checkpoint, save_pair


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two tiny random checkpoints, `big` and `small`, of one tokenizer."""
    folder = save_pair(tmp_path_factory.mktemp("models"))
    save_checkpoint(folder / "mute", seed=1)
    return folder
