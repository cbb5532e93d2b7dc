"""Save tiny random DFlash and DSpark heads in the formats of the projects, and define their logits in plain float64.

The definition reads the files anew and shares no code with the library.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from tests.support import heads
from tests.support.heads import DRAFT_VOCAB, HEADS, INNER, KV_HEADS, LAYERS, NORMS, D, Weights

BLOCK, RANK, HEAD_DIM = 4, 5, 24
BODY: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": D, "intermediate_size": INNER, "num_hidden_layers": 2,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "max_position_embeddings": 2048, "hidden_act": "silu",
}  # fmt: skip
SLIDING = {
    "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
# format -> the drafter that reads it, the keys of its config, and what lies among its tensors
FORMATS: dict[str, dict[str, Any]] = {
    "z-lab": {
        "of": "dflash", "keys": {"architectures": ["DFlashDraftModel"], "block_size": BLOCK},
        "section": {"mask_token_id": 7, "target_layer_ids": [0, 2, 5]},
    },
    "scaled": {
        "of": "dflash", "keys": {"architectures": ["DFlashDraftModel"], "num_target_layers": LAYERS},
        "body": {**SLIDING, "attention_bias": True},
        "section": {
            "mask_token_id": 4, "block_size": BLOCK, "input_embedding_scale": 2.0, "output_multiplier": 0.5,
            "final_logit_softcapping": 4.0,
        },
    },
    "speculators": {
        "of": "dflash", "spec": {"speculators_model_type": "dflash", "aux_hidden_state_layer_ids": [1, 3, 6]},
        "body": SLIDING, "draft_vocab": DRAFT_VOCAB, "t2d": True, "head": True,
    },
    "anchored": {
        "of": "dflash", "draft_vocab": DRAFT_VOCAB, "body": SLIDING,
        "spec": {
            "speculators_model_type": "dflash", "aux_hidden_state_layer_ids": [2, 7],
            "sample_from_anchor": True, "sliding_window_non_causal": True,
        },
    },
    "deepspec": {
        "of": "dspark", "head": True, "embedding": True, "confidence": True,
        "keys": {
            "architectures": ["Qwen3DSparkModel"], "block_size": BLOCK, "mask_token_id": 9, "num_anchors": 64,
            "target_layer_ids": [-1, 2, 4], "markov_rank": RANK, "markov_head_type": "vanilla",
            "enable_confidence_head": True, "confidence_head_with_markov": True, "num_target_layers": LAYERS,
        },
    },
    "gated": {
        "of": "dspark", "draft_vocab": DRAFT_VOCAB, "head": True,
        "spec": {
            "speculators_model_type": "dspark", "aux_hidden_state_layer_ids": [1, 4], "markov_rank": RANK,
            "markov_head_type": "gated",
        },
    },
    "rnn": {
        "of": "dspark",
        "spec": {
            "speculators_model_type": "dspark", "aux_hidden_state_layer_ids": [2, 5], "markov_rank": RANK,
            "markov_head_type": "rnn", "sample_from_anchor": False,
        },
    },
}  # fmt: skip


def save_block(
    folder: Path,
    format: str,
    vocabulary: int,
    *,
    draft_vocab: int | None = None,
    target_size: int = D,
    config: dict[str, Any] | None = None,
    section: dict[str, Any] | None = None,
    tensors: dict[str, Tensor | None] | None = None,
    seed: int = 0,
) -> Path:
    """Write a head in one of FORMATS; `tensors`, `config` and its `section` replace or, by None, drop some."""
    form = FORMATS[format]
    body = {**BODY, "vocab_size": vocabulary, **form.get("body", {})}
    draft_vocab = draft_vocab or form.get("draft_vocab", vocabulary)
    if spec := dict(form.get("spec", {})):
        written = heads.speculators_config(
            spec.pop("speculators_model_type"), 3, body, block_size=BLOCK, mask_token_id=7, **spec
        )
        written |= {"architectures": ["AnySpeculator"], "draft_vocab_size": draft_vocab}
    else:
        written = {**body, **form["keys"], "dtype": "float32", "tie_word_embeddings": False}
        if inner := {**form.get("section", {}), **(section or {})}:
            written["dflash_config"] = {key: value for key, value in inner.items() if value is not None}
    written |= config or {}
    kept = {key: value for key, value in written.items() if value is not None or spec}
    made = _tensors(form, written, body, draft_vocab, target_size, seed)
    return heads.write_head(folder, kept, {**made, **(tensors or {})})


def _read(config: dict[str, Any]) -> dict[str, Any]:
    """Return what a config says, whatever its format: auxiliary layers by their states, and the rest by one name each."""
    section, spec = config.get("dflash_config", {}), "speculators_model_type" in config
    both = {**config, **section}
    if spec:
        aux = config["aux_hidden_state_layer_ids"]
        anchored = config.get("sample_from_anchor", config["speculators_model_type"] == "dspark")
    else:
        ids = both.get("target_layer_ids", [1, 4])  # of 2 layers over LAYERS: round(1 + i * (LAYERS - 4))
        aux, anchored = [layer + 1 for layer in ids], config["architectures"] == ["Qwen3DSparkModel"]
    return {
        "aux": aux, "anchored": anchored, "mask": both.get("mask_token_id"), "block": both.get("block_size"),
        "rank": both.get("markov_rank", 0), "form": both.get("markov_head_type"), "spec": spec,
        "free": config.get("sliding_window_non_causal", config.get("is_causal") is False),
        "in": both.get("input_embedding_scale", 1.0), "out": both.get("output_multiplier", 1.0),
        "cap": both.get("final_logit_softcapping"),
    }  # fmt: skip


def _tensors(
    form: dict[str, Any], config: dict[str, Any], body: dict[str, Any], draft_vocab: int, size: int, seed: int
) -> dict[str, Tensor]:
    drawn, told = heads.Drawn(seed), _read(config)
    rank, vocabulary = told["rank"], body["vocab_size"]
    drawn.weights(D, len(told["aux"]) * size, of="fc.weight")
    drawn.norms(D, of=["norm", "hidden_norm"])
    for index in range(body["num_hidden_layers"]):
        drawn.layer(f"layers.{index}", body, D, NORMS)
    drawn.outputs(form, vocabulary, draft_vocab)
    if rank:
        drawn.weights(vocabulary, rank, of="markov_head.markov_w1.weight", scale=2)
        drawn.weights(draft_vocab, rank, of="markov_head.markov_w2.weight", scale=2)
    linear = {"gated": ("markov_head.gate_proj", rank, D + rank)}
    linear["rnn"] = ("markov_head.joint_proj", 3 * rank, 2 * rank + D)
    parts = [linear[told["form"]]] if told["form"] in linear else []
    parts += [("confidence_head.proj", 1, D + rank)] if form.get("confidence") else []
    for name, rows, columns in parts:
        drawn.weights(rows, columns, of=f"{name}.weight")
        drawn.weights(rows, of=f"{name}.bias")
    return drawn.tensors


def defined_logits(
    folder: Path,
    model: transformers.PreTrainedModel,
    text: list[int],
    drafted: list[int],
    weights: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """Return the logits [drafts, V] of a block after `text`, which ends with the anchor; ids outside the draft vocabulary have -inf.

    `drafted` has one token at least before each slot that is compared. `weights` replace the head's own.
    """
    config = json.loads((folder / "config.json").read_text())
    told, body = _read(config), config.get("transformer_layer_config", config)
    w, states = Weights(folder, body["rms_norm_eps"], weights), heads.aux_states_of(model, text)
    anchor, block = len(text) - 1, told["block"]
    aux_states = torch.cat([states[layer] for layer in told["aux"]], -1)[:anchor]
    context = w.rms(w.projected(aux_states, "fc"), "hidden_norm")
    embedding = w.get("embed_tokens.weight", model.model.embed_tokens.weight.detach())
    x = embedding[[text[-1]] + [told["mask"]] * (block - 1)] * told["in"]
    for index in range(body["num_hidden_layers"]):
        name = f"layers.{index}"
        full = "layer_types" not in body or body["layer_types"][index] == "full_attention"
        window = None if full else body["sliding_window"]
        entering = w.rms(x, f"{name}.input_layernorm")
        x = w.mlp(x + _attention(w, f"{name}.self_attn", told, window, context, entering), name)
    x = w.rms(x, "norm")
    ids = torch.arange(len(w["d2t"])) + w["d2t"].long() if "d2t" in w else torch.arange(len(embedding))
    head = w["lm_head.weight"] if "lm_head.weight" in w else model.lm_head.weight.detach()[ids]
    logits = x @ head.T * told["out"]
    if told["cap"]:
        logits = told["cap"] * torch.tanh(logits / told["cap"])
    if told["rank"]:
        logits = logits[: len(drafted) + 1 + (not told["anchored"])].clone()
        # slot k of an anchored head gives the token k + 1 places on, and has the one k places on before it
        before = [text[-1], *drafted] if told["anchored"] else [text[-1], text[-1], *drafted]
        logits += _biases(w, told["form"], torch.tensor(before[: len(logits)]), x)
    model.float()
    return heads.everywhere(logits, ids, len(embedding))[0 if told["anchored"] else 1 :]


def _biases(w: Weights, form: str, before: Tensor, x: Tensor) -> Tensor:
    inner, state, found = w["markov_head.markov_w1.weight"][before], torch.zeros(RANK).double(), []
    for slot, e in enumerate(inner):
        if form == "gated":
            e = w.projected(torch.cat([x[slot], e]), "markov_head.gate_proj").sigmoid() * e
        if form == "rnn":
            keep, new, e = w.projected(torch.cat([state, e, x[slot]]), "markov_head.joint_proj").chunk(3)
            state, e = keep.sigmoid() * state + (1 - keep.sigmoid()) * new.tanh(), e.tanh()
        found.append(w["markov_head.markov_w2.weight"] @ e)
    return torch.stack(found)


def _attention(
    w: Weights, name: str, told: dict[str, Any], window: int | None, context: Tensor, x: Tensor
) -> Tensor:
    n, block, wide = len(context), len(x), torch.cat([context, x])

    def split(each: str, y: Tensor) -> Tensor:
        return w.projected(y, f"{name}.{each}_proj").view(len(y), -1, HEAD_DIM)

    q = heads.rotated(w.rms(split("q", x), f"{name}.q_norm"), n, BODY["rope_theta"])
    k = heads.rotated(w.rms(split("k", wide), f"{name}.k_norm"), 0, BODY["rope_theta"])
    v, causal = split("v", wide), window is not None and not told["free"]
    outs = []
    for slot in range(block):
        seen = [place for place in range(n + block) if not causal or place <= n + slot]
        if window is not None and told["spec"]:
            seen = [place for place in seen if place >= n - window]
        elif window is not None:
            seen = [place for place in seen if place > n + slot - window]
        own = []
        for head in range(HEADS):
            group = head // (HEADS // KV_HEADS)
            scores = k[seen, group] @ q[slot, head] / math.sqrt(HEAD_DIM)
            own.append(scores.softmax(-1) @ v[seen, group])
        outs.append(torch.cat(own))
    return w.projected(torch.stack(outs), f"{name}.o_proj")
