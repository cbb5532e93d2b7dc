"""Write a checkpoint of a model whose layer for further tokens (MTP) is replaced by a trained one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection
from pathlib import Path

from torch import Tensor

from foredraft.drafters.heads.settings import with_settings
from foredraft.drafters.mtp import files_at, files_in, read_values, stored_values
from foredraft.errors import ConfigError
from foredraft.files import replacing_folder
from foredraft.model.checkpoint import Checkpoint
from foredraft.model.config import read_json
from foredraft.model.safetensors_file import INDEX, SINGLE, SafetensorsFile, write_tensors

OWN_FILE = "mtp.safetensors"


def write_model(out: Path, draft: Path, target: Checkpoint) -> None:
    """Write the model's folder whole or not at all; all other files and tensors stay as they are."""
    folder = target.source.path
    if not folder.is_dir() or target.spec.quantisation is not None or target.source.loras:
        problem = "which is no folder of a whole model in 16 or 32 bits"
        raise ConfigError(problem, option="model", value=str(folder), remedy="give one")
    files, _ = with_settings(files_at(draft, target), target.spec)
    own = files_in(target.source, target)
    format = "Qwen" if own is None else own.record.format
    tensors = stored_values(read_values(files), target.dtype, format, target.spec.layers)
    with replacing_folder(out) as new:
        for file in folder.iterdir():
            if file.is_file() and file.suffix != ".safetensors" and file.name != INDEX:
                shutil.copyfile(file, new / file.name)
        index = None if (folder / SINGLE).is_file() else read_json(folder / INDEX)
        where = {SINGLE} if index is None else set(index["weight_map"].values())
        if index is not None:
            index["weight_map"] |= dict.fromkeys(tensors, OWN_FILE)
            (new / INDEX).write_text(json.dumps(index, indent=1))
        own_file = SINGLE if index is None else OWN_FILE
        for name in where | {own_file}:
            held = _without(folder / name, tensors) if name in where else {}
            held |= tensors if name == own_file else {}
            write_tensors(new / name, held, {"format": "pt"})


def _without(shard: Path, replaced: Collection[str]) -> dict[str, Tensor]:
    """Return the tensors of a file but for those that are replaced."""
    with SafetensorsFile(shard) as opened:
        return {name: opened.get_tensor(name) for name in opened.tensors if name not in replaced}
