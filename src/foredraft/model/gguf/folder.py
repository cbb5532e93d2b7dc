"""The checkpoint folder of a GGUF file: the small files that all readers of a model take from a folder.

The folder holds `config.json`, `generation_config.json`, the tokenizer's files, and a record that names the
GGUF file, or the first of its parts. It lies in the user's cache folder under the file's path, or is
temporary without one, and is made again when the file or one of its parts has changed. Before that, the file
is checked to hold every tensor that its model needs in the right shape, and no other.
"""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path
from typing import Any

from foredraft.errors import CheckpointError
from foredraft.files import process_folder, replacing_folder
from foredraft.model.gguf.gguf_config import CONVERT_AGAIN, config_of, generation_of
from foredraft.model.gguf.tensors import (
    RECORD,
    GGUFModel,
    file_name,
    holds_factors,
    identity,
    model_name,
    part_names,
)
from foredraft.model.gguf.vocabulary import UnreadableVocabularyError, end_ids, special_ids, vocabulary_of
from foredraft.model.spec import ModelSpec
from foredraft.model.tokenizer import GIVE_TOKENIZER
from foredraft.model.weights import tensor_shapes
from foredraft.user_cache import cache_folder, check_folder, make_folder, read_private, shut

TEMPORARY = "foredraft-gguf-"  # how the name of a folder outside the cache begins
_writing_temporary = threading.Lock()
FORMAT = 3  # raised when a folder's content is made differently


def checkpoint_folder(path: Path) -> Path:
    # the file's own link stays: the hub's cache gives parts their names by links
    names = part_names(path.name)
    path = path.parent.resolve() / names[0]
    if len(names) > 1 and not path.exists():
        GGUFModel(path)  # says that the first part is missing
    try:
        record = {"format": FORMAT, "file": str(path), "identity": identity(path)}
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror})", remedy="check its name") from error
    name = hashlib.sha256(str(path).encode()).hexdigest()[:32]
    folder = _place(name)
    if _is_of(folder, record):
        return folder
    files = _files(path, record)
    try:
        _write(folder, files, record)
    except OSError:
        # another process has made the folder meanwhile, or the cache folder is full or read only
        if not _is_of(folder, record):
            folder = process_folder(TEMPORARY) / name
            if not _is_of(folder, record):
                _write_temporary(folder, files, record)
    return folder


def _is_of(folder: Path, record: dict[str, Any]) -> bool:
    """Return whether a folder was made from the file of a record, as the file is now."""
    return {**(_record(folder) or {}), "no_tokenizer": None} == {**record, "no_tokenizer": None}


def _write(folder: Path, files: dict[str, str], record: dict[str, Any]) -> None:
    """Write the folder of a record; the same one of another process stays, because it may be in use."""
    with replacing_folder(folder, keeps=lambda: _is_of(folder, record)) as new:
        for name, content in files.items():
            (new / name).write_text(content, encoding="utf-8")
        shut(new)


def _write_temporary(folder: Path, files: dict[str, str], record: dict[str, Any]) -> None:
    with _writing_temporary:  # another thread of this process writes the same
        try:
            _write(folder, files, record)
        except OSError as error:
            problem = f"{folder} cannot be written ({error.strerror})"
            remedy = "make room there, or set FOREDRAFT_CACHE to another folder"
            raise CheckpointError(problem, remedy=remedy) from error


def check_vocabulary(folder: Path) -> None:
    """Raise CheckpointError where a folder's GGUF file has a vocabulary that makes no tokenizer."""
    record = _record(folder)
    if record is not None and record["no_tokenizer"] is not None:
        raise CheckpointError(f"{record['file']} {record['no_tokenizer']}", remedy=GIVE_TOKENIZER)


def _files(path: Path, record: dict[str, Any]) -> dict[str, str]:
    file = GGUFModel(path)
    metadata = file.metadata
    config = config_of(file, special_ids(metadata).get("bos"), end_ids(metadata))
    generation = generation_of(file)
    try:
        spec = ModelSpec.from_hf(config, generation)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}", remedy=CONVERT_AGAIN) from error
    _check_tensors(file, spec)
    files, refusal = {"config.json": json.dumps(config)}, None
    if generation:
        files["generation_config.json"] = json.dumps(generation)
    try:
        vocabulary = vocabulary_of(file.metadata)
    except UnreadableVocabularyError as error:
        vocabulary, refusal = None, str(error)
    if vocabulary is not None:
        files["tokenizer.json"] = vocabulary.tokenizer
        files["tokenizer_config.json"] = json.dumps(vocabulary.config)
    files[RECORD] = json.dumps(record | {"no_tokenizer": refusal})
    return files


def _check_tensors(file: GGUFModel, spec: ModelSpec) -> None:
    architecture, needed = file.metadata["general.architecture"], tensor_shapes(spec)
    for name, shape in needed.items():
        own = file_name(architecture, name)
        if own not in file.tensors:
            raise file.error(f"lacks tensor {own}", CONVERT_AGAIN)
        if file.tensors[own].shape != shape:
            found = [*file.tensors[own].shape]
            problem = f"has tensor {own} of shape {found}, but its metadata imply {[*shape]}"
            raise file.error(problem, CONVERT_AGAIN)
    for own in file.tensors:
        given = model_name(architecture, own)
        unread = holds_factors(architecture, own) or (given is not None and spec.leaves_unread(given))
        if given not in needed and not unread:
            raise file.error(f"has tensor {own}, which is not part of a {spec.architecture}", CONVERT_AGAIN)


def _place(name: str) -> Path:
    """Return the path of a folder, in the cache folder if this user alone can write it."""
    cache = cache_folder("gguf")
    if cache is not None:
        try:
            make_folder(cache)
            return check_folder(cache) / name
        except OSError:
            pass
    return process_folder(TEMPORARY) / name


def _record(folder: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(read_private(check_folder(folder) / RECORD))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and {"no_tokenizer", "file"} <= found.keys() else None
