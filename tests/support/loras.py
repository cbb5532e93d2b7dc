"""Save LoRAs for tiny checkpoints by PEFT, and let PEFT say what they make of the model."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tests.support.checkpoints import save_variant


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


with quiet():
    import peft

QKVO = ["q_proj", "k_proj", "v_proj", "o_proj"]


@dataclass(frozen=True)
class LoraCase:
    variant: str  # of the base
    options: Mapping[str, Any]  # of PEFT's `LoraConfig`
    trained: tuple[str, ...] = ()  # ends of the names of the base's own parameters that the training changed
    merges: bool = True  # `merge_and_unload` gives what PEFT runs: it does not where a tied weight changed
    dtype: torch.dtype = torch.float32  # of the LoRA's tensors


SAVED = ("modules_to_save.default.weight",)
STRONG = {"r": 4, "lora_alpha": 32}
PATTERNS = {
    "rank_pattern": {"k_proj": 2, "model.layers.1.self_attn.q_proj": 7},
    "alpha_pattern": {r"layers\.\d+\.mlp\.gate_proj": 40},
}
LORAS: dict[str, LoraCase] = {
    "attention": LoraCase("llama", {"target_modules": QKVO, "r": 4, "lora_alpha": 24}),
    "square": LoraCase("llama", {"target_modules": ["q_proj", "o_proj"], "r": 4, "lora_alpha": 24}),
    "all-linear": LoraCase("gemma2", {"target_modules": "all-linear", "r": 3, "lora_alpha": 8}),
    "regex": LoraCase("qwen3", {"target_modules": r".*layers\.[02]\..*(up|down)_proj", "r": 2}),
    "rslora": LoraCase("gemma3", {"target_modules": QKVO, "r": 9, "lora_alpha": 16, "use_rslora": True}),
    "patterns": LoraCase("mistral", {"target_modules": [*QKVO, "gate_proj"], "r": 4, "lora_alpha": 8, **PATTERNS}),
    "some-layers": LoraCase("qwen2", {"target_modules": QKVO, "layers_to_transform": [1], "r": 2}),
    "fan-in-fan-out": LoraCase("llama", {"target_modules": QKVO, "r": 4, "fan_in_fan_out": True}),
    "bfloat16": LoraCase("llama", {"target_modules": QKVO, "r": 4}, dtype=torch.bfloat16),
    "biases": LoraCase("llama-biases", {"target_modules": QKVO, "r": 2, "bias": "all"}, trained=("bias",)),
    "own-biases": LoraCase(
        "qwen2", {"target_modules": ["q_proj", "v_proj"], "r": 2, "bias": "lora_only"},
        trained=("q_proj.base_layer.bias", "v_proj.base_layer.bias"),
    ),
    "lora-bias": LoraCase("llama-biases", {"target_modules": QKVO, "r": 2, "lora_bias": True}),
    "saved-head": LoraCase(
        "llama", {"target_modules": QKVO, "r": 2, "modules_to_save": ["lm_head", "norm"]}, trained=SAVED
    ),
    "saved-embedding": LoraCase(
        "qwen3", {"target_modules": QKVO, "r": 2, "modules_to_save": ["embed_tokens"]}, trained=SAVED
    ),
    "head": LoraCase("llama", {"target_modules": ["lm_head", "q_proj"], "r": 4}),
    "embedding": LoraCase("llama", {"target_modules": ["embed_tokens", "q_proj"], "r": 4}),
    "tied-head": LoraCase("llama-gqa-tied", {"target_modules": ["lm_head", "q_proj"], **STRONG}, merges=False),
    "tied-embedding": LoraCase(
        "llama-gqa-tied", {"target_modules": ["embed_tokens", "q_proj"], **STRONG}, merges=False
    ),
    "tied-saved-head": LoraCase(
        "gemma2", {"target_modules": QKVO, "r": 2, "modules_to_save": ["lm_head"]}, trained=SAVED, merges=False
    ),
    "layer-inputs": LoraCase(
        "gemma4-shared", {"target_modules": [*QKVO, "per_layer_input_gate", "per_layer_model_projection"], "r": 4}
    ),
    "recurrent": LoraCase(
        "qwen3_5", {"target_modules": [*QKVO, *(f"in_proj_{part}" for part in ("qkv", "z", "a", "b")), "out_proj"]}
    ),
    "recurrent-all-linear": LoraCase("qwen3_5-three-a-key", {"target_modules": "all-linear", "r": 3}),
    "tied-both": LoraCase(
        "llama-gqa-tied", {"target_modules": ["embed_tokens"], **STRONG, "ensure_weight_tying": True}, merges=False
    ),
}  # fmt: skip


def save_case(folder: Path, name: str, **keys: Any) -> tuple[Path, Path]:
    case = LORAS[name]
    base = save_variant(folder / "base", case.variant, **keys)
    lora = save_lora(base, folder / "lora", trained=case.trained, dtype=case.dtype, **case.options)
    return base, lora


def save_lora(
    base: Path,
    folder: Path,
    *,
    seed: int = 0,
    trained: tuple[str, ...] = (),
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Path:
    """Save a random LoRA with options of PEFT's `LoraConfig`; parameters of the base that end in `trained` change, too."""
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed + 1)
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        config = peft.LoraConfig(task_type="CAUSAL_LM", **{"target_modules": QKVO, "r": 4, **options})
        made = peft.get_peft_model(model, config)
        for parameter_name, parameter in made.named_parameters():
            if "lora_" in parameter_name:
                nn.init.normal_(parameter, std=0.15)
            elif parameter_name.endswith(trained or ("\0",)):
                parameter.data += 0.2 * torch.randn_like(parameter)
        made.save_pretrained(folder)
    file = folder / "adapter_model.safetensors"
    save_file({each: tensor.to(dtype) for each, tensor in load_file(file).items()}, file)
    return folder


def _opened(base: Path, *loras: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    made = peft.PeftModel.from_pretrained(model, loras[0], adapter_name="0")
    for index, lora in enumerate(loras[1:], 1):
        made.load_adapter(lora, adapter_name=str(index))
    made.base_model.set_adapter([str(index) for index in range(len(loras))])
    return made.eval()


def peft_logits(base: Path, *loras: Path, tokens: Tensor) -> Tensor:
    """Return the logits [T, V] of tokens [1, T] by PEFT, with the LoRAs beside the model."""
    with quiet(), torch.inference_mode():
        return _opened(base, *loras)(tokens).logits[0]


def peft_weights(base: Path, *loras: Path) -> dict[str, Tensor]:
    with quiet(), torch.inference_mode():
        return _opened(base, *loras).merge_and_unload().state_dict()


def edited(
    lora: Path,
    folder: Path,
    config: Mapping[str, Any] | None = None,
    tensors: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None,
) -> Path:
    folder.mkdir(parents=True)
    content = json.loads((lora / "adapter_config.json").read_text()) | dict(config or {})
    kept = {key: value for key, value in content.items() if value is not None}
    (folder / "adapter_config.json").write_text(json.dumps(kept))
    values = load_file(lora / "adapter_model.safetensors")
    save_file(values if tensors is None else tensors(values), folder / "adapter_model.safetensors")
    return folder
