"""Save tiny random EAGLE-3 heads in the formats of the projects that publish them, and define their logits.

The definition is plain float64: whole attention matrices, one draft at a time, the files read anew. It shares no
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

from foredraft.drafters.heads.configs import read_eagle3
from foredraft.train.head_students import Eagle3Student
from foredraft.train.target import FrozenTarget

LAYERS = 7  # of the targets: the default auxiliary layers are 2, 3, 4
D, HEADS, KV_HEADS, INNER, DRAFT_VOCAB = 64, 4, 2, 80, 6
FILE = "model.safetensors"
NORMS = ("input", "post_attention")  # of a layer
BODY: dict[str, Any] = {
    "model_type": "llama", "hidden_size": D, "intermediate_size": INNER, "num_hidden_layers": 1,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "max_position_embeddings": 2048, "hidden_act": "silu",
}  # fmt: skip
# format -> what differs: flags of the config, keys of the body, and what lies among the tensors
FORMATS: dict[str, dict[str, Any]] = {
    "safeailab": {"draft_vocab": DRAFT_VOCAB, "t2d": True},
    "specforge": {"draft_vocab": DRAFT_VOCAB, "eagle": [1, 2, 4]},
    "residual": {"draft_vocab": DRAFT_VOCAB, "flags": {"norm_before_residual": True}},
    "whole": {"flags": {"norm_before_fc": True}, "head": False},
    "speculators": {
        "spec": True, "draft_vocab": DRAFT_VOCAB, "t2d": True, "embedding": True, "aux": [1, 3, 6],
        "flags": {"norm_before_residual": True},
    },
    "qwen3": {
        "spec": True, "draft_vocab": DRAFT_VOCAB, "t2d": True, "embedding": True, "aux": [2, 4, 5, 7],
        "flags": {"norm_output": True, "fc_norm": True}, "body": {"model_type": "qwen3", "head_dim": 24},
    },
    "deep": {"spec": True, "draft_vocab": DRAFT_VOCAB, "body": {"num_hidden_layers": 2, "attention_bias": True}},
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

    def outputs(self, form: dict[str, Any], vocabulary: int, draft_vocab: int) -> None:
        if form.get("head"):
            self.weights(draft_vocab, D, of="lm_head.weight", scale=2)
        if form.get("embedding"):
            self.weights(vocabulary, D, of="embed_tokens.weight")
        if draft_vocab != vocabulary:
            ids = torch.randperm(vocabulary, generator=self.random)[:draft_vocab].sort().values
            self.tensors["d2t"] = ids - torch.arange(draft_vocab)
            if form.get("t2d"):
                self.tensors["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill(0, ids, True)


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


def write_head(folder: Path, config: Any, tensors: Mapping[str, Tensor | None], file: str = FILE) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: t.contiguous() for name, t in tensors.items() if t is not None}, folder / file)
    return folder


def save_head(
    folder: Path,
    format: str,
    vocabulary: int,
    *,
    seed: int = 0,
    draft_vocab: int | None = None,
    target_size: int = D,
    tensors: dict[str, Tensor] | None = None,
    config: dict[str, Any] | None = None,
) -> Path:
    """Write a head in one of FORMATS; `tensors` and `config` replace or add some, and a key of None is left out."""
    form = FORMATS[format]
    body = {**BODY, "vocab_size": vocabulary, **form.get("body", {})}
    outputs = draft_vocab or form.get("draft_vocab", vocabulary)
    flags, spec = form.get("flags", {}), form.get("spec")
    if spec:
        written = speculators_config(
            "eagle3", 4, body, architectures=["Eagle3Speculator"], draft_vocab_size=outputs, **flags
        )
        written["eagle_aux_hidden_state_layer_ids"] = form.get("aux")
    else:
        written = {**body, "architectures": ["LlamaForCausalLMEagle3"], "torch_dtype": "float32", **flags}
        written |= {"draft_vocab_size": outputs, "bos_token_id": 1, "tie_word_embeddings": False}
        if aux_layers := form.get("eagle"):
            written["eagle_config"] = {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": aux_layers,
            }
    written |= config or {}
    drawn, aux_layers = Drawn(seed), form.get("eagle") or form.get("aux") or range(3)
    drawn.weights(D, len(aux_layers) * target_size, of="fc.weight")
    drawn.norms(D, of="norm")
    if flags.get("norm_before_fc"):
        drawn.norms(len(aux_layers) * target_size, of="input_norm")
    if flags.get("fc_norm"):
        drawn.norms(target_size, of=[f"fc_norm.{place}" for place in range(len(aux_layers))])
    first = "layers.0" if spec else "midlayer"
    drawn.norms(D, of=f"{first}.hidden_norm")
    for index in range(body["num_hidden_layers"]):
        name, entering = (f"layers.{index}", D) if index else (first, 2 * D)
        drawn.layer(name, body, entering, NORMS)
    drawn.outputs({"head": True, **form}, vocabulary, outputs)
    kept = {key: value for key, value in written.items() if value is not None or spec}
    return write_head(folder, kept, {**drawn.tensors, **(tensors or {})})


class Weights(dict[str, Tensor]):
    def __init__(self, folder: Path, eps: float = 0.0, tensors: Mapping[str, Tensor] | None = None) -> None:
        [file] = folder.glob("*.safetensors")
        super().__init__(tensors or {name: tensor.double() for name, tensor in load_file(file).items()})
        self.eps = eps

    def rms(self, x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt() * self[f"{name}.weight"]

    def mlp(self, x: Tensor, layer: str) -> Tensor:
        y = self.rms(x, f"{layer}.post_attention_layernorm")
        gate, up, down = (self[f"{layer}.mlp.{each}_proj.weight"].T for each in ("gate", "up", "down"))
        return x + (torch.nn.functional.silu(y @ gate) * (y @ up)) @ down

    def projected(self, x: Tensor, name: str) -> Tensor:
        return x @ self[f"{name}.weight"].T + self.get(f"{name}.bias", 0)


def everywhere(logits: Tensor, ids: Tensor, vocabulary: int) -> Tensor:
    spread = torch.full((*logits.shape[:-1], vocabulary), -math.inf, dtype=torch.float64)
    spread[..., ids] = logits
    return spread


def defined_logits(
    folder: Path,
    model: transformers.PreTrainedModel,
    text: list[int],
    drafted: list[int],
    weights: dict[str, Tensor] | None = None,
) -> Tensor:
    """Return the logits [len(drafted) + 1, V] of a draft after `text`, in float64; ids outside the draft vocabulary have -inf.

    `text` ends with the pending token and has two at least.
    """
    config = json.loads((folder / "config.json").read_text())
    body = config.get("transformer_layer_config", config)
    w = Weights(folder, body["rms_norm_eps"], weights)
    aux_layers = config.get("eagle_aux_hidden_state_layer_ids")
    if "eagle_config" in config:
        aux_layers = [layer + 1 for layer in config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]]
    if aux_layers is None:
        aux_layers = [2, LAYERS // 2, LAYERS - 3]
    own = aux_states_of(model, text)
    joined = [own[k][:-1] for k in aux_layers]
    if config.get("fc_norm"):
        joined = [w.rms(x, f"fc_norm.{place}") for place, x in enumerate(joined)]
    wide = torch.cat(joined, -1)
    if config.get("norm_before_fc"):
        wide = w.rms(wide, "input_norm")
    states = list(wide @ w["fc.weight"].T)
    embedding = w.get("embed_tokens.weight", model.model.embed_tokens.weight.detach())
    head = w.get("lm_head.weight", model.lm_head.weight.detach())
    found: list[Tensor] = []
    first = "midlayer" if "midlayer.hidden_norm.weight" in w else "layers.0"
    for step in range(len(drafted) + 1):
        e, g = embedding[torch.tensor([*text[1:], *drafted[:step]])], torch.stack(states)
        normed = w.rms(g, f"{first}.hidden_norm")
        x = normed if config.get("norm_before_residual") else g
        entering = torch.cat([w.rms(e, f"{first}.input_layernorm"), normed], -1)
        for index in range(body["num_hidden_layers"]):
            name = f"layers.{index}" if index else first
            if index:
                entering = w.rms(x, f"{name}.input_layernorm")
            x = w.mlp(x + attention(w, f"{name}.self_attn", body, entering), name)
        last = w.rms(x[-1], "norm")
        states.append(last if config.get("norm_output") else x[-1])
        found.append(head @ last)
    model.float()
    logits = torch.stack(found)
    if "d2t" in w:
        logits = everywhere(logits, torch.arange(len(w["d2t"])) + w["d2t"].long(), body["vocab_size"])
    return logits


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


def student_of(head: Path, target: FrozenTarget, steps: int, decay: float) -> Eagle3Student:
    record = read_eagle3(head).record.for_target(target.spec, "the head")
    stored = load_file(head / FILE)
    ids = (stored["d2t"] + torch.arange(record.draft_vocab_size)).tolist() if "d2t" in stored else None
    student = Eagle3Student(
        record, target.decoder, target.head_weight, vocabulary=ids, steps=steps, decay=decay
    )
    student.own.fill(stored)
    return student
