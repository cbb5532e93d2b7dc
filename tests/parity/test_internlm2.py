"""InternLM 2: the logits of a Llama whose tensors are stored under the names and in the order of InternLM 2.

`transformers` has no class of it. Its modelling code computes a Llama; `wqkv` holds, for each key head, its
queries, its key and its value.
"""

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
from transformers import AutoModelForCausalLM

import foredraft
from foredraft import CheckpointError, SamplingParams
from foredraft.model import row_orders
from foredraft.model.runner import Runner
from foredraft.model.spec import ModelSpec
from foredraft.model.weights import load_decoder
from foredraft.quantise.writing import write_quantised
from tests.parity.test_logits import TOTAL, Pair, close, decoded, greedy, prompt_logits
from tests.support.checkpoints import LLAMA, save_checkpoint
from tests.support.planting import Mutant, assert_caught, defect

ARCHITECTURE = "InternLM2ForCausalLM"
CONFIG: dict[str, Any] = {
    **{key: value for key, value in LLAMA.items() if key not in ("initializer_range", "num_key_value_heads")},
    "architectures": [ARCHITECTURE],
    "auto_map": {
        "AutoConfig": "configuration_internlm2.InternLM2Config",
        "AutoModelForCausalLM": "modeling_internlm2.InternLM2ForCausalLM",
    },
    "attn_implementation": "eager",
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
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"bias": False},
    "biases": {"bias": True},
    "linear": {"bias": False, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "theta-eps": {"bias": False, "rope_theta": 1e6, "rms_norm_eps": 1e-1},
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
    """Save a Llama and the same model as an InternLM 2, and return both folders."""
    own = VARIANTS[variant]
    llama = {key: value for key, value in own.items() if key != "bias"}
    if "rope_scaling" in llama:
        llama["rope_parameters"] = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000}
        del llama["rope_scaling"]
    elif "rope_theta" in llama:
        llama["rope_parameters"] = {"rope_type": "default", "rope_theta": llama.pop("rope_theta")}
    first = save_checkpoint(
        folder / "llama", "llama", num_key_value_heads=2, attention_bias=own["bias"], **llama
    )
    second = folder / "internlm2"
    second.mkdir()
    tensors = converted(load_file(first / "model.safetensors"), 16)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, second / "model.safetensors")
    (second / "config.json").write_text(json.dumps({**CONFIG, **own, **keys}))
    return first, second


class InternPair(Pair):
    """A Llama of transformers, and foredraft's InternLM 2."""

    def __init__(self, folder: Path, variant: str) -> None:
        first, second = save_internlm(folder, variant)
        self.reference = AutoModelForCausalLM.from_pretrained(
            first, attn_implementation="eager", dtype=torch.float32
        ).eval()
        self.runner = Runner(load_decoder(second))
        self.tokens = torch.randint(3, 97, (1, TOTAL), generator=torch.Generator().manual_seed(7))  # [1, T]
        with torch.inference_mode():
            self.expected = self.reference(self.tokens).logits[0]


@functools.cache
def pair(variant: str) -> InternPair:
    with tempfile.TemporaryDirectory() as folder:
        return InternPair(Path(folder), variant)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_greedy_tokens_equal_those_of_the_llama(variant: str) -> None:
    found = pair(variant)
    assert close(prompt_logits(found.runner, found.tokens), found.expected)
    prompt = found.tokens[:, :20]
    assert decoded(found.runner, prompt, 64) == greedy(found, prompt, 64)


def test_speculation_keeps_the_greedy_tokens(tmp_path: Path) -> None:
    found = pair("plain")
    _, folder = save_internlm(tmp_path, "plain")
    prompts = [found.tokens[:, at : at + 20] for at in range(8)]
    expected = [greedy(found, prompt, 40) for prompt in prompts]
    llm = foredraft.load(folder, device="cpu", max_batch=8, max_length=96, policy="fixed")
    for drafter in ("none", "lookup"):
        params = SamplingParams(temperature=0, max_new_tokens=40, ignore_eos=True, drafter=drafter)
        for batch in (prompts[:1], prompts):
            outputs = llm.generate([prompt[0].tolist() for prompt in batch], params)
            assert [output.token_ids for output in outputs] == expected[: len(batch)]


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
    """Its tensors have the names of the decoder, in the order of InternLM 2."""
    _, folder = save_internlm(tmp_path, "plain", tie_word_embeddings=False)
    out = tmp_path / "out"
    out.mkdir()
    write_quantised(folder, out, ModelSpec.from_folder(folder), 8, torch.float32)
    found = pair("plain")
    got = prompt_logits(Runner(load_decoder(out)), found.tokens)
    assert (got - found.expected).norm() <= 0.3 * found.expected.norm()


def ungrouped(sound: Any) -> Any:
    """Read the weight as if it held all queries, then all keys, then all values."""
    return lambda heads, kv_heads, dim: torch.arange((heads + 2 * kv_heads) * dim)


def reloaded() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = InternPair(Path(folder), "biases")
    assert close(prompt_logits(found.runner, found.tokens), found.expected)


MUTANTS = [defect("heads not undone from their groups", row_orders.grouped_rows, ungrouped, reloaded)]


def test_a_check_passes_without_a_defect() -> None:
    reloaded()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_defect_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(mutant, monkeypatch)
