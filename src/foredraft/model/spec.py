"""What a model is, in numbers: the only reader of Hugging Face config keys.

Contract: every key of a `config.json` is consumed, or known not to change the mathematics, or checked to hold
its neutral value. Any other key, or any other value, is a `CheckpointError` that names it, because a model
run with a key ignored is another model. A key that is absent has the value that `transformers` gives it in
that family; the sizes must be there. A new family is one line of `FAMILIES` and one small function.

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
        architecture, family = _family(read)
        fields = _sizes(read) | family.fields(read)
        if read.take("attention_multiplier") not in (None, fields["attention_scale"]):
            raise read.wrong("attention_multiplier", f"only {fields['attention_scale']} is supported")
        spec = cls(
            architecture=architecture,
            **fields,
            eos_token_ids=_eos(read, generation_config, family.eos),
            bos_token_id=_bos(read, generation_config, family.bos),
        )
        read.refuse_rest()
        return spec


@dataclass(frozen=True, slots=True)
class Family:
    """What one architecture reads besides the common sizes, and the ids it means where none are given."""

    model_type: str
    fields: Callable[[ConfigReader], dict[str, Any]]
    eos: int
    bos: int


def _family(read: ConfigReader) -> tuple[str, Family]:
    """The architecture's name and family; `model_type` may stand in for `architectures`, never contradict."""
    names, kind = read.take("architectures"), read.take("model_type")
    if not names:
        names = [name for name, family in FAMILIES.items() if family.model_type == kind] or [kind]
    name = names[0] if isinstance(names, list) and len(names) == 1 else names
    if not isinstance(name, str) or name not in FAMILIES:
        raise CheckpointError(
            f"config.json: architecture {shortened(name)} is not supported; supported are "
            f"{', '.join(sorted(FAMILIES))}"
        )
    family = FAMILIES[name]
    if kind not in (None, family.model_type):
        raise read.wrong("model_type", f"architectures names {name}, whose type is {family.model_type!r}")
    return name, family


def _sizes(read: ConfigReader) -> dict[str, Any]:
    """The fields that every family spells alike."""
    return {
        "vocab_size": read.count("vocab_size"),
        "hidden_size": read.count("hidden_size"),
        "layers": read.count("num_hidden_layers"),
        "heads": read.count("num_attention_heads"),
        "intermediate_size": read.count("intermediate_size"),
        "norm_eps": read.number("rms_norm_eps", 1e-6),
        "max_positions": read.count("max_position_embeddings"),
        "dtype": _dtype(read),
        "rope": _rope(read),
    }


