"""InternLM 2 and 2.5: a Llama under other names, with queries, keys and values stored by key heads.

`transformers` has no class of it: the reference is the modelling code that its checkpoints bring
(https://huggingface.co/internlm/internlm2_5-7b/blob/main/modeling_internlm2.py).
"""

from __future__ import annotations

from typing import Any

from foredraft.model.config import ConfigReader
from foredraft.model.families.llama import llama_like
from foredraft.model.families.shared import FULL, read_head_dim, read_windows
from foredraft.model.tensor_layouts import EMBEDDING, LAST_NORM, TensorLayout

# the keys that its modelling code reads, besides those that all families share
KEYS = frozenset({"bias", "hidden_act", "pretraining_tp"})
CODE = "modeling_internlm2.InternLM2ForCausalLM"  # the modelling code that this family stands for
INTERNLM2 = TensorLayout(
    outer={"tok_embeddings": EMBEDDING, "norm": LAST_NORM},
    inner={
        "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attention.wqkv": "self_attn.qkv_proj",
        "attention.wo": "self_attn.o_proj",
        "feed_forward.w1": "mlp.gate_proj",
        "feed_forward.w3": "mlp.up_proj",
        "feed_forward.w2": "mlp.down_proj",
    },
    heads=("output",),
)


def internlm2(read: ConfigReader) -> dict[str, Any]:
    heads, bias = read.count("num_attention_heads"), read.flag("bias", default=True)
    _check_code(read)
    return llama_like(read, read.count("num_key_value_heads", heads, if_null=heads), read_head_dim(read)) | {
        "windows": read_windows(read, {FULL: None}, [FULL]),
        "qkv_bias": bias,
        "output_bias": bias,
        "fused_qkv": True,
        "grouped_qkv": True,
        "naming": INTERNLM2,
    }


def _check_code(read: ConfigReader) -> None:
    """Check that the modelling code which the checkpoint brings is that of the family."""
    code = read.take("auto_map")
    named = code.get("AutoModelForCausalLM", CODE) if isinstance(code, dict) else code
    if named is not None and str(named).rpartition("--")[2] != CODE:
        raise read.error("auto_map", f"only the code {CODE} is known")
