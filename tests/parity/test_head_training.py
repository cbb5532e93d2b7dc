"""The training of heads: a step against a plain float64 definition, and what is written against the student."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from foredraft.doctor.teacher_forced import block_drafts, head_drafts, read_text
from foredraft.drafters.block_drafter import load_block
from foredraft.drafters.eagle3 import Eagle3Head, load_eagle3
from foredraft.drafters.heads import writing
from foredraft.drafters.heads.block_configs import layers_of, read_block
from foredraft.drafters.heads.configs import read_eagle3
from foredraft.drafters.heads.record import BlockRecord, HeadRecord
from foredraft.drafters.heads.tensors import HEAD
from foredraft.drafters.heads.writing import (
    llama_body,
    qwen3_body,
    specforge_config,
    write_head,
    z_lab_config,
)
from foredraft.model.runner import Runner
from foredraft.model.spec import ModelSpec
from foredraft.train import head_students
from foredraft.train.head_students import BlockStudent, Eagle3Student
from foredraft.train.loop import Prepared, Trainee, TrainingRun, acceptance
from foredraft.train.target import Batches, Document, FrozenTarget, Packed, PackedPass
from foredraft.train.training_checkpoints import Processes
from foredraft.train.training_options import DFlashOptions, Eagle3Options
from tests.parity.test_heads import KEYS, V, model
from tests.support.checkpoints import reference_model
from tests.support.head_logits import defined_block, defined_eagle3
from tests.support.heads import BLOCK, save_head
from tests.support.mutation import Mutant, assert_caught, defect
from tests.support.mutations import Function, argument, around, changed, instead
from tests.support.training import student_of

STEPS, SLOTS = 3, BLOCK - 1
IDS = [0, 2, 3, 5, 8, 10]  # a draft vocabulary
DECAY = 0.7
TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4]
# texts of two lengths, of which two attend in one call, and the first tokens that count
TEXTS = (
    ((3, 1, 4, 1, 5, 9, 2, 6), 3),
    ((2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4), 1),
    ((5, 0, 10, 7, 7, 3, 1, 2), 0),
)
DOCUMENTS = [Document(ids, tuple(place >= first for place in range(len(ids)))) for ids, first in TEXTS]
COUNTED = sum(each.counted for each in DOCUMENTS)
Step = tuple[float, dict[str, Tensor]]  # a loss and the gradients


@functools.cache
def target_folder() -> Path:
    folder = Path(tempfile.mkdtemp()) / "target"
    reference_model(**KEYS).save_pretrained(folder)
    return folder


def target() -> FrozenTarget:
    return FrozenTarget(target_folder(), torch.device("cpu"), torch.float32)


def learned(folder: Path, student: Any, options: Any) -> Step:
    """Return the loss of all documents, and the gradients, as a step of training has them."""
    unread: Any = None
    data = target(), Batches(DOCUMENTS, 64, 0), DOCUMENTS, 0
    prepared = Prepared(unread, "", "", *data, folder, "digest", Processes())
    run = TrainingRun(options, prepared, Trainee(student, 0.2, folder, unread), unread)
    loss = run._learn(0, COUNTED)[0].item() / COUNTED
    return loss, {name: value.grad for name, value in student.own.by_name.items() if value.grad is not None}


def defined(head: Path, define: Callable[..., Tensor], steps: int, stride: int) -> Step:
    """Return the same by the definition: every draft anew, with an anchor at every `stride`-th token of a text."""
    stored = load_file(head / "model.safetensors")
    weights = {n: t.double().requires_grad_() if t.is_floating_point() else t for n, t in stored.items()}
    loss, counted = torch.zeros((), dtype=torch.float64), 0
    offset = sum(sum(document.ids) for document in DOCUMENTS) % stride
    for document in DOCUMENTS:
        ids = list(document.ids)
        with torch.no_grad():
            p = model().double()(torch.tensor([ids])).logits[0].softmax(-1)
        counts = [*document.counts[1:], False]  # whether the prediction after each token counts
        counted += sum(counts)
        for anchor in range(offset, len(ids) - 1, stride):
            if not anchor or not counts[anchor]:
                continue
            logits = define(head, model(), ids[: anchor + 1], ids[anchor + 1 : anchor + steps], weights)
            for step, each in enumerate(logits):
                if anchor + step < len(ids) and counts[anchor + step]:
                    has, own = each.isfinite(), p[anchor + step]
                    log_q = each[has] - each[has].logsumexp(0)
                    loss = loss + stride * DECAY**step * (own[has] * (own[has].log() - log_q)).sum()
    (loss / counted).backward()
    return loss.item() / counted, {n: t.grad for n, t in weights.items() if t.grad is not None}


def check_gradients(
    head: Path, student: Any, options: Any, define: Callable[..., Tensor], *, steps: int, stride: int = 1
) -> dict[str, Tensor]:
    """Check the loss and all gradients of a step of training; returns the gradients."""
    loss, gradients = learned(head.parent, student, options)
    want, wanted = defined(head, define, steps, stride)
    assert loss == pytest.approx(want, rel=1e-4)
    assert gradients.keys() == wanted.keys()
    for name, gradient in gradients.items():
        error = (gradient - wanted[name]).abs().max() / wanted[name].abs().max()
        assert error < 2e-3, (name, error)
    return gradients


def check_step(format: str) -> None:
    with tempfile.TemporaryDirectory() as place:
        head = save_head(Path(place) / "head", format, V)
        student = student_of(head, target(), STEPS, DECAY)
        options = Eagle3Options(data=(), out=Path(place) / "out", draft_length=STEPS, decay=DECAY)
        assert HEAD in check_gradients(head, student, options, defined_eagle3, steps=STEPS)


def block_student(head: Path, target: FrozenTarget) -> BlockStudent:
    record = read_block(head).record.for_target(target.spec, "the head")
    stored = load_file(head / "model.safetensors")
    ids = (stored["d2t"] + torch.arange(record.draft_vocab_size)).tolist() if "d2t" in stored else None
    student = BlockStudent(record, target.decoder, target.head_weight, vocabulary=ids, decay=DECAY)
    student.own.fill(stored)
    return student


def check_block_step(draft_vocab: int | None = None) -> None:
    config = {} if draft_vocab is None else {"draft_vocab_size": draft_vocab}
    with tempfile.TemporaryDirectory() as place:
        head = save_head(Path(place) / "head", "block z-lab", V, draft_vocab=draft_vocab, config=config)
        student = block_student(head, target())
        options = DFlashOptions(data=(), out=Path(place) / "out", block=BLOCK, decay=DECAY)
        define = defined_block
        assert "fc.weight" in check_gradients(head, student, options, define, steps=SLOTS, stride=SLOTS)


@pytest.mark.parametrize("format", ["safeailab", "residual"])
def test_loss_and_gradients_are_those_of_the_definition(format: str) -> None:
    check_step(format)


@pytest.mark.parametrize("draft_vocab", [None, len(IDS)])
def test_loss_and_gradients_of_a_block_are_those_of_the_definition(draft_vocab: int | None) -> None:
    check_block_step(draft_vocab)


def enlarged(student: Any) -> Any:
    """Return a new student whose drafts differ from each other."""
    with torch.no_grad():
        for value in student.own.parameters():
            value.mul_(8 if value.dim() > 1 else 1)
    return student


def check_acceptance(student: Any, logits: Tensor, drafts: Mapping[int, Tensor], steps: int) -> None:
    """Check the student's acceptance at every anchor of TEXT against drafts of the head that it wrote."""
    documents = [Document((*TEXT,), (True,) * len(TEXT))]
    [sampled], _ = acceptance(student, target(), [documents], 1.0)
    [greedy], _ = acceptance(student, target(), [documents], 0.0)
    for anchor, drafted in drafts.items():
        p, q = logits[anchor : anchor + steps].softmax(-1), drafted.softmax(-1)
        want = torch.minimum(p, q).sum(-1).tolist()
        assert sampled[anchor].tolist() == pytest.approx(want, abs=1e-4), anchor
        assert greedy[anchor].tolist() == (p.argmax(-1) == q.argmax(-1)).tolist(), anchor
    assert len(drafts) > 10


