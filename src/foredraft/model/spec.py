"""`ModelSpec`: the sizes and the arithmetic of a model, read from its `config.json`.

`model_type` decides which keys `transformers` reads. Each of them is read here too, or changes no text, or is
refused by name, because a model that ignores a key is another model. An absent key has the default that
`transformers` gives it in that family; the sizes have none.

Layers with one window have heads of one number and one size, so a window stands for its kind. Every pass has
a plan: a draft of Draft & Verify (arXiv:2309.08168) leaves some sub-layers out, and an early exit
(arXiv:2404.16710) all from one layer on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from foredraft.errors import CheckpointError, Option, shortened
from foredraft.model.config import CONFIG_KEYS, GENERATION, ConfigReader, read_json
from foredraft.model.families import FAMILIES
from foredraft.model.families.shared import Family
from foredraft.model.memory import dtype_name
from foredraft.model.quantisation import read_quantisation
from foredraft.model.quantisation.scheme import KEYS, Quantisation
from foredraft.model.recurrent_sizes import RecurrentSizes
from foredraft.model.rope import MAX_POSITIONS, Rope
from foredraft.model.tensor_names import AS_STORED, Naming, predicts_further, read_further_layers
from foredraft.model.unsupported import HARMLESS, check_unread, refusal
from foredraft.model.wrappers import text_part_of, with_tie

POSITIONS = "max_position_embeddings"
SIZES = {name: name for name in ("vocab_size", "hidden_size", "intermediate_size")}  # field -> key
SIZES |= {"layers": "num_hidden_layers", "heads": "num_attention_heads"}
MODELOPT = "hf_quant_config.json"  # beside a config.json that says nothing of it
CONFIG, TOKENIZER, TOKENIZER_CONFIG = "config.json", "tokenizer.json", "tokenizer_config.json"
LORA_CONFIG, LORA_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # of a LoRA's folder
# Keys that `foredraft quantise` writes, and wrote before it coded embeddings; other programs ignore them.
EMBEDDING_COPIES, HEAD_COPIES = "embedding_copies_head", "head_copies_embedding"


@dataclass(frozen=True, slots=True)
class Plan:
    attention: tuple[bool, ...]  # whether each layer's attention runs
    mlp: tuple[bool, ...]  # whether each layer's MLP runs

    @classmethod
    def full(cls, layers: int) -> Plan:
        return cls((True,) * layers, (True,) * layers)

    def without(self, attention: Iterable[int] = (), mlp: Iterable[int] = ()) -> Plan:
        return Plan(_cleared(self.attention, attention), _cleared(self.mlp, mlp))


def _cleared(runs: tuple[bool, ...], skip: Iterable[int]) -> tuple[bool, ...]:
    skipped = frozenset(skip)
    if not skipped <= frozenset(range(len(runs))):
        raise ValueError(f"cannot skip layers {sorted(skipped)}: the model has layers 0 to {len(runs) - 1}")
    return tuple(run and layer not in skipped for layer, run in enumerate(runs))


OUTSIDE = -1  # the source of keys and values that are another model's
OF_KEYS = re.compile(r"model\.layers\.(\d{1,6})\.self_attn\.(?:[kv]_proj|[kv]_norm)\.\w+")


def is_lora(folder: Path) -> bool:
    return (folder / LORA_CONFIG).is_file() and not (folder / CONFIG).is_file()


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Everything that determines a model's shapes and arithmetic, except its weights."""

    architecture: str  # a key of `FAMILIES`; of a multimodal checkpoint, that of its text model
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int  # query heads
    kv_heads: int  # key and value heads; of windowed layers, where `full_kv_heads` gives others
    head_dim: int  # of windowed layers, where `full_head_dim` gives another
    intermediate_size: int
    norm_eps: float
    max_positions: int  # the most positions that a request may use
    windows: tuple[int | None, ...]  # the sliding window of each layer in positions; None is full attention
    tied: bool  # the head has the weight of the embedding
    dtype: str  # the checkpoint's dtype: "float32", "bfloat16" or "float16"
    eos_token_ids: tuple[int, ...]  # every id that ends a text
    bos_token_id: int | None
    rope: Rope  # of layers with full attention, and of all layers if `window_rope` is None
    activation: str  # a name that `layers.activate` knows
    attention_scale: float  # the factor on attention scores
    attention_softcap: float | None = None  # the soft-cap on attention scores
    logit_softcap: float | None = None  # the soft-cap on logits
    embedding_scale: float | None = None  # the factor on embeddings
    logit_scale: float | None = None  # the factor on logits, before their soft-cap
    residual_scale: float | None = None  # the factor on what each sub-layer adds
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    gated: bool = True  # the MLP multiplies the activation of a gate by another projection
    parallel_residual: bool = False  # the MLP reads what enters the layer, as attention does
    shared_norm: bool = False  # and attention's norm of it
    layer_norms: bool = False  # norms subtract the mean
    norm_bias: bool = False  # and have a bias
    norm_float32: bool = False  # RMS norms multiply by their weight in float32
    norm_offset: bool = False  # norms multiply by 1 + weight, in float32
    plain_last_norm: bool = False  # but the final norm by its weight
    pre_norms: bool = True  # the input of each sub-layer has a norm of its own
    post_norms: bool = False  # the output of each sub-layer has a norm of its own
    sum_norms: bool = False  # what enters a sub-layer plus its output has a norm; the last is the final norm
    post_norm_eps: float | None = None  # of the norms of outputs, where it is not `norm_eps`
    head_norms: bool = False  # queries and keys are normed per head before rotation
    plain_head_norms: bool = False  # and without a weight
    projection_norms: bool = False  # and so over all heads together
    own_head_norms: bool = False  # each head has a norm of its own, without a bias
    gated_attention: bool = False  # what each query head attends to has a gate, projected beside the query
    gates_apart: bool = False  # which is stored as a weight of its own
    recurrent: RecurrentSizes | None = None  # of recurrent layers, all of one kind, where there are any
    recurrent_layers: tuple[int, ...] = ()  # these layers, none without `recurrent`; windows say nothing
    without_mlp: tuple[int, ...] = ()  # the layers that have no MLP
    learned_positions: int = 0  # rows of the table that is added to embeddings by position; 0 is no table
    position_offset: int = 0  # the row of position 0
    window_rope: Rope | None = None  # of windowed layers
    full_kv_heads: int | None = None  # key and value heads of layers with full attention; None: `kv_heads`
    full_head_dim: int | None = None  # the size of a head there; None: `head_dim`
    sources: tuple[int, ...] = ()  # whose keys each layer reads; (): its own. -1 (`OUTSIDE`): another model's
    shared_intermediate_size: int | None = None  # in layers that read keys of another; None: as elsewhere
    value_norms: bool = False  # values are normed per head, without a weight
    keys_are_values: bool = False  # layers with full attention project keys alone, which are their values too
    layer_scalars: bool = False  # what leaves a layer is multiplied by a number of the layer's own
    layer_input_size: int = 0  # of the embedding that each token has in every layer; 0: there is none
    layer_input_rows: int = 0  # tokens with such embeddings
    rotated_ahead: int = 0  # queries are rotated by so many positions past the last one that they see
    interleaved: bool = False  # channels 2i and 2i + 1 of a stored head rotate together (`row_orders`)
    fused_qkv: bool = False  # queries, keys and values are stored as one weight
    grouped_qkv: bool = False  # in it, those of each key head lie together
    fused_gate_up: bool = False  # the gate and the up projection are stored as one weight
    naming: Naming = AS_STORED  # how the checkpoint names its tensors
    query_rope: Rope | None = None  # of queries, where they are rotated otherwise than keys
    unrotated: tuple[int, ...] = ()  # the layers whose queries and keys are not rotated
    head_copies: bool = False  # the head is a coded copy of the embedding, so its weights are no further ones
    embedding_copies: bool = False  # and the embedding holds what the head's codes stand for
    quantisation: Quantisation | None = None  # how the checkpoint stores the weights of linear layers
    further_layers: int = 0  # layers behind these that predict further tokens, and stay unread
    wrapper: str | None = None  # the multimodal architecture whose text model this is
    media_tokens: tuple[tuple[str, int], ...] = ()  # config keys and ids of tokens for images and sounds
    ignored: tuple[str, ...] = field(default=(), compare=False)  # keys that change nothing, as "key = value"

    def rope_of(self, window: int | None) -> Rope:
        return self.rope if window is None or self.window_rope is None else self.window_rope

    @property
    def ropes(self) -> dict[Rope, int]:
        """Every set of rotary parameters that a layer uses -> the size of a head that they rotate."""
        ropes = {self.rope_of(window): self.head_dim_of(window) for window in self.windows}
        return ropes if self.query_rope is None else ropes | {self.query_rope: self.head_dim}

    def at_length(self, positions: int | None) -> ModelSpec:
        """Return the spec of a model that is loaded for texts of so many positions; None is its longest."""
        length = self.max_positions if positions is None else positions
        changed = {
            name: own.at_length(length)
            for name in ("rope", "window_rope", "query_rope")
            if (own := getattr(self, name)) is not None
        }
        return replace(self, **changed)

    def leaves_unread(self, name: str) -> bool:
        """Return whether a checkpoint may hold a tensor of this name that the decoder does not need."""
        further = predicts_further(name, self.layers, self.further_layers)
        keys = OF_KEYS.fullmatch(name)  # of a layer that reads those of another
        unread_keys = keys is not None and (layer := int(keys[1])) < self.layers and not self.stores(layer)
        return further or self.naming.is_ignored(name) or unread_keys

    @property
    def groups(self) -> int:
        """G, the query heads that share one key head, where all layers have the same heads."""
        return self.heads // self.kv_heads

    def kv_heads_of(self, window: int | None) -> int:
        return self.kv_heads if window is not None else self.full_kv_heads or self.kv_heads

    def head_dim_of(self, window: int | None) -> int:
        return self.head_dim if window is not None else self.full_head_dim or self.head_dim

    def groups_of(self, window: int | None) -> int:
        return self.heads // self.kv_heads_of(window)

    def joins_values(self, window: int | None) -> bool:
        return self.keys_are_values and window is None

    def inner_of(self, layer: int) -> int:
        own = self.stores(layer) or self.shared_intermediate_size is None
        return self.intermediate_size if own else self.shared_intermediate_size or 0

    def source_of(self, layer: int) -> int:
        return self.sources[layer] if self.sources else layer

    def attends(self, layer: int) -> bool:
        return layer not in self.recurrent_layers

    def stores(self, layer: int) -> bool:
        return self.source_of(layer) == layer and self.attends(layer)

    @property
    def producers(self) -> tuple[int, ...]:
        """The layers whose keys and values another layer reads, in ascending order."""
        read = {source for layer, source in enumerate(self.sources) if source not in (layer, OUTSIDE)}
        return tuple(sorted(read))

    @property
    def windows_by_heads(self) -> tuple[int | None, ...]:
        """One window for each shape of heads that layers have."""
        shapes = {(self.kv_heads_of(w), self.head_dim_of(w)): w for w in reversed(self.windows)}
        return tuple(reversed(shapes.values()))

    @property
    def cached_values(self) -> int:
        """The numbers that the keys and values of one position are, over all layers."""
        own = [window for layer, window in enumerate(self.windows) if self.stores(layer)]
        return 2 * sum(self.kv_heads_of(window) * self.head_dim_of(window) for window in own)

    def first(self, layers: int) -> ModelSpec:
        unrotated = tuple(layer for layer in self.unrotated if layer < layers)
        bare = tuple(layer for layer in self.without_mlp if layer < layers)
        recurs = tuple(layer for layer in self.recurrent_layers if layer < layers)
        return replace(
            self, layers=layers, windows=self.windows[:layers], sources=self.sources[:layers],
            unrotated=unrotated, without_mlp=bare, recurrent_layers=recurs,
            recurrent=self.recurrent if recurs else None,
        )  # fmt: skip

    def plain_layer(self, window: int | None = None) -> ModelSpec:
        """Return the spec of one rotated layer with full attention, own keys, and this window's heads."""
        return replace(
            self, layers=1, windows=(None,), kv_heads=self.kv_heads_of(window),
            head_dim=self.head_dim_of(window), full_kv_heads=None, full_head_dim=None, sources=(),
            unrotated=(), without_mlp=(), recurrent_layers=(), recurrent=None, gated_attention=False,
            gates_apart=False, keys_are_values=self.joins_values(window), layer_input_size=0,
            layer_input_rows=0,
        )  # fmt: skip

    @classmethod
    def from_folder(cls, folder: Path) -> ModelSpec:
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is not a folder", remedy="give the folder of a checkpoint")
        if not (folder / CONFIG).is_file():
            if is_lora(folder):
                problem = f"{folder} is a LoRA, which changes another model"
                remedy = ("give that one, and this as ", Option("lora", str(folder)))
                raise CheckpointError(problem, remedy=remedy)
            problem = f"{folder} has no config.json"
            raise CheckpointError(problem, remedy="give the folder of a Hugging Face checkpoint")
        generation = folder / GENERATION
        config = with_tie(read_json(folder / CONFIG), folder)
        if (folder / MODELOPT).is_file() and not any(key in config for key in KEYS):
            told = read_json(folder / MODELOPT).get("quantization")
            algorithm = shortened(told.get("quant_algo") if isinstance(told, dict) else None)
            problem = f"{folder / MODELOPT}: weights that ModelOpt quantised by {algorithm} are not supported"
            remedy = ("give the 16-bit model that it was made from, with ", Option("weights", "int8"))
            raise CheckpointError(problem, remedy=remedy)
        made = read_json(generation) if generation.is_file() else None
        return cls.from_hf(config, made, lambda: _tokenizers_end(folder))

    @classmethod
    def from_hf(
        cls,
        config: Mapping[str, Any],
        generation_config: Mapping[str, Any] | None = None,
        tokenizers_end: Callable[[], int | None] = lambda: None,
    ) -> ModelSpec:
        part = text_part_of(config)
        if part is not None:
            spec = cls.from_hf(part.config, generation_config, tokenizers_end)
            return replace(
                spec,
                wrapper=part.architecture,
                media_tokens=tuple((key, id) for key, id in part.media if id < spec.vocab_size),
                naming=replace(spec.naming, nested=True),
                ignored=(*_listed(part.ignored), *spec.ignored),
            )
        architecture, family = _family(config)
        read = ConfigReader(config, harmless=HARMLESS, spelled=family.spelled)
        if read.key(POSITIONS) not in config:
            read.config = {**config, POSITIONS: family.positions}
        fields = family.fields(read)
        fields |= {name: read.count(key) for name, key in SIZES.items() if name not in fields}
        if read.take("attention_multiplier") not in (None, fields["attention_scale"]):
            raise read.error("attention_multiplier", f"only {fields['attention_scale']} is supported")
        positions = trained = read.count(POSITIONS)
        rope: Rope = fields["rope"]
        if rope.kind == "linear":  # it may stand in a key of its own
            positions = max(trained, read.count("max_sequence_length", trained, if_null=trained))
        elif rope.kind in ("dynamic", "yarn"):
            positions = max(trained, int(min(rope.factor * rope.original_positions, MAX_POSITIONS)))
        copies = read.flag(EMBEDDING_COPIES, default=False)
        ends, begin = _end_ids(read, generation_config, family, tokenizers_end)
        spec = cls(
            architecture=architecture,
            max_positions=min(positions, fields.pop("longest", None) or positions),
            **fields,
            dtype=_dtype(read),
            eos_token_ids=ends,
            bos_token_id=begin,
            head_copies=copies or read.flag(HEAD_COPIES, default=False),
            embedding_copies=copies,
            quantisation=read_quantisation(read, fields.get("naming", AS_STORED)),
            further_layers=read_further_layers(read),
        )
        _check_ropes(spec)
        ignored = check_unread(read, family.keys or CONFIG_KEYS[family.model_type]) | read.ignored
        return replace(spec, ignored=_listed(ignored))


