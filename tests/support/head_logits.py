"""The logits of published heads by definition, in plain float64: whole attention matrices, one draft at a time.

The definition reads the files anew, and shares no code with the library.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from tests.support.heads import (
    AUX,
    AUX_IDS,
    BLOCK_BODY,
    BLOCK_IDS,
    FILES,
    FORMATS,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    RANK,
    D,
    body_of,
    plain_of,
)  # fmt: skip


def definition_of(format: str) -> Callable[..., Tensor]:
    """Return the function of a head's place, the target, a text that ends with the pending token, and drafted tokens.

    It gives the logits [len(drafted) + 1, V]; ids outside the draft vocabulary have -inf.
    """
    kinds: dict[str, Callable[..., Tensor]] = {
        "eagle3": defined_eagle3,
        "p-eagle": defined_p_eagle,
        "eagle": defined_eagle,
        "medusa": defined_medusa,
    }
    define = kinds.get(FORMATS[format]["of"], defined_block)
    return (lambda place, *given: define(plain_of(place), *given)) if format in FILES else define


class Weights(dict[str, Tensor]):
    def __init__(self, folder: Path, eps: float = 0.0, tensors: Mapping[str, Tensor] | None = None) -> None:
        [file] = folder.glob("*.safetensors")
        super().__init__(tensors or {name: tensor.double() for name, tensor in load_file(file).items()})
        self.eps = eps

    def rms(self, x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt() * self[f"{name}.weight"]

    def mlp(self, x: Tensor, layer: str) -> Tensor:
        return x + self.gated(self.rms(x, f"{layer}.post_attention_layernorm"), layer)

    def gated(self, y: Tensor, layer: str) -> Tensor:
        gate, up, down = (self[f"{layer}.mlp.{each}_proj.weight"].T for each in ("gate", "up", "down"))
        return (torch.nn.functional.silu(y @ gate) * (y @ up)) @ down

    def projected(self, x: Tensor, name: str) -> Tensor:
        return x @ self[f"{name}.weight"].T + self.get(f"{name}.bias", 0)


def everywhere(logits: Tensor, ids: Tensor, vocabulary: int) -> Tensor:
    spread = torch.full((*logits.shape[:-1], vocabulary), -math.inf, dtype=torch.float64)
    spread[..., ids] = logits
    return spread


def defined_eagle3(
    folder: Path,
    model: transformers.PreTrainedModel,
    text: list[int],
    drafted: list[int],
    weights: Mapping[str, Tensor] | None = None,
) -> Tensor:
    config = json.loads((folder / "config.json").read_text())
    w = Weights(folder, body_of(config)["rms_norm_eps"], weights)
    aux_layers = config.get(AUX_IDS)
    if "eagle_config" in config:
        aux_layers = [layer + 1 for layer in config["eagle_config"][AUX_IDS]]
    own = aux_states_of(model, text)
    joined = [own[k][:-1] for k in aux_layers or AUX]
    if config.get("fc_norm"):
        joined = [w.rms(x, f"fc_norm.{place}") for place, x in enumerate(joined)]
    wide = torch.cat(joined, -1)
    if config.get("norm_before_fc"):
        wide = w.rms(wide, "input_norm")
    states = list(wide @ w["fc.weight"].T)
    found: list[Tensor] = []
    for step in range(len(drafted) + 1):
        x = _eagle3_layers(w, config, model, [*text[1:], *drafted[:step]], torch.stack(states))
        last = w.rms(x[-1], "norm")
        states.append(last if config.get("norm_output") else x[-1])
        found.append(last)
    return _eagle3_logits(w, config, model, torch.stack(found))


def _eagle3_layers(w: Weights, config: dict[str, Any], model: Any, tokens: list[int], g: Tensor) -> Tensor:
    """Return what leaves the layers of an EAGLE-3 head, of all pairs of tokens and states."""
    body = body_of(config)
    embedding = w.get("embed_tokens.weight", model.model.embed_tokens.weight.detach())
    first = "midlayer" if "midlayer.hidden_norm.weight" in w else "layers.0"
    normed = w.rms(g, f"{first}.hidden_norm")
    x = normed if config.get("norm_before_residual") else g
    entering = torch.cat([w.rms(embedding[torch.tensor(tokens)], f"{first}.input_layernorm"), normed], -1)
    for index, name in enumerate((first, *(f"layers.{n}" for n in range(1, 9)))):
        if f"{name}.self_attn.q_proj.weight" not in w:
            break
        if index:
            entering = w.rms(x, f"{name}.input_layernorm")
        x = w.mlp(x + attention(w, f"{name}.self_attn", body, entering), name)
    return x


def _eagle3_logits(w: Weights, config: dict[str, Any], model: Any, normed: Tensor) -> Tensor:
    logits = normed @ w.get("lm_head.weight", model.lm_head.weight.detach()).T
    model.float()
    if "d2t" in w:
        ids = torch.arange(len(w["d2t"])) + w["d2t"].long()
        logits = everywhere(logits, ids, body_of(config)["vocab_size"])
    return logits


def defined_p_eagle(folder: Path, model: Any, text: list[int], drafted: list[int]) -> Tensor:
    config = json.loads((folder / "config.json").read_text())
    if (folder / "peagle_config.json").exists():
        config |= json.loads((folder / "peagle_config.json").read_text())
    w, own = Weights(folder, body_of(config)["rms_norm_eps"]), aux_states_of(model, text)
    wide = torch.cat([own[k][:-1] for k in config.get(AUX_IDS) or AUX], -1)
    masks = w["mask_hidden"].view(1, -1).expand(len(drafted), -1)
    mask = next(config[key] for key in ("mask_token_id", "ptd_token_id") if key in config)
    g = torch.cat([wide, masks]) @ w["fc.weight"].T
    x = _eagle3_layers(w, config, model, [*text[1:], *[mask] * len(drafted)], g)
    return _eagle3_logits(w, config, model, w.rms(x[len(text) - 2 :], "norm"))


def defined_eagle(folder: Path, model: Any, text: list[int], drafted: list[int]) -> Tensor:
    config = json.loads((folder / "config.json").read_text())
    w = Weights(folder, config["rms_norm_eps"])
    states = list(last_states(model, text))
    embedding = w.get("embed_tokens.weight", model.model.embed_tokens.weight.detach())
    head = w.get("lm_head.weight", model.lm_head.weight.detach())
    found: list[Tensor] = []
    for step in range(len(drafted) + 1):
        tokens = [*text[1:], *drafted[:step]]
        x = w.projected(torch.cat([embedding[torch.tensor(tokens)], torch.stack(states)], -1), "fc")
        for index in range(config["num_hidden_layers"]):
            name = f"layers.{index}"
            entering = w.rms(x, f"{name}.input_layernorm") if index else x
            x = w.mlp(x + attention(w, f"{name}.self_attn", config, entering), name)
        states.append(x[-1])
        found.append(head @ x[-1])
    model.float()
    return torch.stack(found)


def defined_medusa(folder: Path, model: Any, text: list[int], drafted: list[int]) -> Tensor:
    config = json.loads((folder / "config.json").read_text())
    w, hidden = Weights(folder), last_states(model, text)[-1]
    model.float()
    found = []
    for head in range(len(drafted) + 1):
        x, block = hidden, 0
        for name in (f"{head}.{{}}.linear", f"blocks.{head}.layers.{{}}"):
            while f"{name.format(block)}.weight" in w:
                x, block = x + torch.nn.functional.silu(w.projected(x, name.format(block))), block + 1
        own = 0 if config.get("original_lm_head") else head
        name = f"{head}.{block}" if f"{head}.{block}.weight" in w else f"lm_heads.{own}"
        found.append(w.projected(x, name))
    logits = torch.stack(found)
    return everywhere(logits, w["token_map"].long(), model.config.vocab_size) if "token_map" in w else logits


def defined_block(
    folder: Path,
    model: transformers.PreTrainedModel,
    text: list[int],
    drafted: list[int],
    weights: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """`drafted` has one token at least before each slot that is compared; `weights` replace the head's own."""
    config = json.loads((folder / "config.json").read_text())
    told, body = told_by(config), body_of(config)
    w, states = Weights(folder, body["rms_norm_eps"], weights), aux_states_of(model, text)
    anchor, block = len(text) - 1, told["block"]
    aux_states = torch.cat([states[layer] for layer in told["aux"]], -1)[:anchor]
    context = w.rms(w.projected(aux_states, "fc"), "hidden_norm")
    embedding = w.get("embed_tokens.weight", model.model.embed_tokens.weight.detach())
    x = embedding[[text[-1]] + [told["mask"]] * (block - 1)] * told["in"]
    for index in range(body["num_hidden_layers"]):
        name = f"layers.{index}"
        full = "layer_types" not in body or body["layer_types"][index] == "full_attention"
        window = None if full and not told["all windows"] else body["sliding_window"]
        entering = w.rms(x, f"{name}.input_layernorm")
        if told["taps"]:
            enters, leaves = _convolutions(w, f"{name}.attention_conv", entering)
            x = x + leaves(_block_attention(w, f"{name}.self_attn", told, window, context, enters(entering)))
            entering = w.rms(x, f"{name}.post_attention_layernorm")
            enters, leaves = _convolutions(w, f"{name}.mlp_conv", entering)
            x = x + leaves(w.gated(enters(entering), name))
        else:
            x = w.mlp(x + _block_attention(w, f"{name}.self_attn", told, window, context, entering), name)
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
    if told["candidates"]:
        logits = _selected(w, told["candidates"], [*drafted], text[-1], x[1:], logits[1:])
        return logits[: len(drafted) + 1]
    return everywhere(logits, ids, len(embedding))[0 if told["anchored"] else 1 :]