def check_written(student: Any, config: Any, read: Any, draft: Any, steps: int) -> Any:
    """Check that what is written has the student's acceptance, by the doctor's forward; returns the record and the drafts."""
    with tempfile.TemporaryDirectory() as place:
        write_head(Path(place) / "head", config, {n: t.detach() for n, t in student.tensors().items()})
        files = read(Path(place) / "head")
        files = replace(files, record=files.record.for_target(target().spec, "the head"))
        runner = Runner(target().decoder)
        text = read_text(runner, TEXT, files.record.aux_layers)
        drafts = draft(files, runner, text)
    check_acceptance(student, text.logits, drafts, steps)
    return files.record, drafts


def test_what_is_written_drafts_as_the_student_does() -> None:
    frozen, aux_layers = target(), (2, 4, 5)
    body = llama_body(frozen.spec, 64)
    record = HeadRecord(
        spec=ModelSpec.from_hf(body),
        format="",
        layer="midlayer",
        aux_layers=aux_layers,
        target_size=64,
        draft_vocab_size=len(IDS),
    )
    weights = frozen.decoder, frozen.head_weight
    student = enlarged(Eagle3Student(record, *weights, vocabulary=IDS, steps=STEPS, decay=1.0))
    config = specforge_config(body, record, (1,), torch.float32)

    def draft(files: Any, runner: Runner, text: Any) -> Any:
        return head_drafts(load_eagle3(files, runner), text, STEPS, 99)

    read, _ = check_written(student, config, read_eagle3, draft, STEPS)
    assert read.aux_layers == aux_layers


