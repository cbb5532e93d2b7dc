"""What a model is, in numbers: the only reader of Hugging Face config keys.

Contract: every key of a `config.json` is consumed, or known not to change the mathematics, or checked to hold
its neutral value. Any other key, or any other value, is a `CheckpointError` that names it, because a model
run with a key ignored is another model. A new family is one line of `FAMILIES` and one small function.

Rotary scaling `llama3`: Llama 3.1 (arXiv:2407.21783). Soft-caps and alternating windows: Gemma 2
(arXiv:2408.00118).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foredraft.errors import CheckpointError
from foredraft.model.config import ConfigReader, read_json, shortened

__all__ = ["ModelSpec", "Rope"]

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions; `factor` and what follows it count for kind "llama3" alone."""

    kind: str
    theta: float
    factor: float = 1.0
    low_frequency: float = 1.0
    high_frequency: float = 1.0
    original_positions: int = 0


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Everything that decides a model's shapes and arithmetic, its weights aside."""

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    max_positions: int
    windows: tuple[int | None, ...]  # per layer; None = full attention
    tied: bool
    dtype: str  # torch's name of the dtype that the checkpoint asks for
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    rope: Rope
    activation: str  # "silu" or "gelu_tanh"
    attention_scale: float
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    norm_offset: bool = False  # the norm multiplies by (1 + weight), in float32
    post_norms: bool = False  # each sub-layer's output has a norm of its own

    @property
    def groups(self) -> int:
        """Query heads that share one key head."""
        return self.heads // self.kv_heads

    @classmethod
    def from_folder(cls, folder: Path) -> ModelSpec:
        """The spec of a checkpoint folder, its weights untouched."""
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is not a folder; give the folder of a checkpoint")
        if not (folder / "config.json").is_file():
            raise CheckpointError(
                f"{folder} has no config.json; give the folder of a Hugging Face checkpoint"
            )
        generation = folder / "generation_config.json"
        config = read_json(folder / "config.json")
        return cls.from_hf(config, read_json(generation) if generation.is_file() else None)

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
    ) -> ModelSpec:
        """The spec of a parsed `config.json`; `generation_config.json` may add end tokens."""
        read = ConfigReader(config)
        architecture = _architecture(config)
        family = FAMILIES[architecture](read)
        spec = cls(
            architecture=architecture,
            **_sizes(read, family),
            eos_token_ids=_eos(config, generation_config or {}),
            bos_token_id=_first(config, generation_config or {}, "bos_token_id"),
        )
        read.seen.update(("eos_token_id", "bos_token_id"))
        read.refuse_rest()
        return spec


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures") or [
        MODEL_TYPES.get(str(config.get("model_type")), config.get("model_type"))
    ]
    if not isinstance(names, list) or len(names) != 1 or names[0] not in FAMILIES:
        shown = names[0] if isinstance(names, list) and len(names) == 1 else names
        raise CheckpointError(
            f"config.json: architecture {shown!r} is not supported; supported are "
            f"{', '.join(sorted(FAMILIES))}"
        )
    return str(names[0])


