"""The doctor on block drafters: a planted mismatch is found, and nothing is found where there is none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import foredraft
from foredraft.doctor import Diagnosis, diagnose, examination
from foredraft.doctor.block_forced import block_drafts
from foredraft.doctor.teacher_forced import ReadText, read_text
from foredraft.drafters.heads.block_files import read_block
from foredraft.drafters.heads.block_head import load_block
from foredraft.drafters.heads.settings import SETTINGS, HeadSettings, write_settings
from foredraft.loading.inspection import inspect_models
from tests.parity.test_heads import KEYS, V
from tests.support.blocks import BLOCK, SPELLINGS, save_block
from tests.support.checkpoints import reference_model
from tests.support.loaded import engine_of
from tests.support.planting import assert_caught, defect
from tests.unit.test_doctor import settings_ignored, texts

LENGTH = BLOCK - 1  # tokens of a draft, from the anchor or not
# true setting -> spelling of the head whose files say otherwise
PLANTED: dict[str, tuple[HeadSettings, str]] = {
    "slots from the anchor": (HeadSettings(from_anchor=True), "z-lab"),
    "slots after the anchor": (HeadSettings(from_anchor=False), "deepspec"),
    "causal slots": (HeadSettings(causal=True), "gated"),
    "nothing": (HeadSettings(), "speculators"),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    reference_model(**KEYS).save_pretrained(folder)
    return folder


def examined(target: Path, head: Path, true: HeadSettings) -> Diagnosis:
    """Examine a head whose true setting is given."""
    llm = foredraft.load(
        target, draft=head, policy="fixed", dtype="float32", device="cpu", max_batch=1, max_length=64
    )
    runner, spec, files = llm.loaded.runner, llm.loaded.spec, read_block(head)
    record = true.applied(files.record.for_target(spec, "the head"), spec)
    right = load_block(replace(files, record=record), runner)

    def as_the_head_says(runner: Any, tokens: list[int], taps: Any) -> ReadText:
        text = read_text(runner, tokens, taps)
        logits = text.logits.clone()
        for anchor, own in block_drafts(right, text, LENGTH, examination.MOST).items():
            logits[anchor : anchor + LENGTH] = own
        return ReadText(text.tokens, logits, text.states)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(examination, "read_text", as_the_head_says)
        patch.setattr(examination, "MOST", 10)
        return diagnose(llm.loaded, head, texts())


def check_found(target: Path, folder: Path, name: str) -> None:
    true, spelling = PLANTED[name]
    head = save_block(folder, spelling, V)
    found = examined(target, head, true)
    assert found.drafter == SPELLINGS[spelling]["of"]
    assert found.best.settings == true.given, found.best
    assert found.best.sampled == pytest.approx((1.0,) * LENGTH, abs=1e-3)
    assert found.improved == bool(true.given) == (head / SETTINGS).exists()


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_mismatch_is_found_and_written_down(target: Path, tmp_path: Path, name: str) -> None:
    check_found(target, tmp_path / "head", name)


def test_ignored_settings_are_caught(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = defect(
        "ignored", HeadSettings.applied, settings_ignored,
        lambda: check_found(target, tmp_path / "head", "slots from the anchor"),
    )  # fmt: skip
    assert_caught(planted, monkeypatch)


def test_loading_honours_a_setting_and_says_so(target: Path, tmp_path: Path) -> None:
    head = save_block(tmp_path / "head", "z-lab", V)
    write_settings(head, HeadSettings(tap_shift=-1, from_anchor=True, window=32))
    llm = foredraft.load(target, draft=head, drafter="dflash", device="cpu", policy="fixed", max_length=64)
    drafter: Any = engine_of(llm).drafters["dflash"]
    assert drafter.taps == (0, 2, 5) and drafter.max_draft == 4
    assert drafter.head.record.spec.windows == (32, 32) and not drafter.head.record.causal_windows
    [note] = [
        each.note
        for each in inspect_models(target, draft=head, device="cpu").drafters
        if each.name == "dflash"
    ]
    assert "blocks of 4" in str(note) and "set tap_shift = -1, window = 32, from_anchor = true" in str(note)
    write_settings(head, HeadSettings(norm_output=True))
    with pytest.raises(foredraft.CheckpointError, match="norm_output = true is not possible with this head"):
        foredraft.load(target, draft=head, device="cpu")
