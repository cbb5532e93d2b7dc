"""Open the LoRAs of a folder, and merge them into the open files of its model."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from foredraft.errors import CheckpointError
from foredraft.model.config import read_json
from foredraft.model.lora.finding import changed_tensors, is_embedding, is_head
from foredraft.model.lora.lora_config import read_lora_config
from foredraft.model.lora.lora_tensors import LoraTensors
from foredraft.model.lora.merging import MergedTensors
from foredraft.model.lora.record import CONFIG, RECORD, UNTIED, WEIGHTS, loras_of
from foredraft.model.safetensors_file import SafetensorsFile

__all__ = ["merge_loras", "open_lora"]


def open_lora(name: str, folder: Path, stack: ExitStack) -> LoraTensors:
    """Open a LoRA.

    Args:
        name: What messages call it.
        folder: Its folder.
        stack: Closes its file.

    Raises:
        CheckpointError: It is not one, is broken, or is not supported.
    """
    if not (folder / CONFIG).is_file():
        model = f": it has a config.json, but no {CONFIG}" if (folder / "config.json").is_file() else ""
        problem = f"is no LoRA{model}" if model else "is a file" if folder.is_file() else f"has no {CONFIG}"
        raise CheckpointError(f"LoRA {name} {problem}", remedy="give the folder of a LoRA, as PEFT saves it")
    config = read_lora_config(folder)
    if not (folder / WEIGHTS).is_file():
        pickled = (folder / WEIGHTS).with_suffix(".bin").is_file()
        raise CheckpointError(
            f"LoRA {name} has no {WEIGHTS}{', but a pickle, which can hold code' if pickled else ''}",
            remedy="save it again with PEFT, as safetensors" if pickled else "download it again",
        )
    return LoraTensors(name, config, stack.enter_context(SafetensorsFile(folder / WEIGHTS)))


def merge_loras(
    folder: Path, files: Mapping[str, Any], stack: ExitStack, dtype: torch.dtype, source: str
) -> MergedTensors:
    """Return the tensors that the LoRAs of a folder change, merged when they are read.

    Args:
        folder: As `folder.with_loras` made it.
        files: The open files of the model's own folder, by the names of their tensors.
        stack: Closes the LoRAs' files.
        dtype: The dtype that the model is loaded in.
        source: What messages call the model.

    Raises:
        CheckpointError: A LoRA is broken, or does not fit the model.
    """
    loras = [open_lora(name, lora, stack) for name, lora in loras_of(folder)]
    aliases = _untied(files, source) if read_json(folder / RECORD)[UNTIED] else {}
    return MergedTensors(changed_tensors(files, loras, source, aliases), dtype)


def _untied(files: Mapping[str, Any], source: str) -> dict[str, str]:
    """Return the head of a model, which is no longer tied, and the embedding, which has its values."""
    modules = {name: name.removesuffix(".weight") for name in files if name.endswith(".weight")}
    embeddings = [name for name, module in modules.items() if is_embedding(module)]
    if len(embeddings) != 1:
        raise CheckpointError(
            f"{source} has {len(embeddings)} embeddings, and a LoRA unties its head from one",
            remedy="merge it with PEFT (merge_and_unload), and give the merged model",
        )
    outer = "language_model." if embeddings[0].startswith("language_model.") else ""
    heads = [name for name, module in modules.items() if is_head(module)]
    return dict.fromkeys(heads or [f"{outer}lm_head.weight"], embeddings[0])
