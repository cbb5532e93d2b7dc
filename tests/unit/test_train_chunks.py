"""The gradients of a loss that is taken a few positions at a time are those of the whole loss."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from foredraft.train import chunks
from foredraft.train.losses import FUNCTIONS, overlap
from foredraft.train.packed_documents import Packed
from foredraft.train.students import AdapterStudent, DraftStudent, Student
from foredraft.train.target import FrozenTarget
from tests.support.planting import assert_caught, defect
from tests.unit.test_train_packed import CPU, adapter_student, documents

FAMILIES = ["llama", "gemma2"]  # an untied head; a tied one with soft-capped logits and norms of 1 + weight


def student_of(folder: Path, family: str, kind: str) -> tuple[FrozenTarget, Student]:
    target, adapter = adapter_student(folder, family)
    if kind == "adapter":
        return target, adapter
    return target, DraftStudent(target.spec, CPU, load_file(folder / family / "model.safetensors"))


def check_gradients(folder: Path, family: str, kind: str) -> None:
    target, student = student_of(folder, family, kind)
    packed = Packed.of(documents(), CPU)
    tapped = target.states(packed, student.taps).tapped
    random = torch.Generator().manual_seed(1)
    log_p = torch.randn(len(packed.predicting), 97, generator=random).log_softmax(-1)

    def compare(logits: Tensor, rows: slice) -> Tensor:
        log_q = logits.log_softmax(-1)
        return torch.stack([FUNCTIONS["lk"](log_p[rows], log_q).sum(), overlap(log_p[rows], log_q).sum()])

    def gradients(sums: Tensor) -> dict[str, Tensor]:
        (3 * sums[0]).backward()
        found = {name: value.grad for name, value in student.named_parameters() if value.grad is not None}
        student.zero_grad()
        assert found
        return found

    whole, by_chunks = compare(student(packed, tapped), slice(None)), student(packed, tapped, compare)
    torch.testing.assert_close(by_chunks.detach(), whole.detach())
    want, found = gradients(whole), gradients(by_chunks)
    assert found.keys() == want.keys() == dict(student.named_parameters()).keys()
    for name, gradient in found.items():
        assert (gradient - want[name]).abs().max() <= 1e-4 * want[name].abs().max(), name


@pytest.mark.parametrize("kind", ["adapter", "draft"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_the_whole(
    family: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "CHUNK", 7)
    check_gradients(tmp_path, family, kind)


def test_nothing_to_predict_has_no_gradient(tmp_path: Path) -> None:
    target, student = student_of(tmp_path, "llama", "adapter")
    assert isinstance(student, AdapterStudent)
    packed = Packed.of(documents(counted_from=99), CPU)
    sums = student(packed, target.states(packed, student.taps).tapped, lambda *given: pytest.fail("called"))
    sums[0].backward()
    assert not sums.any() and all(not value.grad.any() for value in student.parameters())  # type: ignore[union-attr]


def last_chunk_alone(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Keep the gradients of the parameters in the last chunk alone."""

    def spoilt(compare: Callable[..., Tensor], x: Tensor, parameters: Any) -> Tensor:
        def compared(part: Tensor, rows: slice) -> Tensor:
            sums = compare(part, rows)
            if rows.stop < len(x):
                sums = sums.detach() + 0 * (part.sum() + sum(value.sum() for value in parameters))
            return sums

        found: Tensor = forward(compared, x, parameters)
        return found

    return spoilt


def test_a_lost_chunk_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK", 7)
    check = partial(check_gradients, tmp_path, "llama", "draft")
    name = "the gradients of all chunks but the last lost"
    assert_caught(defect(name, chunks.by_chunks, last_chunk_alone, check), monkeypatch)


def test_a_lost_factor_of_the_loss_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = chunks._ByChunks.backward
    unscaled = staticmethod(lambda ctx, given: sound(ctx, torch.ones_like(given)))
    monkeypatch.setattr(chunks._ByChunks, "backward", unscaled)
    with pytest.raises(AssertionError):
        check_gradients(tmp_path, "llama", "draft")
