"""The source that a GGUF file is: config and tokenizer of its metadata, tensors by the names of Hugging Face.

The metadata become the `config.json` that the model had. Every key of the architecture is read, has a neutral
value, or is refused. What a file does not say is what llama.cpp assumes
(https://github.com/ggml-org/llama.cpp/tree/master/src/models); what is written:
https://github.com/ggml-org/llama.cpp/blob/master/convert_hf_to_gguf.py. The file is first checked to hold
every tensor that its model needs in the right shape, and no other. To make a large vocabulary takes seconds,
so what was made of the latest files is kept in the user's cache folder, by the state of their parts.
"""

from __future__ import annotations

import functools
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from foredraft import user_cache
from foredraft.errors import CheckpointError, Option
from foredraft.model.chat import ChatTemplate
from foredraft.model.config import GENERATION, ConfigReader
from foredraft.model.families import FAMILIES, IN_GGUF
from foredraft.model.families.shared import FULL, GGUF, SLIDING
from foredraft.model.gguf.tensors import (
    LONG_FACTORS,
    PLAIN,
    ROPE_FACTORS,
    SHORT_FACTORS,
    GGUFModel,
    file_name,
    holds_factors,
    identity,
    is_further_alone,
    model_name,
    model_shape,
    part_names,
    stored_tensors,
    stored_values,
)
from foredraft.model.gguf.vocabulary import UnreadableVocabularyError, end_ids, special_ids, vocabulary_of
from foredraft.model.quantisation.scheme import METHOD, TENSORS
from foredraft.model.rope import Rope, frequencies
from foredraft.model.source import ModelSource, Opened
from foredraft.model.spec import ModelSpec
from foredraft.model.tokenizer import FILE, GIVE_TOKENIZER, Tokenizer
from foredraft.model.unsupported import refusal_of_gguf
from foredraft.model.weights import tensor_shapes

CONVERT_AGAIN = "convert the model again, or give its checkpoint folder"
HARMLESS = ("tensor_data_layout", "rope.scaling.finetuned")
NEUTRAL: dict[str, object] = {  # keys that change what a forward computes, except with this value
    "attention.causal": True,
    "expert_count": 0,
    "expert_used_count": 0,
    "rope.scaling.attn_factor": 1.0,
    "use_parallel_residual": False,
}
# values of general.type, besides "model" (`GGUFType` in
# https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/constants.py)
OTHER_KINDS = {
    "mmproj": "the vision part of a model (mmproj)",
    "adapter": "an adapter for a model (LoRA)",
    "imatrix": "an importance matrix (imatrix), made for quantising a model",
}
# sampling settings of a file -> their names in generation_config.json, where these differ
SAMPLING, RENAMED = "general.sampling.", {"temp": "temperature", "penalty_repeat": "repetition_penalty"}
THETA = 10_000.0  # RoPE's base where the file does not say
# Llama 3.1's RoPE factors come as a tensor alone. These parameters of its formula are the same in all models.
LOW, HIGH = 1.0, 4.0


