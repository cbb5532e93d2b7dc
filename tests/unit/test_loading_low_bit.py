"""A target gets a copy in few bits for drafter "auto", if it is large and memory is ample."""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import foredraft
from foredraft import SamplingParams
from foredraft.drafters import assets as low_bit
from foredraft.drafters.assets import OFFER
from foredraft.kernels.compilation import library
from foredraft.loading import checkpoints
from foredraft.loading.inspection import inspect_models
from tests.support.checkpoints import save_checkpoint
from tests.support.loaded import engine_of

pytestmark = pytest.mark.skipif(library() is None, reason="no kernels")
SIZES = {"hidden_size": 64, "intermediate_size": 96, "eos_token_id": None}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    target = save_checkpoint(folder / "big", tokenizer=True, **SIZES)
    return target, save_checkpoint(folder / "small", tokenizer=True, num_hidden_layers=1, **SIZES)


def drafters(model: Path, **options: Any) -> list[str]:
    with foredraft.load(model, device="cpu", max_batch=1, max_length=128, **options) as llm:
        return [*engine_of(llm).drafters]


def test_auto_drafts_with_a_copy_of_a_large_target(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target, _ = folders
    assert "low-bit" not in drafters(target), "it is small"
    assert not any("low-bit" in record.getMessage() for record in caplog.records)
    monkeypatch.setattr(low_bit, "LEAST", 1)
    with caplog.at_level(logging.WARNING), foredraft.load(target, device="cpu", max_length=128) as llm:
        assert "low-bit" in engine_of(llm).drafters
        params = SamplingParams(temperature=0, max_new_tokens=24)
        [text] = llm.generate("a b", params, drafter="low-bit", policy="fixed")
        [plain] = llm.generate("a b", params, drafter="none")
    assert text.stats.drafted and text.token_ids == plain.token_ids
    [record] = [record for record in caplog.records if "low-bit" in record.getMessage()]
    assert record.getMessage().startswith("drafter low-bit is at hand, too, with a copy of 0.00")
    assert record.getMessage().endswith(f": {OFFER}")


@pytest.mark.heavy
def test_a_model_is_told_of_once(
    folders: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    target, _ = folders
    monkeypatch.setattr(low_bit, "LEAST", 1)
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    other = shutil.copytree(target, tmp_path / "other")

    def told(model: Path, **options: Any) -> int:
        caplog.clear()
        assert "low-bit" in drafters(model, **options)
        return sum(OFFER in record.getMessage() for record in caplog.records)

    assert [told(model) for model in (target, target, other, target, other)] == [1, 0, 1, 0, 0]
    assert told(tmp_path / "cache" / ".." / "other") == 0, "another spelling of its path"
    monkeypatch.setenv("FOREDRAFT_CACHE", "")  # off: nothing remembers it
    assert [told(target), told(target)] == [1, 1]
    assert told(target, draft_weights="int4") == 0, "the user asked for it"


def test_info_says_what_load_makes(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target, draft = folders

    def row(**options: Any) -> tuple[bool, str | None]:
        found = inspect_models(target, device="cpu", **options)
        [drafter] = [each for each in found.drafters if each.name == "low-bit"]
        assert drafter.at_hand == ("low-bit" in drafters(target, **options))
        return drafter.at_hand, drafter.note

    without = f"low-bit has no copy of this model: {OFFER}; give draft_weights='int4'"
    assert row() == (False, without), "it is small"
    monkeypatch.setattr(low_bit, "LEAST", 1)
    caplog.clear()
    inspect_models(target, device="cpu")
    assert not caplog.records, "the note says it"
    at_hand, note = row()
    assert at_hand and note is not None and re.fullmatch(rf"a copy of 0\.00\d+ GiB: {re.escape(OFFER)}", note)
    assert row(draft=draft)[0], "beside a draft model, too"
    context = inspect_models(target, device="cpu").context
    monkeypatch.setattr(low_bit, "unserved_because", lambda *given: "there are none")
    why = "a copy needs Foredraft's kernels: there are none"
    assert row() == (False, f"low-bit has no copy of this model: {why}")
    assert context.longest == inspect_models(target, device="cpu").context.longest


def test_no_copy_is_made_if_unwanted(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = folders
    monkeypatch.setattr(low_bit, "LEAST", 1)
    for options in ({}, {"draft": draft}, {"plan": "exit:1"}):  # whatever else is at hand
        assert "low-bit" in drafters(target, **options), options
    for options in ({"drafter": "lookup"}, {"policy": "fixed"}, {"weights": "int8"}, {"kernels": False}):
        assert "low-bit" not in drafters(target, **options), options


def test_no_copy_is_made_in_little_room(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    target, _ = folders
    monkeypatch.setattr(low_bit, "LEAST", 1)
    monkeypatch.setattr(checkpoints, "free_memory", lambda device: 600_000)
    assert "low-bit" not in drafters(target)
