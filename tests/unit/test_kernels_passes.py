"""Forward passes of the C kernels: equal to PyTorch operators, and the same bits at every shape and thread count."""

from __future__ import annotations

import functools
import itertools
import math
import platform
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft import kernels
from foredraft.model.cache import KVCache
from foredraft.model.decoder import Decoder
from foredraft.model.runner import Resume, Runner, unserved_because
from foredraft.model.runner.native.products import NativeLinear, pack_native
from foredraft.model.spec import Plan
from foredraft.model.weights import load_decoder
from tests.support import variants_norms
from tests.support.caches import dense
from tests.support.checkpoints import VARIANTS, save_checkpoint, save_variant
from tests.support.compiling import QUICK, compile_anew

pytestmark = pytest.mark.skipif(kernels.library() is None, reason="no C compiler")

# heads of two shapes, keys and values that layers share, inputs by layer
GEMMA4 = ("gemma4-k-eq-v", "gemma4-shared", "gemma4-double-wide", "gemma4-unified-shared", "gemma4-unified")
FAMILIES = (
    *"llama mistral qwen2 qwen3 gemma2 gemma3 granite ministral3 phi3 smollm3".split(),
    *("opt-sums-normed", "stablelm-head-norms", *variants_norms.FAMILIES, *GEMMA4),
)
PARTLY_ROTATED = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}
PUBLISHED_HEADS = {"head_dim": 256, "global_head_dim": 512, "num_attention_heads": 2}
OPTIONS: dict[str, dict[str, Any]] = {
    **{family: {"sliding_window": 24} for family in ("mistral", "gemma2", "gemma3")},
    "phi3": {"rope_parameters": PARTLY_ROTATED},
    "gemma4-unified": {
        **PUBLISHED_HEADS,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CPU = torch.device("cpu")
TOKENS = torch.randint(3, 97, (4, 90), generator=torch.Generator().manual_seed(0))


@functools.cache
def decoders(family: str, dtype: torch.dtype) -> tuple[Decoder, Decoder]:
    """Load one checkpoint of a family or a variant for the kernels, and for PyTorch operators."""
    more = dict(OPTIONS.get(family, {}))
    if VARIANTS[family][0] not in variants_norms.OWN_HEADS and family not in GEMMA4:
        more["num_key_value_heads"] = 2
    with tempfile.TemporaryDirectory() as temporary:
        folder = save_variant(Path(temporary), family, **more)
        return load_decoder(folder, dtype=dtype, native=True), load_decoder(folder, dtype=dtype)


def runners(family: str, dtype: torch.dtype) -> tuple[Runner, Runner]:
    native, plain = (Runner(decoder, deterministic=False) for decoder in decoders(family, dtype))
    assert native.by_kernels and not plain.by_kernels
    return native, plain


def logits_of(runner: Runner, cache: KVCache, tokens: Tensor, starts: list[int], **more: object) -> Tensor:
    logits = runner.forward(cache, tokens, starts, **more).logits  # type: ignore[arg-type]
    assert logits is not None
    return logits


def text_logits(runner: Runner, widths: tuple[int, ...], tokens: Tensor = TOKENS) -> Tensor:
    """Return the logits [B, T, V] of all rows in one batch, in passes of these widths."""
    cache, parts, start = runner.new_cache(len(tokens), 200), [], 0
    for width in widths:
        parts.append(logits_of(runner, cache, tokens[:, start : start + width], [start] * len(tokens)))
        start += width
    return torch.cat(parts, 1)


def assert_near(got: Tensor, want: Tensor, most: float) -> None:
    assert (got - want).abs().max() <= most * want.abs().max()


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_pytorch(family: str) -> None:
    got, want = (text_logits(runner, (60, 30)) for runner in runners(family, torch.float32))
    assert_near(got, want, 5e-5 if family in GEMMA4 else 2e-5)


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("family", FAMILIES)
def test_16_bits_are_as_accurate_as_in_pytorch(family: str, dtype: torch.dtype) -> None:
    exact = text_logits(runners(family, torch.float32)[1], (90,))
    ours, theirs = ((text_logits(each, (90,)) - exact).abs().mean() for each in runners(family, dtype))
    assert ours <= 1.25 * theirs


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_shape_has_the_same_bits(family: str, dtype: torch.dtype) -> None:
    native = decoders(family, dtype)[0]
    assert type(native.output) is NativeLinear and unserved_because(native.spec, CPU, dtype) is None
    runner = Runner(native)
    whole = text_logits(runner, (90,))
    for widths in ((64, 1, 25), (33, 33, 24), (1,) * 20 + (50,) + (1,) * 20):
        assert torch.equal(text_logits(runner, widths), whole), widths
    cache = runner.new_cache(8, 128)  # now each row alone, and then with other neighbours
    for row, start in itertools.product((3, 0, 2, 1), (0, 45)):
        alone = logits_of(runner, cache, TOKENS[row : row + 1, start : start + 45], [start], first_row=row)
        assert torch.equal(alone[0], whole[row, start : start + 45])
    starts = [80, 71, 88, 60]
    stacked = torch.stack([row[start : start + 2] for row, start in zip(TOKENS, starts, strict=True)])
    mixed = logits_of(runner, cache, stacked, starts)
    for row, start in enumerate(starts):
        assert torch.equal(mixed[row], whole[row, start : start + 2])


def test_a_window_longer_than_a_block_of_keys_has_the_same_bits() -> None:
    tokens = torch.randint(3, 97, (1, 160), generator=torch.Generator().manual_seed(1))
    runner = Runner(wide_window())
    assert torch.equal(text_logits(runner, (160,), tokens), text_logits(runner, (64, 65, *(1,) * 31), tokens))


@functools.cache
def wide_window() -> Decoder:
    with tempfile.TemporaryDirectory() as temporary:
        return load_decoder(save_checkpoint(Path(temporary), "mistral", sliding_window=70), native=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["gemma2", *GEMMA4])
def test_any_number_of_threads_gives_the_same_bits(family: str, dtype: torch.dtype) -> None:
    runner, threads = Runner(decoders(family, dtype)[0]), torch.get_num_threads()
    try:
        seen = []
        for count in (1, 2, 5, 7):  # 5 and 7 divide neither heads nor queries evenly
            torch.set_num_threads(count)
            seen.append(text_logits(runner, (80, 3, 7)))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(seen[0], other) for other in seen[1:])


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_padding_columns_are_not_computed(family: str) -> None:
    runner = Runner(decoders(family, torch.float32)[0])
    cache, whole = runner.new_cache(4, 128), text_logits(runner, (90,))
    logits_of(runner, cache, TOKENS[:, :40], [0] * 4)
    before = dense(cache)
    counts, idle = [3, 1, 2, 3], [False, False, True, False]
    got = logits_of(runner, cache, TOKENS[:, 40:43], [40] * 4, counts=counts, idle=idle)
    assert got.isfinite().all()
    for row, (count, dummy) in enumerate(zip(counts, idle, strict=True)):
        end = 40 if dummy else 40 + count
        assert torch.equal(got[row, : end - 40], whole[row, 40:end])
        now, then = dense(cache)[:, :, row], before[:, :, row]
        assert torch.equal(now[..., end:, :], then[..., end:, :])
        assert dummy or not torch.equal(now[..., 40:end, :], then[..., 40:end, :])


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_row_may_have_several_groups_of_columns(dtype: torch.dtype) -> None:
    """The groups start and end within blocks of keys, and the last positions come first."""
    decoder, _ = decoders("gemma2", dtype)
    runner, whole = Runner(decoder), text_logits(Runner(decoder), (90,))[2]
    native: Any = runner.backend
    for edges in ((0, 90), (0, 20, 33, 90), (0, 33, 34, 65, 90)):
        runs = list(itertools.pairwise(edges))[::-1]
        order = torch.cat([torch.arange(*run) for run in runs])
        states = decoder.embed(TOKENS[2:3, order])[0].clone()
        columns = [(2, start, stop - start, start) for start, stop in runs]
        cache, layers = runner.new_cache(4, 128), decoder.spec.layers
        native.forward(None, states, cache, columns, (Plan.full(layers), 0, layers))
        assert torch.equal(native.head(states), whole[order])


def test_a_plan_skips_sub_layers() -> None:
    results = []
    for runner in runners("qwen3", torch.float32):
        plan = Plan.full(runner.decoder.spec.layers).without(attention=[1], mlp=[0])
        results.append(logits_of(runner, runner.new_cache(4, 128), TOKENS[:, :30], [0] * 4, plan=plan))
    assert torch.allclose(*results, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["qwen3", *GEMMA4])
def test_a_resumed_pass_and_aux_states_have_the_same_bits(family: str, dtype: torch.dtype) -> None:
    """In Gemma 4, layers above the known states read keys of layers below, and the inputs of their tokens."""
    native = decoders(family, dtype)[0]
    runner, layers = Runner(native), native.spec.layers
    whole, cache, depth = text_logits(runner, (90,)), runner.new_cache(4, 128), layers - 1
    lower = runner.forward(cache, TOKENS, [0] * 4, stop=depth, aux_layers=[depth])
    assert torch.equal(lower.aux_states[depth], lower.hidden)
    resume = Resume(depth, lower.hidden, [90, 0, 40, 89])
    resumed = runner.forward(cache, TOKENS, [0] * 4, resume=resume, aux_layers=[depth, layers])
    assert resumed.logits is not None and torch.equal(resumed.logits, whole)
    assert torch.equal(resumed.aux_states[depth], lower.hidden)
    assert torch.equal(resumed.aux_states[layers], resumed.hidden)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (31, 64), (32, 30), (33, 66), (100, 4), (257, 320)])
