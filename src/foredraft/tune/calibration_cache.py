"""Calibration texts in the user's cache folder, since a large model writes them for minutes.

The name of a file is a hash of everything that its texts depend on. A file holds complete texts only. No
problem with the folder is an error: a file that cannot be read or is not valid is replaced, and if it
cannot be written, the texts are not cached.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import foredraft
from foredraft.errors import ConfigError
from foredraft.files import write_whole
from foredraft.kernels.machine import cache_folder
from foredraft.llm import LLM
from foredraft.model.runner import Runner
from foredraft.tune.calibration import CalibrationText, CalibrationTexts

__all__ = ["CalibrationCache"]

FORMAT = 1


class CalibrationCache:
    """The cached texts of one search.

    Args:
        folder: Folder of the model. The name depends on its path and on the sizes and times of its files,
            because the hash does not cover the values of the weights.
        hash: Hash of the model (`plan_files.model_hash`).
        llm: The model.
        prompts: Token ids of the prompts that the texts continue.
        tokens: New tokens of all texts, at least.
        temperature: Temperature of the texts.
    """

    def __init__(
        self, folder: Path, hash: str, llm: LLM, prompts: Sequence[list[int]], tokens: int, temperature: float
    ) -> None:
        self.prompts = {tuple(prompt) for prompt in prompts}
        self.vocabulary, self.tokens, self.temperature = llm.spec.vocab_size, tokens, temperature
        asked = [list(prompts), tokens, temperature]
        told = json.dumps([FORMAT, foredraft.__version__, hash, _files(folder), _passes(llm), asked])
        self.name = hashlib.sha256(told.encode()).hexdigest()
        cache = cache_folder()
        self.file = None if cache is None else cache / "texts" / f"{self.name[:32]}.json"

    def read_or(self, write: Callable[[], CalibrationTexts]) -> CalibrationTexts:
        """Return the cached texts, or call `write` and cache what it returns."""
        found = self._read()
        if found is None:
            found = write()
            self._keep(found)
        return found

    def _read(self) -> CalibrationTexts | None:
        if self.file is None:
            return None
        try:
            kept = json.loads(self.file.read_text(encoding="utf-8"))
            if (kept["format"], kept["name"]) != (FORMAT, self.name):
                return None
            texts = tuple(CalibrationText(tuple(ids), start) for ids, start in kept["texts"])
            found = CalibrationTexts(texts, self.temperature)
            sound = kept["digest"] == found.digest and all(map(self._sound, texts))
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return None
        return found if sound and found.tokens >= self.tokens else None

    def _sound(self, text: CalibrationText) -> bool:
        ids = all(type(id) is int and 0 <= id < self.vocabulary for id in text.ids)
        start = type(text.prompt_length) is int and 0 < text.prompt_length < len(text.ids)
        return ids and start and text.ids[: text.prompt_length] in self.prompts

    def _keep(self, found: CalibrationTexts) -> None:
        if self.file is None:
            return
        texts = [[text.ids, text.prompt_length] for text in found.texts]
        told = {"format": FORMAT, "name": self.name, "digest": found.digest, "texts": texts}
        with suppress(OSError, ConfigError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.file, json.dumps(told) + "\n", "texts")


def _files(folder: Path) -> list[Any]:
    """Return the path of the folder, and the name, size and time of its weights and configuration files."""
    files = sorted([*folder.glob("*.safetensors"), *folder.glob("*config.json")])
    about = ((file.name, file.stat()) for file in files)
    return [str(folder.resolve()), *([name, found.st_size, found.st_mtime_ns] for name, found in about)]


def _passes(llm: LLM) -> list[Any]:
    """Return what determines the arithmetic: device, dtype, kind of passes, version of PyTorch."""
    runner = llm.engine.target
    assert isinstance(runner, Runner)
    device, dtype = llm.engine.device.type, str(llm.engine.cache.dtype)
    how = [runner.by_kernels, runner.compiled, llm.deterministic]
    return [device, dtype, how, torch.__version__]
