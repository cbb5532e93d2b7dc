"""The contender from llama.cpp: the same weights in its own format, decoded greedily through its C interface.

It has its own defaults (flash attention where it likes, a 16-bit cache), but for what all contenders share:
the weights' dtype, the threads, the positions. At float32 all of it is: its flash attention rounds to half
precision, which moves logits by 1e-2 where its plain attention over a float32 cache moves them by 1e-5, so it
gets that. The pass that reads the prompt makes the first token; decoding is what follows, one pass a token.
"""

from __future__ import annotations

import ctypes
import logging
import tempfile
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from foredraft.bench.contender import BenchContext, Timing
from foredraft.bench.gguf_file import write_gguf
from foredraft.bench.optional import module
from foredraft.errors import ConfigError

__all__ = ["LlamaCpp"]

logger = logging.getLogger(__name__)
SUPPORTED = (torch.float32, torch.bfloat16)
MOST_ROWS = 512  # of a pass: its own default of a physical batch


class LlamaCpp:
    """A file of the weights, a model and a context, all gone with `close`. Greedy; one prompt at a time.

    Raises ConfigError: llama-cpp-python or gguf is not installed, or the setting is not one it can have.
    """

    name = method = "llama.cpp"
    policy: str | None = None
    peer = True
    lossless = True
    batches: tuple[int, ...] | None = (1,)

    def __init__(self, setting: BenchContext) -> None:
        _refuse(setting)
        self._library = module("llama_cpp", self.name)
        self._library.llama_log_set(_logging(self._library.llama_log_callback), ctypes.c_void_p(0))
        self._model: Any = None
        self._context: Any = None
        self._batch: Any = None
        self._words = 0
        self._positions = setting.positions
        self._folder = tempfile.TemporaryDirectory(prefix="foredraft-")
        try:
            self._load(setting)
        except BaseException:
            self.close()
            raise

    def _load(self, setting: BenchContext) -> None:
        library, file = self._library, Path(self._folder.name) / "model.gguf"
        try:
            write_gguf(setting.target, file, setting.dtype)
        except OSError as error:
            raise ConfigError(f"{self.name}: {file} cannot be written ({error.strerror})") from error
        model = library.llama_model_default_params()
        model.n_gpu_layers = 0
        self._model = library.llama_model_load_from_file(str(file).encode(), model)
        if not self._model:
            raise ConfigError(f"{self.name} cannot load this model; leave it out of the methods")
        context = library.llama_context_default_params()
        context.n_ctx = context.n_batch = self._positions
        context.n_ubatch = min(MOST_ROWS, self._positions)
        context.n_outputs_max = context.n_outputs_max_per_seq = context.n_ubatch
        context.n_threads = context.n_threads_batch = torch.get_num_threads()
        if setting.dtype == torch.float32:
            context.type_k = context.type_v = library.GGML_TYPE_F32
            context.flash_attn_type = library.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._context = library.llama_init_from_model(self._model, context)
        if not self._context:
            raise ConfigError(f"{self.name} has no room for {self._positions} positions; lower max_length")
        self._batch = library.llama_batch_init(self._positions, 0, 1)
        self._words = library.llama_vocab_n_tokens(library.llama_model_get_vocab(self._model))

    def run(self, prompts: list[list[int]], new_tokens: int) -> Timing:
        (prompt,) = prompts
        start = time.perf_counter()
        self._forget(0)
        token = self._greedy(prompt, 0)
        first = time.perf_counter()
        tokens = [token]
        for position in range(len(prompt), len(prompt) + new_tokens - 1):
            tokens.append(token := self._greedy([token], position))
        end = time.perf_counter()
        return Timing((tuple(tokens),), first - start, end - first, new_tokens - 1, new_tokens - 1)

    def forward_seconds(self, rows: int, context: int) -> float:
        """Of one pass over `rows` tokens with logits of all, at `context` tokens that were read before."""
        self._forget(0)
        if context:
            self._forward([0] * context, 0, logits=1)
        start = time.perf_counter()
        self._forward([0] * rows, context, logits=rows)
        self._library.llama_synchronize(self._context)
        return time.perf_counter() - start

    def close(self) -> None:
        library = self._library
        if self._batch is not None:
            library.llama_batch_free(self._batch)
        if self._context:
            library.llama_free(self._context)
        if self._model:
            library.llama_model_free(self._model)
        self._model = self._context = self._batch = None
        self._folder.cleanup()

    def _forget(self, length: int) -> None:
        """All but the first `length` positions."""
        self._library.llama_memory_seq_rm(self._library.llama_get_memory(self._context), 0, length, -1)

    def _greedy(self, tokens: Sequence[int], position: int) -> int:
        self._forward(tokens, position, logits=1)
        logits = self._library.llama_get_logits_ith(self._context, -1)
        return int(np.ctypeslib.as_array(logits, (self._words,)).argmax())  # of equals the smallest id

    def _forward(self, tokens: Sequence[int], position: int, logits: int) -> None:
        """logits: of how many of the last tokens."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for row, token in enumerate(tokens):
            batch.token[row], batch.pos[row] = token, position + row
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, 0
            batch.logits[row] = row >= len(tokens) - logits
        code = self._library.llama_decode(self._context, batch)
        if code:
            raise ConfigError(f"{self.name} failed at position {position} (code {code}); leave it out")


def _refuse(setting: BenchContext) -> None:
    if setting.device.type != "cpu":
        raise ConfigError(f"llama.cpp runs on the CPU here, and device is {setting.device}; leave it out")
    if setting.dtype not in SUPPORTED:
        raise ConfigError(f"llama.cpp is given float32 or bfloat16 here, and dtype is {setting.dtype}")
    if setting.temperature:
        raise ConfigError(f"llama.cpp decodes greedily here: temperature is {setting.temperature}; give 0")


@cache  # the library calls it until the process ends
def _logging(kind: Any) -> Any:
    """What it has to tell, as this module's own debugging messages."""
    return kind(lambda level, text, data: logger.debug("%s", text.decode(errors="replace").rstrip()))