class MetadataReader(ConfigReader):
    """Reads the keys of the architecture, without the architecture's name in front."""

    ROPE_FACTORS = ROPE_FACTORS
    LONG_ROPE = SHORT_FACTORS, LONG_FACTORS

    def __init__(self, file: GGUFModel, architecture: str) -> None:
        own = _under(file, f"{architecture}.")
        super().__init__(own, f"{file.path}, {architecture}", frozenset(HARMLESS))
        self.file, self.architecture = file, architecture

    def has(self, key: str) -> bool:
        return key in self.config

    def has_tensor(self, name: str) -> bool:
        return name in self.file.tensors

    def rope(self, sizes: dict[str, Any]) -> dict[str, Any]:
        """Return the rotary parameters, of layers with full attention where there are others."""
        theta, factor = self.number("rope.freq_base", THETA), self._factor()
        kind = self.take("rope.scaling.type", "linear" if factor else "none")
        if self.has_tensor(ROPE_FACTORS):
            if factor and kind != "none":
                raise self.error("rope.scaling.type", f"the file has {ROPE_FACTORS}, too")
            return _llama3(self, theta, sizes["head_dim"])
        if kind == "none" or (kind == "linear" and factor in (None, 1.0)):
            return {"rope_type": "default", "rope_theta": theta}
        if kind == "linear":
            return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
        if kind != "yarn":
            raise self.error("rope.scaling.type", "supported are none, linear, yarn")
        found: dict[str, Any] = {"rope_type": "yarn", "rope_theta": theta, "factor": factor}
        found |= {key: self.number(own) for key, own in YARN.items() if self.has(own)}
        if ORIGINAL in found:
            found[ORIGINAL] = int(found[ORIGINAL])
        return found

    def share(self, sizes: dict[str, Any]) -> dict[str, Any]:
        """Return the share of a head that is rotated."""
        head_dim = sizes["head_dim"]
        return {"partial_rotary_factor": self.count("rope.dimension_count", head_dim) / head_dim}

    def _factor(self) -> float | None:
        """Return what RoPE's positions are divided by; older files spell it otherwise."""
        self.take("rope.scaling.original_context_length")  # it counts with yarn and Llama 3.1's factors only
        found = self.optional_number("rope.scaling.factor", zero_is_null=True)
        older = self.optional_number("rope.scale_linear", zero_is_null=True)
        if found is not None and older not in (None, found):
            raise self.error("rope.scale_linear", f"rope.scaling.factor is {found}")
        return found or older

    def factors(self, name: str, count: int) -> list[float]:
        """Return the numbers of a tensor of RoPE's divisors."""
        info = self.file.tensors.get(name)
        if info is None or info.dtype not in PLAIN or info.shape != (count,):
            raise self.file.error(f"has no {count} numbers in {name}", CONVERT_AGAIN)
        numbers: list[float] = stored_values(self.file, info).float().tolist()
        return numbers

    def windows(self, sizes: dict[str, Any], pattern: int = 4) -> dict[str, Any]:
        given = self.take("attention.sliding_window_pattern", pattern)
        if isinstance(given, list):
            windowed = [bool(each) for each in given]
        else:
            every = self.count("attention.sliding_window_pattern", pattern)
            windowed = [(layer + 1) % every != 0 for layer in range(sizes["num_hidden_layers"])]
        return {
            "sliding_window": self.count("attention.sliding_window"),
            "layer_types": [SLIDING if each else FULL for each in windowed],
        }

    @staticmethod
    def exact(value: Any) -> Any:
        """Return the shortest decimal number that float32 rounds to the value, if that is a float32."""
        if not isinstance(value, float) or float(np.float32(value)) != value:
            return value
        return float(str(np.float32(value)))


def config_of(file: GGUFModel) -> dict[str, Any]:
    metadata, architecture = file.metadata, file.metadata.get("general.architecture")
    kind = metadata.get("general.type", "mmproj" if architecture == "clip" else None)  # in files of 2024
    if isinstance(kind, str) and kind in OTHER_KINDS:
        raise file.error(f"is {OTHER_KINDS[kind]}", "give the file of the language model")
    if not isinstance(architecture, str) or architecture not in IN_GGUF:
        raise file.error(*refusal_of_gguf(architecture, metadata, IN_GGUF))
    read = MetadataReader(file, architecture)
    name, of = IN_GGUF[architecture]
    config = {"architectures": [name], "model_type": FAMILIES[name].model_type} | _sizes(read, of)
    config |= {of.activation_key: of.activation, **of.fixed}
    config |= {key: read.has_tensor(f"blk.0.{part}.bias") for key, part in of.biases.items()}
    if of.norm_key != "rms_norm_eps":
        config |= {"rms_norm_eps": None, of.norm_key: config["rms_norm_eps"]}
    if of.rope != "own":
        config["rope_parameters"] = read.rope(config) | (read.share(config) if of.rope == "part" else {})
    if not of.windows:  # llama.cpp runs it without sliding windows, and scales as usual
        positions, usual = config["max_position_embeddings"], config["head_dim"] ** -0.5
        if read.optional_number("attention.sliding_window", zero_is_null=True) not in (None, positions):
            raise read.error("attention.sliding_window", "windows are supported in gemma2 and gemma3 only")
        if abs(read.number("attention.scale", usual) / usual - 1) > 1e-6:  # the file has float32
            raise read.error("attention.scale", f"only {usual:.7g} is supported")
    if of.keys is not None:
        config |= of.keys(read, config)
    config |= {
        "tie_word_embeddings": not read.has_tensor("output.weight"),
        "dtype": _dtype(file, architecture),
        "bos_token_id": special_ids(metadata).get("bos"),
        "eos_token_id": end_ids(metadata) or None,
    }
    quantised: dict[str, list[str]] = {}
    for name, info in file.tensors.items():
        own = model_name(architecture, name, config["num_hidden_layers"])
        if info.dtype not in PLAIN and own is not None:
            quantised.setdefault(info.dtype, []).append(own.removesuffix(".weight"))
    if quantised:
        config["quantization_config"] = {"quant_method": METHOD, TENSORS: quantised}
    for key, neutral in NEUTRAL.items():
        if key not in read.seen and read.take(key, neutral) != neutral:
            raise read.error(key, f"only {neutral} is supported")
    read.reject_unknown_keys()
    return config