def test_products_equal_those_of_float64(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias = (torch.randn(size, generator=generator).to(dtype) for size in (shape, shape[:1]))
    for offset in (None, bias):
        product = pack_native(weight, offset)
        assert product.shape == shape
        for count in (1, 5, 70):
            x = torch.randn(count, shape[1], generator=generator).to(dtype)
            want = x.double() @ weight.double().T + (0 if offset is None else offset.double())
            most = max(1e-5, torch.finfo(dtype).eps)
            assert torch.allclose(product(x).double(), want, rtol=most, atol=1e-4)
    before = weight.clone()
    weight.zero_()
    assert torch.equal(product.dense(), before), "a packed weight is a copy"
    with pytest.raises(AssertionError):  # states of another dtype are refused
        product(torch.randn(2, shape[1]).double())


@pytest.mark.parametrize("activation", ["gelu", "relu", "gelu_fast", "silu"])
def test_activations_are_accurate(activation: str, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "starcoder2", hidden_act=activation, num_hidden_layers=1)
    each = (Runner(load_decoder(folder, native=native), deterministic=False) for native in (True, False))
    assert_near(*(text_logits(runner, (90,)) for runner in each), 5e-6)


@functools.cache
def odd_sizes(native: bool) -> Decoder:
    sizes = {"hidden_size": 72, "intermediate_size": 90, "num_attention_heads": 3, "num_key_value_heads": 1}
    with tempfile.TemporaryDirectory() as folder:
        return load_decoder(save_checkpoint(Path(folder), "starcoder2", **sizes), native=native)


def test_sizes_within_a_vector_equal_those_of_pytorch() -> None:
    each = (Runner(odd_sizes(native), deterministic=False) for native in (True, False))
    assert_near(*(text_logits(runner, (60, 30)) for runner in each), 2e-5)


def test_rows_at_other_positions_equal_those_of_pytorch() -> None:
    tokens = torch.randint(3, 97, (3, 5), generator=torch.Generator().manual_seed(5))
    found = []
    for runner in runners("gpt2", torch.float32):
        cache = runner.new_cache(3, 64)
        for row, length in enumerate((3, 30, 17)):
            runner.prefill(cache, row, tokens[row].repeat(6)[:length].tolist(), 0)
        found.append(logits_of(runner, cache, tokens, [3, 30, 17]))
    assert_near(*found, 2e-5)


@pytest.mark.parametrize("key", [0, 1, 15, 63, 64, 87])
def test_a_nan_key_makes_its_rows_logits_nan(key: int) -> None:
    runner = Runner(decoders("llama", torch.float32)[0])
    cache = runner.new_cache(4, 128)
    logits_of(runner, cache, TOKENS[:, :88], [0] * 4)
    keys, values = cache.read(0, 1, 1, 128)
    cache.write(0, 1, key, keys[0, :, key : key + 1] * math.nan, values[0, :, key : key + 1])
    logits = logits_of(runner, cache, TOKENS[:, 88:], [88] * 4)
    assert logits[1].isnan().all()
    assert logits[[0, 2, 3]].isfinite().all()


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("family", "optimisation"),
    [
        ("gemma3", QUICK),  # -O3 compiles for 16 s
        *(pytest.param(family, "-O3", marks=pytest.mark.slow) for family in ("gemma2", "gemma3", "qwen3")),
    ],
)
def test_the_portable_code_has_the_same_properties(
    family: str, optimisation: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """CPUs without AVX-512 compile it."""
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("every CPU of this kind compiles the same")
    compile_anew(monkeypatch, tmp_path, "-march=x86-64", optimisation)
    test_logits_equal_those_of_pytorch(family)
    for dtype in DTYPES:
        test_every_shape_has_the_same_bits(family, dtype)


@pytest.mark.parametrize(
    ("changes", "device", "dtype", "says"),
    [
        ({}, "cuda", torch.bfloat16, "run on CPUs, and the device is cuda"),
        ({}, "cpu", torch.float64, "compute in float32, bfloat16 and float16, not in float64"),
        ({"head_dim": 600}, "cpu", torch.float32, "take head dimensions up to 512, and the model has 600"),
        (
            {"intermediate_size": 77},
            "cpu",
            torch.bfloat16,
            "need an even width in bfloat16, and a product has 77",
        ),
    ],
    ids=["cuda", "float64", "wide heads", "an odd width"],
)
def test_what_kernels_do_not_run_is_named(changes: Any, device: str, dtype: torch.dtype, says: str) -> None:
    spec = replace(decoders("llama", torch.float32)[0].spec, **changes)
    assert unserved_because(spec, torch.device(device), dtype) == f"the kernels {says}"
