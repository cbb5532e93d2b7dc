"""Batch-invariant shapes: a column's bits do not depend on its pass, and the self-check keeps only shapes that agree."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import foredraft
from foredraft import loading
from foredraft.errors import CheckpointError
from foredraft.kernels.compilation import library
from foredraft.model import attention
from foredraft.model.decoder import Decoder
from foredraft.model.layers import Linear, Product, RowSpan, product
from foredraft.model.runner import Runner, compiled, shape_cache
from foredraft.model.runner import invariant_shapes as shapes_module
from foredraft.model.runner.compiled import PackedLinear, _packed, pack
from foredraft.model.runner.invariant_shapes import (
    ANY_SHAPE,
    FALLBACK,
    InvariantShapes,
    find_shapes,
    probe_shapes,
)
from foredraft.model.runner.probes import ProductProbe
from foredraft.model.spec import ModelSpec
from foredraft.model.weights import load_decoder
from tests.support.caches import held
from tests.support.checkpoints import save_checkpoint, save_variant

# wide enough that libraries choose different kernels for different shapes, as on real models
WIDE = {"hidden_size": 256, "intermediate_size": 512}
WINDOW = {"sliding_window": 200}
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}
HEADS = ("num_attention_heads", "num_key_value_heads")
SIZES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 320, "intermediate_size": 864} | dict.fromkeys(HEADS, 5),
    "qwen3": {**WIDE, "head_dim": 64},
    "gemma2": {**WIDE, **WINDOW, "head_dim": 64},
    "gemma3": {**WIDE, **WINDOW, "head_dim": 64},
    "cohere2": {**WIDE, **WINDOW},
    "gpt2": {"hidden_size": 256, "n_inner": 512},
    "gpt_neox": WIDE,
    "olmo3": {**WIDE, **WINDOW},
    "granite": WIDE,
    "ministral3": {**WIDE, "head_dim": 64},
    "phi3": {**WIDE, "rope_parameters": PARTIAL},
    "smollm3": WIDE,
    "gemma4": {**WIDE, **WINDOW, "head_dim": 64, "global_head_dim": 128, "hidden_size_per_layer_input": 64},
}
START = 240  # wide passes cross the first quantum of 256


@pytest.fixture(params=[1, pytest.param(2, marks=pytest.mark.slow)], ids="{}-threads".format, scope="module")
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["float32", "bfloat16", "float16"], scope="module")
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    chosen: torch.dtype = getattr(torch, request.param)
    return chosen


@pytest.fixture(params=SIZES, scope="module")
def runner(
    request: pytest.FixtureRequest,
    dtype: torch.dtype,
    threads: None,
    tmp_path_factory: pytest.TempPathFactory,
) -> Runner:
    folder = save_checkpoint(
        tmp_path_factory.mktemp("model"), request.param, initializer_range=0.1, **SIZES[request.param]
    )
    return Runner(load_decoder(folder, dtype=dtype))


def prefilled(runner: Runner, rows: int, positions: int, seed: int) -> tuple[Any, Tensor]:
    """Return a cache full of garbage, and the tokens of a text."""
    cache = runner.new_cache(rows, positions)
    ids = torch.randint(3, 97, (1, START + 64), generator=torch.Generator().manual_seed(1))
    for plane in cache.planes:
        plane.copy_(torch.randn(plane[:1, :1, :1].shape, generator=torch.Generator().manual_seed(seed)))
    return cache, ids


def run(runner: Runner, width: int, place: int, batch: int, far: int, seed: int) -> Tensor:
    """Return the logits [T, V] of a row at `place` in a batch, one row of which starts at position `far`.

    Each seed gives other garbage and other neighbours.
    """
    cache, ids = prefilled(runner, batch, 1500, seed)
    runner.prefill(cache, place, ids[0, :START].tolist(), 0)
    others = torch.randint(3, 97, (batch, width), generator=torch.Generator().manual_seed(seed))
    others[place] = ids[0, START : START + width]
    starts = [100 + 13 * row for row in range(batch)]
    starts[place - 1] = far
    starts[place] = START
    out = runner.forward(cache, others, starts).logits
    assert out is not None
    return out[place]


@pytest.mark.heavy
def test_the_bits_of_a_column_do_not_depend_on_its_pass(runner: Runner) -> None:
    """Greedy losslessness needs it: plain steps, a verifying pass and a batch see the same logits."""
    shapes = runner.shapes
    assert (
        shapes.found
        and 64 in shapes.query_buckets
        and shapes.span is not None
        and shapes.span.low <= 8 <= shapes.span.high
    )
    assert runner.max_queries == max(shapes.query_buckets)
    widest = run(runner, 64, 0, 1, START, 1)
    for width in (1, 5, 8, 33):
        for batch, place, far in ((1, 0, START), (2, 1, 1300), (5, 4, 700)):
            got = run(runner, width, place, batch, far, 7 * width + batch)
            assert torch.equal(got, widest[:width]), f"{width} columns at place {place} of {batch}"
    cache, ids = prefilled(runner, 1, 1500, 5)
    runner.prefill(cache, 0, ids[0, :START].tolist(), 0)
    for column in range(20):
        out = runner.forward(cache, ids[:, START + column : START + column + 1], [START + column]).logits
        assert out is not None and torch.equal(out[0, 0], widest[column]), f"plain step {column}"
    kept = []
    for row, seed in ((0, 0), (2, 9)):
        cache, ids = prefilled(runner, 3, 1500, seed)
        runner.prefill(cache, row, ids[0, :256].tolist(), 0)
        runner.prefill(cache, row, ids[0, 256:290].tolist(), 256)
        kept.append(held(cache, row, 290))
    assert torch.equal(*kept), "prefill in another row"


def test_passes_are_padded_to_buckets_and_quanta() -> None:
    shapes = InvariantShapes((4, 8, 16), RowSpan(4, 16), length_quantum=512)
    assert [shapes.queries(width, 1) for width in (1, 4, 5, 16)] == [4, 4, 8, 16]
    assert [shapes.length(positions) for positions in (1, 512, 513)] == [512, 512, 1024]
    assert replace(shapes, query_buckets=(1, 2, 8)).queries(1, 1) == 8  # 1 x 2 rows are too few
    assert replace(shapes, query_buckets=(1, 2, 8)).queries(1, 4) == 1
    assert (
        replace(shapes, query_buckets=(1, 2), span=RowSpan(9, 16)).queries(1, 1) == 1
    )  # the products pad the row
    assert ANY_SHAPE.queries(37, 1) == 37
    assert ANY_SHAPE.span is None


@pytest.mark.parametrize("rows", [1, 3, 4, 7, 8, 9, 15, 16, 17, 40])
@pytest.mark.parametrize("span", [RowSpan(4, 16), RowSpan(8, 8, 8), RowSpan(4, 16, 4), RowSpan(1, 64)])
def test_products_are_padded_and_cut_to_the_span(rows: int, span: RowSpan) -> None:
    seen: list[int] = []

    class Watched(Linear):
        def __call__(self, x: Tensor) -> Tensor:
            seen.append(x.shape[0])
            return x @ self.weight.T

    weights = Watched(torch.randn(5, 6))
    x = torch.randn(rows, 6)
    torch.testing.assert_close(product(weights, x, span), x @ weights.weight.T)
    assert all(span.low <= count <= span.high and count % span.step == 0 for count in seen)


class FussyLinear(Linear):
    """A product whose bits depend on its row count, except for the counts in `alike`."""

    alike: frozenset[int] = frozenset()

    def __call__(self, x: Tensor) -> Tensor:
        out = (x[:, None] * self.weight).sum(-1)  # row by row; even x @ w.T depends on the row count
        return out if x.shape[0] in self.alike else out * (1 + 1e-3 * x.shape[0])


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load_decoder(save_checkpoint(tmp_path_factory.mktemp("model")))


@pytest.fixture
def fussy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Decoder:
    for module in (compiled, shapes_module):
        monkeypatch.setattr(module, "pack", FussyLinear)
    monkeypatch.setattr(compiled, "unpacked_because", lambda *_: "for a test")
    return load_decoder(save_checkpoint(tmp_path))


@pytest.mark.parametrize(
    ("alike", "expected"),
    [
        (range(3, 65), (3, 64, 1)),
        (range(1, 17), (1, 16, 1)),
        ([*range(4, 17), 20, 24], (4, 24, 1)),
        (range(4, 65, 4), (4, 64, 4)),
        ([8, 16, 24, 32, 48, 64], (8, 64, 8)),
    ],
)
def test_the_span_of_agreeing_row_counts_is_found(
    fussy: Any, monkeypatch: pytest.MonkeyPatch, alike: Any, expected: tuple[int, int, int]
) -> None:
    monkeypatch.setattr(FussyLinear, "alike", frozenset(alike))
    found = find_shapes(fussy)
    assert found.span == RowSpan(*expected)


def test_without_agreeing_row_counts_one_shape_serves_all(
    fussy: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(FussyLinear, "alike", frozenset())
    assert find_shapes(fussy) == FALLBACK
    assert "no two row counts" in caplog.text
    runner = Runner(fussy)
    cache, ids = prefilled(runner, 3, 200, 0)
    one = runner.forward(cache, ids[:, :5], [0]).logits
    other = runner.forward(cache, ids[:, :5].repeat(3, 1), [0, 0, 0]).logits
    assert one is not None and other is not None and torch.equal(one[0], other[2])


Odd = Callable[[int, int, int], bool]


def round_otherwise(monkeypatch: pytest.MonkeyPatch, odd: Odd) -> None:
    original = attention._batch_attention

    def rounding(spec: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        out = original(spec, q, k, v, mask)
        return out * 1.001 if odd(len(q), q.shape[2] // spec.groups, k.shape[2]) else out

    monkeypatch.setattr(attention, "_batch_attention", rounding)


@pytest.mark.parametrize(
    ("odd", "left"),
    [
        (lambda rows, queries, length: queries < 5, lambda shapes: min(shapes.query_buckets) == 5),
        (lambda rows, queries, length: length % 1024 != 0, lambda shapes: shapes.length_quantum == 1024),
        (lambda rows, queries, length: rows != 1, lambda shapes: shapes.apart),
    ],
    ids=["narrow passes", "short lengths", "batches"],
)
def test_shapes_at_which_attention_differs_are_dropped(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, odd: Odd, left: Callable[[InvariantShapes], bool]
) -> None:
    round_otherwise(monkeypatch, odd)
    found = find_shapes(decoder)
    assert found.found and left(found)


@pytest.mark.parametrize(
    ("odd", "left"),
    [
        (lambda rows, queries, length: rows == 32, "apart"),
        (lambda rows, queries, length: rows > 1 and length > 5000, "apart"),
        (lambda rows, queries, length: length > 6000, "none"),
        (lambda rows, queries, length: length > 5000 and queries < 5, "wide"),
    ],
    ids=["32 rows", "a batch over thousands", "thousands", "thousands and queries"],
)
def test_a_gpu_is_probed_at_what_its_batches_reach(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, odd: Odd, left: str
) -> None:
    """Here on a CPU, which as itself is not: loading would take longer."""
    whole = probe_shapes(decoder, decoder.device)
    round_otherwise(monkeypatch, odd)
    assert probe_shapes(decoder, decoder.device) == whole
    monkeypatch.setitem(shapes_module.REACH, "cpu", shapes_module.REACH["cuda"])
    found = probe_shapes(decoder, decoder.device)
    assert found.found == (left != "none") and found.apart == (left != "wide")
    if left == "wide":
        assert found == replace(whole, query_buckets=tuple(n for n in whole.query_buckets if n >= 5))


def test_without_agreeing_query_counts_one_shape_serves_all(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original = attention._batch_attention
    monkeypatch.setattr(
        attention, "_batch_attention", lambda *a: original(*a) * (1 + 1e-3 * a[1].shape[2] * a[2].shape[2])
    )
    assert find_shapes(decoder) == FALLBACK
    assert "no two query counts" in caplog.text


def of_the_same_kind(weight: Tensor, decoder: Decoder) -> Product:
    """Return a product of the class that the decoder uses for weights of this shape."""
    products = (*decoder.layers[0].products, decoder.output)
    [kind] = {type(loaded) for loaded in products if tuple(loaded.dense().shape) == tuple(weight.shape)}
    return PackedLinear(_packed(weight)) if kind is PackedLinear else Linear(weight)


@pytest.mark.parametrize("dtype_", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", ["llama-gqa-tied", "llama-biases", "qwen3", "gemma2"])
def test_probing_without_weights_equals_probing_with_them(
    variant: str, dtype_: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = load_decoder(save_variant(tmp_path, variant), dtype=dtype_)
    before = probe_shapes(load_decoder(tmp_path, "meta", dtype_), decoder.device)
    assert before.found
    monkeypatch.setattr(shapes_module, "pack", lambda weight: of_the_same_kind(weight, decoder))
    assert probe_shapes(decoder, decoder.device) == before
    assert find_shapes(decoder, before) == find_shapes(decoder)


def test_one_product_is_probed_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights: list[weakref.ref[Tensor]] = []
    products: list[weakref.ref[Tensor]] = []

    def watching(weight: Tensor) -> Product:
        assert not any(held() is not None for held in (*weights, *products))
        made = pack(weight)
        assert isinstance(made, PackedLinear)
        weights.append(weakref.ref(weight))
        products.append(weakref.ref(made.weight))
        return made

    def run(probe: Any, rows: int, reference: int, original: Any = ProductProbe.agrees) -> bool:
        assert weights[-1]() is None
        assert products[-1]() is not None
        return bool(original(probe, rows, reference))

    monkeypatch.setattr(shapes_module, "pack", watching)
    monkeypatch.setattr(ProductProbe, "agrees", run)
    assert probe_shapes(load_decoder(save_checkpoint(tmp_path), "meta"), torch.device("cpu")).found
    assert len(products) == 5


def test_layers_that_differ_in_batches_attend_row_by_row(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    probed = probe_shapes(decoder, decoder.device)
    assert not probed.apart
    original = attention.masked_attention

    def by_batch(spec: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, apart: bool) -> Tensor:
        out = original(spec, q, k, v, mask, apart)
        return out if apart or len(q) == 1 else out * 1.001

    monkeypatch.setattr(attention, "masked_attention", by_batch)
    assert find_shapes(decoder, probed) == replace(probed, apart=True)
    monkeypatch.setattr(attention, "masked_attention", lambda *a: original(*a) * (1 + 1e-3 * a[1].shape[2]))
    assert find_shapes(decoder, probed) == FALLBACK
    assert "model's layers" in caplog.text


def test_only_the_target_is_probed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probed: list[torch.device] = []

    def watching(outline: Decoder, device: torch.device) -> InvariantShapes:
        assert outline.device.type == "meta"
        probed.append(device)
        return probe_shapes(outline, device)

    library()  # the kernels come from the cache of all tests
    monkeypatch.setenv("FOREDRAFT_CACHE", "")
    monkeypatch.setattr(loading.runners, "unserved_because", lambda *_: "for a test")
    monkeypatch.setattr(shape_cache, "probe_shapes", watching)
    folder = save_checkpoint(tmp_path)
    llm = foredraft.load(folder, draft=folder, device="cpu", max_batch=1, max_length=512, policy="fixed")
    assert probed == [torch.device("cpu")]
    assert llm.loaded.runner.shapes.found
    foredraft.load(folder, device="cpu", max_batch=1, max_length=512, deterministic=False)
    assert len(probed) == 1


def test_a_wrong_checkpoint_is_refused_before_it_is_probed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong vocabulary size could need much memory."""
    folder = save_checkpoint(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 10**6}))
    monkeypatch.setattr(shape_cache, "probe_shapes", lambda *_: pytest.fail("probed"))
    with pytest.raises(CheckpointError, match=r"lm_head.weight has shape \[97, 64\]"):
        foredraft.load(folder, device="cpu", max_batch=1, max_length=512)