FEED_FORWARD, KEY_HEADS = "feed_forward_length", "attention.head_count_kv"
EPSILONS = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")  # of RMS and of layer norms


def _sizes(read: MetadataReader, of: GGUF) -> dict[str, Any]:
    embedding = read.file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise read.file.error("has no matrix token_embd.weight", CONVERT_AGAIN)
    words = embedding.shape[0]
    if read.count("vocab_size", words) != words:
        raise read.error("vocab_size", f"token_embd.weight has {words} rows")
    hidden, heads = read.count("embedding_length"), read.count("attention.head_count")
    head_dim = read.count("attention.key_length", max(1, hidden // heads))
    for key in ("attention.value_length", *(["rope.dimension_count"] if of.rope != "part" else [])):
        if read.count(key, head_dim) != head_dim:
            raise read.error(key, f"only the size of a key head, {head_dim}, is supported")
    return {
        "vocab_size": words,
        "hidden_size": hidden,
        "intermediate_size": None if FEED_FORWARD in of.by_layer else read.count(FEED_FORWARD),
        "num_hidden_layers": read.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": None if KEY_HEADS in of.by_layer else read.count(KEY_HEADS, heads),
        "head_dim": head_dim,
        "max_position_embeddings": read.count("context_length"),
        "rms_norm_eps": read.number(EPSILONS[read.has(EPSILONS[1])]),
    }


ORIGINAL = "original_max_position_embeddings"
YARN = {  # key of config.json -> that of the file
    ORIGINAL: "rope.scaling.original_context_length",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}


def _llama3(read: MetadataReader, theta: float, head_dim: int) -> dict[str, Any]:
    """Return the parameters of Llama 3.1's scaling that give the factors in the file."""
    given = torch.tensor(read.factors(ROPE_FACTORS, head_dim // 2))
    largest = MetadataReader.exact(float(given.max()))
    for original in (8192, *(2**power for power in range(5, 21))):  # Llama's own first
        rope = Rope("llama3", theta, largest, LOW, HIGH, original)
        plain, scaled = (frequencies(each, head_dim) for each in (Rope("default", theta), rope))
        if torch.allclose(plain / scaled, given, rtol=1e-4, atol=0.0):
            return {
                "rope_type": "llama3",
                "rope_theta": theta,
                "factor": largest,
                "low_freq_factor": LOW,
                "high_freq_factor": HIGH,
                ORIGINAL: original,
            }
    problem = f"has factors in {ROPE_FACTORS} that are not those of Llama 3.1"
    raise read.file.error(problem, "give the model's checkpoint folder")


def _dtype(file: GGUFModel, architecture: str) -> str:
    """Return the dtype to run the model in: that of its matrices, and bfloat16 where they are quantised.

    Gemma in float16 runs in bfloat16, too: its states grow beyond what float16 holds.
    """
    kinds = {info.dtype for info in file.tensors.values() if len(info.shape) > 1}
    if kinds <= {"F32", "F64"}:
        return "float32"
    return "float16" if kinds <= {"F16", "F32"} and not architecture.startswith("gemma") else "bfloat16"


def _under(file: GGUFModel, prefix: str) -> dict[str, Any]:
    given = ((key, value) for key, value in file.metadata.items() if key.startswith(prefix))
    return {key.removeprefix(prefix): MetadataReader.exact(value) for key, value in given}


KIND, SUFFIX, MOST = "gguf", ".content", 16  # of the user's cache; files whose content is kept
FORMAT = 4  # raised when the content is made differently


class GGUFSource(ModelSource):
    renamed = True

    def __init__(self, path: Path) -> None:
        # the file's own link stays: the hub's cache gives parts their names by links
        names = part_names(path.name)
        super().__init__(path.parent.resolve() / names[0])
        if len(names) > 1 and not self.path.exists():
            GGUFModel(path)  # says that the first part is missing
        self._state = self._read_state("check its name")
        head, self._content = _content(self.path, self._state)
        self.config, self.generation, self._tokens, self._refusal = json.loads(head)

    def _read_state(self, remedy: str) -> tuple[tuple[int, ...] | None, ...]:
        try:
            return identity(self.path)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read ({error.strerror})", remedy=remedy) from error

    def named(self, file: str) -> Path:
        return self.path

    def _own_files(self) -> list[Path]:
        return [self.path.with_name(name) for name in part_names(self.path.name)]

    @functools.cached_property
    def spec(self) -> ModelSpec:
        return ModelSpec.from_hf(self.config, self.generation)

    def tokenizer(self, size: int | None = None, *, like: Tokenizer | None = None) -> Tokenizer | None:
        if self._refusal is not None:
            raise CheckpointError(f"{self.path} {self._refusal}", remedy=GIVE_TOKENIZER)
        if self._content is None:
            return None
        chat = ChatTemplate.from_config(self._tokens, self.path)
        return Tokenizer.from_content(self._content, self.path, chat, size, like=like)

    @property
    def tokenizer_json(self) -> bytes | None:
        return self._content

    def write_others(self, folder: Path, beginnings: tuple[str, ...] = ("",)) -> None:
        texts = {GENERATION: self.generation, "tokenizer_config.json": self._tokens}
        contents = {name: json.dumps(value).encode() for name, value in texts.items() if value is not None}
        contents |= {} if self._content is None else {FILE: self._content}
        for name in filter(lambda name: name.startswith(beginnings), contents):
            (folder / name).write_bytes(contents[name])

    def _open(self, stack: ExitStack, device: torch.device) -> Opened:
        if self._read_state("give the model's file again") != self._state:
            raise CheckpointError(f"{self.path} has changed while it was used", remedy="load the model again")
        return stored_tensors(_opened(self.path, self._state), self.config, meta=device.type == "meta")


@functools.lru_cache(maxsize=1)
def _opened(path: Path, state: tuple[tuple[int, ...] | None, ...]) -> GGUFModel:
    """Return an open file. Loading reads it twice, and to walk over a large vocabulary takes a second."""
    return GGUFModel(path, lists=False)  # the vocabulary of Gemma takes 40 MB


@functools.lru_cache(maxsize=1)
def _content(path: Path, state: tuple[tuple[int, ...] | None, ...]) -> tuple[bytes, bytes | None]:
    """Return a line with all but the tokenizer, and the content of tokenizer.json, if any."""
    key = {"format": FORMAT, "file": str(path), "state": state}
    content = user_cache.read_bytes(KIND, key, SUFFIX)
    if content is None:
        content = _made(GGUFModel(path))
        user_cache.write_bytes(KIND, key, SUFFIX, content)
        user_cache.keep_newest(KIND, SUFFIX, MOST)
    head, _, tokenizer = content.partition(b"\n")
    return head, tokenizer or None


def _made(file: GGUFModel) -> bytes:
    config = config_of(file)
    recommended = {RENAMED.get(key, key): value for key, value in _under(file, SAMPLING).items()}
    generation = recommended or None
    try:
        spec = ModelSpec.from_hf(config, generation)
    except CheckpointError as error:
        raise CheckpointError(f"{file.path}: {error}", remedy=CONVERT_AGAIN) from error
    _check_tensors(file, spec)
    tokens, text, refusal = None, "", None
    try:
        text, tokens = vocabulary_of(file.metadata) or ("", None)
    except UnreadableVocabularyError as error:
        refusal = str(error)
    return f"{json.dumps([config, generation, tokens, refusal])}\n{text}".encode()


class GGUFHead(ModelSource):
    """The layers that predict further tokens, in a file of their own: tensors without a model."""

    renamed = True

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._model = GGUFModel(path)
        self.config = config_of(self._model)

    @functools.cached_property
    def spec(self) -> ModelSpec:
        return ModelSpec.from_hf(self.config)

    def _open(self, stack: ExitStack, device: torch.device) -> Opened:
        return stored_tensors(self._model, self.config, meta=device.type == "meta")


def _check_tensors(file: GGUFModel, spec: ModelSpec) -> None:
    if is_further_alone(file):
        remedy = ("give the model's own, and this one as ", Option("draft", str(file.path)))
        problem = f"{file.path} holds only the layer that predicts further tokens"
        raise CheckpointError(problem, remedy=remedy)
    architecture, needed = file.metadata["general.architecture"], tensor_shapes(spec)
    for name, shape in needed.items():
        own = file_name(architecture, name)
        if own not in file.tensors:
            raise file.error(f"lacks tensor {own}", CONVERT_AGAIN)
        if model_shape(file.tensors[own]) != shape:
            found = [*file.tensors[own].shape]
            problem = f"has tensor {own} of shape {found}, but its metadata imply {[*shape]}"
            raise file.error(problem, CONVERT_AGAIN)
    for own in file.tensors:
        given = model_name(architecture, own, spec.layers)
        unread = holds_factors(architecture, own) or (given is not None and spec.leaves_unread(given))
        if given not in needed and not unread:
            raise file.error(f"has tensor {own}, which is not part of a {spec.architecture}", CONVERT_AGAIN)
