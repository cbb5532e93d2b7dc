"""Save tiny random EAGLE-3 heads in the spellings of the projects that publish them, and define their logits.

The definition is plain float64: whole attention matrices, one draft at a time, the files read anew. It shares no
code with the library.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from foredraft.drafters.heads.eagle3_files import read_eagle3
from foredraft.train.eagle3_student import Eagle3Student
from foredraft.train.target import FrozenTarget

LAYERS = 7  # of the targets: the default taps are 2, 3, 4
D, HEADS, KV_HEADS, INNER, WORDS = 64, 4, 2, 80, 6
BODY: dict[str, Any] = {
    "model_type": "llama", "hidden_size": D, "intermediate_size": INNER, "num_hidden_layers": 1,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "max_position_embeddings": 2048, "hidden_act": "silu",
}  # fmt: skip
# spelling -> what differs: flags of the config, keys of the body, and what lies among the tensors
SPELLINGS: dict[str, dict[str, Any]] = {
    "safeailab": {"words": WORDS, "t2d": True},
    "specforge": {"words": WORDS, "eagle": [1, 2, 4]},
    "residual": {"words": WORDS, "flags": {"norm_before_residual": True}},
    "whole": {"flags": {"norm_before_fc": True}, "head": False},
    "speculators": {
        "spec": True, "words": WORDS, "t2d": True, "embedding": True, "taps": [1, 3, 6],
        "flags": {"norm_before_residual": True},
    },
    "qwen3": {
        "spec": True, "words": WORDS, "t2d": True, "embedding": True, "taps": [2, 4, 5, 7],
        "flags": {"norm_output": True, "fc_norm": True}, "body": {"model_type": "qwen3", "head_dim": 24},
    },
    "deep": {"spec": True, "words": WORDS, "body": {"num_hidden_layers": 2, "attention_bias": True}},
}  # fmt: skip


def save_head(
    folder: Path,
    spelling: str,
    vocabulary: int,
    *,
    seed: int = 0,
    words: int | None = None,
    target_size: int = D,
    tensors: dict[str, Tensor] | None = None,
    config: dict[str, Any] | None = None,
) -> Path:
    """Write a head.

    Args:
        folder: The head's.
        spelling: A key of SPELLINGS.
        vocabulary: Size of the target's.
        seed: Of the weights and the words.
        words: Replaces the size of the head's own vocabulary.
        target_size: Hidden size of the target.
        tensors: Replace or add tensors.
        config: Replaces or adds keys of the config; None drops one.
    """
    form = SPELLINGS[spelling]
    body = {**BODY, "vocab_size": vocabulary, **form.get("body", {})}
    words, flags = words or form.get("words", vocabulary), form.get("flags", {})
    count = len(form.get("eagle") or form.get("taps") or range(3))
    if form.get("spec"):
        written: dict[str, Any] = {
            "speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"],
            "speculators_version": "0.9.0", "draft_vocab_size": words, **flags,
            "transformer_layer_config": body, "target_hidden_size": None,
            "eagle_aux_hidden_state_layer_ids": form.get("taps"),
            "speculators_config": {
                "algorithm": "eagle3", "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],
                "verifier": {"name_or_path": "some/target", "architectures": ["LlamaForCausalLM"]},
            },
        }  # fmt: skip
    else:
        written = {**body, "architectures": ["LlamaForCausalLMEagle3"], "torch_dtype": "float32", **flags}
        written |= {"draft_vocab_size": words, "bos_token_id": 1, "tie_word_embeddings": False}
        if form.get("eagle"):
            written["eagle_config"] = {
                "use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": form["eagle"],
            }  # fmt: skip
    written |= config or {}
    folder.mkdir(parents=True)
    kept = {key: value for key, value in written.items() if value is not None or form.get("spec")}
    (folder / "config.json").write_text(json.dumps(kept))
    made = _tensors(form, body, vocabulary, words, count, target_size, seed)
    save_file(
        {name: t.contiguous() for name, t in {**made, **(tensors or {})}.items()},
        folder / "model.safetensors",
    )
    return folder


def _tensors(
    form: dict[str, Any], body: dict[str, Any], vocabulary: int, words: int, count: int, size: int, seed: int
) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)

    def weight(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random) / math.sqrt(shape[-1]) * 1.5

    def norm(n: int = D) -> Tensor:
        return 1 + 0.2 * torch.randn(n, generator=random)

    flags, head_dim = form.get("flags", {}), body.get("head_dim", D // HEADS)
    first = "layers.0" if form.get("spec") else "midlayer"
    found = {"fc.weight": weight(D, count * size), "norm.weight": norm()}
    if flags.get("norm_before_fc"):
        found["input_norm.weight"] = norm(count * size)
    if flags.get("fc_norm"):
        found |= {f"fc_norm.{tap}.weight": norm(size) for tap in range(count)}
    for index in range(body["num_hidden_layers"]):
        name, entering = (first, 2 * D) if index == 0 else (f"layers.{index}", D)
        if index == 0:
            found[f"{name}.hidden_norm.weight"] = norm()
        found |= {f"{name}.{each}_layernorm.weight": norm() for each in ("input", "post_attention")}
        rows = {"q": HEADS * head_dim, "k": KV_HEADS * head_dim, "v": KV_HEADS * head_dim}
        found |= {f"{name}.self_attn.{each}_proj.weight": weight(n, entering) for each, n in rows.items()}
        found[f"{name}.self_attn.o_proj.weight"] = weight(D, HEADS * head_dim)
        if body.get("attention_bias"):
            found |= {f"{name}.self_attn.{each}_proj.bias": weight(n) for each, n in {**rows, "o": D}.items()}
        if body["model_type"] == "qwen3":
            found |= {f"{name}.self_attn.{each}_norm.weight": norm(head_dim) for each in "qk"}
        found |= {f"{name}.mlp.{each}_proj.weight": weight(INNER, D) for each in ("gate", "up")}
        found[f"{name}.mlp.down_proj.weight"] = weight(D, INNER)
    if form.get("head", True):
        found["lm_head.weight"] = weight(words, D) * 2
    if form.get("embedding"):
        found["embed_tokens.weight"] = weight(vocabulary, D)
    if words != vocabulary:
        ids = torch.randperm(vocabulary, generator=random)[:words].sort().values
        found["d2t"] = ids - torch.arange(words)
        if form.get("t2d"):
            found["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill(0, ids, True)
    return found


def defined_logits(
    folder: Path,
    model: transformers.PreTrainedModel,
    text: list[int],
    drafted: list[int],
    weights: dict[str, Tensor] | None = None,
) -> Tensor:
    """Return the logits [len(drafted) + 1, V] of a draft after `text`, in float64; ids without a word have -inf.

    Args:
        folder: The head.
        model: The target.
        text: Committed tokens, the pending one last; two at least.
        drafted: The tokens that were drafted.
        weights: Replace the folder's tensors; in float64.
    """
    config = json.loads((folder / "config.json").read_text())
    body = config.get("transformer_layer_config", config)
    w = weights or {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}
    eps, theta, layers = body["rms_norm_eps"], body["rope_theta"], body["num_hidden_layers"]
    taps = config.get("eagle_aux_hidden_state_layer_ids")
    if "eagle_config" in config:
        taps = [tap + 1 for tap in config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]]
    if taps is None:
        taps = [2, LAYERS // 2, LAYERS - 3]
    boundaries = boundaries_of(model, text)

    def rms(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * w[name]

    joined = [boundaries[tap][:-1] for tap in taps]
    if config.get("fc_norm"):
        joined = [rms(tap, f"fc_norm.{place}.weight") for place, tap in enumerate(joined)]
    wide = torch.cat(joined, -1)
    if config.get("norm_before_fc"):
        wide = rms(wide, "input_norm.weight")
    states = list(wide @ w["fc.weight"].T)
    embedding = w.get("embed_tokens.weight", model.model.embed_tokens.weight.detach())
    tokens, found, recurs = text[1:], [], states[-1]
    first = "midlayer" if "midlayer.hidden_norm.weight" in w else "layers.0"
    for step in range(len(drafted) + 1):
        if step:
            tokens = [*tokens, drafted[step - 1]]
            states = [*states, recurs]
        e, g = embedding[torch.tensor(tokens)], torch.stack(states)
        normed = rms(g, f"{first}.hidden_norm.weight")
        x = normed if config.get("norm_before_residual") else g
        entering = torch.cat([rms(e, f"{first}.input_layernorm.weight"), normed], -1)
        for index in range(layers):
            name = first if index == 0 else f"layers.{index}"
            if index:
                entering = rms(x, f"{name}.input_layernorm.weight")
            x = x + attention(w, name, body, entering, theta, rms)
            y = rms(x, f"{name}.post_attention_layernorm.weight")
            gated = torch.nn.functional.silu(y @ w[f"{name}.mlp.gate_proj.weight"].T)
            x = x + (gated * (y @ w[f"{name}.mlp.up_proj.weight"].T)) @ w[f"{name}.mlp.down_proj.weight"].T
        last = rms(x[-1], "norm.weight")
        recurs = last if config.get("norm_output") else x[-1]
        head = w.get("lm_head.weight", model.lm_head.weight.detach())
        logits = head @ last
        if "d2t" in w:
            everywhere = torch.full((body["vocab_size"],), -math.inf, dtype=torch.float64)
            everywhere[torch.arange(len(w["d2t"])) + w["d2t"].long()] = logits
            logits = everywhere
        found.append(logits)
    model.float()
    return torch.stack(found)


def boundaries_of(model: transformers.PreTrainedModel, text: list[int]) -> dict[int, Tensor]:
    """Return the target's states [n, D] of a text at every boundary, in float64; the model becomes float64."""
    model.double()
    boundaries: dict[int, Tensor] = {}

    def keep(place: int) -> Any:
        def kept(layer: Any, given: Any, out: Any) -> None:
            boundaries[place] = (out if isinstance(out, Tensor) else out[0]).reshape(len(text), -1)

        return kept

    hooks = [layer.register_forward_hook(keep(place)) for place, layer in enumerate(model.model.layers, 1)]
    with torch.no_grad():
        boundaries[0] = model.model.embed_tokens(torch.tensor(text))
        model(torch.tensor([text]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return boundaries


def attention(
    w: dict[str, Tensor], name: str, body: dict[str, Any], x: Tensor, theta: float, rms: Any
) -> Tensor:
    """Return attention over the whole text, one head after the other."""
    dim, n = body.get("head_dim", D // HEADS), len(x)

    def heads(each: str, count: int) -> Tensor:
        y = x @ w[f"{name}.self_attn.{each}_proj.weight"].T
        return (y + w.get(f"{name}.self_attn.{each}_proj.bias", 0)).view(n, count, dim)

    q, k, v = heads("q", HEADS), heads("k", KV_HEADS), heads("v", KV_HEADS)
    if body["model_type"] == "qwen3":
        q, k = rms(q, f"{name}.self_attn.q_norm.weight"), rms(k, f"{name}.self_attn.k_norm.weight")
    angles = torch.arange(n).double()[:, None] / theta ** (torch.arange(0, dim, 2).double() / dim)
    cos, sin = angles.cos().repeat(1, 2)[:, None], angles.sin().repeat(1, 2)[:, None]

    def rotated(y: Tensor) -> Tensor:
        half = dim // 2
        return y * cos + torch.cat([-y[..., half:], y[..., :half]], -1) * sin

    q, k = rotated(q), rotated(k)
    outs = []
    for head in range(HEADS):
        own = head // (HEADS // KV_HEADS)
        scores = q[:, head] @ k[:, own].T / math.sqrt(dim)
        scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -math.inf)
        outs.append(scores.softmax(-1) @ v[:, own])
    y = torch.cat(outs, -1) @ w[f"{name}.self_attn.o_proj.weight"].T
    return y + w.get(f"{name}.self_attn.o_proj.bias", 0)


def student_of(head: Path, target: FrozenTarget, steps: int, decay: float) -> Eagle3Student:
    """Return the student that has the weights of a head's files."""
    record = read_eagle3(head).record.for_target(target.spec, "the head")
    stored = load_file(head / "model.safetensors")
    words = (stored["d2t"] + torch.arange(record.words)).tolist() if "d2t" in stored else None
    student = Eagle3Student(
        record, target.decoder, target.head_weight, vocabulary=words, steps=steps, decay=decay
    )
    student.own.fill(stored)
    return student
