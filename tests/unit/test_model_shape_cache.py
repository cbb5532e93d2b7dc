"""The cache of batch-invariant shapes: which circumstances share a result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch

import foredraft
from foredraft import loading
from foredraft.kernels.compilation import library
from foredraft.model.decoder import Decoder
from foredraft.model.layers import RowSpan
from foredraft.model.runner import invariant_shapes, shape_cache
from foredraft.model.runner.invariant_shapes import FALLBACK, InvariantShapes, probe_shapes
from foredraft.model.weights import load_decoder
from tests.support.checkpoints import save_checkpoint

CPU = torch.device("cpu")
FOUND = InvariantShapes((1, 2, 8, 64), RowSpan(4, 64, 4), length_quantum=256, apart=True)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    library()  # the kernels come from the cache of all tests
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def outline(tmp_path: Path) -> Decoder:
    return load_decoder(save_checkpoint(tmp_path / "model"), "meta")


def shapes_and_probes(outline: Decoder, finds: InvariantShapes = FOUND) -> tuple[InvariantShapes, int]:
    with patch.object(shape_cache, "probe_shapes", return_value=finds) as probe:
        return shape_cache.cached_shapes(outline, CPU), probe.call_count


def only_file(folder: Path) -> Path:
    [path] = folder.rglob("*.*")
    return path


def test_shapes_are_probed_once_and_kept(outline: Decoder, folder: Path) -> None:
    assert shapes_and_probes(outline) == (FOUND, 1)
    other = replace(FOUND, apart=False)
    assert shapes_and_probes(outline, other) == (FOUND, 0)
    assert only_file(folder).suffix == ".json"


CIRCUMSTANCES: dict[str, Callable[[pytest.MonkeyPatch, Decoder], None]] = {
    "threads": lambda monkey, _: monkey.setattr(torch, "get_num_threads", lambda: 3),
    "torch": lambda monkey, _: monkey.setattr(torch, "__version__", "2.99"),
    "capability": lambda monkey, _: monkey.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "SSE"),
    "environment": lambda monkey, _: monkey.setenv("ONEDNN_MAX_CPU_ISA", "AVX2"),
    "packing": lambda monkey, _: monkey.setattr(shape_cache, "unpacked_because", lambda *_: "for a test"),
    "code": lambda monkey, _: monkey.setattr(shape_cache, "code_digest", lambda: "another"),
    "dtype": lambda monkey, outline: monkey.setattr(outline, "dtype", torch.bfloat16),
    "shape": lambda monkey, outline: monkey.setattr(
        outline, "spec", replace(outline.spec, intermediate_size=128)
    ),
}


@pytest.mark.parametrize("name", CIRCUMSTANCES)
def test_other_circumstances_are_probed_again(
    name: str, outline: Decoder, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes_and_probes(outline)
    CIRCUMSTANCES[name](monkeypatch, outline)
    other = replace(FOUND, apart=False)
    assert shapes_and_probes(outline, other) == (other, 1)
    assert len(list(folder.rglob("*.json"))) == 2


def test_the_fallback_is_not_kept(outline: Decoder, folder: Path) -> None:
    assert shapes_and_probes(outline, FALLBACK) == (FALLBACK, 1)
    assert shapes_and_probes(outline, FALLBACK) == (FALLBACK, 1)
    assert not folder.exists()


@pytest.mark.heavy
def test_loading_twice_probes_once_and_confirms_twice(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe, confirm = Mock(wraps=probe_shapes), Mock(wraps=invariant_shapes._confirmed_buckets)
    monkeypatch.setattr(loading.runners, "unserved_because", lambda *_: "for a test")
    monkeypatch.setattr(shape_cache, "probe_shapes", probe)
    monkeypatch.setattr(invariant_shapes, "_confirmed_buckets", confirm)
    model = save_checkpoint(tmp_path / "model")
    one, two = (
        foredraft.load(model, device="cpu", max_batch=1, max_length=512).loaded.runner.shapes
        for _ in range(2)
    )
    assert one == two and one.found
    assert (probe.call_count, confirm.call_count) == (1, 2)
