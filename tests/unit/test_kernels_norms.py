"""The C kernels of further families: layer norms, parallel residuals, learned positions, planted defects.

`test_kernels_passes.py` compares all families with PyTorch's operators; here each further piece is broken.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from foredraft import kernels
from foredraft.model.decoder import Decoder
from foredraft.model.runner import Runner
from foredraft.model.weights import load_decoder
from tests.support.checkpoints import save_checkpoint
from tests.support.compiling import plant
from tests.unit import test_kernels_passes
from tests.unit.test_kernels_passes import decoders, text_logits

pytestmark = pytest.mark.skipif(kernels.library() is None, reason="no C compiler")

CHECKED = (
    "cohere2",
    "gpt2",
    "gpt_neox",
    "olmo2",
    "opt",
    "opt-sums-normed",
    "stablelm-head-norms",
    "starcoder2",
)


@functools.cache
def odd_sizes(native: bool) -> Decoder:
    """Load a model whose states and MLPs end within a vector."""
    with tempfile.TemporaryDirectory() as folder:
        sizes = {
            "hidden_size": 72,
            "intermediate_size": 90,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
        }
        return load_decoder(save_checkpoint(Path(folder), "starcoder2", **sizes), native=native)


@pytest.fixture(scope="module", autouse=True)
def sound_decoders() -> None:
    """Build all decoders before a test plants a defect: the kernels pack their weights."""
    for family in CHECKED:
        decoders(family, torch.float32)
    odd_sizes(True)


def test_sizes_within_a_vector_equal_those_of_pytorch() -> None:
    got, want = (
        text_logits(Runner(odd_sizes(native), deterministic=False), (60, 30)) for native in (True, False)
    )
    assert (got - want).abs().max() <= 2e-5 * want.abs().max()


@pytest.mark.parametrize("activation", ["gelu", "relu", "gelu_fast", "silu"])
def test_activations_are_accurate(activation: str, tmp_path: Path) -> None:
    """Of a model of one layer."""
    folder = save_checkpoint(tmp_path, "starcoder2", hidden_act=activation, num_hidden_layers=1)
    native, plain = (
        Runner(load_decoder(folder, native=native), deterministic=False) for native in (True, False)
    )
    got, want = (text_logits(runner, (90,)) for runner in (native, plain))
    assert (got - want).abs().max() <= 5e-6 * want.abs().max()


def test_the_error_function_is_accurate() -> None:
    """GELU of every argument, against float64, by the polynomials of the kernels."""
    x = torch.linspace(-12, 12, 200_001)
    alpha = [0.00022905065861350646, 0.0034082910107109506, 0.050955695062380861, 0.18520832239976145]
    beta = [-1.1791602954361697e-7, 0.000023547966471313185, 0.0010179625278914885, 0.014070470171167667]
    z = (x / 2**0.5).clamp(-3.8325069, 3.8325069)
    p, q = torch.zeros_like(x), torch.zeros_like(x)
    for value in (*alpha, 1.128379143519084):
        p = p * z * z + value
    for value in (*beta, 0.11098505178285362, 0.49746925110067538, 1.0):
        q = q * z * z + value
    got, want = x * 0.5 * (z * p / q + 1), F.gelu(x.double())
    assert (got - want).abs().max() <= 2e-6


WRONG = {
    "mean not subtracted": ("NAME(read_some)(x + i, n - i) - mean) * inverse", "NAME(read_some)(x + i, n - i)) * inverse"),
    "bias of a norm left out": ("if (norm->bias)", "if (0)"),
    "lanes past the end in the variance": ("choose(LANE_INDEX < (int32_t)(n - i), ", "choose(LANE_INDEX < LANES, "),
    "parallel residual made sequential": ("m->parallel && run->attention[i] && mlp", "0"),
    "a sub-layer without a norm reads the states of another": ("else memmove(y, x, n * sizeof(E));", ""),
    "queries normed by head": ("if (norm->weight && !m->together)", "if (norm->weight)"),
    "keys normed with the queries' width": ("columns, width, l->kv_heads * l->dim", "columns, width, m->heads * l->dim"),
    "learned position off by one": ("const int64_t at = p->start[g] + t;", "const int64_t at = p->start[g] + t + 1;"),
    "learned positions of the first group": ("const int64_t at = p->start[g] + t;", "const int64_t at = p->start[0] + t;"),
    "ReLU taken for GELU": ("if (kind == GELU)", "if (kind == GELU) return choose(x < splat(0.0f), splat(0.0f), x);\n    if (kind == GELU)"),
    "negative values pass ReLU": ("if (kind == RELU) return choose(x < splat(0.0f), splat(0.0f), x);", "if (kind == RELU) return x;"),
    "norms of outputs, not of sums": ("if (after->weight && !m->sums)", "if (after->weight)"),
    "the first head's norm for all": ("if (norm->apart)", "if (0)"),
    "queries' norms taken for keys": ("run->kv * heads_per_kv + h : run->kv, to", "run->kv * heads_per_kv + h : run->kv + 1, to"),
    "half of an MLP without a gate": ("width = m->gated ? 2 * inner : inner;", "width = 2 * inner;"),
}  # fmt: skip


def test_rows_at_other_positions_equal_those_of_pytorch() -> None:
    """Learned positions are those of each row, not of the first."""
    tokens = torch.randint(3, 97, (3, 5), generator=torch.Generator().manual_seed(5))
    found = []
    for decoder in decoders("gpt2", torch.float32):
        runner = Runner(decoder, deterministic=False)
        cache = runner.new_cache(3, 64)
        for row, length in enumerate((3, 30, 17)):
            runner.prefill(cache, row, tokens[row].repeat(6)[:length].tolist(), 0)
        found.append(runner.forward(cache, tokens, [3, 30, 17]).logits)
    got, want = found
    assert got is not None and want is not None
    assert (got - want).abs().max() <= 2e-5 * want.abs().max()


def check_values() -> None:
    for family in CHECKED:
        test_kernels_passes.test_logits_equal_those_of_pytorch(family)
    test_sizes_within_a_vector_equal_those_of_pytorch()
    test_rows_at_other_positions_equal_those_of_pytorch()


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_value_is_caught(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plant(monkeypatch, tmp_path, *WRONG[name])
    with pytest.raises(AssertionError):
        check_values()
