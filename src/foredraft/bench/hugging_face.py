"""The contenders from `transformers`: `generate` alone, with a draft model, with prompt lookup, with beams.

Each keeps the library's defaults apart from what all contenders share. The decoding phase follows the prefill
pass; a stopping criterion that never stops the text notes where it begins.
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

from foredraft.bench.contender import BenchContext, Contender, Timing
from foredraft.errors import ConfigError, Option
from foredraft.model.memory import synchronise

BEAMS = 4  # that most guides of beam search take
LOOKUP_TOKENS = 10  # draft length in tokens, from the library's documentation; it has no default


class TransformersModels:
    """The target and, if there is one, the draft model, each loaded once for all contenders."""

    def __init__(self, context: BenchContext) -> None:
        if context.target.loras:
            problem = "transformers takes no LoRA here, as the target has"
            raise ConfigError(problem, remedy="save the merged model with PEFT, and give that")
        for source in filter(None, (context.target, context.draft)):
            if source.path.is_file():
                problem = f"transformers takes no GGUF file here, as {source.path.name} is"
                raise ConfigError(problem, remedy="give a checkpoint folder to compare with it")
        with _quiet():
            self.target = _load(context.target.path, context)
            self.draft = None if context.draft is None else _load(context.draft.path, context)


class Generate(Contender):
    """One way of calling `generate`: alone, with `assistant_model`, with prompt lookup, or with beams.

    Beam search looks for a likely text and draws none, whatever the temperature is.
    """

    def __init__(self, name: str, models: TransformersModels, context: BenchContext) -> None:
        from transformers import GenerationConfig

        assisted, beams = name == "transformers-assisted", BEAMS if name == "beam" else 1
        lookup = LOOKUP_TOKENS if name == "transformers-lookup" else None
        if assisted and (models.draft is None or "draft-model" not in context.drafters):
            problem = "transformers-assisted needs a draft model with the target's tokenizer"
            raise ConfigError(problem, remedy=("give ", Option("draft")))
        sampling = {"do_sample": True, "temperature": context.temperature, "top_k": 0, "top_p": 1.0}
        self.name, self.method, self.lossless = name, name, beams == 1
        self._model, self._assistant = models.target, models.draft if assisted else None
        self._config = GenerationConfig(
            pad_token_id=0,  # any id will do, because the attention mask hides the padding
            prompt_lookup_num_tokens=lookup,
            num_beams=beams,
            **(sampling if context.temperature and beams == 1 else {"do_sample": False}),
        )
        self._drafts = assisted or lookup is not None
        self.batch_sizes = (1,) if self._drafts else None  # `generate` drafts for one prompt at a time

    @torch.inference_mode()
    def run(self, prompts: list[list[int]], new_tokens: int) -> Timing:
        device = self._model.device
        longest = max(map(len, prompts))
        padded = [[0] * (longest - len(ids)) + ids for ids in prompts]
        mask = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts]
        first = _FirstTokenTimer(device)
        self._config.max_new_tokens = new_tokens
        with _quiet():
            start = time.perf_counter()
            ids = self._model.generate(
                torch.tensor(padded, device=device),
                attention_mask=torch.tensor(mask, device=device),
                generation_config=self._config,
                stopping_criteria=[first],
                **({} if self._assistant is None else {"assistant_model": self._assistant}),
            )
            synchronise(device)
            end = time.perf_counter()
        tokens = tuple(tuple(row[longest:]) for row in ids.tolist())
        in_prefill = first.length - longest  # tokens of each prompt that the prefill pass made
        return Timing(
            tokens=tokens,
            prefill_seconds=first.seconds - start,
            decode_seconds=end - first.seconds,
            decoded_tokens=sum(len(row) - in_prefill for row in tokens),
            passes=None if self._drafts else new_tokens - 1,
        )

    def close(self) -> None:
        self._model = self._assistant = None


class _FirstTokenTimer:
    """A stopping criterion that notes the time and the text's length at its first call, and never stops."""

    def __init__(self, device: torch.device) -> None:
        self.seconds, self.length, self._device = 0.0, 0, device

    def __call__(self, ids: Tensor, scores: Any, **more: Any) -> Tensor:
        if not self.length:
            synchronise(self._device)
            self.seconds, self.length = time.perf_counter(), ids.shape[1]
        return torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)


def _load(folder: Path, context: BenchContext) -> Any:
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=context.dtype, local_files_only=True)
    model.generation_config = GenerationConfig()  # drops the checkpoint's sampling cuts and end-of-text token
    return model.eval().to(context.device)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the library's warnings and progress bars."""
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
