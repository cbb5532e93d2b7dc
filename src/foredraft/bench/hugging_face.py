"""The contenders from `transformers`: `generate` as it comes, with a draft model, and with prompt look-up.

Each has the library's own defaults (its schedule of draft lengths, its attention kernels), but for what all
contenders share. The pass that reads the prompt makes the first token, or with drafts the first few; decoding
is what follows, and a stopping criterion that never stops anything notes where it begins.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.bench.contender import BenchContext, Timing
from foredraft.errors import ConfigError
from foredraft.model.device import synchronise

__all__ = ["Checkpoints", "Generate", "assisted", "plain", "prompt_lookup"]

LOOKUP_TOKENS = 10  # of its documentation's example; the library has no default


class Checkpoints:
    """The target and, where there is one, the draft, each loaded once for all contenders."""

    def __init__(self, setting: BenchContext) -> None:
        with _quiet():
            self.target = _load(setting.target, setting)
            self.draft = None if setting.draft is None else _load(setting.draft, setting)


def plain(models: Checkpoints, setting: BenchContext) -> Generate:
    return Generate("transformers", models.target, setting, batches=None)


def assisted(models: Checkpoints, setting: BenchContext) -> Generate:
    """Raises ConfigError where there is no draft that it can use."""
    if models.draft is None:
        raise ConfigError("transformers-assisted needs a draft model; give draft=")
    if "draft-model" not in setting.drafters:
        raise ConfigError("transformers-assisted needs a draft model with the target's tokenizer; give one")
    return Generate("transformers-assisted", models.target, setting, assistant_model=models.draft)


def prompt_lookup(models: Checkpoints, setting: BenchContext) -> Generate:
    return Generate("transformers-lookup", models.target, setting, prompt_lookup_num_tokens=LOOKUP_TOKENS)


class Generate:
    """One way of calling `generate`; `more` are its arguments. What drafts takes one prompt at a time."""

    policy: str | None = None
    peer = True
    lossless = True

    def __init__(
        self,
        name: str,
        model: Any,
        setting: BenchContext,
        *,
        batches: tuple[int, ...] | None = (1,),
        assistant_model: Any = None,
        prompt_lookup_num_tokens: int | None = None,
    ) -> None:
        from transformers import GenerationConfig

        sampling = {"do_sample": True, "temperature": setting.temperature, "top_k": 0, "top_p": 1.0}
        self.name, self.method, self.batches = name, name, batches
        self._model, self._assistant = model, assistant_model
        self._config = GenerationConfig(
            pad_token_id=0,  # is masked, so its value says nothing
            prompt_lookup_num_tokens=prompt_lookup_num_tokens,
            **(sampling if setting.temperature else {"do_sample": False}),
        )
        self._drafts = assistant_model is not None or prompt_lookup_num_tokens is not None

    @torch.inference_mode()
    def run(self, prompts: list[list[int]], new_tokens: int) -> Timing:
        device = self._model.device
        longest = max(map(len, prompts))
        padded = [[0] * (longest - len(ids)) + ids for ids in prompts]
        real = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts]
        first = _First(device)
        self._config.max_new_tokens = new_tokens
        with _quiet():
            start = time.perf_counter()
            ids = self._model.generate(
                torch.tensor(padded, device=device),
                attention_mask=torch.tensor(real, device=device),
                generation_config=self._config,
                stopping_criteria=[first],
                **({} if self._assistant is None else {"assistant_model": self._assistant}),
            )
            synchronise(device)
            end = time.perf_counter()
        tokens = tuple(tuple(row[longest:]) for row in ids.tolist())
        after = first.length - longest
        return Timing(
            tokens,
            first.seconds - start,
            end - first.seconds,
            sum(len(row) - after for row in tokens),
            None if self._drafts else new_tokens - 1,
        )

    def close(self) -> None:
        self._model = self._assistant = None


class _First:
    """A stopping criterion: notes when it is first asked, and how long the text is then."""

    def __init__(self, device: torch.device) -> None:
        self.seconds, self.length, self._device = 0.0, 0, device

    def __call__(self, ids: Tensor, scores: Any, **more: Any) -> Tensor:
        if not self.length:
            synchronise(self._device)
            self.seconds, self.length = time.perf_counter(), ids.shape[1]
        return torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)


def _load(folder: Path, setting: BenchContext) -> Any:
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=setting.dtype, local_files_only=True)
    model.generation_config = GenerationConfig()  # no cuts and no end-of-text token of the checkpoint's
    return model.eval().to(setting.device)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the library's advice and progress bars."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
