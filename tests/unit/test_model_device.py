"""Uploads never block the host: they leave from pinned memory. Downloads synchronise once."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft.decode import constraint
from foredraft.model import memory as device
from foredraft.model.memory import collect_the_new, upload

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record the steps of an upload to a GPU, without a GPU."""
    done: list[Any] = []

    def pin(self: Tensor) -> Tensor:
        done.append("pinned")
        return self

    def to(self: Tensor, device: torch.device, non_blocking: bool = False) -> Tensor:
        done.append((device.type, non_blocking))
        return self

    monkeypatch.setattr(Tensor, "pin_memory", pin)
    monkeypatch.setattr(Tensor, "to", to)
    return done


def test_an_upload_to_the_cpu_copies_nothing() -> None:
    mask = torch.tensor([True, False])
    assert upload(mask, CPU) is mask
    assert upload([[1], [2]], CPU, torch.int32).tolist() == [[1], [2]]
    assert upload([True], CPU).dtype == torch.bool


@pytest.mark.parametrize("values", [[1, 2], torch.tensor([True, False])], ids=["numbers", "tensor"])
def test_an_upload_to_a_gpu_is_pinned_and_non_blocking(sent: list[Any], values: Any) -> None:
    upload(values, CUDA)
    assert sent == ["pinned", ("cuda", True)]
    sent.clear()
    upload(torch.empty(2, device="meta"), CUDA)  # which is off the host already
    assert sent == [("cuda", True)]


def test_constraint_masks_are_uploaded_without_blocking(
    sent: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    even: Any = SimpleNamespace(length=0, narrow=False, at_dead_end=False)
    even.mask, even.advance = lambda: torch.tensor([True, False, True]), lambda token: 1
    even.rewind = lambda length: None
    monkeypatch.setattr(torch, "ones", lambda *shape, dtype, device: torch.full(shape, True))
    constraint.masks_along(even, [0], 3, CUDA)
    assert sent == ["pinned", ("cuda", True)] * 2
    sent.clear()
    constraint.Walks([even], 3, CUDA).masks()
    assert sent == ["pinned", ("cuda", True)]


def test_a_download_keeps_every_bit_and_copies_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU stands for a device whose memory the host cannot read."""
    monkeypatch.setattr(device, "HOST", ())
    copies: list[torch.Size] = []
    cpu = Tensor.cpu

    def counted(self: Tensor) -> Tensor:
        copies.append(self.shape)
        return cpu(self)

    monkeypatch.setattr(Tensor, "cpu", counted)
    floats = torch.tensor([[0.1, -0.0, float("nan")], [float("-inf"), 1e-45, 3e38]]).T  # not contiguous
    sent = [torch.tensor([2**62, -1]), floats, torch.tensor([[True], [False]])]
    for one, other in zip(device.download(sent), sent, strict=True):
        assert one.shape == other.shape
        same_bits = [x.contiguous().view(torch.uint8) for x in (one.to(other.dtype), other)]
        assert torch.equal(*same_bits)
    assert len(copies) == 1


def test_what_is_loaded_is_left_out_of_garbage_collection_for_a_while() -> None:
    gc.unfreeze()
    try:
        with collect_the_new():
            assert gc.get_freeze_count() > 1000
        assert gc.get_freeze_count() == 0
        gc.freeze()
        with collect_the_new():
            pass
        assert gc.get_freeze_count() > 1000, "what a program froze stays frozen"
    finally:
        gc.freeze()  # as `tests/conftest.py` does