def test_a_block_that_is_written_drafts_as_the_student_does() -> None:
    frozen, aux_layers = target(), (2, 5)
    body = qwen3_body(frozen.spec, 2, 64)
    record = BlockRecord(
        spec=layers_of(body), format="", layer="layers.0", aux_layers=aux_layers, target_size=64, draft_vocab_size=len(IDS),
        own_head=False, block=BLOCK, mask_token=7,
    )  # fmt: skip
    student = enlarged(BlockStudent(record, frozen.decoder, frozen.head_weight, vocabulary=IDS, decay=1.0))
    config = z_lab_config(body, record, frozen.spec, torch.float32)

    def draft(files: Any, runner: Runner, text: Any) -> Any:
        return block_drafts(load_block(files, runner), text, SLOTS, 99)

    read, drafts = check_written(student, config, read_block, draft, SLOTS)
    assert (read.aux_layers, read.block, read.mask_token, read.draft_vocab_size) == (
        aux_layers,
        BLOCK,
        7,
        len(IDS),
    )
    packed = Packed.of([Document((*TEXT,), (True,) * len(TEXT))], torch.device("cpu"))
    found = student(packed, frozen.states(packed, aux_layers).aux_states)
    for anchor, logits in drafts.items():
        torch.testing.assert_close(found[anchor], logits[0][student.vocabulary], rtol=1e-3, atol=1e-4)


# --- planted defects ------------------------------------------------------------------------------------------

layers_one_off = argument(2, lambda layers: tuple(layer + 1 for layer in layers))
anchor_shifted = changed(lambda found: (*found[:2], (found[2] - 1).clamp(min=0)))
not_rotated_on = around(lambda start, self, spec, packed, dtype, shift=0: start(self, spec, packed, dtype))
own_keys_of_the_last_step_alone = around(
    lambda attended, self, packed, q, keys, values: attended(
        self, packed, q, [keys[0], *keys[1:][-1:]], [values[0], *values[1:][-1:]]
    )
)


def fed_by_the_target() -> Mutant:
    """Later steps read the target's states in place of the head's own."""
    kept: list[Tensor] = []

    @around
    def keeping(joined: Function, head: Eagle3Head, aux_states: Tensor) -> Tensor:
        kept[:] = [joined(head, aux_states)]
        return kept[0]

    edits = ((Eagle3Head.joined, keeping), (Eagle3Head.recurring, instead(lambda head, left: kept[0])))
    return Mutant(
        "later steps fed with the target's states", edits, functools.partial(check_step, "safeailab")
    )


ids_in_place_of_offsets = around(
    lambda maps, ids, record: {"d2t": maps(ids, record)["d2t"] - (ids >= 5).long()}
)
a_slot_late = changed(lambda blocks: (blocks[0], blocks[1].roll(1, 1)))
anchors_context_seen = argument(4, lambda given: tuple(each.roll(-1, 0) for each in given))
blocks_seen_by_the_next = argument(3, lambda own: (own[0], *(each.roll(BLOCK, 0) for each in own[1:])))
written_layers_one_off = argument(
    1, lambda record: replace(record, aux_layers=tuple(layer + 1 for layer in record.aux_layers))
)
step = functools.partial(check_step, "safeailab")
written = test_what_is_written_drafts_as_the_student_does
block_written = test_a_block_that_is_written_drafts_as_the_student_does
MUTANTS = [
    defect("the anchor shifted", head_students.reaching, anchor_shifted, step),
    defect("layers one off", FrozenTarget.states, layers_one_off, step),
    defect("later queries at the anchor's position", PackedPass.__init__, not_rotated_on, step),
    defect("earlier steps of the draft unseen", Eagle3Student._attended, own_keys_of_the_last_step_alone, step),
    fed_by_the_target(),
    defect("d2t off by one", writing.maps_of, ids_in_place_of_offsets, written),
    defect("layers one off in what is written", FrozenTarget.states, layers_one_off, written),
    defect("block: layers one off", FrozenTarget.states, layers_one_off, check_block_step),
    defect("the slot before", BlockStudent._blocks, a_slot_late, check_block_step),
    defect("the anchor's context seen", BlockStudent._attended, anchors_context_seen, check_block_step),
    defect("another block seen", BlockStudent._attended, blocks_seen_by_the_next, check_block_step),
    defect("block: layers one off in what is written", writing.z_lab_config, written_layers_one_off, block_written),
]  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_defect_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(mutant, monkeypatch)
