"""Forward passes of the C kernels: equal to PyTorch operators, the same bits at every shape, planted defects."""

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
from foredraft.model.plan import Plan
from foredraft.model.runner import Resume, Runner, unserved_because
from foredraft.model.runner.native import check
from foredraft.model.runner.native.linear import NativeLinear, pack_native
from foredraft.model.weights import load_decoder
from tests.support import variants_norms
from tests.support.caches import dense
from tests.support.checkpoints import VARIANTS, save_checkpoint, save_variant
from tests.support.compiling import QUICK, compile_anew, plant

pytestmark = pytest.mark.skipif(kernels.library() is None, reason="no C compiler")

FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "granite",
    "ministral3",
    "phi3",
    "smollm3",
    "opt-sums-normed",
    "stablelm-head-norms",
    *variants_norms.FAMILIES,
)
DTYPES = (torch.float32, torch.bfloat16)
TOKENS = torch.randint(3, 97, (4, 90), generator=torch.Generator().manual_seed(0))


@functools.cache
def decoders(family: str, dtype: torch.dtype) -> tuple[Decoder, Decoder]:
    """Load one checkpoint of a family or a variant for the kernels, and for PyTorch operators."""
    more: dict[str, Any] = {"sliding_window": 24} if family in ("mistral", "gemma2", "gemma3") else {}
    if family == "phi3":  # a part of each head is rotated
        more = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}}
    if VARIANTS[family][0] not in variants_norms.OWN_HEADS:
        more["num_key_value_heads"] = 2
    with tempfile.TemporaryDirectory() as temporary:
        folder = save_variant(Path(temporary), family, **more)
        return load_decoder(folder, dtype=dtype, native=True), load_decoder(folder, dtype=dtype)


@pytest.fixture(scope="module", autouse=True)
def sound_decoders() -> None:
    """Build all decoders before a test plants a defect: the kernels pack their weights."""
    for family, dtype in itertools.product(FAMILIES, DTYPES):
        decoders(family, dtype)


def logits_of(runner: Runner, cache: KVCache, tokens: Tensor, starts: list[int], **more: object) -> Tensor:
    logits = runner.forward(cache, tokens, starts, **more).logits  # type: ignore[arg-type]
    assert logits is not None
    return logits


def text_logits(runner: Runner, widths: tuple[int, ...]) -> Tensor:
    """Return the logits [B, 90, V] of all rows in one batch, in passes of these widths."""
    cache, parts, start = runner.new_cache(4, 128), [], 0
    for width in widths:
        parts.append(logits_of(runner, cache, TOKENS[:, start : start + width], [start] * 4))
        start += width
    return torch.cat(parts, 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_pytorch(family: str) -> None:
    native, plain = (Runner(decoder, deterministic=False) for decoder in decoders(family, torch.float32))
    got, want = text_logits(native, (60, 30)), text_logits(plain, (60, 30))
    assert (got - want).abs().max() <= 2e-5 * want.abs().max()


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_as_accurate_as_in_pytorch(family: str) -> None:
    native, plain = (Runner(decoder, deterministic=False) for decoder in decoders(family, torch.bfloat16))
    exact = text_logits(Runner(decoders(family, torch.float32)[1], deterministic=False), (90,))
    ours, theirs = ((text_logits(runner, (90,)) - exact).abs().mean() for runner in (native, plain))
    assert ours <= 1.25 * theirs


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_shape_has_the_same_bits(family: str, dtype: torch.dtype) -> None:
    runner = Runner(decoders(family, dtype)[0])
    whole = text_logits(runner, (90,))
    for widths in ((64, 1, 25), (33, 33, 24), (1,) * 20 + (50,) + (1,) * 20):
        assert torch.equal(text_logits(runner, widths), whole), widths
    cache = runner.new_cache(8, 128)  # now each row alone, and then with other neighbours
    for row in (3, 0, 2, 1):
        for start in range(0, 90, 45):
            alone = logits_of(
                runner, cache, TOKENS[row : row + 1, start : start + 45], [start], first_row=row
            )
            assert torch.equal(alone[0], whole[row, start : start + 45])
    starts = [80, 71, 88, 60]
    stacked = torch.stack([row[start : start + 2] for row, start in zip(TOKENS, starts, strict=True)])
    mixed = logits_of(runner, cache, stacked, starts)
    for row, start in enumerate(starts):
        assert torch.equal(mixed[row], whole[row, start : start + 2])


def test_a_window_longer_than_a_block_of_keys_has_the_same_bits() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = save_checkpoint(Path(temporary), "mistral", sliding_window=70)
        runner = Runner(load_decoder(folder, native=True))
    tokens = torch.randint(3, 97, (1, 160), generator=torch.Generator().manual_seed(1))
    seen = []
    for widths in ((160,), (64, 65, *(1,) * 31)):
        cache, parts, start = runner.new_cache(1, 200), [], 0
        for width in widths:
            parts.append(logits_of(runner, cache, tokens[:, start : start + width], [start]))
            start += width
        seen.append(torch.cat(parts, 1))
    assert torch.equal(*seen)


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_number_of_threads_gives_the_same_bits(dtype: torch.dtype) -> None:
    runner, threads = Runner(decoders("gemma2", dtype)[0]), torch.get_num_threads()
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
        real = 0 if dummy else count
        assert torch.equal(got[row, :real], whole[row, 40 : 40 + real])
        assert torch.equal(dense(cache)[:, :, row, :, 40 + real :], before[:, :, row, :, 40 + real :])
        assert real == 0 or not torch.equal(
            dense(cache)[:, :, row, :, 40 : 40 + real], before[:, :, row, :, 40 : 40 + real]
        )


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
        native.forward(None, states, cache, columns, Plan.full(layers), 0, layers)
        assert torch.equal(native.head(states), whole[order])


def test_a_plan_skips_sub_layers_and_a_resumed_pass_joins_states() -> None:
    native, plain = decoders("qwen3", torch.float32)
    plan = Plan.full(native.spec.layers).without(attention=[1], mlp=[0])
    results = []
    for decoder in (native, plain):
        runner = Runner(decoder, deterministic=False)
        cache = runner.new_cache(4, 128)
        results.append(logits_of(runner, cache, TOKENS[:, :30], [0] * 4, plan=plan))
    assert torch.allclose(*results, atol=1e-4)
    runner = Runner(native)
    cache, whole = runner.new_cache(4, 128), text_logits(runner, (90,))
    lower = runner.forward(cache, TOKENS, [0] * 4, stop=1, taps=[1])
    assert torch.equal(lower.taps[1], lower.hidden)
    resumed = runner.forward(
        cache, TOKENS, [0] * 4, resume=Resume(1, lower.hidden, [90, 0, 40, 89]), taps=[1, 2]
    )
    assert resumed.logits is not None
    assert torch.equal(resumed.logits, whole)
    assert torch.equal(resumed.taps[1], lower.hidden)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (31, 64), (32, 30), (33, 66), (100, 4), (257, 320)])
