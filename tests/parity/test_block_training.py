"""The training of DFlash heads: a step against a plain float64 definition, and what is written against the student."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from foredraft.doctor.block_forced import block_drafts
from foredraft.doctor.teacher_forced import read_text
from foredraft.drafters.heads import block_writing
from foredraft.drafters.heads.block_files import layers_of, read_block
from foredraft.drafters.heads.block_head import load_block
from foredraft.drafters.heads.block_record import BlockRecord
from foredraft.drafters.heads.block_writing import qwen3_body, z_lab_config
from foredraft.drafters.heads.eagle3_writing import write_head
from foredraft.model.runner import Runner
from foredraft.train.batches import Batches
from foredraft.train.block_student import BlockStudent
from foredraft.train.loop import TrainingRun
from foredraft.train.packed_documents import Document, Packed
from foredraft.train.processes import Processes
from foredraft.train.target import FrozenTarget
from foredraft.train.training_options import DFlashOptions
from foredraft.train.validation import acceptance
from tests.parity.test_head_training import CPU, TEXT, documents, target_folder
from tests.parity.test_heads import V, model
from tests.support.blocks import BLOCK, defined_logits, save_block
from tests.support.planting import assert_caught, defect

STEPS, DECAY, REDUCED = BLOCK - 1, 0.7, 6


def student_of(head: Path, target: FrozenTarget) -> BlockStudent:
    """Return the student that has the weights of a head's files."""
    record = read_block(head).record.for_target(target.spec, "the head")
    stored = load_file(head / "model.safetensors")
    words = (stored["d2t"] + torch.arange(record.words)).tolist() if "d2t" in stored else None
    student = BlockStudent(record, target.decoder, target.head_weight, vocabulary=words, decay=DECAY)
    student.own.fill(stored)
    return student


def learned(folder: Path, student: BlockStudent, target: FrozenTarget) -> tuple[float, dict[str, Tensor]]:
    """Return the loss of all documents, and the gradients, as a step of training has them."""
    options = DFlashOptions(data=(), out=folder / "out", block=BLOCK, decay=DECAY)
    run = TrainingRun(
        student, target, Batches(documents(), 64, 0), documents(), 0.2, options, folder, "digest",
        Processes(), lambda *_: None, lambda: True, lambda *_: None,
    )  # fmt: skip
    counted = sum(each.counted for each in documents())
    loss = run._learn(0, counted)[0].item() / counted
    return loss, {name: value.grad for name, value in student.own.by_name.items() if value.grad is not None}


def defined(head: Path) -> tuple[float, dict[str, Tensor]]:
    """Return the same by the definition: every block anew, with an anchor at every third token of a text."""
    stored = load_file(head / "model.safetensors")
    weights = {n: t.double().requires_grad_() if t.is_floating_point() else t for n, t in stored.items()}
    loss, counted = torch.zeros((), dtype=torch.float64), 0
    offset = sum(sum(document.ids) for document in documents()) % STEPS
    for document in documents():
        ids = list(document.ids)
        with torch.no_grad():
            p = model().double()(torch.tensor([ids])).logits[0].softmax(-1)
        counts = [*document.counts[1:], False]  # whether the prediction after each token counts
        counted += sum(counts)
        for anchor in range(offset, len(ids) - 1, STEPS):
            if not anchor or not counts[anchor]:
                continue
            logits = defined_logits(head, model(), ids[: anchor + 1], ids[anchor + 1 :], weights)
            for step, each in enumerate(logits):
                if anchor + step < len(ids) and counts[anchor + step]:
                    has, own = each.isfinite(), p[anchor + step]
                    log_q = each[has] - each[has].logsumexp(0)
                    loss = loss + STEPS * DECAY**step * (own[has] * (own[has].log() - log_q)).sum()
    (loss / counted).backward()
    return loss.item() / counted, {n: t.grad for n, t in weights.items() if t.grad is not None}


def check_step(*, words: int | None = None) -> None:
    """Check the loss and all gradients of a step of training against the definition."""
    config = {} if words is None else {"draft_vocab_size": words}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        head = save_block(folder / "head", "z-lab", V, words=words, config=config)
        target = FrozenTarget(target_folder(), CPU, torch.float32)
        loss, gradients = learned(folder, student_of(head, target), target)
        want, wanted = defined(head)
    assert loss == pytest.approx(want, rel=1e-4)
    assert gradients.keys() == wanted.keys() and "fc.weight" in gradients
    for name, gradient in gradients.items():
        error = (gradient - wanted[name]).abs().max() / wanted[name].abs().max()
        assert error < 2e-3, (name, error)