# --- probes, which show the order of additions that ordinary values hide -------------------------------


COLUMNS, OUTPUTS = 320, 96


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


class SplitLinear(Linear):
    """A product that sums more than 8 rows in two parts, in float32, and so in another order."""

    def __call__(self, x: Tensor) -> Tensor:
        wide, weight = x.float(), self.weight.float()
        parts = [slice(0, COLUMNS)] if x.shape[0] <= 8 else [slice(0, 128), slice(128, COLUMNS)]
        sums = [(wide[:, None, part] * weight[:, part]).sum(-1) for part in parts]
        return torch.stack(sums).sum(0).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_product_probe_shows_the_order_of_additions(dtype: torch.dtype) -> None:
    like = torch.zeros(1, dtype=dtype)
    probe = ProductProbe(SplitLinear, (OUTPUTS, COLUMNS), 16, like, seeded())
    assert probe.agrees(8, 8)
    assert probe.agrees(5, 8)
    assert not probe.agrees(9, 8)
    exact = probe.rows.double() @ probe.product.dense().double().T
    assert exact.abs().max() < 1e-12  # the terms cancel, so the result of a kernel is its rounding error


def test_a_kernel_that_splits_long_contexts_is_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel computes in bfloat16, whose rounding hides most differences."""

    def blockwise(spec: ModelSpec, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = q.double() @ k.double().transpose(2, 3) * spec.attention_scale + mask
        weights = torch.softmax(scores, -1).float()
        size = 64 if k.shape[2] > 512 else 96
        parts = [
            (w.double() @ x.double()).float()
            for w, x in zip(weights.split(size, -1), v.split(size, 2), strict=True)
        ]
        total = torch.zeros_like(parts[0])
        for part in parts:
            total = total + part
        return total.to(q.dtype)

    monkeypatch.setattr(attention, "_batch_attention", blockwise)
    found = find_shapes(load_decoder(save_checkpoint(tmp_path, dtype=torch.bfloat16)))
    assert found == FALLBACK or found.length_quantum == 1024
