"""Write tables of docs/models.md: public checkpoints with their memory, and what is refused.

The sizes are those of the checkpoints' config.json; memory is what the tool's own plan says of them. A table
lies between two comments. This writes everything between them.

    python -m recipes.family_table
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from foredraft.files import write_whole
from foredraft.model.cache import KVCache
from foredraft.model.families import FAMILIES
from foredraft.model.spec import ModelSpec
from foredraft.model.unsupported import KINDS, KNOWN
from foredraft.model.weights import parameter_count, weight_bytes

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
BLOCK = re.compile(r"(?<=<!-- table: )(?P<name>\w+) -->\n.*?(?=<!-- /table -->)", re.S)
TOKENS = 8192  # of the text whose cache the table shows, or as many as the model takes
GB = 1e9
# architectures whose public checkpoints' sizes are not known here; `foredraft info` says them of a checkpoint
UNKNOWN = {"Gemma4ForCausalLM", "Gemma4UnifiedForCausalLM", "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM"}
# what is refused, by its kind -> model types that people know
EXAMPLES = {
    "experts": "mixtral gpt_oss qwen3_moe llama4 phimoe olmoe",
    "latent": "deepseek_v3 deepseek_v2 kimi_k2 glm_moe_dsa",
    "latent-dense": "minicpm3",
    "hybrid": "mamba rwkv7 falcon_h1 bamba",
    "hybrid-experts": "qwen3_next jamba lfm2_moe",
    "encoder": "bert roberta modernbert",
    "encoder-decoder": "t5 bart marian",
    "vision": "qwen2_5_vl qwen3_vl llava gemma3n",
    "audio": "whisper voxtral qwen2_audio",
    "diffusion": "llada dream",
}


@dataclass(frozen=True)
class Checkpoint:
    """A public checkpoint."""

    name: str
    billions: float  # of its parameters, as its makers say
    config: Mapping[str, Any]  # the keys of its config.json that sizes depend on


def _sized(
    name: str,
    billions: float,
    layers: int,
    hidden: int,
    inner: int,
    heads: int,
    kv_heads: int,
    vocabulary: int,
    *,
    tied: bool = False,
    positions: int = TOKENS,
    **more: Any,
) -> Checkpoint:
    """Return a checkpoint; `positions` are those of its texts, or as many as the table needs."""
    sizes = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        "max_position_embeddings": positions,
        "eos_token_id": None,
        "bos_token_id": None,
        "dtype": "bfloat16",
    }
    return Checkpoint(name, billions, sizes | more)


def _gpt2(name: str, billions: float, layers: int, hidden: int, heads: int) -> Checkpoint:
    sizes = {"n_layer": layers, "n_embd": hidden, "n_head": heads, "vocab_size": 50_257, "dtype": "bfloat16"}
    return Checkpoint(name, billions, sizes)


def _mamba(layers: int, *attending: int) -> list[str]:
    return ["attention" if layer in attending else "mamba" for layer in range(layers)]


LFM2: dict[str, Any] = {"full_attn_idxs": [2, 5, 8, 10, 12, 14], "tied": True}
GRANITE_H: dict[str, Any] = {"num_local_experts": None, "mamba_d_state": 128, "tied": True}
# architecture -> public checkpoints
CHECKPOINTS: dict[str, tuple[Checkpoint, ...]] = {
    "LlamaForCausalLM": (
        _sized("meta-llama/Llama-3.2-1B", 1.24, 16, 2048, 8192, 32, 8, 128_256, tied=True),
        _sized("meta-llama/Llama-3.1-8B", 8.03, 32, 4096, 14336, 32, 8, 128_256),
        _sized("HuggingFaceTB/SmolLM2-1.7B", 1.71, 24, 2048, 8192, 32, 32, 49_152, tied=True),
    ),
    "MistralForCausalLM": (
        _sized("mistralai/Mistral-7B-v0.3", 7.25, 32, 4096, 14336, 32, 8, 32_768, sliding_window=None),
        _sized("mistralai/Mistral-Small-24B-Base-2501", 23.6, 40, 5120, 32768, 32, 8, 131_072, head_dim=128,
               sliding_window=None),
    ),
    "Qwen2ForCausalLM": (
        _sized("Qwen/Qwen2.5-1.5B", 1.54, 28, 1536, 8960, 12, 2, 151_936, tied=True),
        _sized("Qwen/Qwen2.5-7B", 7.62, 28, 3584, 18944, 28, 4, 152_064),
    ),
    "Qwen3ForCausalLM": (
        _sized("Qwen/Qwen3-0.6B", 0.6, 28, 1024, 3072, 16, 8, 151_936, tied=True, head_dim=128),
        _sized("Qwen/Qwen3-4B", 4.02, 36, 2560, 9728, 32, 8, 151_936, tied=True, head_dim=128),
        _sized("Qwen/Qwen3-8B", 8.19, 36, 4096, 12288, 32, 8, 151_936, head_dim=128),
        _sized("Qwen/Qwen3-32B", 32.8, 64, 5120, 25600, 64, 8, 151_936, head_dim=128),
    ),
    "GemmaForCausalLM": (
        _sized("google/gemma-2b", 2.51, 18, 2048, 16384, 8, 1, 256_000, tied=True, head_dim=256),
    ),
    "Gemma2ForCausalLM": (
        _sized("google/gemma-2-2b", 2.61, 26, 2304, 9216, 8, 4, 256_000, tied=True, head_dim=256),
        _sized("google/gemma-2-9b", 9.24, 42, 3584, 14336, 16, 8, 256_000, tied=True, head_dim=256),
    ),
    "Gemma3ForCausalLM": (
        _sized("google/gemma-3-1b-pt", 1.0, 26, 1152, 6912, 4, 1, 262_144, tied=True, head_dim=256),
        _sized("google/gemma-3-12b-pt (text)", 11.77, 48, 3840, 15360, 16, 8, 262_208, tied=True,
               head_dim=256),
    ),
    "Cohere2ForCausalLM": (
        _sized("CohereLabs/c4ai-command-r7b-12-2024", 8.03, 32, 4096, 14336, 32, 8, 256_000, tied=True),
    ),
    "Exaone4ForCausalLM": (
        _sized("LGAI-EXAONE/EXAONE-4.0-1.2B", 1.28, 30, 2048, 4096, 32, 8, 102_400, tied=True, head_dim=64,
               sliding_window=None),
    ),
    "Glm4ForCausalLM": (
        _sized("zai-org/GLM-4-9B-0414", 9.4, 40, 4096, 13696, 32, 2, 151_552, head_dim=128,
               attention_bias=True),
    ),
    "GPT2LMHeadModel": (_gpt2("openai-community/gpt2", 0.124, 12, 768, 12),
           _gpt2("openai-community/gpt2-xl", 1.56, 48, 1600, 25)),
    "GPTNeoXForCausalLM": (
        _sized("EleutherAI/pythia-1.4b", 1.41, 24, 2048, 8192, 16, 16, 50_304, positions=2048),
        _sized("EleutherAI/pythia-6.9b", 6.86, 32, 4096, 16384, 32, 32, 50_432, positions=2048),
    ),
    "OPTForCausalLM": (
        _sized("facebook/opt-350m", 0.331, 24, 1024, 0, 16, 16, 50_272, tied=True, ffn_dim=4096,
               word_embed_proj_dim=512,
               do_layer_norm_before=False, positions=2048),
        _sized("facebook/opt-1.3b", 1.32, 24, 2048, 0, 32, 32, 50_272, tied=True, ffn_dim=8192,
               positions=2048),
    ),
    "PhiForCausalLM": (_sized("microsoft/phi-2", 2.78, 32, 2560, 10240, 32, 32, 51_200, positions=2048),),
    "Phi3ForCausalLM": (
        _sized("microsoft/Phi-4-mini-instruct", 3.84, 32, 3072, 8192, 24, 8, 200_064, tied=True,
               partial_rotary_factor=0.75),
        _sized("microsoft/phi-4", 14.66, 40, 5120, 17920, 40, 10, 100_352, sliding_window=None),
    ),
    "StableLmForCausalLM": (
        _sized("stabilityai/stablelm-2-1_6b", 1.64, 24, 2048, 5632, 32, 32, 100_352, use_qkv_bias=True,
               positions=4096),
        _sized("stabilityai/stablelm-2-12b", 12.14, 40, 5120, 13824, 32, 8, 100_352, qk_layernorm=True,
               use_parallel_residual=True, positions=4096),
    ),
    "Starcoder2ForCausalLM": (
        _sized("bigcode/starcoder2-3b", 3.03, 30, 3072, 12288, 24, 2, 49_152, tied=True),
    ),
    "Olmo2ForCausalLM": (
        _sized("allenai/OLMo-2-0425-1B", 1.48, 16, 2048, 8192, 16, 16, 100_352, positions=4096),
        _sized("allenai/OLMo-2-1124-7B", 7.3, 32, 4096, 11008, 32, 32, 100_352, positions=4096),
    ),
    "Olmo3ForCausalLM": (_sized("allenai/Olmo-3-1025-7B", 7.3, 32, 4096, 11008, 32, 32, 100_278),),
    "GraniteForCausalLM": (
        _sized("ibm-granite/granite-3.3-8b-instruct", 8.17, 40, 4096, 12800, 32, 8, 49_159, tied=True),
    ),
    "GraniteMoeHybridForCausalLM": (
        _sized("ibm-granite/granite-4.0-h-350m", 0.34, 32, 768, 0, 12, 4, 100_352, mamba_n_heads=48,
               shared_intermediate_size=2048, layer_types=_mamba(32, 10, 13, 17, 27), **GRANITE_H),
        _sized("ibm-granite/granite-4.0-h-micro", 3.19, 40, 2048, 0, 32, 8, 100_352, mamba_n_heads=64,
               shared_intermediate_size=8192, layer_types=_mamba(40, 5, 15, 25, 35), **GRANITE_H),
    ),
    "Lfm2ForCausalLM": (
        _sized("LiquidAI/LFM2-350M", 0.354, 16, 1024, 6656, 16, 8, 65_536, **LFM2),
        _sized("LiquidAI/LFM2-1.2B", 1.17, 16, 2048, 12288, 32, 8, 65_536, **LFM2),
    ),
    "MuseGlimmerForCausalLM": (
        _sized("meta-models/Muse-Glimmer-30B (text)", 27.85, 52, 6656, 19968, 32, 2, 202_048),
    ),
    "NemotronHForCausalLM": (
        _sized("nvidia/Nemotron-H-8B-Base-8K", 8.1, 52, 4096, 21504, 32, 8, 131_072,
               hybrid_override_pattern="M-M-M-M*-" + "M-M-M-M-M*-" * 3 + "M-M-M-M-M-"),
        _sized("nvidia/NVIDIA-Nemotron-Nano-9B-v2", 8.89, 56, 4480, 15680, 40, 8, 131_072, mamba_head_dim=80,
               hybrid_override_pattern="M-M-M-MM-" + "M-M-M*-" * 2 + "M-M-M-M*-" * 2 + "M-MM-M-M-M-M-M-"),
    ),
    "InternLM2ForCausalLM": (
        _sized("internlm/internlm2_5-7b", 7.74, 32, 4096, 14336, 32, 8, 92_544, bias=False),
    ),
    "MinistralForCausalLM": (
        _sized("mistralai/Ministral-8B-Instruct-2410", 8.02, 36, 4096, 12288, 32, 8, 131_072, head_dim=128),
    ),
    "Ministral3ForCausalLM": (
        _sized("mistralai/Ministral-3-8B-Instruct-2512-BF16 (text)", 8.5, 34, 4096, 14336, 32, 8, 131_072,
               head_dim=128),
    ),
    "SeedOssForCausalLM": (
        _sized("ByteDance-Seed/Seed-OSS-36B-Base", 36.15, 64, 5120, 27648, 80, 8, 155_136, head_dim=128,
               attention_bias=True,
               attention_out_bias=False),
    ),
    "SmolLM3ForCausalLM": (
        _sized("HuggingFaceTB/SmolLM3-3B", 3.08, 36, 2048, 11008, 16, 4, 128_256, tied=True),
    ),
}  # fmt: skip


def spec_of(architecture: str, checkpoint: Checkpoint) -> ModelSpec:
    """Return the spec of a checkpoint."""
    keys = {key: value for key, value in checkpoint.config.items() if value != 0}
    return ModelSpec.from_hf({"model_type": FAMILIES[architecture].model_type, **keys})


def _memory() -> list[str]:
    lines = [
        f"| checkpoint | `model_type` | parameters | 16 bits | `int4` | cache of {TOKENS:,} tokens |",
        "|---|---|---|---|---|---|",
    ]
    cpu, dtype = torch.device("cpu"), torch.bfloat16
    for architecture, checkpoints in CHECKPOINTS.items():
        for checkpoint in checkpoints:
            spec = spec_of(architecture, checkpoint)
            weights = [weight_bytes(spec, cpu, dtype, native=True, bits=bits) for bits in (None, 4)]
            cache = KVCache.bytes_per_row(spec, min(TOKENS, spec.max_positions), dtype)
            shown = " | ".join(f"{size / GB:.2f}" for size in (*weights, cache))
            kind, count = FAMILIES[architecture].model_type, parameter_count(spec)
            lines.append(f"| {checkpoint.name} | `{kind}` | {count / GB:.2f} B | {shown} |")
    return lines


def _refused() -> list[str]:
    lines = ["| what is refused | such as `model_type` | what to give instead, by size |", "|---|---|---|"]
    for kind, what in KINDS.items():
        instead = dict.fromkeys(own for known, own in KNOWN.values() if known == kind)
        shown = ", ".join(f"`{name}`" for name in EXAMPLES[kind].split())
        lines.append(f"| {what} | {shown} | {', '.join(instead)} |")
    return lines


TABLES = {"memory": _memory, "refused": _refused}


def brought_up_to_date(page: str) -> str:
    """Return the text of the page with its tables as this module makes them."""
    return BLOCK.sub(lambda found: "\n".join([f"{found['name']} -->", *TABLES[found["name"]](), ""]), page)


def main() -> None:
    """Write the tables of the page."""
    write_whole(PAGE, brought_up_to_date(PAGE.read_text(encoding="utf-8")), "page")


if __name__ == "__main__":
    main()
