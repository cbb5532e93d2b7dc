"""Write a head in published formats: SpecForge's, which SGLang reads, speculators', for vLLM, and z-lab's.

`configs` reads what is written here into the same record, whatever a reader's defaults are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from foredraft.drafters.head_kinds import DFLASH
from foredraft.drafters.heads.configs import (
    AUX_LAYERS,
    EAGLE,
    FLAGS,
    LAYER,
    OF_EAGLE3,
    SPECULATOR,
    SPECULATORS,
    read_eagle3,
)
from foredraft.drafters.heads.keys import layer_keys
from foredraft.drafters.heads.record import BlockRecord, HeadRecord, draft_ids
from foredraft.drafters.heads.settings import with_settings
from foredraft.drafters.heads.tensors import D2T, EMBEDDING, HEAD, T2D
from foredraft.errors import CheckpointError, ConfigError
from foredraft.files import replacing_folder
from foredraft.model.checkpoint import Checkpoint
from foredraft.model.config import read_json
from foredraft.model.safetensors_file import SINGLE, SafetensorsFile
from foredraft.model.spec import CONFIG, ModelSpec, with_dtype
from foredraft.model.tensor_names import EMBEDDING as TARGETS_EMBEDDING
from foredraft.model.weights import read_tensors

PLANNED = 3  # tokens of a draft where the head does not say: what vLLM's guides propose


def llama_body(target: ModelSpec, positions: int) -> dict[str, Any]:
    """Return the config of a head's layer: one of Llama's, with the target's sizes and rotary base."""
    return {
        "model_type": "llama", "vocab_size": target.vocab_size, "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size, "num_hidden_layers": 1,
        "num_attention_heads": target.heads, "num_key_value_heads": target.kv_heads,
        "head_dim": target.head_dim, "hidden_act": "silu", "max_position_embeddings": positions,
        "rms_norm_eps": target.norm_eps, "rope_theta": target.rope.theta, "rope_scaling": None,
        "attention_bias": False, "mlp_bias": False,
    }  # fmt: skip


def _of_the_head(record: HeadRecord) -> dict[str, Any]:
    flags = {name: getattr(record, name) for name in FLAGS}
    return {"draft_vocab_size": record.draft_vocab_size, "target_hidden_size": record.target_size, **flags}


def specforge_config(
    body: Mapping[str, Any], record: HeadRecord, ends: tuple[int, ...], dtype: torch.dtype
) -> dict[str, Any]:
    assert record.aux_layers is not None
    return with_dtype(
        {
            "architectures": ["LlamaForCausalLMEagle3"], **body,
            **_of_the_head(record),
            EAGLE: {"use_aux_hidden_state": True, AUX_LAYERS: list(record.aux_layers)},
            "tie_word_embeddings": False, "eos_token_id": ends[0] if ends else None,
        },
        dtype,
    )  # fmt: skip


def specforge_lacks(record: HeadRecord) -> str | None:
    """Return what of a head SpecForge's files do not say, or SGLang does not compute; None for nothing."""
    if record.spec.head_norms:
        return "norms of queries and keys"
    if (record.aux_layers or ())[:1] == (1,):
        return "an auxiliary layer 1, which SGLang takes for another"
    return None


