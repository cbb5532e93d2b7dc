"""Uploads to a CPU copy nothing, downloads synchronise once. How uploads to a GPU leave is seen in tests/rehearsal."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

from foredraft.model import memory as device
from foredraft.model.memory import collect_the_new, upload

CPU = torch.device("cpu")


def test_an_upload_to_the_cpu_copies_nothing() -> None:
    mask = torch.tensor([True, False])
    assert upload(mask, CPU) is mask
    assert upload([[1], [2]], CPU, torch.int32).tolist() == [[1], [2]]
    assert upload([True], CPU).dtype == torch.bool


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
