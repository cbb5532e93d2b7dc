"""Calibration texts in the user's cache folder, since a large model writes them for minutes.

Contract: the key holds everything that the texts depend on, and only finished texts are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import foredraft
from foredraft import user_cache
from foredraft.llm.loaded import Loaded
from foredraft.model.lora.record import base_of
from foredraft.tune.calibration import MIN_TOKENS, CalibrationText, CalibrationTexts

__all__ = ["CalibrationCache"]

KIND = "texts"  # of the user's cache
FORMAT = 1


class CalibrationCache:
    """The cached texts of one search.

    Args:
        folder: Folder of the model. The name depends on its path and on the sizes and times of its files,
            because the hash does not cover the values of the weights.
        hash: Hash of the model (`plan_files.model_hash`).
        loaded: The model.
        prompts: Token ids of the prompts that the texts continue.
        tokens: New tokens of all texts, at least, unless the prompts give fewer.
        temperature: Temperature of the texts.
    """

    def __init__(
        self,
        folder: Path,
        hash: str,
        loaded: Loaded,
        prompts: Sequence[list[int]],
        tokens: int,
        temperature: float,
    ) -> None:
        self.prompts = {tuple(prompt) for prompt in prompts}
        self.vocabulary, self.tokens, self.temperature = loaded.spec.vocab_size, tokens, temperature
        self.key = {
            "format": FORMAT,
            "foredraft": foredraft.__version__,
            "model": hash,
            "files": _files(folder),
            "passes": _passes(loaded),
            "prompts": list(prompts),
            "tokens": tokens,
            "temperature": temperature,
        }

    def read_or(self, write: Callable[[], CalibrationTexts]) -> CalibrationTexts:
        """Return the cached texts, or call `write` and cache what it returns."""
        found = self._read()
        if found is None:
            found = write()
            self._keep(found)
        return found

    def _read(self) -> CalibrationTexts | None:
        kept = user_cache.read(KIND, self.key)
        if kept is None:
            return None
        try:
            texts = tuple(CalibrationText(tuple(ids), start) for ids, start in kept["texts"])
            found = CalibrationTexts(texts, self.temperature)
            sound = all(map(self._sound, texts))
        except (ValueError, LookupError, TypeError):  # not what `_keep` writes
            return None
        return found if sound and found.tokens >= min(self.tokens, MIN_TOKENS) else None

    def _sound(self, text: CalibrationText) -> bool:
        ids = all(type(id) is int and 0 <= id < self.vocabulary for id in text.ids)
        start = type(text.prompt_length) is int and 0 < text.prompt_length < len(text.ids)
        return ids and start and text.ids[: text.prompt_length] in self.prompts

    def _keep(self, found: CalibrationTexts) -> None:
        texts = [[text.ids, text.prompt_length] for text in found.texts]
        user_cache.write(KIND, self.key, {"texts": texts})


def _files(folder: Path) -> list[Any]:
    """Return the path of the folder, and the name, size and time of its weights and configuration files."""
    folder = base_of(folder)  # its LoRAs are in the hash whole
    files = sorted([*folder.glob("*.safetensors"), *folder.glob("*config.json")])
    about = ((file.name, file.stat()) for file in files)
    return [str(folder.resolve()), *([name, found.st_size, found.st_mtime_ns] for name, found in about)]


def _passes(loaded: Loaded) -> list[Any]:
    """Return what determines the arithmetic: device, dtype, kind of passes, version of PyTorch."""
    runner, engine = loaded.runner, loaded.engine
    device, dtype = engine.device.type, str(engine.cache.dtype)
    how = [runner.by_kernels, runner.compiled, loaded.deterministic]
    return [device, dtype, how, torch.__version__]
