"""A model with LoRAs as a source: its base's files, and tensors into which the LoRAs are merged.

A head that is tied to the embedding is untied where a LoRA changes one of the two, as when PEFT runs the LoRA
beside the model; with `ensure_weight_tying` both stay one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from foredraft.errors import CheckpointError, shortened
from foredraft.model.gguf.file import is_gguf
from foredraft.model.hub import REPOSITORY, Download
from foredraft.model.lora.adapter import WEIGHTS, LoraTensors, open_lora
from foredraft.model.lora.merging import is_embedding, is_head, merge_loras
from foredraft.model.source import ModelSource, OnProgress, Opened, existing, source_of
from foredraft.model.spec import LORA_CONFIG, ModelSpec
from foredraft.model.tokenizer import Tokenizer

TIED, TEXT = "tie_word_embeddings", "text_config"  # keys of config.json


class LoraSource(ModelSource):
    def __init__(self, base: ModelSource, loras: Sequence[tuple[str, Path]]) -> None:
        super().__init__(base.path)
        self._base, self.loras, self.renamed = base, tuple(loras), base.renamed
        with ExitStack() as stack:
            opened = [open_lora(name, folder, stack) for name, folder in loras]
            self.untied = base.spec.tied and any(map(_unties, opened))  # the head is no longer the embedding

    @property
    def base(self) -> ModelSource:
        return self._base

    def named(self, file: str) -> Path:
        return self._base.named(file)

    @property
    def files(self) -> list[Path]:
        return self._base.files + [file for _, lora in self.loras for file in lora.iterdir()]

    @cached_property
    def config(self) -> dict[str, Any]:
        """The base's, which says whether the head is the embedding: no tensor here can tell."""
        config, tied = self._base.config, self._base.spec.tied and not self.untied
        text = config.get(TEXT)
        inner = {TEXT: {**text, TIED: tied}} if isinstance(text, dict) and TIED in text else {}
        return {**config, **inner, TIED: tied}

    @property
    def generation(self) -> dict[str, Any] | None:
        return self._base.generation

    @cached_property
    def spec(self) -> ModelSpec:
        return ModelSpec.from_hf(self.config, self.generation)

    def tokenizer(self, size: int | None = None, *, like: Tokenizer | None = None) -> Tokenizer | None:
        return self._base.tokenizer(size, like=like)

    @property
    def tokenizer_json(self) -> bytes | None:
        return self._base.tokenizer_json

    def write_others(self, folder: Path, beginnings: tuple[str, ...] = ("",)) -> None:
        self._base.write_others(folder, beginnings)

    def open(self, stack: ExitStack, device: torch.device, dtype: torch.dtype) -> Opened:
        opened = self._base.open(stack, device, dtype)
        loras = [open_lora(name, folder, stack) for name, folder in self.loras]
        files = {name: file for name, (file, _) in opened.items()}
        merged = merge_loras(loras, files, dtype, str(self), untied=self.untied)
        return opened | {name: (merged, opened.get(name, (None, "LoRAs"))[1]) for name in merged.tensors}


def _unties(lora: LoraTensors) -> bool:
    modules = [change.module for change in lora.changes]
    return any(map(is_head, modules)) or (not lora.config.ties and any(map(is_embedding, modules)))


def with_loras(
    base: ModelSource | Path, names: str | Path | Sequence[str | Path], report: OnProgress | None = None
) -> ModelSource:
    """Return a model with LoRAs, downloaded if necessary; without any, the model."""
    base = source_of(base)
    given = [names] if isinstance(names, str | Path) else names
    return LoraSource(base, [(str(name), resolve_lora(name, report)) for name in given]) if given else base


def resolve_lora(name: str | Path, report: OnProgress | None = None) -> Path:
    folder = existing(name)
    if folder is not None:
        if not folder.is_dir() and is_gguf(folder):
            problem = f"LoRA {name} is a GGUF file"
            raise CheckpointError(problem, remedy="give the folder that it was made from, as PEFT saves it")
        return folder.absolute()
    match = REPOSITORY.fullmatch(str(name))
    if match is None or match[2] is not None:
        problem = f"LoRA {shortened(str(name))} is neither a folder nor a hub name of the form owner/name"
        raise CheckpointError(problem, remedy="check its spelling")
    return Download(match[1], None, match[3], report).run_files((LORA_CONFIG, WEIGHTS))