def _sizes(read: ConfigReader, family: dict[str, Any]) -> dict[str, Any]:
    """The fields that every family spells alike, merged with the family's own."""
    hidden, heads = read.count("hidden_size"), read.count("num_attention_heads")
    layers, kv_heads = read.count("num_hidden_layers"), read.count("num_key_value_heads", heads)
    head_dim = read.count("head_dim", family.pop("default_head_dim", None) or max(1, hidden // heads))
    positions = read.count("max_position_embeddings")
    if heads % kv_heads:
        raise CheckpointError(f"config.json: num_key_value_heads = {kv_heads} does not divide {heads} heads")
    if head_dim % 2:
        raise CheckpointError(f"config.json: head_dim = {head_dim} is odd; rotary positions need an even one")
    fields = {
        "vocab_size": read.count("vocab_size"),
        "hidden_size": hidden,
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": read.count("intermediate_size"),
        "norm_eps": read.number("rms_norm_eps", 1e-6),
        "max_positions": positions,
        "dtype": _dtype(read),
        "rope": _rope(read, positions),
        "windows": (None,) * layers,
        "attention_scale": head_dim**-0.5,
    }
    return fields | {name: value(fields) if callable(value) else value for name, value in family.items()}


def _llama(read: ConfigReader) -> dict[str, Any]:
    attention_bias = read.flag("attention_bias")
    return {
        "activation": _activation(read, "hidden_act", default="silu"),
        "tied": read.flag("tie_word_embeddings", default=False),
        "qkv_bias": attention_bias,
        "output_bias": attention_bias,
        "mlp_bias": read.flag("mlp_bias"),
    }


def _gemma2(read: ConfigReader) -> dict[str, Any]:
    attention_bias = read.flag("attention_bias")
    act = _activation(read, "hidden_activation", default="gelu_pytorch_tanh")
    read.seen.add("hidden_act")  # the reference reads hidden_activation alone
    window = read.take("sliding_window", 4096)
    kinds = read.take("layer_types")
    return {
        "activation": act,
        "tied": read.flag("tie_word_embeddings", default=True),
        "qkv_bias": attention_bias,
        "output_bias": attention_bias,
        "default_head_dim": 256,
        "attention_scale": read.number("query_pre_attn_scalar", 256) ** -0.5,
        "attention_softcap": read.optional("attn_logit_softcapping"),
        "logit_softcap": read.optional("final_logit_softcapping"),
        "embedding_scale": lambda fields: fields["hidden_size"] ** 0.5,
        "windows": lambda fields: _windows(window, kinds, fields["layers"]),
        "norm_offset": True,
        "post_norms": True,
    }


FAMILIES: dict[str, Callable[[ConfigReader], dict[str, Any]]] = {
    "Gemma2ForCausalLM": _gemma2,
    "LlamaForCausalLM": _llama,
}
MODEL_TYPES = {"gemma2": "Gemma2ForCausalLM", "llama": "LlamaForCausalLM"}


def _activation(read: ConfigReader, key: str, default: str) -> str:
    name = read.take(key, default)
    if name not in ACTIVATIONS:
        raise CheckpointError(
            f"config.json: {key} = {name!r} is not supported; supported are {', '.join(sorted(ACTIVATIONS))}"
        )
    return ACTIVATIONS[name]


def _windows(window: object, kinds: object, layers: int) -> tuple[int | None, ...]:
    """One window a layer; without a list the even layers slide, as the first Gemma 2 configs meant."""
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise CheckpointError(f"config.json: sliding_window is {window!r}; it must be a whole number above 0")
    if kinds is None:
        kinds = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)]
    known = {"full_attention": None, "sliding_attention": window}
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
        raise CheckpointError(
            f"config.json: layer_types = {shortened(kinds)} must name full_attention or sliding_attention "
            f"for each of the {layers} layers"
        )
    return tuple(known[kind] for kind in kinds)


def _rope(read: ConfigReader, positions: int) -> Rope:
    """Rotary parameters, from `rope_parameters` or from the older `rope_theta` and `rope_scaling`."""
    new, old = read.take("rope_parameters"), read.take("rope_scaling")
    given = dict(new or old or {})
    kind = given.pop("rope_type", None) or given.pop("type", None) or "default"
    given.pop("type", None)
    read.seen.add("rope_theta")
    theta = given.pop("rope_theta", None) or read.take("rope_theta", 10000.0)
    if given.pop("partial_rotary_factor", 1.0) not in (None, 1, 1.0):
        raise CheckpointError("config.json: partial_rotary_factor other than 1.0 is not supported")
    names = {
        "factor": "factor",
        "low_freq_factor": "low_frequency",
        "high_freq_factor": "high_frequency",
        "original_max_position_embeddings": "original_positions",
    }
    if kind == "default":
        names = {}
    elif kind != "llama3":
        raise CheckpointError(
            f"config.json: rope type {kind!r} is not supported; supported are default, llama3"
        )
    else:
        given.setdefault("original_max_position_embeddings", positions)
    if set(given) != set(names):
        odd = ", ".join(sorted(set(given) ^ set(names)))
        raise CheckpointError(
            f"config.json: rope parameters of type {kind!r} are missing or not supported: {odd}"
        )
    try:
        values = {field: given[key] for key, field in names.items()}
        return Rope(kind=kind, theta=float(theta), **values)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"config.json: rope parameters {shortened(given)} are not numbers") from error


def _dtype(read: ConfigReader) -> str:
    new, old = read.take("dtype"), read.take("torch_dtype")
    name = str(new or old or "float32").removeprefix("torch.")
    if name not in ("float32", "bfloat16", "float16"):
        raise CheckpointError(
            f"config.json: dtype {name!r} is not supported; supported are float32, bfloat16, float16"
        )
    return name


def _eos(config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """Every token that ends a text: those of the config, then those that generation adds."""
    ids: list[int] = []
    for value in (config.get("eos_token_id"), generation.get("eos_token_id")):
        for token in value if isinstance(value, list) else [value]:
            if token is not None and token not in ids:
                if isinstance(token, bool) or not isinstance(token, int):
                    raise CheckpointError(
                        f"eos_token_id is {value!r}; it must be a token id or a list of them"
                    )
                ids.append(token)
    return tuple(ids)


def _first(config: Mapping[str, Any], generation: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key, generation.get(key))
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise CheckpointError(f"{key} is {value!r}; it must be a token id")
    return value