def _convolutions(w: Weights, name: str, x: Tensor) -> list[Callable[[Tensor], Tensor]]:
    """Return what convolves the input of a sub-layer and its output, one channel after the other."""
    base = w[f"{name}.base_kernel"]
    taps, size = base.shape[1:]
    added = (x @ w[f"{name}.kernel_projection.weight"].T).view(len(x), 2, taps, -1)
    group = size // added.shape[-1]

    def along(which: int, y: Tensor) -> Tensor:
        out = torch.zeros_like(y)
        for slot in range(len(y)):
            for tap in range(min(taps, slot + 1)):
                for channel in range(size):
                    kernel = base[which, tap, channel] + added[slot, which, tap, channel // group]
                    out[slot, channel] += kernel * y[slot - tap, channel]
        return out

    return [lambda y: along(0, y), lambda y: along(1, y)]


def _selected(
    w: Weights, candidates: int, drafted: list[int], anchor: int, x: Tensor, logits: Tensor
) -> Tensor:
    """Return the logits of slots, of the likeliest ids alone, by the token before each."""
    hidden = x @ w["candidate_selector.hidden_projection.weight"].T
    found = []
    for slot, before in zip(range(len(logits)), [anchor, *drafted], strict=False):
        ids = logits[slot].topk(candidates).indices
        context = w["candidate_selector.predecessor_codebook"][before] * hidden[slot]
        scores = logits[slot][ids] + w["candidate_selector.successor_codebook"][ids] @ context
        found.append(everywhere(scores, ids, len(logits[slot])))
    return torch.stack(found)


def _biases(w: Weights, form: str, before: Tensor, x: Tensor) -> Tensor:
    prefix = "" if "markov_w1.weight" in w else "markov_head."
    inner, state, found = w[f"{prefix}markov_w1.weight"][before], torch.zeros(RANK).double(), []
    for slot, e in enumerate(inner):
        if form == "gated":
            e = w.projected(torch.cat([x[slot], e]), f"{prefix}gate_proj").sigmoid() * e
        if form == "rnn":
            keep, new, e = w.projected(torch.cat([state, e, x[slot]]), f"{prefix}joint_proj").chunk(3)
            state, e = keep.sigmoid() * state + (1 - keep.sigmoid()) * new.tanh(), e.tanh()
        found.append(w[f"{prefix}markov_w2.weight"] @ e)
    return torch.stack(found)


def _block_attention(
    w: Weights, name: str, told: dict[str, Any], window: int | None, context: Tensor, x: Tensor
) -> Tensor:
    n, block, wide = len(context), len(x), torch.cat([context, x])

    def split(each: str, y: Tensor) -> Tensor:
        return w.projected(y, f"{name}.{each}_proj").view(len(y), -1, HEAD_DIM)

    q = rotated(w.rms(split("q", x), f"{name}.q_norm"), n, BLOCK_BODY["rope_theta"])
    k = rotated(w.rms(split("k", wide), f"{name}.k_norm"), 0, BLOCK_BODY["rope_theta"])
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


def told_by(config: dict[str, Any]) -> dict[str, Any]:
    """Return what a block's config says, whatever its format: auxiliary layers by their states, the rest by one name each."""
    section, spec = config.get("dflash_config", {}), "speculators_model_type" in config
    both = {**config, **section, **config.get("dspark_config", {})}
    if spec:
        aux = config[BLOCK_IDS]
        anchored = config.get("sample_from_anchor", config["speculators_model_type"] == "dspark")
    else:
        ids = both.get("target_layer_ids", [1, 4])  # of 2 layers over LAYERS: round(1 + i * (LAYERS - 4))
        aux, anchored = [layer + 1 for layer in ids], "markov_rank" in both
    return {
        "aux": aux, "anchored": anchored, "mask": both.get("mask_token_id"), "block": both.get("block_size"),
        "rank": both.get("markov_rank", 0), "form": both.get("markov_head_type"), "spec": spec,
        "free": config.get("sliding_window_non_causal", both.get("causal", config.get("is_causal")) is False),
        "in": both.get("input_embedding_scale", 1.0), "out": both.get("output_multiplier", 1.0),
        "cap": both.get("final_logit_softcapping"), "taps": both.get("conv_kernel_size", 0),
        "candidates": both.get("selector_top_k", 0), "all windows": both.get("use_swa"),
    }  # fmt: skip


def aux_states_of(model: transformers.PreTrainedModel, text: list[int]) -> dict[int, Tensor]:
    """Return the target's states [n, D] of a text after each number of layers, in float64; the model becomes float64."""
    model.double()
    states: dict[int, Tensor] = {}

    def keep(place: int) -> Any:
        def kept(layer: Any, given: Any, out: Any) -> None:
            states[place] = (out if isinstance(out, Tensor) else out[0]).reshape(len(text), -1)

        return kept

    hooks = [layer.register_forward_hook(keep(place)) for place, layer in enumerate(model.model.layers, 1)]
    with torch.no_grad():
        states[0] = model.model.embed_tokens(torch.tensor(text))
        model(torch.tensor([text]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return states


def last_states(model: transformers.PreTrainedModel, text: list[int]) -> Tensor:
    """Return the target's last states [n - 1, D] of a text without its pending token, in float64, as the model then is."""
    with torch.no_grad():
        states: Tensor = model.double().model(torch.tensor([text[:-1]]), use_cache=False).last_hidden_state[0]
    return states


def rotated(y: Tensor, start: int, theta: float) -> Tensor:
    dim = y.shape[-1]
    places = torch.arange(start, start + len(y)).double()
    angles = places[:, None] / theta ** (torch.arange(0, dim, 2).double() / dim)
    cos, sin = angles.cos().repeat(1, 2)[:, None], angles.sin().repeat(1, 2)[:, None]
    return y * cos + torch.cat([-y[..., dim // 2 :], y[..., : dim // 2]], -1) * sin


def attention(w: Weights, name: str, body: dict[str, Any], x: Tensor) -> Tensor:
    dim, n, theta = body.get("head_dim", D // HEADS), len(x), body["rope_theta"]
    q, k, v = (w.projected(x, f"{name}.{each}_proj").view(n, -1, dim) for each in "qkv")
    if body["model_type"] == "qwen3":
        q, k = w.rms(q, f"{name}.q_norm"), w.rms(k, f"{name}.k_norm")
    q, k = rotated(q, 0, theta), rotated(k, 0, theta)
    outs = []
    for head in range(HEADS):
        own = head // (HEADS // KV_HEADS)
        scores = q[:, head] @ k[:, own].T / math.sqrt(dim)
        scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -math.inf)
        outs.append(scores.softmax(-1) @ v[:, own])
    return w.projected(torch.cat(outs, -1), f"{name}.o_proj")
