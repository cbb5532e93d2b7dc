"""The sizes on the page of model pairs follow from the published configs, by the counts that `load` uses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foredraft.model.cache import KVCache
from foredraft.model.spec import ModelSpec
from foredraft.model.weights import parameter_count, weight_bytes
from tests.support.pages import Page
from tests.support.running import ROOT

PAGE = Page(ROOT / "docs/guides/pairs.md")
DTYPE = torch.bfloat16
TOKENS = 4000  # of the caches of a pair on the page


def config(
    architecture: str, hidden: int, layers: int, heads: int, kv_heads: int, inner: int, ids: int, positions: int,
    **more: Any,
) -> dict[str, Any]:  # fmt: skip
    """Return the keys of a config.json that decide sizes."""
    return {
        "architectures": [architecture],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "vocab_size": ids,
        "max_position_embeddings": positions,
        "torch_dtype": "bfloat16",
    } | more


LLAMA, QWEN, GEMMA = "LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM"
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
# Published configs, and the published numbers of parameters.
MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "meta-llama/Llama-3.1-8B-Instruct": (
        8_030_261_248,
        config(LLAMA, 4096, 32, 32, 8, 14336, 128256, 131072, **UNTIED),
    ),
    "meta-llama/Llama-3.2-1B-Instruct": (
        1_235_814_400,
        config(LLAMA, 2048, 16, 32, 8, 8192, 128256, 131072, head_dim=64, **TIED),
    ),
    "Qwen/Qwen3-8B": (
        8_190_735_360,
        config(QWEN, 4096, 36, 32, 8, 12288, 151936, 40960, head_dim=128, **UNTIED),
    ),
    "Qwen/Qwen3-0.6B": (
        596_049_920,
        config(QWEN, 1024, 28, 16, 8, 3072, 151936, 40960, head_dim=128, **TIED),
    ),
    "google/gemma-3-1b-it": (
        999_885_952,
        config(GEMMA, 1152, 26, 4, 1, 6912, 262144, 32768, head_dim=256, sliding_window=512),
    ),
    "google/gemma-3-270m-it": (
        268_098_176,
        config(GEMMA, 640, 18, 4, 1, 2048, 262144, 32768, head_dim=256, sliding_window=512),
    ),
    "mistralai/Mistral-7B-Instruct-v0.3": (
        7_248_023_552,
        config("MistralForCausalLM", 4096, 32, 32, 8, 14336, 32768, 32768, sliding_window=None, **UNTIED),
    ),
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": (
        1_711_376_384,
        config(LLAMA, 2048, 24, 32, 32, 8192, 49152, 8192, **TIED),
    ),
    "HuggingFaceTB/SmolLM2-135M-Instruct": (
        134_515_008,
        config(LLAMA, 576, 30, 9, 3, 1536, 49152, 8192, **TIED),
    ),
}
# Target, draft model, and the draft tokens that its cache holds for each token of the target.
PAIRS = (
    ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.2-1B-Instruct", 1),
    ("Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B", 1),
    ("google/gemma-3-1b-it", "google/gemma-3-270m-it", 1),
    ("HuggingFaceTB/SmolLM2-1.7B-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct", 1),
    ("mistralai/Mistral-7B-Instruct-v0.3", "meta-llama/Llama-3.2-1B-Instruct", 2),
)


def spec(name: str) -> ModelSpec:
    return ModelSpec.from_hf(MODELS[name][1])


def weights(name: str, device: str) -> float:
    """Return the GiB of a model's weights; on a CPU in the layout of the kernels."""
    kind = "cpu" if device == "cpu" else "meta"  # nothing is packed on the meta device, nor on a GPU
    return weight_bytes(spec(name), torch.device(kind), DTYPE, native=device == "cpu") / 2**30


def cache(name: str, tokens: int) -> float:
    """Return the GiB of the keys and values of so many tokens."""
    return KVCache.bytes_of(spec(name), tokens, DTYPE) / 2**30


@pytest.mark.parametrize("name", MODELS)
def test_the_row_of_a_model_has_its_sizes(name: str) -> None:
    published, _ = MODELS[name]
    assert parameter_count(spec(name)) == published
    row = (
        f"| `{name}` | {published / 1e6:,.0f} M | {weights(name, 'cuda'):.1f} | {weights(name, 'cpu'):.1f}"
        f" | {1024 * cache(name, 1000):.0f} | {spec(name).max_positions:,} |"
    )
    assert row in PAGE.text, row


@pytest.mark.parametrize(("target", "draft", "stretch"), PAIRS)
def test_the_row_of_a_pair_has_its_memory(target: str, draft: str, stretch: int) -> None:
    caches = cache(target, TOKENS) + cache(draft, stretch * TOKENS)
    gpu, cpu = (sum(weights(name, device) for name in (target, draft)) + caches for device in ("cuda", "cpu"))
    ratio = parameter_count(spec(target)) / parameter_count(spec(draft))
    row = f"| `{target}` | `{draft}` | {ratio:.1f} | {gpu:.1f} | {cpu:.1f} |"
    assert row in PAGE.text, row
    for command in ("info", "generate"):
        assert any(
            line.startswith(f"foredraft {command} ") and target in line and draft in line
            for block in PAGE.blocks
            for line in block.text.splitlines()
        ), command
