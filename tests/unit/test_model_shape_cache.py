"""The cache of batch-invariant shapes: which circumstances share a result, and which files are not believed.

These tests fail where the key lacks the threads, the dtype or the code, where shapes are accepted that probing
cannot find, and where the fallback is kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import foredraft
from foredraft import loading
from foredraft.model.decoder import Decoder
from foredraft.model.runner import InvariantShapes, cached_shapes, probe_shapes, shape_cache
from foredraft.model.runner.invariant_shapes import FALLBACK
from foredraft.model.weights import load_decoder
from tests.support.cache_files import replace_document
from tests.support.checkpoints import save_checkpoint

CPU = torch.device("cpu")
FOUND = InvariantShapes((1, 2, 8, 64), row_low=4, row_high=64, length_quantum=256, row_step=4, apart=True)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def outline(tmp_path: Path) -> Decoder:
    return load_decoder(save_checkpoint(tmp_path / "model"), "meta")


class Probe:
    def __init__(self, finds: InvariantShapes = FOUND) -> None:
        self.finds, self.calls = finds, 0

    def __call__(self, outline: Decoder, device: torch.device) -> InvariantShapes:
        self.calls += 1
        return self.finds


def shapes_and_probes(outline: Decoder, finds: InvariantShapes = FOUND) -> tuple[InvariantShapes, int]:
    """Return the cached shapes, and how often they were probed."""
    probe = Probe(finds)
    return cached_shapes(outline, CPU, probe), probe.calls


def only_file(folder: Path) -> Path:
    [path] = folder.rglob("*.*")
    return path


def test_shapes_are_probed_once_and_kept(outline: Decoder, folder: Path) -> None:
    assert shapes_and_probes(outline) == (FOUND, 1)
    other = replace(FOUND, apart=False)
    assert shapes_and_probes(outline, other) == (FOUND, 0)
    assert only_file(folder).suffix == ".json"


def test_shapes_survive_a_round_trip(outline: Decoder, folder: Path) -> None:
    found = cached_shapes(outline, CPU, probe_shapes)
    assert shapes_and_probes(outline) == (found, 0)


def change_threads(monkeypatch: pytest.MonkeyPatch, outline: Decoder) -> Decoder:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    return outline


def change_torch(monkeypatch: pytest.MonkeyPatch, outline: Decoder) -> Decoder:
    monkeypatch.setattr(torch, "__version__", "2.99")
    return outline


def change_capability(monkeypatch: pytest.MonkeyPatch, outline: Decoder) -> Decoder:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "SSE")
    return outline


def change_environment(monkeypatch: pytest.MonkeyPatch, outline: Decoder) -> Decoder:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    return outline


def change_packing(monkeypatch: pytest.MonkeyPatch, outline: Decoder) -> Decoder:
    monkeypatch.setattr(shape_cache, "packs", lambda *_: None)
    return outline


def change_code(monkeypatch: pytest.MonkeyPatch, outline: Decoder) -> Decoder:
    monkeypatch.setattr(shape_cache, "CODE", (shape_cache,))
    return outline


def change_dtype(monkeypatch: pytest.MonkeyPatch, outline: Decoder) -> Decoder:
    monkeypatch.setattr(outline, "dtype", torch.bfloat16)
    return outline


def change_shape(monkeypatch: pytest.MonkeyPatch, outline: Decoder) -> Decoder:
    monkeypatch.setattr(outline, "spec", replace(outline.spec, intermediate_size=128))
    return outline


@pytest.mark.parametrize(
    "change",
    [
        change_threads,
        change_torch,
        change_capability,
        change_environment,
        change_packing,
        change_code,
        change_dtype,
        change_shape,
    ],
)
def test_other_circumstances_are_probed_again(
    change: Callable[[pytest.MonkeyPatch, Decoder], Decoder],
    outline: Decoder,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shapes_and_probes(outline)
    other = replace(FOUND, apart=False)
    assert shapes_and_probes(change(monkeypatch, outline), other) == (other, 1)
    assert len(list(folder.rglob("*.json"))) == 2


CHANGES: tuple[dict[str, Any], ...] = (
    {"query_buckets": []},
    {"query_buckets": None},
    {"query_buckets": [1, 7]},
    {"query_buckets": [8, 1]},
    {"row_low": 0},
    {"row_low": 16},
    {"row_high": 10**9},
    {"row_step": 3},
    {"length_quantum": 1},
    {"length_quantum": "256"},
    {"row_low": 4.0},
    {"apart": 1},
    {"found": False},
    {"more": 1},
)


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


def test_loading_twice_probes_once_and_confirms_twice(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from foredraft.model.runner import invariant_shapes

    probes: list[Any] = []
    confirmed: list[Any] = []
    confirm = invariant_shapes._confirmed_buckets
    monkeypatch.setattr(loading.runners, "unserved_because", lambda *_: "for a test")
    monkeypatch.setattr(loading.runners, "probe_shapes", lambda *a: probes.append(a) or probe_shapes(*a))
    monkeypatch.setattr(invariant_shapes, "_confirmed_buckets", lambda *a: confirmed.append(a) or confirm(*a))
    model = save_checkpoint(tmp_path / "model")
    found = [
        foredraft.load(model, device="cpu", max_batch=1, max_length=512).loaded.runner.shapes
        for _ in range(2)
    ]
    assert found[0] == found[1]
    assert (len(probes), len(confirmed)) == (1, 2)
