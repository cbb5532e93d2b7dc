"""Where a model lies: a folder, a GGUF file or a hub id, with LoRAs or without, becomes its `ModelSource`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack
from copy import copy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from foredraft.errors import CheckpointError, ConfigError, shortened
from foredraft.model.safetensors_file import INDEX, SINGLE
from foredraft.model.source import ModelSource, source_of
from foredraft.model.spec import LORA_CONFIG, ModelSpec

if TYPE_CHECKING:
    from foredraft.model.hub import OnProgress

HOST = re.compile(r"(?:https://)?(?:hf\.co|huggingface\.co)/")  # in front of a name, as Ollama spells it
MAX_LISTED = 20  # file names in a message
TIED, TEXT = "tie_word_embeddings", "text_config"  # keys of config.json


def resolve(
    name_or_path: str | Path,
    revision: str | None = None,
    report: OnProgress | None = None,
    *,
    weights: bool = True,
) -> ModelSource:
    """Return the model that a folder, a GGUF file or a hub id stands for."""
    path = locate(name_or_path, revision, report, weights=weights)
    downloaded = path.is_dir() and existing(name_or_path) is None  # a GGUF file may lie beside its weights
    return ModelSource(path) if downloaded else source_at(path)


def locate(
    name_or_path: str | Path,
    revision: str | None = None,
    report: OnProgress | None = None,
    *,
    weights: bool = True,
    drafter: bool = False,
) -> Path:
    """Return the local folder or GGUF file of a name; `owner/name` is downloaded if necessary.

    The name of a repository may have a type of weights, as llama.cpp and Ollama spell it
    (`owner/name:Q4_K_M`, `hf.co/owner/name:Q4_K_M`).
    """
    folder, name = existing(name_or_path), str(name_or_path)
    if folder is not None:
        if not folder.is_dir():
            from foredraft.model.gguf.file import is_gguf

            if not is_gguf(folder):
                problem = f"{name} is a file, but not a GGUF file"
                raise CheckpointError(problem, remedy="give the folder of a checkpoint, or a GGUF file")
        if revision is not None:
            kind = "folder" if folder.is_dir() else "file"
            problem = f"{name} is a local {kind}, which has no revision {revision!r}"
            raise ConfigError(problem, remedy="leave the revision out")
        return folder
    from foredraft.model.hub import REPOSITORY, Download

    match = REPOSITORY.fullmatch(HOST.sub("", name, count=1) if HOST.match(name) else name)
    if match is None:
        problem = f"{shortened(name)} is neither a folder nor a hub name of the form owner/name"
        raise CheckpointError(problem, remedy="check its spelling")
    repository, type, named = match.groups()
    if named is not None and revision not in (None, named):
        raise ConfigError(f"{name} names another revision than {revision!r}", remedy="give one of them")
    return Download(repository, type, named or revision, report, drafter=drafter).run(weights)


def existing(name: str | Path) -> Path | None:
    """Return the path if it exists; a name that no path can have does not."""
    try:
        path = Path(name).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError):
        return None


def source_at(path: Path) -> ModelSource:
    """Return the model of a folder, of the only GGUF file in it, or of a GGUF file."""
    if path.is_dir():
        if any((path / file).is_file() for file in (SINGLE, INDEX)):
            return ModelSource(path)
        from foredraft.model.gguf.tensors import models_among

        try:
            models = models_among(sorted(file.name for file in path.iterdir() if file.is_file()))
        except OSError:
            models = []
        if len(models) > 1:
            listed = ", ".join(models) if len(models) <= MAX_LISTED else f"{len(models)} of them"
            raise CheckpointError(f"{path} holds several GGUF files: {listed}", remedy="give one of them")
        if not models:
            return ModelSource(path)
        path /= models[0]
    from foredraft.model.gguf.source import GGUFSource

    return GGUFSource(path)


def with_loras(
    base: ModelSource | Path, names: str | Path | Sequence[str | Path], report: OnProgress | None = None
) -> ModelSource:
    """Return a model with LoRAs, downloaded if necessary; without any, the model."""
    base = source_of(base)
    if not names:
        return base
    # Here and below, not above: most runs read a plain folder.
    from foredraft.model.lora.adapter import open_lora
    from foredraft.model.lora.merging import merge_loras, unties

    given = [names] if isinstance(names, str | Path) else names
    config, tied, made = base.config, base.spec.tied, copy(base)
    made._base, made.loras = base, tuple((str(name), resolve_lora(name, report)) for name in given)
    with ExitStack() as stack:
        opened = [open_lora(*lora, stack) for lora in made.loras]
        untied = tied and any(map(unties, opened))
    made.merge = partial(merge_loras, made.loras, str(made), untied)
    # the config says whether the head is the embedding: no tensor here can tell
    tied, text = tied and not untied, config.get(TEXT)
    inner = {TEXT: {**text, TIED: tied}} if isinstance(text, dict) and TIED in text else {}
    made.config = {**config, **inner, TIED: tied}
    made.spec = ModelSpec.from_hf(made.config, made.generation)
    return made


def resolve_lora(name: str | Path, report: OnProgress | None = None) -> Path:
    from foredraft.model.gguf.file import is_gguf
    from foredraft.model.hub import REPOSITORY, Download
    from foredraft.model.lora.adapter import WEIGHTS

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
