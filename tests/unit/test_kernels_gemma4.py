"""The C kernels over heads of two shapes, shared keys and values, and inputs by layer: as PyTorch, same bits anywhere."""

from __future__ import annotations

import functools
import itertools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from foredraft import kernels
from foredraft.model.decoder import Decoder
from foredraft.model.runner import DraftInputs, Resume, Runner, unserved_because
from foredraft.model.weights import load_decoder
from tests.support.checkpoints import VARIANTS, save_checkpoint
from tests.support.compiling import plant
from tests.unit.test_kernels_passes import TOKENS, logits_of, text_logits

pytestmark = pytest.mark.skipif(kernels.library() is None, reason="no C compiler")

DTYPES = (torch.float32, torch.bfloat16)
LARGE: dict[str, Any] = {"head_dim": 256, "global_head_dim": 512, "num_hidden_layers": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        name: VARIANTS[name]
        for name in ("gemma4-k-eq-v", "gemma4-shared", "gemma4-double-wide", "gemma4-unified-shared")
    },
    "the published sizes of heads": (
        "gemma4-unified",
        {**LARGE, "layer_types": ["sliding_attention", "full_attention"], "num_attention_heads": 2},
    ),
}


@functools.cache
def decoders(name: str, dtype: torch.dtype) -> tuple[Decoder, Decoder]:
    """Load one checkpoint for the kernels, and for PyTorch operators."""
    family, keys = MODELS[name]
    with tempfile.TemporaryDirectory() as temporary:
        folder = save_checkpoint(Path(temporary), family, **keys)
        return load_decoder(folder, dtype=dtype, native=True), load_decoder(folder, dtype=dtype)


@pytest.fixture(scope="module", autouse=True)
def sound_decoders() -> None:
    """Build all decoders before a test plants a defect: the kernels pack their weights."""
    for name, dtype in itertools.product(MODELS, DTYPES):
        decoders(name, dtype)


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_pytorch(name: str) -> None:
    native, plain = (Runner(decoder, deterministic=False) for decoder in decoders(name, torch.float32))
    assert native.by_kernels and not plain.by_kernels
    got, want = text_logits(native, (60, 30)), text_logits(plain, (60, 30))
    assert (got - want).abs().max() <= 5e-5 * want.abs().max()


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_is_as_accurate_as_in_pytorch(name: str) -> None:
    native, plain = (Runner(decoder, deterministic=False) for decoder in decoders(name, torch.bfloat16))
    exact = text_logits(Runner(decoders(name, torch.float32)[1], deterministic=False), (90,))
    ours, theirs = ((text_logits(runner, (90,)) - exact).abs().mean() for runner in (native, plain))
    assert ours <= 1.25 * theirs


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_every_shape_and_number_of_threads_has_the_same_bits(name: str, dtype: torch.dtype) -> None:
    native = decoders(name, dtype)[0]
    assert unserved_because(native.spec, torch.device("cpu"), dtype) is None
    runner, threads = Runner(native), torch.get_num_threads()
    whole = text_logits(runner, (90,))
    for widths in ((64, 1, 25), (33, 33, 24), (1,) * 10 + (70,) + (1,) * 10):
        assert torch.equal(text_logits(runner, widths), whole), widths
    cache = runner.new_cache(8, 128)
    for row, start in itertools.product((3, 0), (0, 45)):
        alone = logits_of(runner, cache, TOKENS[row : row + 1, start : start + 45], [start], first_row=row)
        assert torch.equal(alone[0], whole[row, start : start + 45])
    try:
        for count in (2, 5):
            torch.set_num_threads(count)
            assert torch.equal(text_logits(runner, (80, 3, 7)), whole)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_a_resumed_pass_and_taps_have_the_same_bits(name: str, dtype: torch.dtype) -> None:
    """Layers above the known states read keys of layers below, and the inputs of their tokens."""
    native = decoders(name, dtype)[0]
    runner, layers = Runner(native), native.spec.layers
    whole, cache = text_logits(runner, (90,)), runner.new_cache(4, 128)
    depth = layers - 1
    lower = runner.forward(cache, TOKENS, [0] * 4, stop=depth, taps=[1])
    resumed = runner.forward(
        cache, TOKENS, [0] * 4, resume=Resume(depth, lower.hidden, [90, 0, 40, 89]), taps=[depth, layers]
    )
    assert resumed.logits is not None
    assert torch.equal(resumed.logits, whole)
    assert torch.equal(resumed.taps[layers], resumed.hidden)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_a_fused_draft_is_that_of_single_steps(name: str, dtype: torch.dtype) -> None:
    check_fused(name, dtype)


