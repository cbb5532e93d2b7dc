"""Write a quantised checkpoint: "pack-quantized" weights of compressed-tensors, which other programs load.

The linear layers and the head are coded; a head that was tied to the embedding becomes a tensor of its own,
and the config says so. The embedding is coded, too, but stored as the values that its codes stand for: the
format has no codes of embeddings, and so every program computes the same model. Every other tensor, and every
other file of the folder, is copied, except the record of a GGUF file or of LoRAs, because the new checkpoint
has weights of its own. Of a multimodal checkpoint the text model alone is written. One tensor is in memory at
a time, beside the file that is being filled.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.model.checkpoint import EMBEDDING, HEAD, INDEX, SINGLE, weight_headers
from foredraft.model.config import read_json
from foredraft.model.gguf.tensors import RECORD
from foredraft.model.lora.record import RECORD as LORAS
from foredraft.model.quantisation import Coding, quantise
from foredraft.model.quantisation.codes import GROUP
from foredraft.model.quantisation.packing import pack
from foredraft.model.safetensors_file import write_tensors
from foredraft.model.spec import CONFIG, EMBEDDING_COPIES, ModelSpec, with_dtype
from foredraft.model.weights import read_tensors
from foredraft.model.wrappers import text_config_of

__all__ = ["write_quantised"]

MODULES = re.compile(r"model\.layers\.\d+\.(self_attn|mlp)\.\w+_proj")
MOST = 4 << 30  # bytes of a file


def write_quantised(source: Path, out: Path, spec: ModelSpec, bits: int, dtype: torch.dtype) -> int:
    """Write a checkpoint with weights of so many bits into an empty folder, and return its bytes.

    Args:
        source: The checkpoint.
        out: The folder.
        spec: The model.
        bits: Of a code, 4 or 8.
        dtype: Of what is not coded.

    Raises:
        OSError: A file cannot be written.
        CheckpointError: The checkpoint is broken.
    """
    own = (CONFIG, INDEX, RECORD, LORAS)
    for file in source.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and file.name not in own:
            shutil.copyfile(file, out / file.name)
    plain: list[str] = []  # linear layers that keep their weights
    classes: set[str] = set()  # of those that are coded
    files: dict[str, str] = {}  # tensor -> file
    filled: dict[str, Tensor] = {}
    total = held = 0
    for name, tensor in _tensors(source, spec, bits, dtype, plain, classes):
        if held and held + tensor.nbytes > MOST:
            files |= _save(out, filled, len(set(files.values())))
            filled, held = {}, 0
        filled[name] = tensor
        held, total = held + tensor.nbytes, total + tensor.nbytes
    if files:
        files |= _save(out, filled, len(set(files.values())))
        index = {"metadata": {"total_size": total}, "weight_map": files}
        (out / INDEX).write_text(json.dumps(index), encoding="utf-8")
    else:
        write_tensors(out / SINGLE, filled, {"format": "pt"})
    config = with_dtype(text_config_of(read_json(source / CONFIG)), dtype) | {"tie_word_embeddings": False}
    config |= spec.naming.written_keys
    config |= {EMBEDDING_COPIES: spec.tied, "quantization_config": _scheme(bits, plain, classes)}
    (out / CONFIG).write_text(json.dumps(config, indent=1), encoding="utf-8")
    return total


def _tensors(
    source: Path, spec: ModelSpec, bits: int, dtype: torch.dtype, plain: list[str], classes: set[str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the new checkpoint, by its stored name.

    `plain` gathers linear layers without whole groups, and `classes` the classes of the others.
    """
    head, naming = f"{HEAD}.weight", spec.naming
    for name in weight_headers(source):
        if (name == head and spec.tied) or spec.leaves_unread(name):
            continue
        [tensor] = read_tensors(source, name.__eq__).values()
        tensor = tensor.to(dtype)
        module = name.removesuffix(".weight")
        linear = name == head or bool(name.endswith(".weight") and MODULES.fullmatch(module))
        if not linear and module != EMBEDDING:
            yield naming.stored_name(name), tensor
            continue
        codes = quantise(tensor, bits) if Coding(bits).holds(tensor.shape[1]) else None
        if module == EMBEDDING:
            yield naming.stored_name(name), tensor if codes is None else codes.expand(dtype)
            if not spec.tied:
                continue
            module = HEAD
        stored = naming.stored_module(module)
        if codes is None:
            plain.append(stored)
            name = f"{module}.weight"
            yield naming.stored_name(name), naming.stored_values(name, tensor).clone()
            continue
        classes.add(naming.layer_class(module))
        yield f"{stored}.weight_packed", pack(codes.codes, bits)
        yield f"{stored}.weight_scale", codes.scales.to(dtype)
        yield f"{stored}.weight_shape", torch.tensor(codes.shape)


def _save(out: Path, tensors: dict[str, Tensor], count: int) -> dict[str, str]:
    """Save tensors as one more file, and return in which file each of them is."""
    file = f"model-{count + 1:05}.safetensors"
    write_tensors(out / file, tensors, {"format": "pt"})
    return dict.fromkeys(tensors, file)


def _scheme(bits: int, plain: list[str], classes: set[str]) -> dict[str, Any]:
    weights = {
        "num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP,
        "dynamic": False,
    }  # fmt: skip
    group = {
        "targets": sorted(classes), "weights": weights, "input_activations": None, "output_activations": None,
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": plain, "kv_cache_scheme": None,
    }  # fmt: skip
