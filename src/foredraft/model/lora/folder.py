"""The folder of a LoRA by its name, downloaded if necessary, and the checkpoint folder of a model with LoRAs.

The temporary folder has links to the files of the model's own, except its weights, a `config.json`, and a
record that names that folder and the LoRAs. A head that is tied to the embedding is untied where a LoRA
changes one of the two, as when PEFT runs the LoRA beside the model; with `ensure_weight_tying` both stay one.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from foredraft.errors import CheckpointError, shortened
from foredraft.files import process_folder
from foredraft.model.config import read_json
from foredraft.model.gguf.file import is_gguf
from foredraft.model.gguf.tensors import RECORD as GGUF_RECORD
from foredraft.model.hub import REPOSITORY, Download, existing
from foredraft.model.lora.lora_config import LORA_CONFIG, RECORD, WEIGHTS, record_of
from foredraft.model.lora.lora_tensors import LoraTensors
from foredraft.model.lora.merging import is_embedding, is_head, open_lora
from foredraft.model.safetensors_file import INDEX
from foredraft.model.spec import CONFIG, ModelSpec


def resolve_lora(name: str | Path, report: Callable[[str, int, int], None] | None = None) -> Path:
    folder = existing(name)
    if folder is not None:
        if not folder.is_dir() and is_gguf(folder):
            problem = f"LoRA {name} is a GGUF file"
            raise CheckpointError(problem, remedy="give the folder that it was made from, as PEFT saves it")
        return folder
    match = REPOSITORY.fullmatch(str(name))
    if match is None or match[2] is not None:
        problem = f"LoRA {shortened(str(name))} is neither a folder nor a hub name of the form owner/name"
        raise CheckpointError(problem, remedy="check its spelling")
    return Download(match[1], None, match[3], report).run_files((LORA_CONFIG, WEIGHTS))


WEIGHT_FILES = (".safetensors", ".bin", ".gguf", ".pt", ".pth")
UNLINKED = (CONFIG, INDEX, GGUF_RECORD, RECORD)
TIED, TEXT = "tie_word_embeddings", "text_config"  # keys of config.json

OnProgress = Callable[[str, int, int], None]


def with_loras(
    base: Path, names: str | Path | Sequence[str | Path], report: OnProgress | None = None
) -> Path:
    """Return the checkpoint folder of a model with LoRAs; without any, the model's own."""
    if not names:
        return base
    given = [names] if isinstance(names, str | Path) else names
    loras = [(str(name), resolve_lora(name, report)) for name in given]
    config, tied = read_json(base / CONFIG), ModelSpec.from_folder(base).tied
    with ExitStack() as stack:
        opened = [open_lora(name, folder, stack) for name, folder in loras]
        untied = tied and any(map(_unties, opened))
    made = Path(tempfile.mkdtemp(dir=process_folder("foredraft-lora-"))) / (base.name or "model")
    made.mkdir()
    for file in base.iterdir():
        if file.suffix not in WEIGHT_FILES and file.name not in UNLINKED:
            _link(file.absolute(), made / file.name)
    (made / CONFIG).write_text(json.dumps(_with_tie(config, tied and not untied)), encoding="utf-8")
    (made / RECORD).write_text(json.dumps(record_of(base, loras, untied=untied)), encoding="utf-8")
    return made


def _unties(lora: LoraTensors) -> bool:
    modules = [change.module for change in lora.changes]
    return any(map(is_head, modules)) or (not lora.config.ties and any(map(is_embedding, modules)))


def _with_tie(config: Mapping[str, Any], tied: bool) -> dict[str, Any]:
    """Return a config.json that says whether the head is the embedding: no tensor here can tell."""
    text = config.get(TEXT)
    inner = {TEXT: {**text, TIED: tied}} if isinstance(text, dict) and TIED in text else {}
    return {**config, **inner, TIED: tied}


def _link(source: Path, place: Path) -> None:
    try:
        os.symlink(source, place, target_is_directory=source.is_dir())
    except OSError:  # a system that lets few users make links
        if source.is_dir():
            shutil.copytree(source, place)
        else:
            shutil.copyfile(source, place)
