"""Texts once written, kept between runs in the user's cache folder: a large model writes them for minutes.

Contract: a file's name tells everything that its texts are a function of, and texts that were not written to
the end are in none. Nothing about the folder is ever an error: a file that cannot be read, or holds something
else, is written anew, and what cannot be written is not kept.
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
    """Where the texts of one search are: `tokens` new ones or more, after these prompts, by the model of this
    folder and hash. The hash knows no values of weights, so the files' own place, sizes and times count, too.
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
        """Those that are kept, or else what `write` gives, which are kept from then on."""
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
    """Of the weights, and of what says where a text ends."""
    files = sorted([*folder.glob("*.safetensors"), *folder.glob("*config.json")])
    about = ((file.name, file.stat()) for file in files)
    return [str(folder.resolve()), *([name, found.st_size, found.st_mtime_ns] for name, found in about)]


def _passes(llm: LLM) -> list[Any]:
    """By what the tokens are computed."""
    runner = llm.engine.target
    assert isinstance(runner, Runner)
    device, dtype = llm.engine.device.type, str(llm.engine.cache.dtype)
    how = [runner.by_kernels, runner.compiled, llm.deterministic]
    return [device, dtype, how, torch.__version__]
