"""EXAONE 4: norms of the outputs of sub-layers, and layers with full attention that do not rotate."""

from __future__ import annotations

from typing import Any

from foredraft.model.config import ConfigReader
from foredraft.model.families.llama import llama_like
from foredraft.model.families.shared import (
    FULL,
    SLIDING,
    full_layers,
    read_head_dim,
    read_window,
    read_windows,
)


def exaone4(read: ConfigReader) -> dict[str, Any]:
    window = read_window(read)
    # beside a list of the layers, the pattern says nothing, and may be a text as in "LLLG"
    pattern = read.take("sliding_window_pattern", 4)
    if window is None:
        windows = read_windows(read, {FULL: None}, [FULL])
    else:
        if read.take("layer_types") is None:
            pattern = read.count("sliding_window_pattern", 4)
        kinds = [*[SLIDING] * (pattern - 1), FULL] if isinstance(pattern, int) else [FULL]
        windows = read_windows(read, {SLIDING: window, FULL: None}, kinds)
    return llama_like(read, read.count("num_key_value_heads", 32), read_head_dim(read)) | {
        "norm_eps": read.number("rms_norm_eps", 1e-5),
        "windows": windows,
        "unrotated": () if window is None else full_layers(windows),
        "pre_norms": False,
        "post_norms": True,
        "head_norms": True,
    }
