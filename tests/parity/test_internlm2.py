"""InternLM 2, of which transformers has no class: a Llama under other names, with `wqkv` in groups of key heads."""

from __future__ import annotations

import functools
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from foredraft import CheckpointError
from foredraft.model import checkpoint
from foredraft.model.runner import Runner
from foredraft.model.source import ModelSource
from foredraft.model.spec import ModelSpec
from foredraft.model.weights import load_decoder
from foredraft.quantise.command import write_quantised
from tests.parity.test_logits import Pair, close, decoded, greedy, prompt_logits
from tests.support.checkpoints import LLAMA, save_checkpoint
from tests.support.mutation import assert_caught, defect
from tests.support.mutations import instead

ARCHITECTURE = "InternLM2ForCausalLM"
CONFIG: dict[str, Any] = {
    **{key: value for key, value in LLAMA.items() if key not in ("initializer_range", "num_key_value_heads")},
    "architectures": [ARCHITECTURE],
    "auto_map": {
        "AutoConfig": "configuration_internlm2.InternLM2Config",
        "AutoModelForCausalLM": "modeling_internlm2.InternLM2ForCausalLM",
    },
    "attn_implementation": "eager",
    "bias": False,
    "hidden_act": "silu",
    "model_type": "internlm2",
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000,
    "tie_word_embeddings": False,
}
NAMES = {
    "model.embed_tokens": "model.tok_embeddings",
    "lm_head": "output",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}
# what differs from the checkpoint of a Llama, and from CONFIG
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "biases": ({"attention_bias": True}, {"bias": True}),
    "linear": (
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000}},
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
    ),
    "theta-eps": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rms_norm_eps": 1e-1},
        {"rope_theta": 1e6, "rms_norm_eps": 1e-1},
    ),
}


def converted(tensors: dict[str, Tensor], head_dim: int) -> dict[str, Tensor]:
    """Return the tensors of a Llama in the names and the order of InternLM 2."""
    made: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        found = re.fullmatch(r"(model\.layers\.\d+)\.self_attn\.([qkv])_proj\.(weight|bias)", name)
        if found is None:
            for own, other in NAMES.items():
                name = name.replace(own, other)
            made[name] = tensor
        elif found[2] == "q":
            parts = [tensors[name.replace("q_proj", f"{kind}_proj")] for kind in "qkv"]
            shape = (2, -1, head_dim, *tensor.shape[1:])  # key heads, heads of one, channels
            whole = torch.cat([part.view(shape) for part in parts], 1)
            made[f"{found[1]}.attention.wqkv.{found[3]}"] = whole.reshape(-1, *tensor.shape[1:])
    return made


def save_internlm(folder: Path, variant: str, **keys: Any) -> tuple[Path, Path]:
    llama, own = VARIANTS[variant]
    first = save_checkpoint(folder / "llama", "llama", num_key_value_heads=2, **llama)
    second = folder / "internlm2"
    second.mkdir()
    tensors = converted(load_file(first / "model.safetensors"), 16)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, second / "model.safetensors")
    (second / "config.json").write_text(json.dumps({**CONFIG, **own, **keys}))
    return first, second


def made(folder: Path, variant: str) -> Pair:
    llama, internlm = save_internlm(folder, variant)
    return Pair(internlm, reference=llama)


@functools.cache
def pair(variant: str) -> Pair:
    with tempfile.TemporaryDirectory() as folder:
        return made(Path(folder), variant)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_greedy_tokens_equal_those_of_the_llama(variant: str) -> None:
    found = pair(variant)
    assert close(prompt_logits(found.runner, found.tokens), found.expected)
    prompt = found.tokens[:, :20]
    assert decoded(found.runner, prompt, 64) == greedy(found, prompt, 64)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"auto_map": {"AutoModelForCausalLM": "modeling_mine.Mine"}}, "auto_map"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "mscales": 3}, "is_causal": False}, "is_causal"),
        ({"attention_multiplier": 2.0}, "attention_multiplier"),
    ],
)
def test_what_is_not_known_is_refused(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        ModelSpec.from_hf({**CONFIG, **keys})


def test_a_quantised_copy_is_written_and_read(tmp_path: Path) -> None:
    _, folder = save_internlm(tmp_path, "plain", tie_word_embeddings=False)
    out = tmp_path / "out"
    out.mkdir()
    write_quantised(ModelSource(folder), out, ModelSpec.from_folder(folder), 8, torch.float32)
    found = pair("plain")
    got = prompt_logits(Runner(load_decoder(out)), found.tokens)
    assert (got - found.expected).norm() <= 0.3 * found.expected.norm()


# read the weight as if it held all queries, then all keys, then all values
ungrouped = instead(lambda heads, kv_heads, dim: torch.arange((heads + 2 * kv_heads) * dim))


def reloaded() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = made(Path(folder), "biases")
    assert close(prompt_logits(found.runner, found.tokens), found.expected)


def test_heads_that_stay_in_their_groups_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    reloaded()
    assert_caught(defect("heads left in groups", checkpoint.grouped_rows, ungrouped, reloaded), monkeypatch)
