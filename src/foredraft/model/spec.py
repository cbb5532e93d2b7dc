"""`ModelSpec`: the sizes and the arithmetic of a model, read from its `config.json`.

Contract: `model_type` decides which keys `transformers` reads. Each of them is read here too, or changes no
text, or is a `CheckpointError` that names it, because a model that ignores a key is another model.
`reference.py` decides about the keys that are left. An absent key has the default that `transformers` gives
it in that family; the sizes have no default. `families.py` and `rope_config.py` read the keys of each
architecture, and `quantisation` those of quantised weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from foredraft.errors import CheckpointError, shortened
from foredraft.model.config import ConfigReader, read_json
from foredraft.model.families import FAMILIES, Family
from foredraft.model.generation import FILE as GENERATION
from foredraft.model.quantisation import Quantisation, read_quantisation
from foredraft.model.reference import HARMLESS, check_unread
from foredraft.model.reference_keys import CONFIG as REFERENCE
from foredraft.model.rope import Rope
from foredraft.model.transfers import dtype_name

__all__ = ["ModelSpec", "Rope", "with_dtype"]

CONFIG = "config.json"
# Keys of checkpoints that `foredraft quantise` writes, and wrote before it coded embeddings, too; other
# programs ignore them.
EMBEDDING_COPIES, HEAD_COPIES = "embedding_copies_head", "head_copies_embedding"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Everything that determines a model's shapes and arithmetic, except its weights."""

    architecture: str  # a key of `FAMILIES`
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int  # query heads
    kv_heads: int  # key and value heads
    head_dim: int
    intermediate_size: int
    norm_eps: float
    max_positions: int  # the most positions that a request may use
    windows: tuple[int | None, ...]  # the sliding window of each layer in positions; None is full attention
    tied: bool  # the head has the weight of the embedding
    dtype: str  # the checkpoint's dtype: "float32", "bfloat16" or "float16"
    eos_token_ids: tuple[int, ...]  # every id that ends a text
    bos_token_id: int | None
    rope: Rope  # of layers with full attention, and of all layers if `window_rope` is None
    activation: str  # "silu" or "gelu_tanh"
    attention_scale: float  # the factor on attention scores
    attention_softcap: float | None = None  # the soft-cap on attention scores
    logit_softcap: float | None = None  # the soft-cap on logits
    embedding_scale: float | None = None  # the factor on embeddings
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    norm_offset: bool = False  # norms multiply by 1 + weight, in float32
    post_norms: bool = False  # the output of each sub-layer has a norm of its own
    head_norms: bool = False  # queries and keys are normed per head before rotation
    window_rope: Rope | None = None  # of windowed layers
    head_copies: bool = False  # the head is a coded copy of the embedding, so its weights are no further ones
    embedding_copies: bool = False  # and the embedding holds what the head's codes stand for
    quantisation: Quantisation | None = None  # how the checkpoint stores the weights of linear layers
    ignored: tuple[str, ...] = field(default=(), compare=False)  # keys that change nothing, as "key = value"

    @property
    def groups(self) -> int:
        """G, the query heads that share one key head."""
        return self.heads // self.kv_heads

    def rope_of(self, window: int | None) -> Rope:
        """Return the rotary parameters of layers with the given window."""
        return self.rope if window is None or self.window_rope is None else self.window_rope

    @classmethod
    def from_folder(cls, folder: Path) -> ModelSpec:
        """Return the spec of a checkpoint folder, without reading its weights.

        Raises:
            CheckpointError: The folder is not a checkpoint, or its model is not supported.
        """
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is not a folder", remedy="give the folder of a checkpoint")
        if not (folder / CONFIG).is_file():
            raise CheckpointError(
                f"{folder} has no config.json", remedy="give the folder of a Hugging Face checkpoint"
            )
        generation = folder / GENERATION
        config = read_json(folder / CONFIG)
        return cls.from_hf(config, read_json(generation) if generation.is_file() else None)

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
    ) -> ModelSpec:
        """Return the spec of a parsed `config.json`.

        Args:
            config: The content of `config.json`.
            generation_config: The content of `generation_config.json`, which may add end-of-text ids.

        Raises:
            CheckpointError: A key is missing, has a wrong value, or is not supported.
        """
        architecture, family = _family(config)
        read = ConfigReader({"max_position_embeddings": family.positions, **config}, harmless=HARMLESS)
        fields = _sizes(read) | family.fields(read)
        if read.take("attention_multiplier") not in (None, fields["attention_scale"]):
            raise read.error("attention_multiplier", f"only {fields['attention_scale']} is supported")
        positions = _positions(read, fields["rope"])
        copies = read.flag(EMBEDDING_COPIES, default=False)
        spec = cls(
            architecture=architecture,
            max_positions=min(positions, fields.pop("longest", None) or positions),
            **fields,
            eos_token_ids=_eos(read, generation_config, family.eos),
            bos_token_id=_bos(read, generation_config, family.bos),
            head_copies=copies or read.flag(HEAD_COPIES, default=False),
            embedding_copies=copies,
            quantisation=read_quantisation(read),
        )
        if spec.head_dim == 2 and any(spec.rope_of(window).kind == "dynamic" for window in spec.windows):
            raise CheckpointError("config.json: head_dim is 2", remedy="rope type 'dynamic' needs 4 or more")
        ignored = check_unread(read, REFERENCE[family.model_type]) | read.ignored
        return replace(spec, ignored=tuple(f"{key} = {shortened(value)}" for key, value in ignored.items()))


