"""Export: a head in the formats of other engines, value for value; help reads their names here."""

from __future__ import annotations

SPECULATORS, SPECFORGE, GGUF, CHECKPOINT = "speculators", "specforge", "gguf", "checkpoint"
FORMATS = {
    SPECULATORS: "a folder for vLLM",
    SPECFORGE: "a folder for SGLang, and vLLM's own option",
    GGUF: "a file for llama.cpp",
    CHECKPOINT: "the model's own folder with its layer for further tokens (MTP) replaced",
}  # name -> who reads it, for the help
