"""The source that a GGUF file is: config and tokenizer of its metadata, tensors by the names of Hugging Face.

The file is first checked to hold every tensor that its model needs in the right shape, and no other. To make
a large vocabulary takes seconds, so what was made of the latest files is kept in the user's cache folder, by
the state of their parts.
"""

from __future__ import annotations

import functools
import json
from contextlib import ExitStack
from pathlib import Path

import torch

from foredraft import user_cache
from foredraft.errors import CheckpointError
from foredraft.model.chat import ChatTemplate
from foredraft.model.config import GENERATION
from foredraft.model.gguf.gguf_config import CONVERT_AGAIN, config_of, generation_of
from foredraft.model.gguf.tensors import (
    GGUFModel,
    file_name,
    holds_factors,
    identity,
    model_name,
    part_names,
    stored_tensors,
)
from foredraft.model.gguf.vocabulary import UnreadableVocabularyError, end_ids, special_ids, vocabulary_of
from foredraft.model.source import ModelSource, Opened
from foredraft.model.spec import ModelSpec
from foredraft.model.tokenizer import FILE, GIVE_TOKENIZER, Tokenizer
from foredraft.model.weights import tensor_shapes

KIND, SUFFIX, MOST = "gguf", ".content", 16  # of the user's cache; files whose content is kept
FORMAT = 4  # raised when the content is made differently
KINDS_OF_HEADS = ("attention", "key_value")


class GGUFSource(ModelSource):
    renamed = True

    def __init__(self, path: Path) -> None:
        # the file's own link stays: the hub's cache gives parts their names by links
        names = part_names(path.name)
        super().__init__(path.parent.resolve() / names[0])
        if len(names) > 1 and not self.path.exists():
            GGUFModel(path)  # says that the first part is missing
        self._state = self._read_state("check its name")
        head, self._content = _content(self.path, self._state)
        self.config, self.generation, self._tokens, self._refusal = json.loads(head)

    def _read_state(self, remedy: str) -> tuple[tuple[int, ...] | None, ...]:
        try:
            return identity(self.path)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read ({error.strerror})", remedy=remedy) from error

    def named(self, file: str) -> Path:
        return self.path

    def _own_files(self) -> list[Path]:
        return [self.path.with_name(name) for name in part_names(self.path.name)]

    @functools.cached_property
    def spec(self) -> ModelSpec:
        return ModelSpec.from_hf(self.config, self.generation)

    def tokenizer(self, size: int | None = None, *, like: Tokenizer | None = None) -> Tokenizer | None:
        if self._refusal is not None:
            raise CheckpointError(f"{self.path} {self._refusal}", remedy=GIVE_TOKENIZER)
        if self._content is None:
            return None
        chat = ChatTemplate.from_config(self._tokens, self.path)
        return Tokenizer.from_content(self._content, self.path, chat, size, like=like)

    @property
    def tokenizer_json(self) -> bytes | None:
        return self._content

    def write_others(self, folder: Path, beginnings: tuple[str, ...] = ("",)) -> None:
        texts = {GENERATION: self.generation, "tokenizer_config.json": self._tokens}
        contents = {name: json.dumps(value).encode() for name, value in texts.items() if value is not None}
        contents |= {} if self._content is None else {FILE: self._content}
        for name in filter(lambda name: name.startswith(beginnings), contents):
            (folder / name).write_bytes(contents[name])

    def _open(self, stack: ExitStack, device: torch.device) -> Opened:
        if self._read_state("give the model's file again") != self._state:
            raise CheckpointError(f"{self.path} has changed while it was used", remedy="load the model again")
        heads, kv_heads = (self.config[f"num_{kind}_heads"] for kind in KINDS_OF_HEADS)
        model = _opened(self.path, self._state)
        return stored_tensors(model, heads, kv_heads, meta=device.type == "meta")


@functools.lru_cache(maxsize=1)
def _opened(path: Path, state: tuple[tuple[int, ...] | None, ...]) -> GGUFModel:
    """Return an open file. Loading reads it twice, and to walk over a large vocabulary takes a second."""
    return GGUFModel(path, lists=False)  # the vocabulary of Gemma takes 40 MB


@functools.lru_cache(maxsize=1)
def _content(path: Path, state: tuple[tuple[int, ...] | None, ...]) -> tuple[bytes, bytes | None]:
    """Return a line with all but the tokenizer, and the content of tokenizer.json, if any."""
    key = {"format": FORMAT, "file": str(path), "state": state}
    content = user_cache.read_bytes(KIND, key, SUFFIX)
    if content is None:
        content = _made(GGUFModel(path))
        user_cache.write_bytes(KIND, key, SUFFIX, content)
        user_cache.keep_newest(KIND, SUFFIX, MOST)
    head, _, tokenizer = content.partition(b"\n")
    return head, tokenizer or None


def _made(file: GGUFModel) -> bytes:
    metadata = file.metadata
    config = config_of(file, special_ids(metadata).get("bos"), end_ids(metadata))
    generation = generation_of(file) or None
    try:
        spec = ModelSpec.from_hf(config, generation)
    except CheckpointError as error:
        raise CheckpointError(f"{file.path}: {error}", remedy=CONVERT_AGAIN) from error
    _check_tensors(file, spec)
    vocabulary, refusal = None, None
    try:
        vocabulary = vocabulary_of(metadata)
    except UnreadableVocabularyError as error:
        refusal = str(error)
    tokens, text = (None, "") if vocabulary is None else (vocabulary.config, vocabulary.tokenizer)
    return f"{json.dumps([config, generation, tokens, refusal])}\n{text}".encode()


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