def head_config(
    body: Mapping[str, Any], record: HeadRecord, target: Checkpoint, dtype: torch.dtype
) -> dict[str, Any]:
    """Return the config.json of a head in its record's format; arguments as `specforge_config`."""
    if record.format != SPECULATORS:
        return specforge_config(body, record, target.spec.eos_token_ids, dtype)
    assert record.aux_layers is not None
    architectures = target.source.config.get("architectures") or [target.spec.architecture]
    proposal = {
        "proposal_type": "greedy", "speculative_tokens": record.planned or PLANNED, "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }  # fmt: skip
    return with_dtype(
        {
            "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3",
            "speculators_version": "0.9.0", **_of_the_head(record), AUX_LAYERS: list(record.aux_layers),
            "tie_word_embeddings": False, LAYER: dict(body),
            SPECULATOR: {
                "algorithm": "eagle3", "default_proposal_method": "greedy", "proposal_methods": [proposal],
                "verifier": {"name_or_path": str(target.source), "architectures": architectures},
            },
        },
        dtype,
    )  # fmt: skip


def speculators_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors under the names of speculators, from those of SpecForge."""
    return {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}


def write_head(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor],
    others: Callable[[Path], object] = lambda new: None,  # writes further files
) -> None:  # fmt: skip
    """Write a head's or a model's folder whole or not at all; an existing one is replaced."""
    folder.absolute().parent.mkdir(parents=True, exist_ok=True)
    with replacing_folder(folder) as new:
        whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
        (new / SINGLE).write_bytes(save(whole, {"format": "pt"}))  # save_file writes for this user alone
        (new / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        others(new)


def maps_of(draft_vocab: Tensor, record: HeadRecord) -> dict[str, Tensor]:
    """Return the maps of a reduced head: the offset of each output, and which ids it can draft."""
    marked = torch.zeros(record.spec.vocab_size, dtype=torch.bool, device=draft_vocab.device)
    marked[draft_vocab] = True
    return {D2T: draft_vocab - torch.arange(len(draft_vocab), device=draft_vocab.device), T2D: marked}


@dataclass(frozen=True, slots=True)
class StoredHead:
    record: HeadRecord  # what it is, with the settings that the doctor wrote beside it
    body: Mapping[str, Any]  # the config of its layers
    tensors: Mapping[str, Tensor]  # by the names of SpecForge; the logits' rows are always among them
    draft_vocab: Tensor | None  # the ids that it can draft, [draft_vocab]; None where it can draft all

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors["fc.weight"].dtype


def read_stored_head(folder: Path, target: Checkpoint, option: str = "draft") -> StoredHead:
    files, settings = with_settings(read_eagle3(folder), target.spec)
    record, first, tensors = files.record, f"{files.record.layer}.", dict[str, Tensor]()
    if settings.window is not None:
        raise ConfigError(
            f"whose settings have a window of {settings.window} positions, which no format of a head holds",
            option=option, value=str(folder), remedy="remove foredraft-head.json",
        )  # fmt: skip
    for path in sorted(folder.glob("*.safetensors")):
        with SafetensorsFile(path) as file:
            for name in filter(files.shapes.__contains__, file.tensors):
                own = f"midlayer.{name.removeprefix(first)}" if name.startswith(first) else name
                tensors[own] = file.get_tensor(name).clone()
    d2t, t2d = (None if name not in tensors else tensors.pop(name).long() for name in (D2T, T2D))
    draft_vocab = draft_ids(str(folder), record.draft_vocab_size, record.spec.vocab_size, d2t, t2d)
    if not record.own_embedding:
        tensors.pop(EMBEDDING, None)
    if not record.own_head:
        name = f"{TARGETS_EMBEDDING}.weight" if target.spec.tied else HEAD
        found = read_tensors(target.source, name.__eq__)
        if name not in found:
            raise CheckpointError(f"{target.source} has no {name} that a head could take over")
        tensors[HEAD] = found[name] if draft_vocab is None else found[name][draft_vocab]
        record = replace(record, own_head=True)
    if draft_vocab is not None:
        tensors |= maps_of(draft_vocab, record)
    return StoredHead(record, _body(folder, record), tensors, draft_vocab)


def _body(folder: Path, record: HeadRecord) -> dict[str, Any]:
    """Return the config of the layers, with what the settings changed."""
    config = read_json(folder / CONFIG)
    layers = config.get(LAYER) or config
    own = layer_keys(layers, OF_EAGLE3)
    family = "qwen3" if record.spec.head_norms else "llama"
    own |= {"model_type": family, "num_hidden_layers": record.spec.layers}
    theta, parameters = record.spec.rope.theta, own.get("rope_parameters")
    if isinstance(parameters, dict):
        own["rope_parameters"] = {**parameters, "rope_theta": theta}
    else:
        own["rope_theta"] = theta
    assert ModelSpec.from_hf(own).rope == record.spec.rope
    return own


def qwen3_body(target: ModelSpec, layers: int, positions: int) -> dict[str, Any]:
    body = {**llama_body(target, positions), "model_type": "qwen3", "num_hidden_layers": layers}
    del body["mlp_bias"]
    return body


def z_lab_config(
    body: Mapping[str, Any], record: BlockRecord, target: ModelSpec, dtype: torch.dtype
) -> dict[str, Any]:
    assert record.aux_layers is not None
    reduced = {} if (size := record.draft_vocab_size) == target.vocab_size else {"draft_vocab_size": size}
    return with_dtype(
        {
            "architectures": ["DFlashDraftModel"], **body, "block_size": record.block,
            "num_target_layers": target.layers, "tie_word_embeddings": False, **reduced,
            DFLASH: {
                "mask_token_id": record.mask_token, "target_layer_ids": [k - 1 for k in record.aux_layers],
            },
        },
        dtype,
    )  # fmt: skip