def test_products_equal_those_of_float64(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias = (
        torch.randn(shape, generator=generator).to(dtype),
        torch.randn(shape[0], generator=generator),
    )
    for offset in (None, bias.to(dtype)):
        product = pack_native(weight, offset)
        assert product.shape == shape
        assert torch.equal(product.dense(), weight)
        for count in (1, 5, 70):
            x = torch.randn(count, shape[1], generator=generator).to(dtype)
            want = torch.nn.functional.linear(
                x.double(), weight.double(), None if offset is None else offset.double()
            )
            assert torch.allclose(
                product(x).double(), want, rtol=8e-3 if dtype == torch.bfloat16 else 1e-5, atol=1e-4
            )


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_head_dimension_equals_pytorch(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "llama", head_dim=512, num_key_value_heads=1, num_hidden_layers=1)
    native, plain = (
        Runner(load_decoder(folder, dtype=dtype, native=kernel), deterministic=False)
        for kernel in (True, False)
    )
    got, want = text_logits(native, (90,)), text_logits(plain, (90,))
    assert (got - want).abs().max() <= (2e-5 if dtype == torch.float32 else 5e-2) * want.abs().max()


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


@pytest.mark.parametrize(
    ("family", "optimisation"),
    [
        ("gemma3", "-O1"),  # -O3 compiles for 16 s
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


def test_states_of_another_dtype_are_refused() -> None:
    with pytest.raises(AssertionError):
        pack_native(torch.randn(40, 6), None)(torch.randn(2, 6).bfloat16())


def test_a_packed_weight_is_a_copy() -> None:
    weight = torch.randn(40, 6)
    product, before = pack_native(weight, None), weight.clone()
    weight.zero_()
    assert torch.equal(product.dense(), before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_kernels_run_every_family(family: str, dtype: torch.dtype) -> None:
    native, _ = decoders(family, dtype)
    assert isinstance(native.output, NativeLinear)
    assert unserved_because(native.spec, torch.device("cpu"), dtype) is None


def test_the_kernels_run_neither_float16_nor_a_gpu() -> None:
    spec = decoders("llama", torch.float32)[0].spec
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert unserved_because(spec, cuda, torch.bfloat16) == "the kernels run on CPUs, and the device is cuda"
    assert unserved_because(spec, cpu, torch.float16) == (
        "the kernels compute in float32 and bfloat16, not in float16"
    )
    wide = replace(spec, head_dim=600)
    assert unserved_because(wide, cpu, torch.float32) == (
        "the kernels take head dimensions up to 512, and the model has 600"
    )
    odd = replace(spec, intermediate_size=77)
    assert unserved_because(odd, cpu, torch.bfloat16) == (
        "the kernels need an even width in bfloat16, and a product has 77"
    )


# (name: old source, new source). WRONG values differ from PyTorch; defects of BITS show only in the last bits, and
# the self-check or another shape catches them; defects of THREADS show at another number of threads.
WRONG = {
    "embedding scale left out": ("m->embedding_scale != 0 && i < n", "0"),
    "a query sees the next position": ("I seen = key <= (int32_t)at;", "I seen = key <= (int32_t)at + 1;"),
    "window edge off by one": ("seen &= key > (int32_t)(at - window)", "seen &= key >= (int32_t)(at - window)"),
    "soft-cap of scores left out": ("if (m->softcap != 0)", "if (0)"),
    "last channels of a block not written": ("if (left <= 0) break;", "if (left <= LANES) break;"),
    "keys stored before their rotation": ("NAME(rotate)(to, h < heads_per_kv ? queries : keys, l->rotated);", "if (h < heads_per_kv) NAME(rotate)(to, queries, l->rotated);"),
    "attended length of the first group": ("at[r] = p->start[rows.group] + t;", "at[r] = p->start[0] + t;"),
    "key in the lane of its neighbour": ("words * BLOCK + slot % BLOCK;", "words * BLOCK + (slot ^ 1) % BLOCK;"),
    "block of keys written from its end": ("slot / BLOCK * words * BLOCK + slot % BLOCK", "slot / BLOCK * words * BLOCK + (31 - slot % BLOCK)"),
    "words of a key in reverse": ("to + w * BLOCK, key + w * WORD", "to + (words - 1 - w) * BLOCK, key + w * WORD"),
    "queries rotated as keys are": ("h < heads_per_kv ? queries : keys, l->rotated", "keys, l->rotated"),
    "the whole head rotated": ("queries : keys, l->rotated);", "queries : keys, dim);"),
    "factor on what a sub-layer adds left out": ("if (linear->scale != 0) v = NAME(rounded)(v * splat(linear->scale));", ";"),
    "factor on logits left out": ("if (linear->scale != 0) v *= splat(linear->scale);", ";"),
    "norm of keys left out": ("h == heads_per_kv ? &l->k : &l->v", "h == heads_per_kv ? &l->q : &l->v"),
    "gate and up projection swapped": ("activation(NAME(read_some)(row + i, n), m->activation)", "activation(NAME(read_some)(row + inner + i, n), m->activation)"),
}  # fmt: skip
THREADS = {
    "a key head of the next piece stored as well": ("if (!commits(w)) continue;\n        for (int64_t unit = piece.from; unit < piece.to; unit++) {\n            const KeyRun run = key_run(l, p, unit);", "if (!commits(w)) continue;\n        for (int64_t unit = piece.from; unit < piece.to; unit++) {\n            const KeyRun run = key_run(l, p, unit + 1 < units ? unit + 1 : unit);"),
    "query rows computed again by the next thread": ("query = index % query_rows(m, l, p, g);", "query = index % query_rows(m, l, p, g) / QUERIES * QUERIES;"),
}  # fmt: skip
BITS = {
    "blocks of keys start where the window does": ("reach > 0 ? reach / KEYS * KEYS : 0", "reach > 0 ? reach : 0"),
    "a single row summed in reverse": (
        "for (int k = 0; k < words; k++) {\n        U low, high;",
        "for (int j = 0, k; j < words; j++) {\n        k = R == 1 ? words - 1 - j : j;\n        U low, high;",
    ),
    "softmax maximum that depends on the neighbours": ("top[r] = -FLT_MAX;", "top[r] = R;"),
}  # fmt: skip


def check_values() -> None:
    for family in ("llama", "qwen3", "gemma2", "gemma3", "granite", "ministral3", "phi3", "smollm3"):
        test_logits_equal_those_of_pytorch(family)
    test_padding_columns_are_not_computed("llama")
    test_every_shape_has_the_same_bits("llama", torch.float32)


def test_the_checks_pass_where_only_the_optimisation_differs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The defects below are compiled so."""
    compile_anew(monkeypatch, tmp_path, QUICK)
    check_values()
    check_bits()
    test_any_number_of_threads_gives_the_same_bits(torch.float32)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_value_is_caught(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plant(monkeypatch, tmp_path, *WRONG[name])
    with pytest.raises(AssertionError):
        check_values()


def check_bits() -> None:
    test_every_shape_has_the_same_bits("mistral", torch.float32)
    test_a_window_longer_than_a_block_of_keys_has_the_same_bits()


@pytest.mark.parametrize("name", BITS)
def test_bits_that_depend_on_the_shape_are_caught(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plant(monkeypatch, tmp_path, *BITS[name])
    check.unserved_because.cache_clear()
    spec = decoders("mistral", torch.float32)[0].spec
    try:
        caught = unserved_because(spec, torch.device("cpu"), torch.float32) is not None
    finally:
        check.unserved_because.cache_clear()
    if not caught:
        with pytest.raises(AssertionError):
            check_bits()


@pytest.mark.parametrize("name", THREADS)
def test_bits_that_depend_on_the_threads_are_caught(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plant(monkeypatch, tmp_path, *THREADS[name])
    with pytest.raises(AssertionError):
        test_any_number_of_threads_gives_the_same_bits(torch.float32)
