"""The doctor: a planted mismatch of each kind is found, and nothing is found where there is none.

The target's distributions are replaced by those of the head as it is under the true setting: there its drafts are
always accepted, and the files that the doctor reads say something else.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import foredraft
from foredraft.cli import main
from foredraft.doctor import Diagnosis, diagnose, examination, teacher_forced
from foredraft.doctor.examination import changes
from foredraft.doctor.teacher_forced import (
    DraftAcceptance,
    ReadText,
    block_drafts,
    head_drafts,
    p_eagle_drafts,
    read_text,
)
from foredraft.drafters.block_drafter import BlockDrafter, load_block
from foredraft.drafters.eagle3 import Eagle3, Eagle3Head, load_eagle3
from foredraft.drafters.heads import settings as head_asset
from foredraft.drafters.heads.block_configs import read_block
from foredraft.drafters.heads.configs import read_eagle3
from foredraft.drafters.heads.settings import SETTINGS, HeadSettings, read_settings, write_settings
from foredraft.drafters.p_eagle import PEagle, load_p_eagle
from foredraft.loading.inspection import inspect_models
from tests.parity.test_heads import KEYS, V
from tests.support.checkpoints import reference_model, save_checkpoint
from tests.support.head_logits import defined_medusa
from tests.support.heads import BLOCK, FORMATS, save_head
from tests.support.loaded import engine_of
from tests.support.mutation import Mutation, assert_caught, defect
from tests.support.mutations import argument
from tests.support.panics import raising

LONG = 150
BLOCK_OF = "block "  # begins the format of a block
SLOTS = BLOCK - 1  # tokens of a draft of a block, from the anchor or not
LOAD: dict[str, Any] = {"policy": "fixed", "device": "cpu", "max_batch": 1, "max_length": 64}
# true setting -> format of the head whose files say otherwise
PLANTED: dict[str, tuple[HeadSettings, str]] = {
    "a layer late": (HeadSettings(tap_shift=1), "specforge"),
    "a layer early": (HeadSettings(tap_shift=-1), "speculators"),
    "rotary base": (HeadSettings(rope_theta=10_000.0), "far"),
    "residual": (HeadSettings(norm_before_residual=True), "safeailab"),
    "raw residual": (HeadSettings(norm_before_residual=False), "residual"),
    "recurrence": (HeadSettings(norm_output=True), "safeailab"),
    "raw recurrence": (HeadSettings(norm_output=False), "qwen3"),
    "the target's head": (HeadSettings(own_head=False), "safeailab"),
    "the target's embedding": (HeadSettings(own_embedding=False), "speculators"),
    "window": (HeadSettings(window=32), "short"),
    "before the final norm": (HeadSettings(final_norm=False), "eagle-1"),
    "two at once": (HeadSettings(tap_shift=1, norm_before_residual=True), "specforge"),
    "residual of masked pairs": (HeadSettings(norm_before_residual=True), "p-eagle amazon"),
    "masked pairs a layer late": (HeadSettings(tap_shift=1), "p-eagle specforge"),
    "slots from the anchor": (HeadSettings(from_anchor=True), "block z-lab"),
    "slots after the anchor": (HeadSettings(from_anchor=False), "block deepspec"),
    "causal slots": (HeadSettings(causal=True), "block gated"),
    "nothing of a block": (HeadSettings(), "block speculators"),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    reference_model(**KEYS).save_pretrained(folder / "llama")
    return folder


def save(folder: Path, format: str) -> Path:
    if format.startswith(BLOCK_OF):
        return save_head(folder, format, V)
    config = {"far": {"rope_theta": 100.0}, "short": {"max_position_embeddings": 32}}.get(format)
    format = format if config is None else "safeailab"
    return save_head(folder, format, V, config=config or {})


def texts() -> list[list[int]]:
    random = torch.Generator().manual_seed(3)
    return [torch.randint(0, V, (LONG,), generator=random).tolist() for _ in range(2)]


def examined(place: Path, head: Path, true: HeadSettings) -> Diagnosis:
    llm = foredraft.load(place / "llama", draft=head, dtype="float32", **LOAD)
    runner, spec = llm.loaded.runner, llm.loaded.spec
    [drafter] = [each for each in engine_of(llm).drafters.values() if isinstance(each, Eagle3 | BlockDrafter)]
    blocks = isinstance(drafter, BlockDrafter)
    masked = isinstance(drafter, PEagle)
    files: Any = read_block(head) if blocks else drafter.read_files(head)
    record = true.applied(files.record.for_target(spec, "the head"), spec)
    loader: Any = load_block if blocks else load_p_eagle if masked else load_eagle3
    right: Any = loader(replace(files, record=record), runner)
    drafts: Any = p_eagle_drafts if masked else head_drafts
    length, most = examination.LENGTH, examination.MOST
    if blocks:
        drafts, length, most = block_drafts, SLOTS, 10

    def as_the_head_says(runner: Any, tokens: list[int], layers: Any) -> ReadText:
        text = read_text(runner, tokens, layers)
        logits = text.logits.clone()
        for anchor, drafted in drafts(right, text, length, most).items():
            logits[anchor : anchor + length] = drafted
        return ReadText(text.tokens, logits, text.states)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(examination, "read_text", as_the_head_says)
        patch.setattr(examination, "MOST", most)
        return diagnose(llm.loaded, head, texts())


def check_found(place: Path, folder: Path, name: str) -> None:
    true, format = PLANTED[name]
    head = save(folder, format)
    found = examined(place, head, true)
    assert found.best.settings == true.given, found.best
    assert found.improved == bool(true.given) == (head / SETTINGS).exists()
    assert found.best.sampled == pytest.approx((1.0,) * len(found.best.sampled), abs=1e-3)
    if format.startswith(BLOCK_OF):
        assert found.drafter == FORMATS[format]["of"]
        assert len(found.best.sampled) == SLOTS
        return
    assert found.best.tau > found.own.tau + 0.1
    assert found.best.greedy == pytest.approx((1.0,) * examination.LENGTH)
    assert found.written == str(head / SETTINGS)
    assert read_settings(head) == true


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_mismatch_is_found_and_written_down(place: Path, tmp_path: Path, name: str) -> None:
    check_found(place, tmp_path / "head", name)


def test_a_head_that_is_read_right_is_as_good_as_it_gets(place: Path, tmp_path: Path) -> None:
    head = save(tmp_path / "head", "safeailab")
    write_settings(head, HeadSettings(tap_shift=1))  # of an earlier examination
    found = examined(place, head, HeadSettings())
    assert not found.improved and found.best is found.own and found.written is None
    assert found.own.sampled == pytest.approx((1.0,) * examination.LENGTH, abs=1e-3)
    assert not (head / SETTINGS).exists()


OF_MTP = {"states_first", "folded_norms"}  # planted in tests/parity/test_mtp.py


def test_every_kind_of_setting_is_planted(place: Path, tmp_path: Path) -> None:
    planted = {name for settings, _ in PLANTED.values() for name in settings.given}
    assert planted | OF_MTP == set(HeadSettings.__dataclass_fields__)
    head = read_eagle3(save(tmp_path / "head", "speculators"))
    llm = foredraft.load(place / "llama", device="cpu", max_length=64, max_batch=1)
    record = head.record.for_target(llm.loaded.spec, "the head")
    tried = [name for each in changes(record, llm.loaded.spec, LONG) for name in each.given]
    assert {"tap_shift", "norm_before_residual", "norm_output", "own_head", "own_embedding"} <= {*tried}


EAGLE = HeadSettings(tap_shift=-1, rope_theta=500.0)
ANCHORED = HeadSettings(tap_shift=-1, from_anchor=True, window=32)
HONOURED = [  # format, settings, drafter, its layers, and what `foredraft info` says
    ("specforge", HeadSettings(), "eagle3", (2, 3, 5), ""),
    ("specforge", EAGLE, "eagle3", (1, 2, 4), "`foredraft doctor` set tap_shift = -1, rope_theta = 500.0"),
    ("block z-lab", ANCHORED, "dflash", (0, 2, 5), "set tap_shift = -1, window = 32, from_anchor = true"),
]


@pytest.mark.parametrize(("format", "settings", "drafter", "layers", "told"), HONOURED)
def test_loading_honours_a_setting_and_says_so(
    place: Path, tmp_path: Path, format: str, settings: HeadSettings, drafter: str, layers: Any, told: str
) -> None:
    head = save(tmp_path / "head", format)
    write_settings(head, settings)
    llm = foredraft.load(place / "llama", draft=head, drafter=drafter, **LOAD)
    found: Any = engine_of(llm).drafters[drafter]
    record = found.head.record
    assert found.aux_layers == layers and record.spec.rope.theta == settings.given.get("rope_theta", 10_000.0)
    if settings.window:
        assert found.max_draft == 4 and record.spec.windows == (32, 32) and not record.causal_windows
    seen = inspect_models(place / "llama", draft=head, device="cpu").drafters
    [note] = [str(each.note) for each in seen if each.name == drafter]
    assert told in note


@pytest.mark.parametrize(
    ("format", "content", "message"),
    [
        ("safeailab", '{"tap_shift": 9}', "out of the target"),
        ("safeailab", '{"mystery": 1}', "mystery = 1 is no setting of a head"),
        ("safeailab", '{"norm_output": 1}', "norm_output = 1 is no setting of a head"),
        ("safeailab", '{"own_embedding": true}', "own_embedding = true is not possible"),
        ("block z-lab", '{"norm_output": true}', "norm_output = true is not possible with this head"),
        ("safeailab", "[", "not readable JSON"),
    ],
)
def test_a_broken_setting_is_refused(
    place: Path, tmp_path: Path, format: str, content: str, message: str
) -> None:
    head = save(tmp_path / "head", format)
    (head / SETTINGS).write_text(content)
    with pytest.raises(foredraft.CheckpointError, match=message):
        foredraft.load(place / "llama", draft=head, device="cpu")


def test_a_setting_is_kept_elsewhere_for_a_head_that_cannot_be_written_to(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    head, other = save(tmp_path / "head", "specforge"), save(tmp_path / "other", "specforge")
    wanted = HeadSettings(tap_shift=-1)
    with monkeypatch.context() as patch:
        patch.setattr(head_asset, "replacing", raising(PermissionError(13, "Permission denied")))
        kept = write_settings(head, wanted)
        assert kept.is_relative_to(tmp_path / "cache") and not (head / SETTINGS).exists()
        patch.setenv("FOREDRAFT_CACHE", "")
        with pytest.raises(PermissionError):
            write_settings(head, wanted)
    assert read_settings(head) == wanted and read_settings(other) == HeadSettings()
    llm = foredraft.load(place / "llama", draft=head, **LOAD)
    assert engine_of(llm).drafters["eagle3"].aux_layers == (1, 2, 4)
    (head / "config.json").write_text((head / "config.json").read_text() + " ")  # another head
    assert read_settings(head) == HeadSettings()


def test_medusa_heads_are_measured_as_they_draft(place: Path, tmp_path: Path) -> None:
    heads, target = save_head(tmp_path / "heads", "fasterdecoding", V), reference_model(**KEYS)
    llm = foredraft.load(place / "llama", draft=heads, dtype="float32", **LOAD)
    found, [text, _] = diagnose(llm.loaded, heads, texts()[:1]), texts()
    read = read_text(llm.loaded.runner, text, ())
    want = []
    for anchor in read.anchors(examination.LENGTH, examination.MOST):
        given, drafted = text[: anchor + 1], text[anchor + 1 : anchor + 4]
        q = defined_medusa(heads, target, given, drafted).softmax(-1)
        p = read.logits[anchor : anchor + 4].double().softmax(-1)
        want.append(torch.minimum(p, q).sum(-1))
    first = torch.stack(want)[:, 0].mean()
    assert found.drafter == "medusa" and found.drafts == len(want) and not found.trials
    assert found.own.sampled[0] == pytest.approx(float(first), abs=1e-3)
    assert found.own.tau == pytest.approx(float((1 + torch.stack(want).cumprod(1).sum(1)).mean()), abs=1e-3)


# --- draft models ---------------------------------------------------------------------------------------------


def saved(folder: Path, template: str | None, **keys: Any) -> Path:
    save_checkpoint(folder, tokenizer=True, **keys)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


TEMPLATE, OTHER = "{% for m in messages %}<{{ m.content }}>{% endfor %}", "{{ messages[0].content }}"


@pytest.mark.parametrize(
    ("target", "draft", "keys", "notes"),
    [
        (TEMPLATE, TEMPLATE, {}, []),
        (TEMPLATE, None, {}, ["a base model drafts for a tuned target"]),
        (TEMPLATE, OTHER, {}, ["the chat templates of target and draft model differ"]),
        (
            None,
            None,
            {"max_position_embeddings": 128},
            ["was made for 128 positions and the target for 2,048"],
        ),
    ],
    ids=["none", "base", "template", "context"],
)
def test_mismatches_of_a_draft_model(
    tmp_path: Path, target: str | None, draft: str | None, keys: dict[str, Any], notes: list[str]
) -> None:
    big, small = saved(tmp_path / "big", target), saved(tmp_path / "small", draft, seed=1, **keys)
    found = diagnose(foredraft.load(big, draft=small, **LOAD).loaded, small)
    assert found.drafter == "draft-model" and not found.improved
    assert all(wanted in note for note, wanted in zip(found.notes, notes, strict=True))


def test_the_target_as_its_own_draft_model_is_always_accepted(tmp_path: Path) -> None:
    big = saved(tmp_path, None)
    found = diagnose(foredraft.load(big, draft=big, **LOAD).loaded, big)
    assert found.own.greedy == (1.0,) * examination.LENGTH
    assert found.own.sampled == pytest.approx((1.0,) * examination.LENGTH, abs=1e-4)


# --- the command ----------------------------------------------------------------------------------------------


def test_the_command_shows_a_diagnosis(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    big = save_checkpoint(tmp_path / "big", tokenizer=True, num_hidden_layers=7)
    vocabulary = json.loads((big / "config.json").read_text())["vocab_size"]
    head = save_head(tmp_path / "head", "safeailab", vocabulary)
    command = ["doctor", "--model", str(big), "--draft", str(head), "--device", "cpu"]
    assert main([*command, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "accepted at temperature 1" in printed and "tap_shift = 1" in printed
    assert main([*command, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["drafter"] == "eagle3" and len(document["own"]["sampled"]) == examination.LENGTH
    assert main(["doctor", "--model", str(big)]) == 2
    assert (
        "mtp needs a head that predicts further tokens (MTP) of this model; give --draft"
        in capsys.readouterr().err
    )


# --- planted defects ------------------------------------------------------------------------------------------


def states_not_normed(joined: Callable[..., Any]) -> Callable[..., Any]:
    return lambda head, states: states if head.record.pair_fc else joined(head, states)


def first_token_alone(_: Callable[..., Any]) -> Callable[..., Any]:
    return lambda accepted: 1 + accepted.sampled[:, 0]  # which no recurrence touches


NO_SETTINGS = argument(0, lambda _: HeadSettings())
DEFECTS: dict[str, tuple[Any, Mutation, str]] = {
    "positions late": (teacher_forced._accepted, argument(0, lambda target: target.roll(1, 0)), "residual"),
    "states not normed": (Eagle3Head.joined, states_not_normed, "before the final norm"),
    "settings ignored": (HeadSettings.applied, NO_SETTINGS, "a layer late"),
    "the first is best": (examination._is_better, lambda better: lambda one, other: False, "a layer late"),
    "rounds of the first token": (DraftAcceptance.rounds, first_token_alone, "recurrence"),
    "settings of a block ignored": (HeadSettings.applied, NO_SETTINGS, "slots from the anchor"),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_planted_defects_die(name: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    point, mutation, case = DEFECTS[name]
    check = partial(check_found, place, tmp_path / "head", case)
    assert_caught(defect(name, point, mutation, check), monkeypatch)
