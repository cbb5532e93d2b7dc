"""The doctor: a planted mismatch of each kind is found, and nothing is found where there is none.

The target's distributions are replaced by those of the head as it is under the true setting: there its drafts are
always accepted, and the files that the doctor reads say something else.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import foredraft
from foredraft.cli import main
from foredraft.doctor import Diagnosis, diagnose, examination, teacher_forced
from foredraft.doctor.head_trials import changes
from foredraft.doctor.teacher_forced import Acceptance, ReadText, head_drafts, read_text
from foredraft.drafters.eagle3 import Eagle3
from foredraft.drafters.heads import settings
from foredraft.drafters.heads.eagle3_files import read_eagle3
from foredraft.drafters.heads.eagle3_head import Eagle3Head, load_eagle3
from foredraft.drafters.heads.settings import SETTINGS, HeadSettings, read_settings, write_settings
from foredraft.loading.inspection import inspect_models
from tests.parity.test_heads import KEYS, V
from tests.support.checkpoints import reference_model, save_checkpoint
from tests.support.heads import save_head
from tests.support.loaded import engine_of
from tests.support.medusa import defined_medusa, save_medusa
from tests.support.planting import Mutant, assert_caught, defect
from tests.support.spelled_heads import SPELLED

LONG = 150
# true setting -> spelling of the head whose files say otherwise
PLANTED: dict[str, tuple[HeadSettings, str]] = {
    "a tap late": (HeadSettings(tap_shift=1), "specforge"),
    "a tap early": (HeadSettings(tap_shift=-1), "speculators"),
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
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    reference_model(**KEYS).save_pretrained(folder / "llama")
    return folder


def save(folder: Path, spelling: str) -> Path:
    """Save the head of one of the cases."""
    config: dict[str, Any] = {}
    if spelling == "far":
        spelling, config = "safeailab", {"rope_theta": 100.0}
    if spelling == "short":
        spelling, config = "safeailab", {"max_position_embeddings": 32}
    return SPELLED[spelling].save(folder, spelling, V, config=config)


def texts() -> list[list[int]]:
    random = torch.Generator().manual_seed(3)
    return [torch.randint(0, V, (LONG,), generator=random).tolist() for _ in range(2)]


def examined(place: Path, head: Path, true: HeadSettings) -> Diagnosis:
    """Examine a head whose true setting is given."""
    llm = foredraft.load(
        place / "llama", draft=head, policy="fixed", dtype="float32", device="cpu", max_batch=1, max_length=64
    )
    runner, spec = llm.loaded.runner, llm.loaded.spec
    [drafter] = [each for each in engine_of(llm).drafters.values() if isinstance(each, Eagle3)]
    files = drafter.read_files(head)
    record = files.record.for_target(spec, "the head")
    right: Eagle3Head = load_eagle3(replace(files, record=true.applied(record, spec)), runner)

    def as_the_head_says(runner: Any, tokens: list[int], taps: Any) -> ReadText:
        text = read_text(runner, tokens, taps)
        logits = text.logits.clone()
        for anchor, drafted in head_drafts(right, text, examination.LENGTH, examination.MOST).items():
            logits[anchor : anchor + examination.LENGTH] = drafted
        return ReadText(text.tokens, logits, text.states)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(examination, "read_text", as_the_head_says)
        return diagnose(llm.loaded, head, texts())


def check_found(place: Path, folder: Path, name: str) -> None:
    true, spelling = PLANTED[name]
    head = save(folder, spelling)
    found = examined(place, head, true)
    assert found.best.settings == true.given, found.best
    assert found.improved and found.best.tau > found.own.tau + 0.1
    assert found.best.sampled == pytest.approx((1.0,) * examination.LENGTH, abs=1e-3)
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


def test_every_kind_of_setting_is_planted(place: Path, tmp_path: Path) -> None:
    planted = {name for settings, _ in PLANTED.values() for name in settings.given}
    of_blocks = {"from_anchor", "causal"}
    assert planted | of_blocks == set(HeadSettings.__dataclass_fields__)
    head = read_eagle3(save(tmp_path / "head", "speculators"))
    llm = foredraft.load(place / "llama", device="cpu", max_length=64, max_batch=1)
    record = head.record.for_target(llm.loaded.spec, "the head")
    tried = [name for each in changes(record, llm.loaded.spec, LONG) for name in each.given]
    assert {"tap_shift", "norm_before_residual", "norm_output", "own_head", "own_embedding"} <= {*tried}


def test_loading_honours_a_setting_and_says_so(place: Path, tmp_path: Path) -> None:
    head = save(tmp_path / "head", "specforge")
    options: dict[str, Any] = {"draft": head, "drafter": "eagle3", "device": "cpu", "policy": "fixed"}
    llm = foredraft.load(place / "llama", max_length=64, max_batch=1, **options)
    assert engine_of(llm).drafters["eagle3"].taps == (2, 3, 5)
    write_settings(head, HeadSettings(tap_shift=-1, rope_theta=500.0))
    llm = foredraft.load(place / "llama", max_length=64, max_batch=1, **options)
    drafter: Any = engine_of(llm).drafters["eagle3"]
    assert drafter.taps == (1, 2, 4) and drafter.head.record.spec.rope.theta == 500.0
    seen = inspect_models(place / "llama", draft=head, device="cpu")
    [note] = [each.note for each in seen.drafters if each.name == "eagle3"]
    assert "`foredraft doctor` set tap_shift = -1, rope_theta = 500.0" in str(note)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"tap_shift": 9}', "moves taps"),
        ('{"mystery": 1}', "mystery = 1 is no setting of a head"),
        ('{"norm_output": 1}', "norm_output = 1 is no setting of a head"),
        ('{"own_embedding": true}', "own_embedding = true is not possible"),
        ("[", "not readable JSON"),
    ],
)
def test_a_broken_setting_is_refused(place: Path, tmp_path: Path, content: str, message: str) -> None:
    head = save(tmp_path / "head", "safeailab")
    (head / SETTINGS).write_text(content)
    with pytest.raises(foredraft.CheckpointError, match=message):
        foredraft.load(place / "llama", draft=head, drafter="eagle3", device="cpu")


def test_a_setting_is_kept_elsewhere_for_a_head_that_cannot_be_written_to(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))

    @contextmanager
    def refused(file: Path) -> Iterator[Path]:
        raise PermissionError(13, "Permission denied", str(file))
        yield file

    head, other = save(tmp_path / "head", "specforge"), save(tmp_path / "other", "specforge")
    wanted = HeadSettings(tap_shift=-1)
    with monkeypatch.context() as patch:
        patch.setattr(settings, "replacing", refused)
        kept = write_settings(head, wanted)
        assert kept.is_relative_to(tmp_path / "cache") and not (head / SETTINGS).exists()
        patch.setenv("FOREDRAFT_CACHE", "")
        with pytest.raises(PermissionError):
            write_settings(head, wanted)
    assert read_settings(head) == wanted and read_settings(other) == HeadSettings()
    options: dict[str, Any] = {"device": "cpu", "policy": "fixed", "max_length": 64, "max_batch": 1}
    assert engine_of(foredraft.load(place / "llama", draft=head, **options)).drafters["eagle3"].taps == (
        1,
        2,
        4,
    )
    (head / "config.json").write_text((head / "config.json").read_text() + " ")  # another head
    assert read_settings(head) == HeadSettings()


def test_medusa_heads_are_measured_as_they_draft(place: Path, tmp_path: Path) -> None:
    """Against the definition of the logits, at every anchor."""
    heads = save_medusa(tmp_path / "heads", "fasterdecoding", V)
    llm = foredraft.load(
        place / "llama",
        draft=heads,
        policy="fixed",
        device="cpu",
        max_batch=1,
        max_length=64,
        dtype="float32",
    )
    found, [text, _] = diagnose(llm.loaded, heads, texts()[:1]), texts()
    read = read_text(llm.loaded.runner, text, ())
    want = []
    for anchor in read.anchors(examination.LENGTH, examination.MOST):
        q = defined_medusa(
            heads, reference_model(**KEYS), text[: anchor + 1], text[anchor + 1 : anchor + 4]
        ).softmax(-1)
        p = read.logits[anchor : anchor + 4].double().softmax(-1)
        want.append(torch.minimum(p, q).sum(-1))
    first = torch.stack(want)[:, 0].mean()
    assert found.drafter == "medusa" and found.drafts == len(want) and not found.trials
    assert found.own.sampled[0] == pytest.approx(float(first), abs=1e-3)
    assert found.own.tau == pytest.approx(float((1 + torch.stack(want).cumprod(1).sum(1)).mean()), abs=1e-3)


# --- draft models ---------------------------------------------------------------------------------------------


def with_template(folder: Path, template: str | None) -> Path:
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
    big = with_template(save_checkpoint(tmp_path / "big", tokenizer=True), target)
    small = with_template(save_checkpoint(tmp_path / "small", tokenizer=True, seed=1, **keys), draft)
    llm = foredraft.load(big, draft=small, device="cpu", policy="fixed", max_length=64, max_batch=1)
    found = diagnose(llm.loaded, small)
    assert found.drafter == "draft-model" and not found.improved
    assert len(found.notes) == len(notes)
    for note, wanted in zip(found.notes, notes, strict=True):
        assert wanted in note


def test_the_target_as_its_own_draft_model_is_always_accepted(tmp_path: Path) -> None:
    big = save_checkpoint(tmp_path / "big", tokenizer=True)
    llm = foredraft.load(big, draft=big, device="cpu", policy="fixed", max_length=64, max_batch=1)
    found = diagnose(llm.loaded, big)
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
    assert "no drafter to examine; give --draft" in capsys.readouterr().err


# --- planted defects ------------------------------------------------------------------------------------------


def positions_late(accepted: Callable[..., Any]) -> Callable[..., Any]:
    return lambda target, draft: accepted(target.roll(1, 0), draft)


def states_not_normed(joined: Callable[..., Any]) -> Callable[..., Any]:
    return lambda head, taps: taps if head.record.pair_fc else joined(head, taps)


def settings_ignored(applied: Callable[..., Any]) -> Callable[..., Any]:
    return lambda settings, record, target: applied(HeadSettings(), record, target)


def first_one_is_best(better: Callable[..., Any]) -> Callable[..., Any]:
    return lambda one, other: False


def rounds_of_the_first_token(rounds: Callable[..., Any]) -> Callable[..., Any]:
    """Judge a setting by the first token alone, which no recurrence touches."""
    return lambda accepted: 1 + accepted.sampled[:, 0]


@pytest.fixture
def found(place: Path, tmp_path: Path) -> Callable[[str], Callable[[], None]]:
    return lambda name: lambda: check_found(place, tmp_path / "head", name)


def test_defects_of_the_doctor_are_caught(found: Callable[[str], Callable[[], None]], tmp_path: Path) -> None:
    planted: list[tuple[Any, Any, str]] = [
        (teacher_forced._accepted, positions_late, "residual"),
        (Eagle3Head.joined, states_not_normed, "before the final norm"),
        (HeadSettings.applied, settings_ignored, "a tap late"),
        (examination._is_better, first_one_is_best, "a tap late"),
        (Acceptance.rounds, rounds_of_the_first_token, "recurrence"),
    ]
    for seam, spoiler, name in planted:
        mutant: Mutant = defect(name, seam, spoiler, found(name))
        with pytest.MonkeyPatch.context() as patch:
            assert_caught(mutant, patch)
        shutil.rmtree(tmp_path / "head", ignore_errors=True)
