"""Save tiny random heads in the formats of the projects that publish them, in safetensors or, as llama.cpp does, GGUF."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.gguf_files import permuted, quantised, write_tensors

LAYERS = 7  # of the targets: the default auxiliary layers are 2, 3, 4
AUX = [2, LAYERS // 2, LAYERS - 3]
D, HEADS, KV_HEADS, INNER, DRAFT_VOCAB = 64, 4, 2, 80, 6
BLOCK, RANK, HEAD_DIM = 4, 5, 24  # of DFlash and DSpark heads
FILE = "model.safetensors"
NORMS = ("input", "post_attention")  # of a layer
BODY: dict[str, Any] = {
    "model_type": "llama", "hidden_size": D, "intermediate_size": INNER, "num_hidden_layers": 1,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "max_position_embeddings": 2048, "hidden_act": "silu",
}  # fmt: skip
BLOCK_BODY = {**BODY, "model_type": "qwen3", "num_hidden_layers": 2, "head_dim": HEAD_DIM}
SLIDING = {
    "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
AUX_IDS, BLOCK_IDS = "eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids"
QWEN3 = {"model_type": "qwen3", "head_dim": HEAD_DIM}
DEEPSPEC = {
    "architectures": ["Qwen3DSparkModel"], "block_size": BLOCK, "mask_token_id": 9, "num_anchors": 64,
    "target_layer_ids": [-1, 2, 4], "markov_rank": RANK, "markov_head_type": "vanilla",
    "enable_confidence_head": True, "confidence_head_with_markov": True, "num_target_layers": LAYERS,
}  # fmt: skip
DFLASH_2 = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": RANK, "selector_top_k": 4}
MODELOPT = {  # keys of an `eagle_config` that change nothing
    "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False,
    "next_layer_regular": True, "parallel_draft_step": 1, "parallel_draft_heads_num_layers": 4, "use_aux_hidden_state": True,
}  # fmt: skip
SCALED = {"input_embedding_scale": 2.0, "output_multiplier": 0.5, "final_logit_softcapping": 4.0}
SMALLER: dict[str, Any] = {"draft_vocab": DRAFT_VOCAB}
MAPPED = {**SMALLER, "t2d": True}
WITH_EMBEDDING = {**MAPPED, "embedding": True}
# drafter -> format -> keys beside those of the body ("spec": in the way of speculators), and of the body, its own section
# of the config, and what lies among the tensors
BY_DRAFTER: dict[str, dict[str, dict[str, Any]]] = {
    "eagle3": {
        "safeailab": MAPPED,
        "specforge": {**SMALLER, "keys": {"eagle_config": {"use_aux_hidden_state": True, AUX_IDS: [1, 2, 4]}}},
        "residual": {**SMALLER, "keys": {"norm_before_residual": True}},
        "whole": {"keys": {"norm_before_fc": True}, "head": False},
        "speculators": {**WITH_EMBEDDING, "spec": {"norm_before_residual": True, AUX_IDS: [1, 3, 6]}},
        "qwen3": {
            **WITH_EMBEDDING, "spec": {"norm_output": True, "fc_norm": True, AUX_IDS: [2, 4, 5, 7]}, "body": QWEN3,
        },
        "modelopt": {"keys": {"eagle_config": {**MODELOPT, AUX_IDS: []}, "num_hidden_layers": 36, "model_type": "phi3"}},
        "deep": {**SMALLER, "spec": {AUX_IDS: None}, "body": {"num_hidden_layers": 2, "attention_bias": True}},
    },
    "p-eagle": {
        "p-eagle speculators": {
            **WITH_EMBEDDING, "spec": {"norm_before_residual": True, AUX_IDS: [1, 3, 6], "mask_token_id": 7},
            "body": {**QWEN3, "num_hidden_layers": 2},
        },
        "p-eagle specforge": {
            **SMALLER, "keys": {"architectures": ["PEagleDraftModel"]}, "body": {"num_hidden_layers": 2},
            "beside": {"mask_token_id": 9, "num_depths": 6, "norm_before_residual": True, "down_sample_ratio": 0.8},
        },
        "p-eagle amazon": {"keys": {"ptd_token_id": 3}},
    },
    "eagle": {
        "eagle-1": {"bias": True, "embedding": True},
        "eagle-2": {"keys": {"bias": False, "qkv_bias": True, "num_hidden_layers": 2}},
    },
    "medusa": {
        "fasterdecoding": {"heads": 4, "blocks": 1, "keys": {"medusa_num_heads": 5, "medusa_num_layers": 1}},
        "vllm": {
            **SMALLER, "heads": 3, "blocks": 2,
            "keys": {"model_type": "medusa", "architectures": ["MedusaModel"], "num_heads": 3},
        },
        "one output": {
            "heads": 5, "blocks": 1, "keys": {"architectures": ["MedusaModel"], "original_lm_head": True},
        },
    },
    "dflash": {
        "block z-lab": {
            "keys": {"architectures": ["DFlashDraftModel"], "block_size": BLOCK},
            "section": {"mask_token_id": 7, "target_layer_ids": [0, 2, 5]},
        },
        "block scaled": {
            "keys": {"architectures": ["DFlashDraftModel"], "num_target_layers": LAYERS},
            "body": {**SLIDING, "attention_bias": True},
            "section": {"mask_token_id": 4, "block_size": BLOCK, **SCALED},
        },
        "block speculators": {**MAPPED, "spec": {BLOCK_IDS: [1, 3, 6]}, "body": SLIDING, "head": True},
        "block dflash 2": {
            "keys": {"architectures": ["DFlash2DraftModel"], "is_causal": False}, "body": SLIDING,
            "draftable": 4, "section": {
                "block_size": BLOCK, "mask_token_id": 4, "target_layer_ids": [0, 3], **DFLASH_2,
            },
        },
        "block dflash 2 of speculators": {
            "spec": {BLOCK_IDS: [1, 3], **DFLASH_2, "conv_kernel_size": 3}, "type": "dflash2", "head": True, "draftable": 4,
        },
        "block windows of modelopt": {
            "keys": {"architectures": ["DFlashDraftModel"], "block_size": BLOCK, "sliding_window": 6},
            "section": {
                "mask_token_id": 7, "target_layer_ids": [0, 2, 5], "use_swa": True, "swa_window_size": 6, "causal": False,
            },
        },
        "block anchored": {
            **SMALLER, "body": SLIDING,
            "spec": {BLOCK_IDS: [2, 7], "sample_from_anchor": True, "sliding_window_non_causal": True},
        },
    },
    "dspark": {
        "block deepspec": {"head": True, "embedding": True, "keys": DEEPSPEC},
        "block modelopt": {
            "keys": {"architectures": ["DFlashDraftModel"], "block_size": BLOCK}, "bare": True,
            "section": {
                "mask_token_id": 7, "target_layer_ids": [0, 2, 5], "projector_type": "dspark", "shift_label": True,
                "markov_rank": RANK, "markov_head_type": "gated", "use_confidence_head": True,
            },
        },
        "block specforge": {
            "keys": {
                "architectures": ["DSparkDraftModel"], "block_size": BLOCK, "auto_map": {"AutoModel": "dspark.DSparkDraftModel"},
                "dspark_config": {
                    "markov_rank": RANK, "markov_head_type": "vanilla", "confidence_head_with_markov": True,
                    "enable_confidence_head": True, "confidence_head_alpha": 1.0,
                },
            },
            "section": {
                "mask_token_id": 7, "target_layer_ids": [0, 2, 5], "attention_mode": "gqa", "projector_type": "dspark",
            },
        },
        "block gated": {
            **SMALLER, "head": True, "spec": {BLOCK_IDS: [1, 4], "markov_rank": RANK, "markov_head_type": "gated"},
        },
        "block rnn": {
            "spec": {
                BLOCK_IDS: [2, 5], "markov_rank": RANK, "markov_head_type": "rnn", "sample_from_anchor": False,
            },
        },
    },
}  # fmt: skip
FORMATS = {
    name: {"of": drafter, **form} for drafter, forms in BY_DRAFTER.items() for name, form in forms.items()
}
# of a GGUF file: the format of the same head in safetensors, what its config says otherwise, and the type of matrices
FILES: dict[str, tuple[str, dict[str, Any], str]] = {
    "gguf": ("residual", {}, "F32"),
    "gguf whole": ("whole", {}, "Q8_0"),
    "block gguf": ("block z-lab", {"is_causal": False, **SLIDING}, "F32"),
    "block gguf reduced": ("block speculators", {"sliding_window_non_causal": True}, "F32"),
    "block gguf with a bias": ("block deepspec", {}, "Q8_0"),
    "block gguf dflash 2": ("block dflash 2", {}, "F32"),
}
FORMATS |= {name: FORMATS[plain] for name, (plain, *_) in FILES.items()}
COMMON: dict[str, dict[str, Any]] = {  # keys of a config in the way of the first project
    "eagle3": {
        "architectures": ["LlamaForCausalLMEagle3"], "torch_dtype": "float32", "bos_token_id": 1,
        "tie_word_embeddings": False,
    },
    "eagle": {"architectures": ["LlamaForCausalLM"], "torch_dtype": "float32"},
    "block": {"dtype": "float32", "tie_word_embeddings": False},
}  # fmt: skip


class Drawn:
    def __init__(self, seed: int, scale: float = 1.5) -> None:
        self.random, self.scale = torch.Generator().manual_seed(seed), scale
        self.tensors: dict[str, Tensor] = {}

    def weights(self, *shape: int, of: str | list[str], scale: float = 1.0) -> None:
        for name in [of] if isinstance(of, str) else of:
            drawn = torch.randn(shape, generator=self.random) / math.sqrt(shape[-1])
            self.tensors[name] = drawn * self.scale * scale

    def norms(self, size: int, of: str | list[str]) -> None:
        for name in [of] if isinstance(of, str) else of:
            self.tensors[f"{name}.weight"] = 1 + 0.2 * torch.randn(size, generator=self.random)

    def layer(self, name: str, body: dict[str, Any], entering: int, norms: tuple[str, ...]) -> None:
        size, attention = body["hidden_size"], f"{name}.self_attn"
        head_dim = body.get("head_dim", size // HEADS)
        self.norms(size, of=[f"{name}.{each}_layernorm" for each in norms])
        rows = {"q": HEADS * head_dim, "k": KV_HEADS * head_dim, "v": KV_HEADS * head_dim}
        for each, count in rows.items():
            self.weights(count, entering, of=f"{attention}.{each}_proj.weight")
        self.weights(size, HEADS * head_dim, of=f"{attention}.o_proj.weight")
        outputs = {"o": size} if body.get("attention_bias") else {}
        for each, count in {**rows, **outputs}.items() if outputs or body.get("qkv_bias") else ():
            self.weights(count, of=f"{attention}.{each}_proj.bias")
        if body["model_type"] == "qwen3":
            self.norms(head_dim, of=[f"{attention}.{each}_norm" for each in "qk"])
        self.weights(INNER, size, of=[f"{name}.mlp.{each}_proj.weight" for each in ("gate", "up")])
        self.weights(size, INNER, of=f"{name}.mlp.down_proj.weight")

    def some_ids(self, vocabulary: int, count: int) -> Tensor:
        return torch.randperm(vocabulary, generator=self.random)[:count].sort().values

    def outputs(self, form: dict[str, Any], vocabulary: int, draft_vocab: int) -> None:
        if form.get("head", form["of"] in ("eagle3", "p-eagle")):
            self.weights(draft_vocab, D, of="lm_head.weight", scale=2)
        if form.get("embedding"):
            self.weights(vocabulary, D, of="embed_tokens.weight")
        if draft_vocab != vocabulary:
            ids = self.some_ids(vocabulary, draft_vocab)
            self.tensors["d2t"] = ids - torch.arange(draft_vocab)
            if form.get("t2d"):
                self.tensors["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill(0, ids, True)


def _of_eagle3(drawn: Drawn, form: dict[str, Any], config: dict[str, Any], outputs: int, size: int) -> None:
    body, keys = body_of(config), form.get("spec", form.get("keys", {}))
    aux_layers = keys.get("eagle_config", keys).get(AUX_IDS) or range(3)
    drawn.weights(D, len(aux_layers) * size, of="fc.weight")
    drawn.norms(D, of="norm")
    if form["of"] == "p-eagle":
        drawn.weights(1, 1, len(aux_layers) * size, of="mask_hidden", scale=8)
    if keys.get("norm_before_fc"):
        drawn.norms(len(aux_layers) * size, of="input_norm")
    if keys.get("fc_norm"):
        drawn.norms(size, of=[f"fc_norm.{place}" for place in range(len(aux_layers))])
    first = "layers.0" if "spec" in form else "midlayer"
    drawn.norms(D, of=f"{first}.hidden_norm")
    for index in range(form.get("body", {}).get("num_hidden_layers", 1)):
        name, entering = (f"layers.{index}", D) if index else (first, 2 * D)
        drawn.layer(name, body, entering, NORMS)
    drawn.outputs(form, body["vocab_size"], outputs)


def _of_eagle(drawn: Drawn, form: dict[str, Any], config: dict[str, Any], outputs: int, size: int) -> None:
    drawn.weights(size, 2 * size, of="fc.weight")
    if form.get("bias"):
        drawn.weights(size, of="fc.bias")
    if form.get("embedding"):
        drawn.weights(config["vocab_size"], size, of="embed_tokens.weight")
    for index in range(form.get("keys", {}).get("num_hidden_layers", 1)):
        drawn.layer(f"layers.{index}", config, size, NORMS if index else NORMS[1:])


def _of_medusa(drawn: Drawn, form: dict[str, Any], config: dict[str, Any], outputs: int, size: int) -> None:
    vocabulary, original = config["vocab_size"], "medusa_num_heads" in form["keys"]
    for head in range(form["heads"]):
        for block in range(form["blocks"]):
            name = f"{head}.{block}.linear" if original else f"blocks.{head}.layers.{block}"
            drawn.weights(size, size, of=f"{name}.weight")
            if original:
                drawn.weights(size, of=f"{name}.bias")
        name = f"{head}.{form['blocks']}" if original else f"lm_heads.{head}"
        drawn.weights(outputs, size, of=f"{name}.weight", scale=2)
    if outputs != vocabulary:
        drawn.tensors["token_map"] = drawn.some_ids(vocabulary, outputs)


def _of_block(drawn: Drawn, form: dict[str, Any], config: dict[str, Any], outputs: int, size: int) -> None:
    body, own = (
        body_of(config),
        {**config, **config.get("dflash_config", {}), **config.get("dspark_config", {})},
    )
    markov, confidence = (
        ("", "confidence_proj") if form.get("bare") else ("markov_head.", "confidence_head.proj")
    )
    rank, vocabulary = own.get("markov_rank", 0), body["vocab_size"]
    aux_layers = own.get(BLOCK_IDS) or own.get("target_layer_ids") or range(2)
    drawn.weights(D, len(aux_layers) * size, of="fc.weight")
    drawn.norms(D, of=["norm", "hidden_norm"])
    for index in range(body["num_hidden_layers"]):
        drawn.layer(f"layers.{index}", body, D, NORMS)
    drawn.outputs(form, vocabulary, outputs)
    if rank:
        drawn.weights(vocabulary, rank, of=f"{markov}markov_w1.weight", scale=2)
        drawn.weights(outputs, rank, of=f"{markov}markov_w2.weight", scale=2)
    parts = {
        "gated": (f"{markov}gate_proj", rank, D + rank),
        "rnn": (f"{markov}joint_proj", 3 * rank, 2 * rank + D),
        "vanilla": (confidence, 1, D + rank),  # which the format with this one has
    }
    if form.get("bare"):
        drawn.weights(1, D, of=f"{confidence}.weight")
    if rank := own.get("selector_rank", 0):
        taps, groups = own["conv_kernel_size"], D // own["conv_group_size"]
        codebooks = [f"candidate_selector.{each}_codebook" for each in ("predecessor", "successor")]
        drawn.weights(vocabulary, rank, of=codebooks, scale=3)
        drawn.weights(rank, D, of="candidate_selector.hidden_projection.weight")
        for name in [
            f"layers.{n}.{part}_conv"
            for n in range(body["num_hidden_layers"])
            for part in ("attention", "mlp")
        ]:
            drawn.weights(2, taps, D, of=f"{name}.base_kernel", scale=4)
            drawn.weights(2 * taps * groups, D, of=f"{name}.kernel_projection.weight")
    if own.get("markov_head_type") in parts:
        name, rows, columns = parts[own["markov_head_type"]]
        drawn.weights(rows, columns, of=f"{name}.weight")
        drawn.weights(rows, of=f"{name}.bias")


def body_of(config: dict[str, Any]) -> dict[str, Any]:
    return config.get("transformer_layer_config", config)


def speculators_config(algorithm: str, tokens: int, body: dict[str, Any], **keys: Any) -> dict[str, Any]:
    return {
        "speculators_model_type": algorithm, "speculators_version": "0.9.0", "transformer_layer_config": body,
        "target_hidden_size": None, **keys,
        "speculators_config": {
            "algorithm": algorithm, "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens}],
            "verifier": {"name_or_path": "some/target", "architectures": ["LlamaForCausalLM"]},
        },
    }  # fmt: skip


def _config_of(
    form: dict[str, Any], vocabulary: int, outputs: int, size: int, section: dict[str, Any]
) -> dict[str, Any]:
    block = form["of"] in ("dflash", "dspark")
    body = {**(BLOCK_BODY if block else BODY), "vocab_size": vocabulary, **form.get("body", {})}
    if "spec" in form:
        own = {"block_size": BLOCK, "mask_token_id": 7} if block else {}
        own["architectures"] = ["AnySpeculator" if block else "Eagle3Speculator"]
        own |= {"draft_vocab_size": outputs, **form["spec"]}
        kind = form.get("type", form["of"].replace("-", ""))
        return speculators_config(kind, 3 if block else 4, body, **own)
    if form["of"] == "medusa":
        return dict(form["keys"])
    eagle3 = {"draft_vocab_size": outputs}
    sizes = {"eagle3": eagle3, "p-eagle": eagle3, "eagle": {"hidden_size": size}}.get(form["of"], {})
    common = COMMON["block" if block else "eagle" if form["of"] == "eagle" else "eagle3"]
    written = {**body, **common, **form.get("keys", {}), **sizes}
    if inner := {**form.get("section", {}), **section}:
        written["dflash_config"] = {key: value for key, value in inner.items() if value is not None}
    return written


LAYER = {  # the names of a layer's tensors
    "hidden_norm": "attn_norm_2", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "attention_conv.kernel_projection": "attn_conv_proj", "mlp_conv.kernel_projection": "ffn_conv_proj",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
OUTER = {
    "fc": "fc", "norm": "output_norm", "lm_head": "output", "embed_tokens": "token_embd",
    "input_norm": "enc.output_norm", "hidden_norm": "enc.output_norm", "markov_head.markov_w1": "markov_w1",
    "markov_head.markov_w2": "markov_w2", "confidence_head.proj": "conf_proj",
    "candidate_selector.hidden_projection": "selector_hidden",
}  # fmt: skip
BARE = {"candidate_selector.predecessor_codebook": "selector_predecessor.weight",
        "candidate_selector.successor_codebook": "selector_successor.weight"}  # fmt: skip


def save_head(
    place: Path,
    format: str,
    vocabulary: int,
    *,
    draft_vocab: int | None = None,
    size: int = D,
    config: dict[str, Any] | None = None,
    section: dict[str, Any] | None = None,
    tensors: Any = None,
    keys: dict[str, Any] | None = None,
    beside: dict[str, Any] | None = None,
) -> Path:
    """Write a head in one of FORMATS, for a target's hidden size.

    `config`, its `section` and `tensors` replace, add or, by None, drop some. Of a GGUF file, beside which the folder
    `plain_of` it has the same head in safetensors, `keys` are those of the architecture, and `tensors` may be a function
    that changes the tensors by their names in the file.
    """
    if format in FILES:
        head = {"draft_vocab": draft_vocab, "size": size, "config": config or {}, "section": section}
        head["tensors"], change = (None, tensors) if callable(tensors) else (tensors, lambda arrays: None)
        return _save_file(place, format, vocabulary, head, keys or {}, change)
    form = FORMATS[format]
    outputs = draft_vocab or form.get("draft_vocab", vocabulary)
    written = _config_of(form, vocabulary, outputs, size, section or {}) | (config or {})
    seeded = {"eagle": (2, 1.0), "medusa": (1,), "p-eagle": (3,)}  # states of EAGLE recur without a norm
    drawn = Drawn(*seeded.get(form["of"], (0,)))
    draw = {"eagle3": _of_eagle3, "p-eagle": _of_eagle3, "eagle": _of_eagle, "medusa": _of_medusa}.get(
        form["of"], _of_block
    )
    draw(drawn, form, {"vocab_size": vocabulary, **written}, outputs, size)
    kept = {key: value for key, value in written.items() if value is not None or "spec" in form}
    file = "medusa_lm_head.safetensors" if "medusa_num_heads" in written else FILE
    place.mkdir(parents=True)
    (place / "config.json").write_text(json.dumps(kept))
    if "beside" in form:
        (place / "peagle_config.json").write_text(json.dumps({**form["beside"], **(beside or {})}))
    stored = {**drawn.tensors, **(tensors or {})}
    save_file({name: t.contiguous() for name, t in stored.items() if t is not None}, place / file)
    return place


def plain_of(file: Path) -> Path:
    return file.with_name(f"{file.name}-plain")


def _save_file(
    file: Path, format: str, vocabulary: int, head: dict[str, Any], keys: dict[str, Any], change: Any
) -> Path:
    plain, config, kind = FILES[format]
    block = plain.startswith("block")
    body = {**(BLOCK_BODY if block else BODY), "vocab_size": vocabulary}
    if plain == "block speculators":  # without windows, which reach back from the anchor there
        config = {**config, "transformer_layer_config": body}
    folder = save_head(plain_of(file), plain, vocabulary, **{**head, "config": {**config, **head["config"]}})
    told = json.loads((folder / "config.json").read_text())
    told = {**told, **told.get("dflash_config", {})}
    flags = ("norm_before_residual", "norm_before_fc")
    own: dict[str, Any] = {flag: True for flag in flags if told.get(flag)}
    own |= {"target_layers": AUX, "target_hidden_size": D}
    if block:
        layers = told.get(BLOCK_IDS) or [layer + 1 for layer in told["target_layer_ids"]]
        own = {"target_layers": layers, "block_size": BLOCK}
        own |= {key: told[key] for key in DFLASH_2 if key in told}
        own |= {"attention.key_length": HEAD_DIM, "attention.value_length": HEAD_DIM}
    if "layer_types" in told:
        own["attention.sliding_window"] = told["sliding_window"]
        own["attention.sliding_window_pattern"] = [
            each == "sliding_attention" for each in told["layer_types"]
        ]
    writer = gguf.GGUFWriter(file, architecture := "dflash" if block else "eagle3")
    written = {
        "context_length": body["max_position_embeddings"], "embedding_length": D, "block_count": body["num_hidden_layers"],
        "feed_forward_length": INNER, "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": body["rms_norm_eps"], "rope.freq_base": body["rope_theta"],
        "vocab_size": vocabulary, **own, **keys,
    }  # fmt: skip
    for key, value in written.items():
        _add_value(writer, f"{architecture}.{key}", value)
    _add_value(writer, "tokenizer.ggml.mask_token_id", told.get("mask_token_id"))
    arrays = _arrays(folder / FILE, kind, permutes=not block)
    change(arrays)
    write_tensors(writer, arrays, lambda name, values: kind if _fits(values, kind) else "F32")
    return file


def _fits(values: Any, kind: str) -> bool:
    size, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return values.ndim == 2 and values.shape[1] % size == 0


def _arrays(plain: Path, kind: str, permutes: bool) -> dict[str, np.ndarray]:
    """Round the matrices of a head in safetensors, and return its tensors by their names in a GGUF file."""
    raw, stored = gguf.GGMLQuantizationType[kind], load_file(plain)

    def rounded(t: Tensor) -> Tensor:
        return torch.from_numpy(gguf.quants.dequantize(quantised(t.numpy(), kind), raw).copy()).view(t.shape)

    save_file({name: rounded(t) if _fits(t, kind) else t for name, t in stored.items()}, plain)
    arrays: dict[str, np.ndarray] = {}
    for name, t in stored.items():
        part, _, end = name.replace("midlayer.", "layers.0.").rpartition(".")
        if end == "base_kernel":
            _, index, part = part.split(".")
            arrays[f"blk.{index}.{'ffn' if part == 'mlp_conv' else 'attn'}_conv_base"] = t.float().numpy()
        elif name in BARE:
            arrays[BARE[name]] = t.float().numpy()
        elif part.startswith("layers."):
            _, index, part = part.split(".", 2)
            heads = {"self_attn.q_proj": HEADS, "self_attn.k_proj": KV_HEADS}.get(part) if permutes else None
            values = t.float().numpy()
            arrays[f"blk.{index}.{LAYER[part]}.{end}"] = values if heads is None else permuted(values, heads)
        elif part in OUTER:
            arrays[f"{OUTER[part]}.{end}"] = t.float().numpy()
    if "d2t" in stored:
        arrays["d2t"] = (stored["d2t"] + torch.arange(len(stored["d2t"]))).numpy()
    return arrays


def _add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    adds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
    if value is not None:
        adds[type(value)](key, value)
