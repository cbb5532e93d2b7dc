"""Tensors that predict further tokens than the next one (multi-token prediction); they stay unread.

They read a model's last hidden states and do not touch its logits. Checkpoints hold them as `mtp.*` (Qwen
3.5, MiMo), or as layers behind the model's own, which a key of the config counts (DeepSeek V3, GLM 4.5).
"""

from __future__ import annotations

import re

from foredraft.model.config import ConfigReader

__all__ = ["KEYS", "predicts_further", "read_further_layers"]

KEYS = ("num_nextn_predict_layers", "num_mtp_layers")  # of the config: layers behind the model's own
PREFIX = re.compile(r"(model\.)?(language_model\.)?mtp(_layers)?\.")
LAYER = re.compile(r"(?:model\.)?(?:language_model\.)?layers\.(\d+)\.")


def read_further_layers(read: ConfigReader) -> int:
    """Return how many layers behind the model's own predict further tokens."""
    return max(read.count(key, 0, if_null=0, allow_zero=True) for key in KEYS)


def predicts_further(name: str, layers: int, further: int) -> bool:
    """Return whether a tensor belongs to what predicts further tokens.

    Args:
        name: Its name.
        layers: The model's own layers.
        further: Layers behind them that predict further tokens.

    Examples:
        >>> predicts_further("mtp.fc.weight", 8, 0), predicts_further("model.layers.8.eh_proj.weight", 8, 1)
        (True, True)
    """
    layer = LAYER.match(name)
    return bool(PREFIX.match(name)) or (layer is not None and layers <= int(layer[1]) < layers + further)
