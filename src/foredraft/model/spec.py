"""What a model is, in numbers, read from a `config.json` together with `families` and `rope_config`.

Contract: every key of a `config.json` is consumed, or known not to change the mathematics, or checked to hold
its neutral value. Any other key, or any other value, is a `CheckpointError` that names it, because a model
run with a key ignored is another model. A key that is absent has the value that `transformers` gives it in
that family; the sizes must be there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foredraft.errors import CheckpointError
from foredraft.model.config import ConfigReader, read_json, shortened
from foredraft.model.families import FAMILIES, Family
from foredraft.model.generation import FILE as GENERATION
from foredraft.model.rope import Rope

__all__ = ["ModelSpec", "Rope"]

CONFIG = "config.json"


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
    rope: Rope  # of layers that see everything, and of all where `window_rope` is None
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
    head_norms: bool = False  # each head's query and key are normed before they are rotated
    window_rope: Rope | None = None  # of layers with a window

    @property
    def groups(self) -> int:
        """Query heads that share one key head."""
        return self.heads // self.kv_heads

    def rope_of(self, window: int | None) -> Rope:
        """The rotary parameters of layers with that window."""
        return self.rope if window is None or self.window_rope is None else self.window_rope

    @classmethod
    def from_folder(cls, folder: Path) -> ModelSpec:
        """The spec of a checkpoint folder, its weights untouched."""
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is not a folder; give the folder of a checkpoint")
        if not (folder / CONFIG).is_file():
            raise CheckpointError(
                f"{folder} has no config.json; give the folder of a Hugging Face checkpoint"
            )
        generation = folder / GENERATION
        config = read_json(folder / CONFIG)
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
            max_positions=_positions(read, fields["rope"]),
            eos_token_ids=_eos(read, generation_config, family.eos),
            bos_token_id=_bos(read, generation_config, family.bos),
        )
        if spec.head_dim == 2 and any(spec.rope_of(window).kind == "dynamic" for window in spec.windows):
            raise CheckpointError("config.json: head_dim is 2; rope type 'dynamic' needs 4 or more")
        read.refuse_rest()
        return spec


def _family(read: ConfigReader) -> tuple[str, Family]:
    """The architecture's name and family; `model_type` may stand in for `architectures`, never contradict."""
    names, kind = read.take("architectures"), read.take("model_type")
    if not names:
        names = [name for name, family in FAMILIES.items() if family.model_type == kind] or [kind]
    name = names[0] if isinstance(names, list) and len(names) == 1 else names
    if not isinstance(name, str) or name not in FAMILIES:
        text = ": it reads more than text, so give a checkpoint of its language model alone"
        raise CheckpointError(
            f"config.json: architecture {shortened(name)} is not supported"
            f"{text if 'text_config' in read.config else ''}; supported are {', '.join(sorted(FAMILIES))}"
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
        "dtype": _dtype(read),
    }


def _positions(read: ConfigReader, rope: Rope) -> int:
    """How far the model reaches. Some scaled linearly keep the unscaled length in the usual place."""
    trained = read.count("max_position_embeddings")
    scaled = read.count("max_sequence_length", trained, null=trained) if rope.kind == "linear" else trained
    return rope.usable_positions(max(trained, scaled))


def _dtype(read: ConfigReader) -> str:
    given = {
        key: str(name).removeprefix("torch.") for key in ("dtype", "torch_dtype") if (name := read.take(key))
    }
    names = [*given.values()] or ["float32"]
    if names[0] != names[-1]:
        raise read.wrong("torch_dtype", f"dtype is {names[0]!r}; keep the one that the weights were made for")
    if names[0] not in ("float32", "bfloat16", "float16"):
        raise CheckpointError(
            f"config.json: dtype {names[0]!r} is not supported; supported are float32, bfloat16, float16"
        )
    return names[0]


def _eos(read: ConfigReader, generation: Mapping[str, Any] | None, default: int | None) -> tuple[int, ...]:
    """Every token that ends a text: those of the config, then those that generation adds."""
    own = read.take("eos_token_id", default if generation is None else None)
    added = (generation or {}).get("eos_token_id")
    ids = [*_ids(read, "eos_token_id", own), *_ids(read, "eos_token_id", added, GENERATION)]
    return tuple(dict.fromkeys(ids))


def _bos(read: ConfigReader, generation: Mapping[str, Any] | None, default: int | None) -> int | None:
    own = read.take("bos_token_id", default if generation is None else None)
    ids = _ids(read, "bos_token_id", own)
    if "bos_token_id" not in read.config:
        ids = ids or _ids(read, "bos_token_id", (generation or {}).get("bos_token_id"), GENERATION)
    return next(iter(ids), None)


def _ids(read: ConfigReader, key: str, value: Any, file: str = CONFIG) -> list[int]:
    """The token ids under a key. null and negative ones, by which some files say none, are none.

    One beyond the vocabulary is refused in the config, which contradicts itself then. generation_config.json
    may have been made for a larger one: what the model cannot say is left out (`generation_defaults` tells).
    """
    several = value if isinstance(value, list) and key == "eos_token_id" else [value]
    vocabulary = read.count("vocab_size")
    ids = []
    for token in several:
        if token is not None and (isinstance(token, bool) or not isinstance(token, int)):
            how = "a token id or a list of them" if key == "eos_token_id" else "a token id"
            raise CheckpointError(f"{file}: {key} is {shortened(value)}; it must be {how}")
        if token is None or token < 0:
            continue
        if token < vocabulary:
            ids.append(token)
        elif file == CONFIG:
            raise CheckpointError(
                f"{file}: {key} is {shortened(value)}, but vocab_size is {vocabulary}; give an id below it"
            )
    return ids
