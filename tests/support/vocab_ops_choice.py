"""Run a test by the PyTorch vocabulary operations, or by the kernels, whichever an engine was given."""

from __future__ import annotations

from typing import Any

import pytest

from foredraft.decode.vocab_ops import TORCH_VOCAB_OPS, TorchVocabOps, VocabOps
from foredraft.kernels import library
from foredraft.kernels.vocab import KernelVocabOps

METHODS = [name for name in vars(TorchVocabOps) if not name.startswith("_")]
PRESENT: VocabOps = (
    TORCH_VOCAB_OPS if library() is None else KernelVocabOps()
)  # the kernels where there is a compiler


def by_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute by PyTorch, where the planted defects are, except those of the kernels."""
    for name in METHODS:
        monkeypatch.setattr(KernelVocabOps, name, getattr(TorchVocabOps, name))


def by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = KernelVocabOps()

    def stand_in(name: str) -> Any:
        run = getattr(kernels, name)
        return lambda self, *given: run(*given)

    for name in METHODS:
        monkeypatch.setattr(TorchVocabOps, name, stand_in(name))
