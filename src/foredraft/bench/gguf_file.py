"""Convert a checkpoint of the Llama family into a GGUF file with the same weights, for llama.cpp.

Contract: matrices have the chosen dtype; vectors (norms and biases) are float32, as llama.cpp requires. A
model that llama.cpp would compute differently is refused. The file holds no tokenizer unless one is asked
for, because a benchmark works on token ids. Only one tensor is in memory at a time.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The `gguf` package defines names and keys.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.bench.optional import module
from foredraft.errors import ConfigError, Option
from foredraft.model.checkpoint import HEAD, IGNORED, CheckpointTensors
from foredraft.model.config import read_json
from foredraft.model.rope import Rope, frequencies
from foredraft.model.spec import ModelSpec

__all__ = ["add_vocabulary", "interleaved", "write_gguf"]

# Hugging Face architecture -> llama.cpp architecture. llama.cpp's "llama" applies RoPE to neighbouring
# channels; the others pair channels half a head apart, as Hugging Face models do.
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
ROPE_FACTORS = "rope_freqs.weight"


def write_gguf(folder: Path, file: Path, dtype: torch.dtype, *, vocabulary: bool = False) -> None:
    """Write a checkpoint to a GGUF file.

    Args:
        folder: The checkpoint.
        file: Where to write.
        dtype: Of the matrices.
        vocabulary: Write the tokenizer, too, which must be byte-level BPE. llama.cpp splits text into words
            by its own rules, so its token ids may differ.

    Raises:
        ConfigError: llama.cpp cannot compute this model, or gguf is not installed.
        CheckpointError: The checkpoint is broken.
    """
    gguf = module("gguf", "llama.cpp")
    spec = ModelSpec.from_folder(folder)
    _check_supported(spec, dtype)
    with ExitStack() as stack:
        tensors = _tensors(folder, spec, gguf, stack)
        writer = gguf.GGUFWriter(file, ARCHITECTURES[spec.architecture])
        _add_metadata(writer, spec, gguf)
        if vocabulary:
            add_vocabulary(writer, folder, spec, gguf)
        else:
            writer.add_tokenizer_model("no_vocab")
        for tensor in tensors:
            kind = dtype if len(tensor.shape) > 1 else torch.float32
            size = torch.Size(tensor.shape).numel() * kind.itemsize
            raw = getattr(gguf.GGMLQuantizationType, DTYPES[kind])
            writer.add_tensor_info(tensor.name, tensor.shape, None, size, raw_dtype=raw)
        stack.callback(writer.close)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in tensors:
            values = tensor.load().to(dtype if len(tensor.shape) > 1 else torch.float32).contiguous()
            writer.write_tensor_data(values.view(torch.uint8).numpy())  # NumPy has no bfloat16


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor under its name in the GGUF file.

    Attributes:
        name: The name.
        shape: The shape.
        load: Reads the values, in the checkpoint's dtype.
    """

    name: str
    shape: tuple[int, ...]
    load: Callable[[], Tensor]


def _check_supported(spec: ModelSpec, dtype: torch.dtype) -> None:
    unsupported = {
        f"architecture {spec.architecture!r}": spec.architecture not in ARCHITECTURES,
        f"rope type {spec.rope.kind!r}": spec.rope.kind not in ("default", "linear", "llama3"),
        f"activation {spec.activation!r}": spec.activation != "silu",
        "a sliding window": any(spec.windows),
        f"dtype {dtype}": dtype not in DTYPES,
        "quantised weights": spec.quantisation is not None,
    }
    for feature, present in unsupported.items():
        if present:
            raise ConfigError(
                f"a model with {feature} cannot be converted for llama.cpp",
                remedy=("leave it out of ", Option("methods")),
            )


def _add_metadata(writer: Any, spec: ModelSpec, gguf: Any) -> None:
    writer.add_context_length(spec.max_positions)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_block_count(spec.layers)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_head_count(spec.heads)
    writer.add_head_count_kv(spec.kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_rope_dimension_count(spec.head_dim)
    writer.add_rope_freq_base(spec.rope.theta)
    if spec.rope.kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(spec.rope.factor)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_vocab_size(spec.vocab_size)


def add_vocabulary(writer: Any, folder: Path, spec: ModelSpec, gguf: Any) -> None:
    """Add the byte-level BPE of a tokenizer.json."""
    read = read_json(folder / "tokenizer.json")
    model, added = read["model"], {each["id"]: each for each in read["added_tokens"]}
    by_id = {id: token for token, id in model["vocab"].items()}
    by_id |= {id: token["content"] for id, token in added.items()}  # the vocabulary may lack them
    ids = range(spec.vocab_size)
    kinds = gguf.TokenType
    of_added = {id: kinds.CONTROL if token["special"] else kinds.USER_DEFINED for id, token in added.items()}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([by_id.get(id, f"[{id}]") for id in ids])
    writer.add_token_types([of_added.get(id, kinds.NORMAL if id in by_id else kinds.UNUSED) for id in ids])
    writer.add_token_merges(
        [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    )
    for end in spec.eos_token_ids[:1]:
        writer.add_eos_token_id(end)
    writer.add_add_bos_token(False)


def _tensors(folder: Path, spec: ModelSpec, gguf: Any, stack: ExitStack) -> list[_Tensor]:
    """Return the tensors in the order of the file, without a tied head, which llama.cpp ties itself."""
    architecture = getattr(gguf.MODEL_ARCH, ARCHITECTURES[spec.architecture].upper())
    known = gguf.get_tensor_name_map(architecture, spec.layers)
    heads_of = {gguf.MODEL_TENSOR.ATTN_Q: spec.heads, gguf.MODEL_TENSOR.ATTN_K: spec.kv_heads}
    found = []
    if spec.rope.kind == "llama3":
        found.append(_Tensor(ROPE_FACTORS, (spec.head_dim // 2,), lambda: _rope_factors(spec)))
    device, naming = torch.device("cpu"), spec.naming
    sources = CheckpointTensors(folder, stack, device, torch.float32, naming=naming).files
    for name, source in sources.items():
        if IGNORED.fullmatch(name) or spec.leaves_unread(name) or (spec.tied and name == f"{HEAD}.weight"):
            continue
        kind, gguf_name = known.get_type_and_name(name, try_suffixes=(".weight", ".bias"))
        heads = heads_of.get(kind, 0) if architecture == gguf.MODEL_ARCH.LLAMA else 0
        load = partial(_interleaved, source, name, heads) if heads else partial(source.get_tensor, name)
        found.append(_Tensor(gguf_name, tuple(source.get_slice(name).get_shape()), load))
    return found


def _interleaved(source: Any, name: str, heads: int) -> Tensor:
    return interleaved(source.get_tensor(name), heads)


def interleaved(tensor: Tensor, heads: int) -> Tensor:
    """Reorder rows [heads * D, ...] so that channels half a head apart, which RoPE pairs, are neighbours."""
    return tensor.view(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def _rope_factors(spec: ModelSpec) -> Tensor:
    """Return the ratio of unscaled to scaled RoPE frequencies [D/2]."""
    unscaled = Rope("default", spec.rope.theta)
    return frequencies(unscaled, spec.head_dim) / frequencies(spec.rope, spec.head_dim)
