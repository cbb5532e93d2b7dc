"""Write an EAGLE-3 head in the spellings of SpecForge, which SGLang reads, and of speculators, for vLLM.

Contract: `eagle3_files` reads what is written here into the same record. All flags, the taps and
rope_theta are written, whatever the defaults of a reader are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from foredraft.drafters.heads.eagle3_files import AUX_LAYERS, CONFIG, D2T, EAGLE, LAYER, SPECULATORS, T2D
from foredraft.drafters.heads.record import HeadRecord
from foredraft.files import replacing_folder
from foredraft.model.config import read_json
from foredraft.model.spec import ModelSpec, with_dtype
from foredraft.model.unread import Checkpoint

__all__ = [
    "WEIGHTS",
    "head_config",
    "llama_body",
    "maps_of",
    "specforge_config",
    "specforge_lacks",
    "speculators_config",
    "speculators_names",
    "write_head",
]

WEIGHTS = "model.safetensors"
PLANNED = 3  # tokens of a draft where the head does not say: what vLLM's guides propose


def llama_body(target: ModelSpec, positions: int) -> dict[str, Any]:
    """Return the config of a head's layer: one of Llama's, with the target's sizes and rotary base.

    Args:
        target: The target.
        positions: Tokens of the longest text that it learns from.
    """
    return {
        "model_type": "llama", "vocab_size": target.vocab_size, "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size, "num_hidden_layers": 1,
        "num_attention_heads": target.heads, "num_key_value_heads": target.kv_heads,
        "head_dim": target.head_dim, "hidden_act": "silu", "max_position_embeddings": positions,
        "rms_norm_eps": target.norm_eps, "rope_theta": target.rope.theta, "rope_scaling": None,
        "attention_bias": False, "mlp_bias": False,
    }  # fmt: skip


def specforge_config(
    body: Mapping[str, Any], record: HeadRecord, ends: tuple[int, ...], dtype: torch.dtype
) -> dict[str, Any]:
    """Return the config.json of a head.

    Args:
        body: The config of its layers.
        record: What it is; its taps are known.
        ends: The target's ids that end a text.
        dtype: Of its tensors.
    """
    assert record.taps is not None
    return with_dtype(
        {
            "architectures": ["LlamaForCausalLMEagle3"], **body,
            "draft_vocab_size": record.words, "target_hidden_size": record.target_size,
            "norm_before_residual": record.norm_before_residual, "norm_before_fc": record.norm_before_fc,
            "fc_norm": record.fc_norm, "norm_output": record.norm_output,
            EAGLE: {"use_aux_hidden_state": True, AUX_LAYERS: list(record.taps)},
            "tie_word_embeddings": False, "eos_token_id": ends[0] if ends else None,
        },
        dtype,
    )  # fmt: skip


def speculators_config(
    body: Mapping[str, Any],
    record: HeadRecord,
    verifier: str,
    architectures: list[str],
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Return the config.json of a head for speculators and vLLM.

    Args:
        body: The config of its layers.
        record: What it is; its taps are known.
        verifier: The target's name or folder.
        architectures: The target's, as its config.json has them.
        dtype: Of its tensors.
    """
    assert record.taps is not None
    proposal = {
        "proposal_type": "greedy", "speculative_tokens": record.planned or PLANNED, "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }  # fmt: skip
    return with_dtype(
        {
            "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3",
            "speculators_version": "0.9.0", "draft_vocab_size": record.words,
            "target_hidden_size": record.target_size, "norm_before_residual": record.norm_before_residual,
            "norm_before_fc": record.norm_before_fc, "fc_norm": record.fc_norm,
            "norm_output": record.norm_output, AUX_LAYERS: list(record.taps),
            "tie_word_embeddings": False, LAYER: dict(body),
            "speculators_config": {
                "algorithm": "eagle3", "default_proposal_method": "greedy", "proposal_methods": [proposal],
                "verifier": {"name_or_path": verifier, "architectures": architectures},
            },
        },
        dtype,
    )  # fmt: skip


def specforge_lacks(record: HeadRecord) -> str | None:
    """Return what of a head SpecForge's files do not say, or SGLang does not compute; None for nothing."""
    if record.spec.head_norms:
        return "norms of queries and keys"
    if (record.taps or ())[:1] == (1,):
        return "a tap after layer 1, which SGLang takes for another"
    return None


def head_config(
    body: Mapping[str, Any], record: HeadRecord, target: Checkpoint, dtype: torch.dtype
) -> dict[str, Any]:
    """Return the config.json of a head in its record's spelling; arguments as `specforge_config`."""
    if record.spelling != SPECULATORS:
        return specforge_config(body, record, target.spec.eos_token_ids, dtype)
    architectures = read_json(target.folder / CONFIG).get("architectures") or [target.spec.architecture]
    return speculators_config(body, record, str(target.source), architectures, dtype)


def speculators_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors under the names of speculators, from those of SpecForge."""
    return {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}


def write_head(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a head's folder whole or not at all; an existing one is replaced.

    Raises:
        OSError: It cannot be written.
    """
    folder.absolute().parent.mkdir(parents=True, exist_ok=True)
    with replacing_folder(folder) as new:
        whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
        (new / WEIGHTS).write_bytes(save(whole, {"format": "pt"}))  # save_file writes for this user alone
        (new / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def maps_of(words: Tensor, record: HeadRecord) -> dict[str, Tensor]:
    """Return the maps of a reduced head: the offset of each word, and which ids of the target have one."""
    marked = torch.zeros(record.spec.vocab_size, dtype=torch.bool, device=words.device)
    marked[words] = True
    return {D2T: words - torch.arange(len(words), device=words.device), T2D: marked}
