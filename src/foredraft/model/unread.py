"""A model before its weights are read: where it lies, its shape, its tokenizer and its dtype."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from foredraft.model.gguf.tensors import source_of
from foredraft.model.lora.record import loras_of
from foredraft.model.quantisation import BITS
from foredraft.model.spec import ModelSpec
from foredraft.model.tokenizer import Tokenizer

__all__ = ["Checkpoint"]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One model before its weights are read.

    Attributes:
        folder: The local folder; of a GGUF file or a model with LoRAs, the one that was made from it.
        spec: The model's shape, from config.json.
        tokenizer: None where the folder has none.
        dtype: The dtype to run it in.
        bits: Of the codes that its weights are quantised to; None leaves them as they are.
        length: The positions of the longest text to come; None: as many as the model takes.
    """

    folder: Path
    spec: ModelSpec
    tokenizer: Tokenizer | None
    dtype: torch.dtype
    bits: int | None = None
    length: int | None = None

    @property
    def coded_bits(self) -> int | None:
        """Bits of the codes that its weights have in memory; None where they are not codes."""
        stored = self.spec.quantisation
        return stored.bits if self.bits is None and stored is not None else self.bits

    @property
    def weights(self) -> str | None:
        """How its weights are quantised, as people say it: "int4", or "gptq, 4 bits in groups of 128"."""
        if self.bits is not None:
            return next(name for name, bits in BITS.items() if bits == self.bits)
        return None if self.spec.quantisation is None else self.spec.quantisation.described

    @property
    def loras(self) -> tuple[str, ...]:
        """The LoRAs that are merged into it, in order, by the names that the user gave."""
        return tuple(name for name, _ in loras_of(self.folder))

    @property
    def shown(self) -> str:
        """What messages call it: its folder or GGUF file, and its LoRAs."""
        return " + ".join([str(self.source), *self.loras])

    @property
    def source(self) -> Path:
        """The folder or the GGUF file that the user has."""
        return source_of(self.folder)
