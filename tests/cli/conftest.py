from __future__ import annotations

from pathlib import Path

import pytest

from checkpoints import save_checkpoint


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two tiny random checkpoints, `big` and `small`, of one tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    save_checkpoint(folder / "big", tokenizer=True, seed=1, eos_token_id=None)
    save_checkpoint(folder / "small", tokenizer=True, seed=2, eos_token_id=None, num_hidden_layers=1)
    save_checkpoint(folder / "mute", seed=1)
    return folder
