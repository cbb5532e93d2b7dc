"""The kinds of adapters, by name; in a module of their own, so that a command's help needs no PyTorch."""

from __future__ import annotations

__all__ = ["ADAPTER_KINDS", "ATTENTION", "WITH_MLP"]

ATTENTION, WITH_MLP = "attention", "attention+mlp"
ADAPTER_KINDS = {
    ATTENTION: "one attention with its norm, as in the paper",
    WITH_MLP: "a whole layer of the model's family",
}