def _family(config: Mapping[str, Any]) -> tuple[str, Family]:
    """Return the name of the architecture and its family: those of `model_type`.

    `architectures` counts only where there is no `model_type`.
    """
    kind, names = config.get("model_type"), config.get("architectures")
    for name, family in FAMILIES.items():
        if kind == family.model_type or (kind is None and names == [name]):
            return name, family
    found = f"model_type {shortened(kind)}" if kind is not None else f"architecture {shortened(_only(names))}"
    remedy = f"supported are {', '.join(sorted(family.model_type for family in FAMILIES.values()))}"
    if "text_config" in config:  # a multimodal model
        remedy = f"give a checkpoint of its language model alone ({remedy})"
    raise CheckpointError(f"config.json: {found} is not supported", remedy=remedy)


def _only(names: Any) -> Any:
    """Return the element of a list of one, and anything else as it is."""
    return names[0] if isinstance(names, list) and len(names) == 1 else names


def _sizes(read: ConfigReader) -> dict[str, Any]:
    """Return the fields whose keys are the same in every family."""
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
    """Return the most positions that a request may use.

    Some linearly scaled checkpoints keep the unscaled length in `max_position_embeddings` and the scaled one
    in `max_sequence_length`.
    """
    trained = read.count("max_position_embeddings")
    scaled = read.count("max_sequence_length", trained, if_null=trained) if rope.kind == "linear" else trained
    return rope.usable_positions(max(trained, scaled))


def with_dtype(config: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return a config.json for weights of a dtype."""
    others = {key: value for key, value in config.items() if key != "torch_dtype"}  # the older name
    return others | {"dtype": dtype_name(dtype)}


def _dtype(read: ConfigReader) -> str:
    given = {
        key: str(name).removeprefix("torch.") for key in ("dtype", "torch_dtype") if (name := read.take(key))
    }
    names = [*given.values()] or ["float32"]
    if names[0] != names[-1]:
        raise read.error("torch_dtype", f"dtype is {shortened(names[0])}; keep the dtype of the weights")
    if names[0] not in ("float32", "bfloat16", "float16"):
        raise CheckpointError(
            f"config.json: dtype {shortened(names[0])} is not supported",
            remedy="supported are float32, bfloat16, float16",
        )
    return names[0]


def _eos(read: ConfigReader, generation: Mapping[str, Any] | None, default: int | None) -> tuple[int, ...]:
    """Return every end-of-text id: those of config.json, then those that generation_config.json adds."""
    own = read.take("eos_token_id", default if generation is None else None)
    added = (generation or {}).get("eos_token_id")
    ids = [*_ids(read, "eos_token_id", own), *_ids(read, "eos_token_id", added, GENERATION)]
    return tuple(dict.fromkeys(ids))


def _bos(read: ConfigReader, generation: Mapping[str, Any] | None, default: int | None) -> int | None:
    """Return the beginning-of-text id of config.json, or else of generation_config.json."""
    own = read.take("bos_token_id", default if generation is None else None)
    ids = _ids(read, "bos_token_id", own)
    if "bos_token_id" not in read.config:
        ids = ids or _ids(read, "bos_token_id", (generation or {}).get("bos_token_id"), GENERATION)
    return next(iter(ids), None)


def _ids(read: ConfigReader, key: str, value: Any, file: str = CONFIG) -> list[int]:
    """Return the token ids under a key; null and negative values stand for no id.

    config.json contradicts itself with an id beyond its vocabulary, so that is an error.
    generation_config.json may come from a model with a larger vocabulary, so such an id is left out;
    `generation_defaults` logs a warning.
    """
    values = value if isinstance(value, list) and key == "eos_token_id" else [value]
    vocab_size = read.count("vocab_size")
    ids = []
    for token in values:
        if token is not None and (isinstance(token, bool) or not isinstance(token, int)):
            accepted = "a token id or a list of them" if key == "eos_token_id" else "a token id"
            raise CheckpointError(f"{file}: {key} is {shortened(value)}", remedy=f"it must be {accepted}")
        if token is None or token < 0:
            continue
        if token < vocab_size:
            ids.append(token)
        elif file == CONFIG:
            raise CheckpointError(
                f"{file}: {key} is {shortened(value)}, but vocab_size is {vocab_size}",
                remedy="give an id below it",
            )
    return ids
