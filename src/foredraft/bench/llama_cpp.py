"""The contender from llama.cpp: the same weights in its own format, decoded greedily through its C interface.

A GGUF file is read as it is; other checkpoints are written as one.
llama.cpp keeps its defaults (flash attention where it chooses it, a 16-bit KV cache) apart from what all
contenders share: the weights' dtype, the threads, the positions. At float32 it gets plain attention over a
float32 KV cache instead: its flash attention rounds to half precision and moves logits by 1e-2, its plain
attention by 1e-5. The prefill pass makes the first token; the decoding phase follows, one pass per token.
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
from foredraft.errors import ConfigError, Option
from foredraft.model.gguf.tensors import source_of
from foredraft.model.transfers import dtype_name

__all__ = ["LlamaCpp"]

logger = logging.getLogger(__name__)
SUPPORTED = (torch.float32, torch.bfloat16)  # dtypes in which both programs can hold the same weights
MAX_ROWS = 512  # tokens in one physical batch: llama.cpp's default
LEAVE_OUT = ("leave it out of ", Option("methods"))


class LlamaCpp:
    """A GGUF file of the weights with a llama.cpp model and context, freed by `close`.

    It decodes greedily, one prompt at a time.

    Raises:
        ConfigError: llama-cpp-python or gguf is not installed, or a setting is not supported here.
    """

    name = method = "llama.cpp"
    policy_name: str | None = None
    peer = True
    lossless = True
    batch_sizes: tuple[int, ...] | None = (1,)

    def __init__(self, context: BenchContext) -> None:
        _check_supported(context)
        self._library = module("llama_cpp", self.name)
        self._library.llama_log_set(_log_callback(self._library.llama_log_callback), ctypes.c_void_p(0))
        self._model: Any = None
        self._context: Any = None  # llama.cpp's context: the KV cache and the buffers
        self._batch: Any = None
        self._vocab_size = 0
        self._positions = context.positions
        self._folder = tempfile.TemporaryDirectory(prefix="foredraft-")
        try:
            self._load(context)
        except BaseException:
            self.close()
            raise

    def _load(self, shared: BenchContext) -> None:
        library, file = self._library, source_of(shared.target)
        if file == shared.target:  # no GGUF file
            file = Path(self._folder.name) / "model.gguf"
            try:
                write_gguf(shared.target, file, shared.dtype)
            except OSError as error:
                raise ConfigError(f"{self.name}: {file} cannot be written ({error.strerror})") from error
        model = library.llama_model_default_params()
        model.n_gpu_layers = 0
        self._model = library.llama_model_load_from_file(str(file).encode(), model)
        if not self._model:
            raise ConfigError(f"{self.name} cannot load this model", remedy=LEAVE_OUT)
        context = library.llama_context_default_params()
        context.n_ctx = context.n_batch = self._positions
        context.n_ubatch = min(MAX_ROWS, self._positions)
        context.n_outputs_max = context.n_outputs_max_per_seq = context.n_ubatch
        context.n_threads = context.n_threads_batch = torch.get_num_threads()
        if shared.dtype == torch.float32:
            context.type_k = context.type_v = library.GGML_TYPE_F32
            context.flash_attn_type = library.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._context = library.llama_init_from_model(self._model, context)
        if not self._context:
            raise ConfigError(
                f"{self.name} has no memory for {self._positions} positions",
                remedy=("lower ", Option("max_length")),
            )
        self._batch = library.llama_batch_init(self._positions, 0, 1)
        self._vocab_size = library.llama_vocab_n_tokens(library.llama_model_get_vocab(self._model))

    def run(self, prompts: list[list[int]], new_tokens: int) -> Timing:
        (prompt,) = prompts
        start = time.perf_counter()
        self._truncate(0)
        token = self._greedy(prompt, 0)
        first = time.perf_counter()
        tokens = [token]
        for position in range(len(prompt), len(prompt) + new_tokens - 1):
            tokens.append(token := self._greedy([token], position))
        end = time.perf_counter()
        return Timing(
            tokens=(tuple(tokens),),
            prefill_seconds=first - start,
            decode_seconds=end - first,
            decoded_tokens=new_tokens - 1,
            passes=new_tokens - 1,
        )

    def forward_seconds(self, rows: int, context: int) -> float:
        """Return the seconds of one pass over `rows` tokens, with logits of all, after `context` tokens."""
        self._truncate(0)
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

    def _truncate(self, length: int) -> None:
        """Truncate the KV cache to its first `length` positions."""
        self._library.llama_memory_seq_rm(self._library.llama_get_memory(self._context), 0, length, -1)

    def _greedy(self, tokens: Sequence[int], position: int) -> int:
        """Run a forward pass and return the likeliest next token; of equal logits, the smallest id."""
        self._forward(tokens, position, logits=1)
        logits = self._library.llama_get_logits_ith(self._context, -1)
        return int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())

    def _forward(self, tokens: Sequence[int], position: int, logits: int) -> None:
        """Run a forward pass from `position` on, with logits of the last `logits` tokens."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for row, token in enumerate(tokens):
            batch.token[row], batch.pos[row] = token, position + row
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, 0
            batch.logits[row] = row >= len(tokens) - logits
        code = self._library.llama_decode(self._context, batch)
        if code:
            raise ConfigError(f"{self.name} failed at position {position} (code {code})", remedy=LEAVE_OUT)


def _check_supported(context: BenchContext) -> None:
    if context.device.type != "cpu":
        raise ConfigError(
            ("llama.cpp runs on the CPU only here, but ", Option("device"), f" is {context.device}"),
            remedy=LEAVE_OUT,
        )
    if context.dtype not in SUPPORTED:
        raise ConfigError(
            ("llama.cpp takes float32 or bfloat16 here, but ", Option("dtype"),
             f" is {dtype_name(context.dtype)}"),
            remedy=LEAVE_OUT,
        )  # fmt: skip
    if context.temperature:
        raise ConfigError(
            ("llama.cpp decodes greedily here, but ", Option("temperature"), f" is {context.temperature}"),
            remedy=LEAVE_OUT,
        )


@cache  # the library keeps the callback until the process ends, so it must not be collected
def _log_callback(kind: Any) -> Any:
    """Return a callback of this ctypes type that logs llama.cpp's messages at level DEBUG."""
    return kind(lambda level, text, data: logger.debug("%s", text.decode(errors="replace").rstrip()))
