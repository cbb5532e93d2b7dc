"""Save tiny random DFlash and DSpark heads in the spellings of the projects, and define their logits.

The definition is plain float64: one block at a time, whole attention matrices, the files read anew. It shares no
code with the library.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.heads import HEADS, INNER, KV_HEADS, LAYERS, WORDS, D, boundaries_of

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
# spelling -> the drafter that reads it, the keys of its config, and what lies among its tensors
SPELLINGS: dict[str, dict[str, Any]] = {
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
        "body": SLIDING, "words": WORDS, "t2d": True, "head": True,
    },
    "anchored": {
        "of": "dflash", "words": WORDS, "body": SLIDING,
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
        "of": "dspark", "words": WORDS, "head": True,
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
    spelling: str,
    vocabulary: int,
    *,
    words: int | None = None,
    target_size: int = D,
    config: dict[str, Any] | None = None,
    section: dict[str, Any] | None = None,
    tensors: dict[str, Tensor | None] | None = None,
    seed: int = 0,
) -> Path:
    """Write a head.

    Args:
        folder: The head's.
        spelling: A key of SPELLINGS.
        vocabulary: Size of the target's.
        words: Replaces the size of the head's own vocabulary.
        target_size: Hidden size of the target.
        config: Replaces or adds keys of the config; None drops one.
        section: The same of `dflash_config`.
        tensors: Replace or add tensors; None drops one.
        seed: Of the weights and the words.
    """
    form = SPELLINGS[spelling]
    body = {**BODY, "vocab_size": vocabulary, **form.get("body", {})}
    words = words or form.get("words", vocabulary)
    if spec := form.get("spec"):
        written: dict[str, Any] = {
            "architectures": ["AnySpeculator"], "speculators_version": "0.9.0", "block_size": BLOCK,
            "draft_vocab_size": words, "mask_token_id": 7, "transformer_layer_config": body,
            "target_hidden_size": None, **spec,
            "speculators_config": {
                "algorithm": spec["speculators_model_type"], "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
                "verifier": {"name_or_path": "some/target", "architectures": ["LlamaForCausalLM"]},
            },
        }  # fmt: skip
    else:
        written = {**body, **form["keys"], "dtype": "float32", "tie_word_embeddings": False}
        if inner := {**form.get("section", {}), **(section or {})}:
            written["dflash_config"] = {key: value for key, value in inner.items() if value is not None}
    written |= config or {}
    folder.mkdir(parents=True)
    kept = {key: value for key, value in written.items() if value is not None or spec}
    (folder / "config.json").write_text(json.dumps(kept))
    made: dict[str, Tensor | None] = {
        **_tensors(form, written, body, vocabulary, words, target_size, seed), **(tensors or {}),
    }  # fmt: skip
    save_file(
        {name: t.contiguous() for name, t in made.items() if t is not None}, folder / "model.safetensors"
    )
    return folder


def _read(config: dict[str, Any]) -> dict[str, Any]:
    """Return what a config says, whatever its spelling: taps as boundaries, and the rest by one name each."""
    section, spec = config.get("dflash_config", {}), "speculators_model_type" in config
    both = {**config, **section}
    if spec:
        taps = config["aux_hidden_state_layer_ids"]
        anchored = config.get("sample_from_anchor", config["speculators_model_type"] == "dspark")
    else:
        ids = both.get("target_layer_ids", [1, 4])  # of 2 layers over LAYERS: round(1 + i * (LAYERS - 4))
        taps, anchored = [tap + 1 for tap in ids], config["architectures"] == ["Qwen3DSparkModel"]
    return {
        "taps": taps, "anchored": anchored, "mask": both.get("mask_token_id"), "block": both.get("block_size"),
        "rank": both.get("markov_rank", 0), "form": both.get("markov_head_type"), "spec": spec,
        "free": config.get("sliding_window_non_causal", config.get("is_causal") is False),
        "in": both.get("input_embedding_scale", 1.0), "out": both.get("output_multiplier", 1.0),
        "cap": both.get("final_logit_softcapping"),
    }  # fmt: skip


def _tensors(
    form: dict[str, Any], config: dict[str, Any], body: dict[str, Any], vocabulary: int, words: int, size: int,
    seed: int,
) -> dict[str, Tensor]:  # fmt: skip
    random, told = torch.Generator().manual_seed(seed), _read(config)
    rank = told["rank"]

    def weight(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random) / math.sqrt(shape[-1]) * 1.5

    def norm(n: int = D) -> Tensor:
        return 1 + 0.2 * torch.randn(n, generator=random)

    found = {
        "fc.weight": weight(D, len(told["taps"]) * size),
        "norm.weight": norm(),
        "hidden_norm.weight": norm(),
    }
    for index in range(body["num_hidden_layers"]):
        name = f"layers.{index}"
        found |= {f"{name}.{each}_layernorm.weight": norm() for each in ("input", "post_attention")}
        rows = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
        found |= {f"{name}.self_attn.{each}_proj.weight": weight(n, D) for each, n in rows.items()}
        found[f"{name}.self_attn.o_proj.weight"] = weight(D, HEADS * HEAD_DIM)
        if body.get("attention_bias"):
            found |= {f"{name}.self_attn.{each}_proj.bias": weight(n) for each, n in {**rows, "o": D}.items()}
        found |= {f"{name}.self_attn.{each}_norm.weight": norm(HEAD_DIM) for each in "qk"}
        found |= {f"{name}.mlp.{each}_proj.weight": weight(INNER, D) for each in ("gate", "up")}
        found[f"{name}.mlp.down_proj.weight"] = weight(D, INNER)
    if form.get("head"):
        found["lm_head.weight"] = weight(words, D) * 2
    if form.get("embedding"):
        found["embed_tokens.weight"] = weight(vocabulary, D)
    if words != vocabulary:
        ids = torch.randperm(vocabulary, generator=random)[:words].sort().values
        found["d2t"] = ids - torch.arange(words)
        if form.get("t2d"):
            found["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill(0, ids, True)
    if rank:
        found["markov_head.markov_w1.weight"] = weight(vocabulary, rank) * 2
        found["markov_head.markov_w2.weight"] = weight(words, rank) * 2
    if told["form"] == "gated":
        found |= {
            "markov_head.gate_proj.weight": weight(rank, D + rank),
            "markov_head.gate_proj.bias": weight(rank),
        }
    if told["form"] == "rnn":
        found["markov_head.joint_proj.weight"] = weight(3 * rank, 2 * rank + D)
        found["markov_head.joint_proj.bias"] = weight(3 * rank)
    if form.get("confidence"):
        found |= {"confidence_head.proj.weight": weight(1, D + rank), "confidence_head.proj.bias": weight(1)}
    return found


def defined_logits(
    folder: Path,
    model: transformers.PreTrainedModel,
    text: list[int],
    drafted: list[int],
    weights: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """Return the logits [drafts, V] of a block after `text`, in float64; ids without a word have -inf.

    Args:
        folder: The head.
        model: The target.
        text: Committed tokens, the anchor last.
        drafted: The tokens that were drafted: one at least before each slot that is compared.
        weights: Replace the head's own.
    """
    config = json.loads((folder / "config.json").read_text())
    told, body = _read(config), config.get("transformer_layer_config", config)
    w = dict(
        weights or {name: each.double() for name, each in load_file(folder / "model.safetensors").items()}
    )
    states = boundaries_of(model, text)
    anchor, block = len(text) - 1, told["block"]

    def rms(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + body["rms_norm_eps"]).sqrt() * w[name]

    context = rms(
        torch.cat([states[tap] for tap in told["taps"]], -1)[:anchor] @ w["fc.weight"].T, "hidden_norm.weight"
    )
    embedding = w.get("embed_tokens.weight", model.model.embed_tokens.weight.detach())
    x = embedding[[text[-1]] + [told["mask"]] * (block - 1)] * told["in"]
    for index in range(body["num_hidden_layers"]):
        name = f"layers.{index}"
        window = (
            None
            if "layer_types" not in body or body["layer_types"][index][0] == "f"
            else body["sliding_window"]
        )
        x = x + _attention(w, name, told, window, context, rms(x, f"{name}.input_layernorm.weight"), rms)
        y = rms(x, f"{name}.post_attention_layernorm.weight")
        gated = torch.nn.functional.silu(y @ w[f"{name}.mlp.gate_proj.weight"].T)
        x = x + (gated * (y @ w[f"{name}.mlp.up_proj.weight"].T)) @ w[f"{name}.mlp.down_proj.weight"].T
    x = rms(x, "norm.weight")
    ids = torch.arange(len(w["d2t"])) + w["d2t"].long() if "d2t" in w else torch.arange(len(embedding))
    head = w.get("lm_head.weight", model.lm_head.weight.detach()[ids] if "lm_head.weight" not in w else None)
    logits = x @ head.T * told["out"]
    if told["cap"]:
        logits = told["cap"] * torch.tanh(logits / told["cap"])
    if told["rank"]:
        logits = logits[: len(drafted) + 1 + (not told["anchored"])].clone()
        # slot k of an anchored head gives the token k + 1 places on, and has the one k places on before it
        before = [text[-1], *drafted] if told["anchored"] else [text[-1], text[-1], *drafted]
        logits += _biases(w, told["form"], torch.tensor(before[: len(logits)]), x)
    everywhere = torch.full((len(logits), len(embedding)), -math.inf, dtype=torch.float64)
    everywhere[:, ids] = logits
    model.float()
    return everywhere if told["anchored"] else everywhere[1:]


def _biases(w: dict[str, Tensor], form: str, before: Tensor, x: Tensor) -> Tensor:
    """Return the biases [slots, words] of a DSpark head."""
    inner, state, found = w["markov_head.markov_w1.weight"][before], torch.zeros(RANK).double(), []
    for slot, e in enumerate(inner):
        if form == "gated":
            wide = torch.cat([x[slot], e])
            gate = w["markov_head.gate_proj.weight"] @ wide + w["markov_head.gate_proj.bias"]
            e = gate.sigmoid() * e
        if form == "rnn":
            wide = w["markov_head.joint_proj.weight"] @ torch.cat([state, e, x[slot]])
            keep, new, e = (wide + w["markov_head.joint_proj.bias"]).chunk(3)
            state, e = keep.sigmoid() * state + (1 - keep.sigmoid()) * new.tanh(), e.tanh()
        found.append(w["markov_head.markov_w2.weight"] @ e)
    return torch.stack(found)


def _attention(
    w: dict[str, Tensor],
    name: str,
    told: dict[str, Any],
    window: int | None,
    context: Tensor,
    x: Tensor,
    rms: Any,
) -> Tensor:
    """Return attention of the block to the contexts and to itself, one query after the other."""
    n, block = len(context), len(x)

    def heads(each: str, y: Tensor, count: int) -> Tensor:
        y = y @ w[f"{name}.self_attn.{each}_proj.weight"].T + w.get(f"{name}.self_attn.{each}_proj.bias", 0)
        return y.view(len(y), count, HEAD_DIM)

    def rotated(y: Tensor, start: int) -> Tensor:
        places = torch.arange(start, start + len(y)).double()
        angles = places[:, None] / 10000.0 ** (torch.arange(0, HEAD_DIM, 2).double() / HEAD_DIM)
        cos, sin = angles.cos().repeat(1, 2)[:, None], angles.sin().repeat(1, 2)[:, None]
        half = HEAD_DIM // 2
        return y * cos + torch.cat([-y[..., half:], y[..., :half]], -1) * sin

    q = rotated(rms(heads("q", x, HEADS), f"{name}.self_attn.q_norm.weight"), n)
    wide = torch.cat([context, x])
    k = rotated(rms(heads("k", wide, KV_HEADS), f"{name}.self_attn.k_norm.weight"), 0)
    v = heads("v", wide, KV_HEADS)
    causal = window is not None and not told["free"]
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
    return torch.stack(outs) @ w[f"{name}.self_attn.o_proj.weight"].T + w.get(
        f"{name}.self_attn.o_proj.bias", 0
    )
