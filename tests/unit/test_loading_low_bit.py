"""A target gets a copy in few bits for drafter "auto", if it is large and memory is ample.

Seen to fail on: each condition left out, no copy beside a draft model or a plan, and a copy that was not told of.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

import foredraft
from foredraft import SamplingParams
from foredraft.kernels.compilation import library
from foredraft.loading import low_bit
from tests.support.checkpoints import save_checkpoint

pytestmark = pytest.mark.skipif(library() is None, reason="no kernels")
SIZES = {"hidden_size": 64, "intermediate_size": 96, "eos_token_id": None}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    target = save_checkpoint(folder / "big", tokenizer=True, **SIZES)
    return target, save_checkpoint(folder / "small", tokenizer=True, num_hidden_layers=1, **SIZES)


def drafters(model: Path, **options: Any) -> list[str]:
    with foredraft.load(model, device="cpu", max_batch=1, max_length=128, **options) as llm:
        return [*llm._engine.drafters]


def test_auto_drafts_with_a_copy_of_a_large_target(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target, _ = folders
    assert "low-bit" not in drafters(target), "it is small"
    assert not caplog.records
    monkeypatch.setattr(low_bit, "LEAST", 1)
    with caplog.at_level(logging.WARNING), foredraft.load(target, device="cpu", max_length=128) as llm:
        assert "low-bit" in llm._engine.drafters
        params = SamplingParams(temperature=0, max_new_tokens=24)
        [text] = llm.generate("a b", params, drafter="low-bit", policy="fixed")
        [plain] = llm.generate("a b", params, drafter="none")
    assert text.stats.drafted and text.token_ids == plain.token_ids
    [record] = caplog.records
    assert "drafter low-bit is at hand, too: a copy of the model in 4 bits, 0.00" in record.getMessage()


def test_no_copy_is_made_where_it_is_not_wanted(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = folders
    monkeypatch.setattr(low_bit, "LEAST", 1)
    for options in ({}, {"draft": draft}, {"plan": "exit:1"}):  # whatever else is at hand
        assert "low-bit" in drafters(target, **options), options
    for options in (
        {"drafter": "lookup"},
        {"policy": "fixed"},
        {"weights": "int8"},
        {"kernels": False},
    ):
        assert "low-bit" not in drafters(target, **options), options


def test_no_copy_is_made_where_memory_is_scarce(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, _ = folders
    monkeypatch.setattr(low_bit, "LEAST", 1)
    monkeypatch.setattr(low_bit, "free_memory", lambda device: 600_000)
    assert "low-bit" not in drafters(target)
