"""Write tiny checkpoints as GGUF files with the `gguf` package's own writer and names.

Keys are named, and tensors reordered and shifted, as convert_hf_to_gguf.py of llama.cpp does it: the rows of Llama's q
and k, for instance, and Gemma's norms plus one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from foredraft.model.safetensors_file import SafetensorsFile
from tests.support import gguf_hybrids

# model_type -> the file's, where they differ
ARCHITECTURES = {
    "gemma3_text": "gemma3", "gemma4_text": "gemma4", "gemma4_unified_text": "gemma4", "gpt_neox": "gptneox",
    "ministral3": "mistral3", "olmo3": "olmo2", "phi": "phi2", "qwen3_5_text": "qwen35",
}  # fmt: skip
# families with other norms and positions
NORMS = ("cohere2", "exaone4", "glm4", "gpt2", "gpt_neox", "olmo2", "olmo3", "phi", "stablelm", "starcoder2")
REORDERED = ("granite", "llama", "mistral3", "smollm3")  # `undo_permute` of the converter's classes
SHIFTED = ("gemma", "gemma2", "gemma3", "qwen35")  # whose norms add one
TRANSPOSED = ("c_attn.weight", "c_fc.weight", "c_proj.weight")  # of GPT-2
EPSILONS = ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
SPELLED = {
    "max_position_embeddings": "n_positions", "hidden_size": "n_embd", "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head", "intermediate_size": "n_inner",
}  # fmt: skip
FULL, SLIDING = "full_attention", "sliding_attention"
CONTROL, NORMAL, USER_DEFINED, UNUSED = map(
    gguf.TokenType.__getitem__, "CONTROL NORMAL USER_DEFINED UNUSED".split()
)
Edit = Callable[[gguf.GGUFWriter], object]


def write_gguf(
    folder: Path,
    file: Path,
    kind: str | Mapping[str, str] = "F32",
    *,
    vocabulary: bool = True,
    pre: str = "gpt-2",
    tensors: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]] = lambda tensors: tensors,
    edit: Edit = lambda writer: None,
    most_tensors: int = 0,
    **keys: Any,
) -> Path:
    """Write a checkpoint folder as a GGUF file, and return it, or its first part of `most_tensors`.

    `kind` is the type of the matrices, or types by a part of the name in the file (F32 for the others); `pre` the name of
    the tokenizer's rule for words. `tensors` changes the tensors, `edit` the metadata, and `keys` those of config.json.
    """
    config = _config_of(folder)
    architecture = ARCHITECTURES.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(file, architecture, split_max_tensors=most_tensors)
    add_sizes(writer, {**config, **keys})
    if vocabulary and (folder / "tokenizer.json").is_file():
        add_byte_level(writer, json.loads((folder / "tokenizer.json").read_text()), config, pre)
    edit(writer)

    def kind_of(name: str, values: np.ndarray) -> str:
        wanted = kind if isinstance(kind, str) else next((kind[part] for part in kind if part in name), "F32")
        return wanted if values.ndim > 1 and "position" not in name and "conv1d" not in name else "F32"

    write_tensors(writer, tensors(dict(converted(folder, config, architecture))), kind_of)
    return writer.format_shard_names(file)[0]


def _config_of(folder: Path) -> dict[str, Any]:
    """Return config.json with the usual names of sizes; heads of layers with full attention by their older keys."""
    config = json.loads((folder / "config.json").read_text())
    if "layer_types" in config and config["model_type"].startswith("gemma4"):
        full = config.pop("per_layer_config", {}).get(str(config["layer_types"].index(FULL)), {})
        config["global_head_dim"] = full.get("head_dim", config["head_dim"])
        config["num_global_key_value_heads"] = full.get("num_key_value_heads", config["num_key_value_heads"])
    return {**config, **{key: config[own] for key, own in SPELLED.items() if own in config}}


def write_tensors(
    writer: gguf.GGUFWriter, arrays: Mapping[str, np.ndarray], kind: Callable[[str, np.ndarray], str]
) -> None:
    for name, values in arrays.items():
        if values.dtype == np.int64:
            writer.add_tensor(name, values)
        else:
            own = kind(name, values)
            writer.add_tensor(name, quantised(values, own), raw_dtype=gguf.GGMLQuantizationType[own])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantised(values: np.ndarray, kind: str) -> np.ndarray:
    raw = gguf.GGMLQuantizationType[kind]
    try:
        return gguf.quants.quantize(values, raw)
    except NotImplementedError:
        return random_blocks(kind, values.shape, seed=values.size)


# kind -> where its blocks have float16 scales
HALVES: dict[str, tuple[int, ...]] = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "MXFP4": (), "NVFP4": (),
    "IQ1_S": (0,), "IQ1_M": (), "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,),
    "TQ1_0": (52,), "TQ2_0": (64,),
}  # fmt: skip
SMALL = 1e-4  # the largest of the random scales
KINDS = [*HALVES]


def random_blocks(kind: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Return random bytes of blocks [..., bytes], whose scales are small and finite."""
    raw = gguf.GGMLQuantizationType[kind]
    values, size = gguf.GGML_QUANT_SIZES[raw]
    rows, columns = shape[:-1], shape[-1]
    draw = np.random.default_rng(seed)
    blocks = draw.integers(0, 256, (*rows, columns // values, size), dtype=np.uint8)

    def scales() -> np.ndarray:
        chosen = draw.uniform(-SMALL, SMALL, (*rows, columns // values, 1))
        return chosen.astype(np.float16).view(np.uint8)

    for at in HALVES[kind]:
        blocks[..., at : at + 2] = scales()
    if kind == "MXFP4":
        blocks[..., 0] = 108 + blocks[..., 0] % 8  # an exponent, less 128
    if kind == "NVFP4":
        blocks[..., :4] &= 0b10000111  # a fraction with the lowest exponent
    if kind == "IQ1_M":  # four bits of the scale lie above each of four numbers
        for at, byte in enumerate((0, 0, 1, 1)):
            four = scales()[..., byte] >> 4 * (at % 2) & 15
            blocks[..., 49 + 2 * at] = blocks[..., 49 + 2 * at] & 15 | four << 4
    return blocks.reshape(*rows, -1)


def add_sizes(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    kind, heads = config["model_type"], config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"] + gguf_hybrids.further_layers(config))
    writer.add_head_count(heads)
    if (own := next((key for key in EPSILONS if key in config), None)) is not None:
        writer.add_layer_norm_eps(config[own])
    else:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if kind.startswith("gemma4"):
        _add_gemma4(writer, config)
        return
    writer.add_feed_forward_length(config["intermediate_size"])
    if "num_key_value_heads" in config:
        writer.add_head_count_kv(config["num_key_value_heads"])
    head_dim, window = config.get("head_dim") or config["hidden_size"] // heads, config.get("sliding_window")
    if kind not in NORMS:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        writer.add_vocab_size(config["vocab_size"])
    if kind == "llama":
        writer.add_rope_dimension_count(head_dim)
    if kind in ("gemma2", "gemma3_text", "cohere2", "exaone4", "olmo3") and window is not None:
        writer.add_sliding_window(window)
    if kind in ("exaone4", "olmo3") and window is not None:
        writer.add_sliding_window_pattern([each == SLIDING for each in config["layer_types"]])
    if kind == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if kind == "qwen3_5_text":
        gguf_hybrids.add_linear(writer, config)
    if "use_parallel_residual" in config:
        writer.add_parallel_residual(config["use_parallel_residual"])
    if "logit_scale" in config:
        writer.add_logit_scale(config["logit_scale"])
    _add_rope(writer, config.get("rope_parameters") or {}, kind, head_dim)


def _add_rope(writer: gguf.GGUFWriter, rope: Mapping[str, Any], kind: str, head_dim: int) -> None:
    if not rope:
        return
    if FULL in rope:
        if kind not in NORMS:
            writer.add_rope_freq_base_swa(rope[SLIDING]["rope_theta"])
        rope = rope[FULL]
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if kind in NORMS and "partial_rotary_factor" in rope:
        writer.add_rope_dimension_count(int(head_dim * rope["partial_rotary_factor"]))


def _add_gemma4(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    windowed = [kind == SLIDING for kind in config["layer_types"]]
    layers, shared, inner = len(windowed), config["num_kv_shared_layers"], config["intermediate_size"]
    wide = [inner * (1 + (layer >= layers - shared)) for layer in range(layers)]
    writer.add_feed_forward_length(wide if config.get("use_double_wide_mlp") else inner)
    heads = config["num_key_value_heads"], config["num_global_key_value_heads"]
    writer.add_head_count_kv([heads[not each] for each in windowed] if heads[0] != heads[1] else heads[0])
    for add in (writer.add_key_length, writer.add_value_length, writer.add_rope_dimension_count):
        add(config["global_head_dim"])
    for add in (writer.add_key_length_swa, writer.add_value_length_swa, writer.add_rope_dimension_count_swa):
        add(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"][FULL]["rope_theta"])
    writer.add_rope_freq_base_swa(config["rope_parameters"][SLIDING]["rope_theta"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern(windowed)
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config.get("hidden_size_per_layer_input") or 0)
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def add_byte_level(
    writer: gguf.GGUFWriter, tokenizer: Mapping[str, Any], config: Mapping[str, Any], pre: str
) -> None:
    special = {each["id"]: each["special"] for each in tokenizer["added_tokens"]}
    texts = {id: token for token, id in tokenizer["model"]["vocab"].items()}
    texts |= {each["id"]: each["content"] for each in tokenizer["added_tokens"]}
    ids = range(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([texts.get(id, f"[PAD{id}]") for id in ids])
    kinds = {True: CONTROL, False: USER_DEFINED, None: NORMAL}
    writer.add_token_types([kinds[special.get(id)] if id in texts else UNUSED for id in ids])
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    if config.get("bos_token_id") is not None:
        writer.add_bos_token_id(config["bos_token_id"])
    if config.get("eos_token_id") is not None:
        writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(bool(tokenizer["post_processor"]))


def converted(folder: Path, config: Mapping[str, Any], architecture: str) -> Iterator[tuple[str, np.ndarray]]:
    names = names_of(architecture, config["num_hidden_layers"] + gguf_hybrids.further_layers(config))
    tied = config.get("tie_word_embeddings", architecture == "gemma4")
    for name, tensor in load_file(folder / "model.safetensors").items():
        if tied and name == "lm_head.weight":
            continue
        values, stored = tensor.float().numpy(), f"{name}.weight" if name.endswith("layer_scalar") else name
        if (heads := heads_of(config, architecture, name)) is not None:
            values = permuted(values, heads)
        if adds_one(architecture, name):
            values = values + np.float32(1)
        if "linear_attn" in name:
            values = gguf_hybrids.written(config, name, values)
        if architecture == "gpt2" and name.endswith(TRANSPOSED):
            values = np.ascontiguousarray(values.T)
        if "query_key_value" in name:
            split = values.reshape(config["num_attention_heads"], 3, -1, *values.shape[1:])
            values = split.swapaxes(0, 1).reshape(values.shape)
        yield named(names, gguf_hybrids.name_in_file(config, stored)), values
    if (config.get("rope_parameters") or {}).get("rope_type") == "llama3":
        yield "rope_freqs.weight", rope_factors(config)
    if architecture == "gemma4":
        half = config["global_head_dim"] // 2
        turning = int(half * config["rope_parameters"][FULL]["partial_rotary_factor"])
        yield "rope_freqs.weight", np.array([1.0] * turning + [1e30] * (half - turning), dtype=np.float32)


def adds_one(architecture: str, name: str) -> bool:
    norm = name.endswith(".weight") and "norm" in name.split(".")[-2] and "linear_attn" not in name
    return norm and architecture in SHIFTED


def heads_of(config: Mapping[str, Any], architecture: str, name: str) -> int | None:
    """Return the heads of a matrix whose rows the converter reorders."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config.get("num_key_value_heads")}
    return heads.get(name.split(".")[-2]) if architecture in REORDERED else None


def names_of(architecture: str, layers: int) -> gguf.TensorNameMap:
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    return gguf.get_tensor_name_map(kind, layers)


def named(names: gguf.TensorNameMap, name: str) -> str:
    own = name if name.startswith("blk.") else names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert own is not None, name
    return own


def permuted(values: np.ndarray, heads: int) -> np.ndarray:
    split = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return split.swapaxes(1, 2).reshape(values.shape)


def rope_factors(config: Mapping[str, Any]) -> np.ndarray:
    """Return Llama 3.1's factors, as `LlamaModel.generate_extra_tensors` of the converter computes them."""
    rope = config["rope_parameters"]
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    frequencies = 1.0 / (rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    lengths = [2 * np.pi / frequency for frequency in frequencies.tolist()]
    smooth = [(rope["original_max_position_embeddings"] / length - low) / (high - low) for length in lengths]
    factors = [1 / ((1 - s) / factor + s) if 0 <= s <= 1 else (1.0 if s > 1 else factor) for s in smooth]
    return np.array(factors, dtype=np.float32)


def save_dequantised(folder: Path, file: Path, other: Path) -> Path:
    """Copy a checkpoint folder with the weights that the package reads from a GGUF file of it."""
    other.mkdir()
    config = _config_of(folder)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    architecture = ARCHITECTURES.get(config["model_type"], config["model_type"])
    names = names_of(architecture, config["num_hidden_layers"] + gguf_hybrids.further_layers(config))
    weights = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if (own := named(names, gguf_hybrids.name_in_file(config, name))) not in stored:
            weights[name] = tensor
            continue
        values = gguf.quants.dequantize(stored[own].data, stored[own].tensor_type).reshape(tensor.shape)
        if (heads := heads_of(config, architecture, name)) is not None:
            split = values.reshape(heads, -1, 2, *values.shape[1:])
            values = split.swapaxes(1, 2).reshape(values.shape)
        if adds_one(architecture, name):
            values = values - np.float32(1)
        if name.endswith("A_log"):
            values = np.log(-values)
        if "linear_attn" in name:
            values = gguf_hybrids.in_heads_order(config, name, values, undo=True)
        weights[name] = torch.from_numpy(values.copy())
    save_file(weights, other / "model.safetensors")
    for path in folder.glob("*.json"):
        (other / path.name).write_text(path.read_text())
    return other


def write_sparse_gguf(folder: Path, file: Path) -> Path:
    """Write the header of a checkpoint's GGUF file in F16, with a hole in place of the values."""
    config = _config_of(folder)
    names = names_of("llama", config["num_hidden_layers"])
    writer, size = gguf.GGUFWriter(file, "llama"), 0
    add_sizes(writer, config)
    with SafetensorsFile(folder / "model.safetensors") as opened:
        infos = opened.tensors
    for name, info in infos.items():
        kind = np.dtype(np.float32 if len(info.shape) == 1 else np.float16)
        nbytes = int(np.prod(info.shape, dtype=np.int64)) * kind.itemsize
        writer.add_tensor_info(named(names, name), info.shape, kind, nbytes)
        size += writer.ggml_pad(nbytes, 32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    header = writer.ggml_pad(file.stat().st_size, 32)
    with file.open("r+b") as written:
        written.truncate(header + size)
    return file
