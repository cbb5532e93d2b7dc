"""The formats that a head is exported to, by name; apart, so that a command's help needs no PyTorch."""

from __future__ import annotations

__all__ = ["FORMATS", "GGUF", "SPECFORGE", "SPECULATORS"]

SPECULATORS, SPECFORGE, GGUF = "speculators", "specforge", "gguf"
FORMATS = {
    SPECULATORS: "a folder for vLLM",
    SPECFORGE: "a folder for SGLang, and vLLM's own option",
    GGUF: "a file for llama.cpp",
}  # name -> who reads it, for the help