def _llama(read: ConfigReader) -> dict[str, Any]:
    attention_bias = read.flag("attention_bias")
    heads = read.count("num_attention_heads")
    shape = _heads(read, heads, max(1, read.count("hidden_size") // heads), null=True)
    return shape | {
        "attention_scale": shape["head_dim"] ** -0.5,
        "activation": _activation(read, "hidden_act", default="silu"),
        "tied": read.flag("tie_word_embeddings", default=False),
        "windows": _windows(read, {"full_attention": None}),
        "qkv_bias": attention_bias,
        "output_bias": attention_bias,
        "mlp_bias": read.flag("mlp_bias"),
    }


def _gemma2(read: ConfigReader) -> dict[str, Any]:
    attention_bias = read.flag("attention_bias")
    read.seen.add("hidden_act")  # the reference reads hidden_activation alone
    window = read.count("sliding_window", 4096)
    if read.take("sliding_window_size") not in (None, window):  # Gemma-2-9B has both
        raise read.wrong("sliding_window_size", f"it must equal sliding_window, {window}")
    return _heads(read, 4, 256) | {
        "attention_scale": read.number("query_pre_attn_scalar", 256) ** -0.5,
        "activation": _activation(read, "hidden_activation", default="gelu_pytorch_tanh"),
        "tied": read.flag("tie_word_embeddings", default=True),
        "windows": _windows(read, {"sliding_attention": window, "full_attention": None}),
        "qkv_bias": attention_bias,
        "output_bias": attention_bias,
        "attention_softcap": read.optional("attn_logit_softcapping", 50.0),
        "logit_softcap": read.optional("final_logit_softcapping", 30.0),
        "embedding_scale": read.count("hidden_size") ** 0.5,
        "norm_offset": True,
        "post_norms": True,
    }


FAMILIES: dict[str, Family] = {
    "Gemma2ForCausalLM": Family("gemma2", _gemma2, eos=1, bos=2),
    "LlamaForCausalLM": Family("llama", _llama, eos=2, bos=1),
}


def _heads(read: ConfigReader, kv_heads: int, head_dim: int, null: bool = False) -> dict[str, Any]:
    """Key heads and the heads' size, by default those given; with `null`, null asks for the default too."""

    def count(key: str, default: int) -> int:
        return default if null and read.take(key) is None else read.count(key, default)

    heads = read.count("num_attention_heads")
    kv_heads, head_dim = count("num_key_value_heads", kv_heads), count("head_dim", head_dim)
    if heads % kv_heads:
        raise CheckpointError(f"config.json: num_key_value_heads = {kv_heads} does not divide {heads} heads")
    if head_dim % 2:
        raise CheckpointError(f"config.json: head_dim = {head_dim} is odd; rotary positions need an even one")
    return {"kv_heads": kv_heads, "head_dim": head_dim}


def _activation(read: ConfigReader, key: str, default: str) -> str:
    name = read.take(key, default)
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise CheckpointError(
            f"config.json: {key} = {shortened(name)} is not supported; supported are "
            f"{', '.join(sorted(ACTIVATIONS))}"
        )
    return ACTIVATIONS[name]


def _windows(read: ConfigReader, known: dict[str, int | None]) -> tuple[int | None, ...]:
    """One window a layer, from the known kinds of layer; without `layer_types` they take turns."""
    layers, pattern = read.count("num_hidden_layers"), list(known)
    kinds = read.take("layer_types")
    if kinds is None:
        kinds = [pattern[layer % len(pattern)] for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in pattern for kind in kinds):
        raise read.wrong(
            "layer_types", f"it must name {' or '.join(pattern)} for each of the {layers} layers"
        )
    return tuple(known[kind] for kind in kinds)


def _rope(read: ConfigReader) -> Rope:
    """Rotary parameters: `rope_parameters`, or the older `rope_scaling` with `rope_theta` beside it."""
    parts = [part for key in ("rope_parameters", "rope_scaling") if (part := read.part(key))]
    ropes = [_rope_of(read, part) for part in parts or [ConfigReader({})]]
    if ropes[0] != ropes[-1]:
        raise CheckpointError(
            f"config.json: rope_parameters = {shortened(parts[0].config)} and rope_scaling = "
            f"{shortened(parts[1].config)} differ; keep the one that the model was trained with"
        )
    return ropes[0]


def _rope_of(read: ConfigReader, part: ConfigReader) -> Rope:
    """One of the two spellings; what it leaves out is taken from beside it."""
    kind = part.take("rope_type", part.take("type", "default"))
    if part.take("type") not in (None, kind):
        raise part.wrong("type", f"rope_type is {shortened(kind)}; keep one of them")
    theta = _theta(read, part)
    if kind == "default":
        rope = Rope(kind, theta)
    elif kind == "llama3":
        rope = Rope(
            kind,
            theta,
            factor=part.number("factor"),
            low_frequency=part.number("low_freq_factor"),
            high_frequency=part.number("high_freq_factor"),
            original_positions=part.count(
                "original_max_position_embeddings", read.count("max_position_embeddings")
            ),
        )
        if rope.low_frequency >= rope.high_frequency:
            raise part.wrong("low_freq_factor", f"it must be below high_freq_factor, {rope.high_frequency}")
    else:
        raise CheckpointError(
            f"{part.where}: rope type {shortened(kind)} is not supported; supported are default, llama3"
        )
    part.refuse_rest()
    return rope


def _theta(read: ConfigReader, part: ConfigReader) -> float:
    if "rope_theta" not in part.config:
        return read.number("rope_theta", 10000.0)
    theta = part.number("rope_theta")
    if read.take("rope_theta") not in (None, theta):
        raise read.wrong(
            "rope_theta", f"{part.where} says {theta}; keep the one that the model was trained with"
        )
    return theta


def _dtype(read: ConfigReader) -> str:
    new, old = read.take("dtype"), read.take("torch_dtype")
    name = str(new or old or "float32").removeprefix("torch.")
    if name not in ("float32", "bfloat16", "float16"):
        raise CheckpointError(
            f"config.json: dtype {name!r} is not supported; supported are float32, bfloat16, float16"
        )
    return name


def _eos(read: ConfigReader, generation: Mapping[str, Any] | None, default: int) -> tuple[int, ...]:
    """Every token that ends a text: those of the config, then those that generation adds."""
    own = read.take("eos_token_id", default if generation is None else None)
    ids: list[int] = []
    for value in (own, (generation or {}).get("eos_token_id")):
        for token in value if isinstance(value, list) else [value]:
            if token is not None and token not in ids:
                if isinstance(token, bool) or not isinstance(token, int):
                    raise CheckpointError(
                        f"eos_token_id is {shortened(value)}; it must be a token id or a list of them"
                    )
                ids.append(token)
    return tuple(ids)


def _bos(read: ConfigReader, generation: Mapping[str, Any] | None, default: int) -> int | None:
    value = read.take("bos_token_id", default if generation is None else generation.get("bos_token_id"))
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise CheckpointError(f"bos_token_id is {shortened(value)}; it must be a token id")
    return value
