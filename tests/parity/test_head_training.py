"""The training of EAGLE-3 heads: a step against a plain float64 definition, and what it predicts against decoding."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from foredraft.doctor.teacher_forced import head_drafts, read_text
from foredraft.drafters.heads import eagle3_writing
from foredraft.drafters.heads.eagle3_files import HEAD, read_eagle3
from foredraft.drafters.heads.eagle3_head import Eagle3Head, load_eagle3
from foredraft.drafters.heads.eagle3_writing import llama_body, specforge_config, write_head
from foredraft.drafters.heads.record import HeadRecord
from foredraft.model.runner import Runner
from foredraft.model.spec import ModelSpec
from foredraft.train import eagle3_student
from foredraft.train.batches import Batches
from foredraft.train.eagle3_student import Eagle3Student
from foredraft.train.loop import TrainingRun
from foredraft.train.packed_documents import Document, Packed, PackedPass
from foredraft.train.processes import Processes
from foredraft.train.target import FrozenTarget
from foredraft.train.training_options import Eagle3Options
from foredraft.train.validation import acceptance
from tests.parity.test_heads import KEYS, V, model
from tests.support.checkpoints import reference_model
from tests.support.heads import defined_logits, save_head, student_of
from tests.support.planting import Mutant, assert_caught, defect

CPU = torch.device("cpu")
STEPS, DECAY = 3, 0.7
TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4]
SPELLINGS = ("safeailab", "residual")


def documents() -> list[Document]:
    """Texts of two lengths, of which two attend in one call; the first tokens of two do not count."""
    ids = [(3, 1, 4, 1, 5, 9, 2, 6), (2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4), (5, 0, 10, 7, 7, 3, 1, 2)]
    counted = (3, 1, 0)
    return [
        Document(each, tuple(place >= first for place in range(len(each))))
        for each, first in zip(ids, counted, strict=True)
    ]


@functools.cache
def target_folder() -> Path:
    folder = Path(tempfile.mkdtemp()) / "target"
    reference_model(**KEYS).save_pretrained(folder)
    return folder


def learned(folder: Path, student: Eagle3Student, target: FrozenTarget) -> tuple[float, dict[str, Tensor]]:
    """Return the loss of all documents, and the gradients, as a step of training has them."""
    options = Eagle3Options(data=(), out=folder / "out", draft_length=STEPS, decay=DECAY)
    run = TrainingRun(
        student, target, Batches(documents(), 64, 0), documents(), 0.2, options, folder, "digest",
        Processes(), lambda *_: None, lambda: True, lambda *_: None,
    )  # fmt: skip
    counted = sum(each.counted for each in documents())
    loss = run._learn(0, counted)[0].item() / counted
    return loss, {name: value.grad for name, value in student.own.by_name.items() if value.grad is not None}


def defined(head: Path) -> tuple[float, dict[str, Tensor]]:
    """Return the same by the definition: every draft anew, one position after the other."""
    stored = load_file(head / "model.safetensors")
    weights = {n: t.double().requires_grad_() if t.is_floating_point() else t for n, t in stored.items()}
    loss, counted = torch.zeros((), dtype=torch.float64), 0
    for document in documents():
        ids = list(document.ids)
        with torch.no_grad():
            p = model().double()(torch.tensor([ids])).logits[0].softmax(-1)
        counts = [*document.counts[1:], False]  # whether the prediction after each token counts
        counted += sum(counts)
        for anchor in range(1, len(ids) - 1):
            if not counts[anchor]:
                continue
            drafted = ids[anchor + 1 : anchor + STEPS]
            logits = defined_logits(head, model(), ids[: anchor + 1], drafted, weights)
            for step, each in enumerate(logits):
                if anchor + step < len(ids) and counts[anchor + step]:
                    has, own = each.isfinite(), p[anchor + step]
                    log_q = each[has] - each[has].logsumexp(0)
                    loss = loss + DECAY**step * (own[has] * (own[has].log() - log_q)).sum()
    (loss / counted).backward()
    return loss.item() / counted, {n: t.grad for n, t in weights.items() if t.grad is not None}


def check_step(spelling: str) -> None:
    """Check the loss and all gradients of a step of training against the definition."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        head = save_head(folder / "head", spelling, V)
        target = FrozenTarget(target_folder(), CPU, torch.float32)
        loss, gradients = learned(folder, student_of(head, target, STEPS, DECAY), target)
        want, wanted = defined(head)
    assert loss == pytest.approx(want, rel=1e-4)
    assert gradients.keys() == wanted.keys() and HEAD in gradients
    for name, gradient in gradients.items():
        error = (gradient - wanted[name]).abs().max() / wanted[name].abs().max()
        assert error < 2e-3, (name, error)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_loss_and_gradients_are_those_of_the_definition(spelling: str) -> None:
    check_step(spelling)