def check_fused(name: str, dtype: torch.dtype) -> None:
    runner, length = Runner(decoders(name, dtype)[0]), 5
    tokens, starts = [[5, 9], [11], [7, 8, 30], [2]], [30, 31, 29, 31]
    cache = runner.new_cache(4, 128)
    logits_of(runner, cache, TOKENS[:, :32], [0] * 4)
    fused = runner.draft(cache, DraftInputs(tokens, starts, [length] * 4))
    assert fused is not None
    for row, (own, start) in enumerate(zip(tokens, starts, strict=True)):
        step, drawn = torch.tensor([own]), []
        for _ in range(length):
            logits = logits_of(runner, cache, step, [start], first_row=row)
            drawn.append(int(logits[0, -1].argmax()))
            start, step = start + step.shape[1], torch.tensor([[drawn[-1]]])
        assert drawn == fused.tokens[row].tolist()


# (model, old source, new source)
WRONG = {
    "norm of values left out": (
        "gemma4-k-eq-v", "if (norm->weight && !m->together)\n", "if (norm->weight && h <= heads_per_kv)\n",
    ),
    "values are rotated keys": (
        "gemma4-k-eq-v", "const E *value = heads > heads_per_kv + 1 ? key + dim", "const E *value = heads > heads_per_kv + 1 ? key",
    ),
    "values rotated": (
        "gemma4-k-eq-v", "if (h <= heads_per_kv) NAME(rotate)", "NAME(rotate)",
    ),
    "scalar of a layer left out": ("gemma4-k-eq-v", "if (l->scalar != 1)", "if (0)"),
    "size of the windowed heads for all": (
        "gemma4-k-eq-v", "const int64_t dim = l->dim, words = dim / WORD, split", "const int64_t dim = m->layer->dim, words = dim / WORD, split",
    ),
    "inputs of the first layer": ("gemma4-shared", "(const E *)p->inputs + layer * n", "(const E *)p->inputs"),
    "tokens' own inputs left out": (
        "gemma4-shared", "NAME(read_some)(to + i, n - i) + NAME(read_some)(inputs + r * n + i, n - i)", "NAME(read_some)(to + i, n - i)",
    ),
    "inputs not normed": ("gemma4-shared", "NAME(norm)(&m->input_norm, to, to, n);", ""),
    "gate of inputs left out": (
        "gemma4-shared", "gate * NAME(read_some)(inputs + r * stride + i, n - i)", "NAME(read_some)(inputs + r * stride + i, n - i)",
    ),
    "narrow MLP in layers that share keys": (
        "gemma4-double-wide", "NAME(gate)(w, m, wide, narrow, columns, l->inner);", "NAME(gate)(w, m, wide, narrow, columns, m->layer->inner);",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_values_are_caught(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, old, new = WRONG[name]
    plant(monkeypatch, tmp_path, old, new)
    with pytest.raises(AssertionError):
        test_logits_equal_those_of_pytorch(model)


def test_inputs_of_a_drafts_first_step_are_caught(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plant(monkeypatch, tmp_path, "if (m->input_size)\n", "if (m->input_size && !step)\n")
    with pytest.raises(AssertionError):
        check_fused("gemma4-shared", torch.float32)