def _listed(ignored: Mapping[str, object]) -> tuple[str, ...]:
    return tuple(f"{key} = {shortened(value)}" for key, value in ignored.items())


def _check_ropes(spec: ModelSpec) -> None:
    for rope, head_dim in spec.ropes.items():
        rotated = rope.rotated(head_dim)
        if rope.kind == "dynamic" and rotated == 2:
            problem = f"config.json: head_dim is {head_dim}"
            raise CheckpointError(problem, remedy="rope type 'dynamic' needs 4 rotated channels or more")
        if rope.factors and 2 * len(rope.factors) != rotated:
            problem = f"config.json: short_factor and long_factor have {len(rope.factors)} numbers"
            remedy = f"{rotated} channels of a head are rotated, so they must have {rotated // 2}"
            raise CheckpointError(problem, remedy=remedy)


def _family(config: Mapping[str, Any]) -> tuple[str, Family]:
    """Return the architecture and its family: those of `model_type`, or else of `architectures`."""
    kind, names = config.get("model_type"), config.get("architectures")
    for name, family in FAMILIES.items():
        if kind == family.model_type or (kind is None and names == [name]):
            return name, family
    raise refusal(config, [family.model_type for family in FAMILIES.values()])


def with_dtype(config: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    others = {key: value for key, value in config.items() if key != "torch_dtype"}  # the older name
    return others | {"dtype": dtype_name(dtype)}


def _dtype(read: ConfigReader) -> str:
    given = [name for key in ("dtype", "torch_dtype") if (name := read.take(key))]
    names = [str(name).removeprefix("torch.") for name in given] or ["float32"]
    if names[0] != names[-1]:
        raise read.error("torch_dtype", f"dtype is {shortened(names[0])}; keep the dtype of the weights")
    if names[0] not in ("float32", "bfloat16", "float16"):
        problem = f"config.json: dtype {shortened(names[0])} is not supported"
        raise CheckpointError(problem, remedy="supported are float32, bfloat16, float16")
    return names[0]


def _end_ids(
    read: ConfigReader,
    generation: Mapping[str, Any] | None,
    family: Family,
    tokenizers_end: Callable[[], int | None],
) -> tuple[tuple[int, ...], int | None]:
    """Return every end-of-text id, and the beginning-of-text id: those of config.json count first.

    generation_config.json adds further ends, and a beginning where config.json names none. Where neither
    names an end, the tokenizer's counts before the default of the class.
    """
    eos, bos = (
        read.take(key, default if generation is None else None)
        for key, default in (("eos_token_id", family.eos), ("bos_token_id", family.bos))
    )
    added = generation or {}
    if all(each.get("eos_token_id") is None for each in (read.config, added)):
        end = _ids(read, "eos_token_id", tokenizers_end(), file=TOKENIZER_CONFIG)
        eos = end[0] if end else eos
    ends = [
        *_ids(read, "eos_token_id", eos, family.eos),
        *_ids(read, "eos_token_id", added.get("eos_token_id"), file=GENERATION),
    ]
    begins = _ids(read, "bos_token_id", bos, family.bos)
    if "bos_token_id" not in read.config:
        begins = begins or _ids(read, "bos_token_id", added.get("bos_token_id"), file=GENERATION)
    return tuple(dict.fromkeys(ends)), next(iter(begins), None)


def _tokenizers_end(folder: Path) -> int | None:
    """Return the id of the end-of-text token that tokenizer_config.json names; None where it names none."""
    files = [folder / TOKENIZER_CONFIG, folder / TOKENIZER]
    config, tokenizer = (read_json(file) if file.is_file() else {} for file in files)
    named = config.get("eos_token")
    text = named.get("content") if isinstance(named, dict) else named
    for token in tokenizer.get("added_tokens") or ():
        if isinstance(token, dict) and isinstance(text, str) and token.get("content") == text:
            id = token.get("id")
            return id if isinstance(id, int) else None
    return None


def _ids(
    read: ConfigReader, key: str, value: Any, default: int | list[int] | None = None, file: str = CONFIG
) -> list[int]:
    """Return the token ids under a key; null and negative values stand for no id.

    An id beyond the vocabulary is an error in config.json, unless it is the default of the class, and left
    out of generation_config.json, which may come from a larger model.
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
        elif file == CONFIG and value != default:
            problem = f"{file}: {key} is {shortened(value)}, but vocab_size is {vocab_size}"
            raise CheckpointError(problem, remedy="give an id below it")
    return ids