def check_written() -> None:
    """Check what is written: by the doctor's own forward it has the student's acceptance at every anchor."""
    target = FrozenTarget(target_folder(), CPU, torch.float32)
    body = llama_body(target.spec, 64)
    record = HeadRecord(
        spec=ModelSpec.from_hf(body), spelling="", layer="midlayer", taps=(2, 4, 5), target_size=64, words=6
    )
    student = Eagle3Student(
        record, target.decoder, target.head_weight, vocabulary=[0, 2, 3, 5, 8, 10], steps=STEPS, decay=1.0
    )
    with torch.no_grad():
        for value in student.own.parameters():
            value.mul_(8 if value.dim() > 1 else 1)
    with tempfile.TemporaryDirectory() as place:
        config = specforge_config(body, record, (1,), torch.float32)
        write_head(Path(place) / "head", config, {n: t.detach() for n, t in student.tensors().items()})
        files = read_eagle3(Path(place) / "head")
        files = replace(files, record=files.record.for_target(target.spec, "the head"))
        assert files.record.taps == (2, 4, 5)
        runner = Runner(target.decoder)
        text = read_text(runner, TEXT, (2, 4, 5))
        drafts = head_drafts(load_eagle3(files, runner), text, STEPS, 99)
    documents = [Document((*TEXT,), (True,) * len(TEXT))]
    [sampled], _ = acceptance(student, target, [documents], 1.0)
    [greedy], _ = acceptance(student, target, [documents], 0.0)
    for anchor, logits in drafts.items():
        p, q = text.logits[anchor : anchor + STEPS].softmax(-1), logits.softmax(-1)
        want = torch.minimum(p, q).sum(-1).tolist()
        assert sampled[anchor].tolist() == pytest.approx(want, abs=1e-4), anchor
        assert greedy[anchor].tolist() == (p.argmax(-1) == q.argmax(-1)).tolist(), anchor
    assert len(drafts) > 10


def test_what_is_written_drafts_as_the_student_does() -> None:
    check_written()


# --- planted defects ------------------------------------------------------------------------------------------


def anchor_shifted(reaching: Callable[..., Any]) -> Callable[..., Any]:
    def spoilt(packed: Packed, step: int) -> Any:
        columns, anchors, reached = reaching(packed, step)
        return columns, anchors, (reached - 1).clamp(min=0)

    return spoilt


def taps_one_off(states: Callable[..., Any]) -> Callable[..., Any]:
    return lambda target, packed, taps: states(target, packed, tuple(tap + 1 for tap in taps))


def not_rotated_on(start: Callable[..., Any]) -> Callable[..., Any]:
    def spoilt(self: PackedPass, spec: Any, packed: Packed, dtype: torch.dtype, shift: int = 0) -> None:
        start(self, spec, packed, dtype)

    return spoilt


def own_keys_of_the_last_step_alone(attended: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, packed, q, context, keys, values: attended(
        self, packed, q, context, keys[-1:], values[-1:]
    )


def fed_by_the_target() -> Mutant:
    """Later steps read the target's states in place of the head's own."""
    kept: list[Tensor] = []

    def keeping(joined: Callable[..., Any]) -> Callable[..., Any]:
        def spoilt(head: Eagle3Head, taps: Tensor) -> Tensor:
            kept[:] = [joined(head, taps)]
            return kept[0]

        return spoilt

    def replacing(_: Callable[..., Any]) -> Callable[..., Any]:
        return lambda head, left: kept[0]

    edits = ((Eagle3Head.joined, keeping), (Eagle3Head.recurring, replacing))
    return Mutant(
        "later steps fed with the target's states", edits, functools.partial(check_step, "safeailab")
    )


def ids_in_place_of_offsets(maps: Callable[..., Any]) -> Callable[..., Any]:
    def spoilt(words: Tensor, record: Any) -> dict[str, Tensor]:
        return {"d2t": maps(words, record)["d2t"] - (words >= 5).long()}

    return spoilt


step = functools.partial(check_step, "safeailab")
MUTANTS = [
    defect("the anchor shifted", eagle3_student.reaching, anchor_shifted, step),
    defect("taps one off", FrozenTarget.states, taps_one_off, step),
    defect("later queries at the anchor's position", PackedPass.__init__, not_rotated_on, step),
    defect("earlier steps of the draft unseen", Eagle3Student._attended, own_keys_of_the_last_step_alone, step),
    fed_by_the_target(),
    defect("d2t off by one", eagle3_writing.maps_of, ids_in_place_of_offsets, check_written),
    defect("taps one off in what is written", FrozenTarget.states, taps_one_off, check_written),
]  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_defect_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(mutant, monkeypatch)
