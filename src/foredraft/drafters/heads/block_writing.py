"""Write the config of a DFlash head in the spelling of z-lab.

Contract: `block_files` reads what is written here into the same record.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from foredraft.drafters.heads.block_files import DFLASH
from foredraft.drafters.heads.block_record import BlockRecord
from foredraft.drafters.heads.eagle3_writing import llama_body
from foredraft.model.spec import ModelSpec, with_dtype

__all__ = ["qwen3_body", "z_lab_config"]


def qwen3_body(target: ModelSpec, layers: int, positions: int) -> dict[str, Any]:
    """Return the config of a head's layers: those of a Qwen 3, with the target's sizes and rotary base.

    Args:
        target: The target.
        layers: Of the head.
        positions: Tokens of the longest text that it learns from.
    """
    body = {**llama_body(target, positions), "model_type": "qwen3", "num_hidden_layers": layers}
    del body["mlp_bias"]
    return body


def z_lab_config(
    body: Mapping[str, Any], record: BlockRecord, target: ModelSpec, dtype: torch.dtype
) -> dict[str, Any]:
    """Return the config.json of a head.

    Args:
        body: The config of its layers.
        record: What it is; its taps are known.
        target: The target.
        dtype: Of its tensors.
    """
    assert record.taps is not None
    reduced = {} if record.words == target.vocab_size else {"draft_vocab_size": record.words}
    return with_dtype(
        {
            "architectures": ["DFlashDraftModel"], **body, "block_size": record.block,
            "num_target_layers": target.layers, "tie_word_embeddings": False, **reduced,
            DFLASH: {
                "mask_token_id": record.mask_token, "target_layer_ids": [tap - 1 for tap in record.taps],
            },
        },
        dtype,
    )  # fmt: skip
