"""The cache of batch-invariant shapes: which circumstances share a result, and which files are not believed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import foredraft
from foredraft import loading
from foredraft.kernels.compilation import library
from foredraft.model.decoder import Decoder
from foredraft.model.runner import InvariantShapes, cached_shapes, invariant_shapes, probe_shapes, shape_cache
from foredraft.model.runner.invariant_shapes import FALLBACK
from foredraft.model.weights import load_decoder
from tests.support.checkpoints import save_checkpoint
from tests.support.foreign import replace_document

CPU = torch.device("cpu")
FOUND = InvariantShapes((1, 2, 8, 64), row_low=4, row_high=64, length_quantum=256, row_step=4, apart=True)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    library()  # the kernels come from the cache of all tests
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def outline(tmp_path: Path) -> Decoder:
    return load_decoder(save_checkpoint(tmp_path / "model"), "meta")


def shapes_and_probes(outline: Decoder, finds: InvariantShapes = FOUND) -> tuple[InvariantShapes, int]:
    probe = Mock(return_value=finds)
    return cached_shapes(outline, CPU, probe), probe.call_count


def only_file(folder: Path) -> Path:
    [path] = folder.rglob("*.*")
    return path


def test_shapes_are_probed_once_and_kept(outline: Decoder, folder: Path) -> None:
    assert shapes_and_probes(outline) == (FOUND, 1)
    other = replace(FOUND, apart=False)
    assert shapes_and_probes(outline, other) == (FOUND, 0)
    assert only_file(folder).suffix == ".json"


CIRCUMSTANCES: dict[str, Callable[[pytest.MonkeyPatch, Decoder], None]] = {
    "threads": lambda patch, _: patch.setattr(torch, "get_num_threads", lambda: 3),
    "torch": lambda patch, _: patch.setattr(torch, "__version__", "2.99"),
    "capability": lambda patch, _: patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "SSE"),
    "environment": lambda patch, _: patch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2"),
    "packing": lambda patch, _: patch.setattr(shape_cache, "packs", lambda *_: None),
    "code": lambda patch, _: patch.setattr(shape_cache, "CODE", (shape_cache,)),
    "dtype": lambda patch, outline: patch.setattr(outline, "dtype", torch.bfloat16),
    "shape": lambda patch, outline: patch.setattr(
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


CHANGES: list[dict[str, Any]] = [
    *({"query_buckets": value} for value in ([], None, [1, 7], [8, 1])),
    *({"row_low": value} for value in (0, 16, 4.0)),
    *({"length_quantum": value} for value in (1, "256")),
    *({key: value} for key, value in {"row_high": 10**9, "row_step": 3, "apart": 1, "found": False}.items()),
    {"more": 1},
]


@pytest.mark.parametrize("document", ["word", [], {}, {"query_buckets": [1, 8]}, *CHANGES], ids=str)
def test_implausible_documents_are_probed_again_and_replaced(
    document: Any, outline: Decoder, folder: Path
) -> None:
    shapes_and_probes(outline)
    path = only_file(folder)
    whole = path.read_text()
    content = json.loads(whole)
    changed = content["document"] | document if document in CHANGES else document
    replace_document(path, changed)
    assert shapes_and_probes(outline)[1] == 1
    assert path.read_text() == whole


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
    monkeypatch.setattr(loading.runners, "probe_shapes", probe)
    monkeypatch.setattr(invariant_shapes, "_confirmed_buckets", confirm)
    model = save_checkpoint(tmp_path / "model")
    one, two = (
        foredraft.load(model, device="cpu", max_batch=1, max_length=512).loaded.runner.shapes
        for _ in range(2)
    )
    assert one == two and one.found
    assert (probe.call_count, confirm.call_count) == (1, 2)