@pytest.mark.parametrize("words", [None, REDUCED])
def test_loss_and_gradients_are_those_of_the_definition(words: int | None) -> None:
    check_step(words=words)


def check_written() -> None:
    """Check what is written: by the doctor's own forward it has the student's acceptance at every anchor."""
    target = FrozenTarget(target_folder(), CPU, torch.float32)
    body = qwen3_body(target.spec, 2, 64)
    record = BlockRecord(
        spec=layers_of(body), spelling="", layer="layers.0", taps=(2, 5), target_size=64, words=REDUCED,
        own_head=False, block=BLOCK, mask_token=7,
    )  # fmt: skip
    student = BlockStudent(
        record, target.decoder, target.head_weight, vocabulary=[0, 2, 3, 5, 8, 10], decay=1.0
    )
    with torch.no_grad():
        for value in student.own.parameters():
            value.mul_(8 if value.dim() > 1 else 1)
    with tempfile.TemporaryDirectory() as place:
        config = z_lab_config(body, record, target.spec, torch.float32)
        write_head(Path(place) / "head", config, {n: t.detach() for n, t in student.tensors().items()})
        files = read_block(Path(place) / "head")
        files = replace(files, record=files.record.for_target(target.spec, "the head"))
        read = files.record
        assert (read.taps, read.block, read.mask_token, read.words) == ((2, 5), BLOCK, 7, REDUCED)
        runner = Runner(target.decoder)
        text = read_text(runner, TEXT, (2, 5))
        drafts = block_drafts(load_block(files, runner), text, STEPS, 99)
    documents = [Document((*TEXT,), (True,) * len(TEXT))]
    [sampled], _ = acceptance(student, target, [documents], 1.0)
    [greedy], _ = acceptance(student, target, [documents], 0.0)
    for anchor, logits in drafts.items():
        p, q = text.logits[anchor : anchor + STEPS].softmax(-1), logits.softmax(-1)
        want = torch.minimum(p, q).sum(-1).tolist()
        assert sampled[anchor].tolist() == pytest.approx(want, abs=1e-4), anchor
        assert greedy[anchor].tolist() == (p.argmax(-1) == q.argmax(-1)).tolist(), anchor
    assert len(drafts) > 10
    found = student(Packed.of(documents, CPU), target.states(Packed.of(documents, CPU), (2, 5)).tapped)
    for anchor, logits in drafts.items():
        torch.testing.assert_close(found[anchor], logits[0][student.vocabulary], rtol=1e-3, atol=1e-4)


def test_what_is_written_drafts_as_the_student_does() -> None:
    check_written()


# --- planted defects ------------------------------------------------------------------------------------------


def taps_one_off(states: Callable[..., Any]) -> Callable[..., Any]:
    return lambda target, packed, taps: states(target, packed, tuple(tap + 1 for tap in taps))


def a_slot_late(drafted: Callable[..., Any]) -> Callable[..., Any]:
    def spoilt(self: BlockStudent, packed: Packed, blocks: Any, step: int) -> Any:
        return drafted(self, packed, blocks._replace(hidden=blocks.hidden.roll(1, 1)), step)

    return spoilt


def anchors_context_seen(attended: Callable[..., Any]) -> Callable[..., Any]:
    """A block attends to the state of its own anchor."""

    def spoilt(self: BlockStudent, packed: Packed, offset: int, own: Any, given: Any) -> Any:
        return attended(self, packed, offset, own, tuple(each.roll(-1, 0) for each in given))

    return spoilt


def blocks_seen_by_the_next(attended: Callable[..., Any]) -> Callable[..., Any]:
    def spoilt(self: BlockStudent, packed: Packed, offset: int, own: Any, given: Any) -> Any:
        q, keys, values = own
        return attended(self, packed, offset, (q, keys.roll(BLOCK, 0), values.roll(BLOCK, 0)), given)

    return spoilt


def ids_in_place_of_boundaries(config: Callable[..., Any]) -> Callable[..., Any]:
    def spoilt(body: Any, record: BlockRecord, *rest: Any) -> Any:
        return config(body, replace(record, taps=tuple(tap + 1 for tap in record.taps or ())), *rest)

    return spoilt


MUTANTS = [
    defect("taps one off", FrozenTarget.states, taps_one_off, check_step),
    defect("the slot before", BlockStudent._drafted, a_slot_late, check_step),
    defect("the anchor's context seen", BlockStudent._attended, anchors_context_seen, check_step),
    defect("another block seen", BlockStudent._attended, blocks_seen_by_the_next, check_step),
    defect("taps one off in what is written", block_writing.z_lab_config, ids_in_place_of_boundaries, check_written),
]  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_defect_is_caught(mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(mutant, monkeypatch)
