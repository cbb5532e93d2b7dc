from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from foredraft import LLM
from tests.support.checkpoints import save_checkpoint, save_pair


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tiny random checkpoints: `big` and `small` share a tokenizer, `mute` has none."""
    folder = save_pair(tmp_path_factory.mktemp("models"))
    save_checkpoint(folder / "mute", seed=1)
    return folder


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[LLM]:
    """Every `LLM` that a command loads, in order."""
    made: list[LLM] = []
    init = LLM.__init__

    def recorded(self: LLM, *arguments: Any, **options: Any) -> None:
        made.append(self)
        init(self, *arguments, **options)

    monkeypatch.setattr(LLM, "__init__", recorded)
    return made
