"""The contender from llama.cpp: the same weights, as a GGUF file, decoded greedily through its library.

A GGUF file is read as it is. Other checkpoints are written as one
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), a tensor at a time: matrices in the chosen dtype,
vectors in float32, and no tokenizer unless it is asked for. A model that llama.cpp would compute differently
is refused. llama.cpp keeps its defaults, but at float32 it gets plain attention over a float32 KV cache,
which moves logits by 1e-5, where its flash attention moves them by 1e-2.
"""

from __future__ import annotations

import ctypes
import json
import logging
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from foredraft.bench.contender import BenchContext, Contender, Timing
from foredraft.bench.contenders import module
from foredraft.errors import ConfigError, Option
from foredraft.model.checkpoint import IGNORED, named_tensors
from foredraft.model.memory import dtype_name
from foredraft.model.rope import Rope, frequencies
from foredraft.model.source import ModelSource, source_of
from foredraft.model.spec import ModelSpec
from foredraft.model.tensor_names import HEAD

logger = logging.getLogger(__name__)


# Hugging Face architecture -> llama.cpp architecture. llama.cpp's "llama" applies RoPE to neighbouring
# channels; the others pair channels half a head apart, as Hugging Face models do.
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
ROPE_FACTORS = "rope_freqs.weight"
LEAVE_OUT = ("leave it out of ", Option("methods"))


def write_gguf(
    place: ModelSource | Path, file: Path, dtype: torch.dtype, *, vocabulary: bool = False
) -> None:
    """Write a checkpoint to a GGUF file."""
    gguf = module("gguf", "llama.cpp")
    source = source_of(place)
    spec = source.spec
    _check_convertible(spec, dtype)
    with ExitStack() as stack:
        tensors = _tensors(source, spec, gguf, stack)
        writer = gguf.GGUFWriter(file, ARCHITECTURES[spec.architecture])
        _add_metadata(writer, spec, gguf)
        if vocabulary:
            add_vocabulary(writer, source, spec, gguf)
        else:
            writer.add_tokenizer_model("no_vocab")
        for tensor in tensors:
            kind = dtype if len(tensor.shape) > 1 else torch.float32
            size = torch.Size(tensor.shape).numel() * kind.itemsize
            raw = getattr(gguf.GGMLQuantizationType, DTYPES[kind])
            writer.add_tensor_info(tensor.name, tensor.shape, None, size, raw_dtype=raw)
        stack.callback(writer.close)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in tensors:
            values = interleaved(tensor.load(), tensor.heads) if tensor.heads else tensor.load()
            values = values.to(dtype if len(tensor.shape) > 1 else torch.float32).contiguous()
            writer.write_tensor_data(values.view(torch.uint8).numpy())  # NumPy has no bfloat16


class _Tensor(NamedTuple):
    """A tensor under its name in the GGUF file."""

    name: str  # the name
    shape: tuple[int, ...]  # the shape
    load: Callable[[], Tensor]  # reads the values, in the checkpoint's dtype
    heads: int = 0  # whose rows are interleaved


def _check_convertible(spec: ModelSpec, dtype: torch.dtype) -> None:
    unsupported = {
        f"architecture {spec.architecture!r}": spec.architecture not in ARCHITECTURES,
        f"rope type {spec.rope.kind!r}": spec.rope.kind not in ("default", "linear", "llama3"),
        f"activation {spec.activation!r}": spec.activation != "silu",
        "a sliding window": any(spec.windows),
        f"dtype {dtype}": dtype not in DTYPES,
        "quantised weights": spec.quantisation is not None,
    }
    for feature, present in unsupported.items():
        if present:
            raise ConfigError(f"a model with {feature} cannot be converted for llama.cpp", remedy=LEAVE_OUT)


def _add_metadata(writer: Any, spec: ModelSpec, gguf: Any) -> None:
    writer.add_context_length(spec.max_positions)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_block_count(spec.layers)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_head_count(spec.heads)
    writer.add_head_count_kv(spec.kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_rope_dimension_count(spec.head_dim)
    writer.add_rope_freq_base(spec.rope.theta)
    if spec.rope.kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(spec.rope.factor)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_vocab_size(spec.vocab_size)


def add_vocabulary(writer: Any, source: ModelSource, spec: ModelSpec, gguf: Any) -> None:
    """Add the byte-level BPE of a tokenizer.json."""
    read = json.loads(source.tokenizer_json or b"")
    model, added = read["model"], {each["id"]: each for each in read["added_tokens"]}
    by_id = {id: token for token, id in model["vocab"].items()}
    by_id |= {id: token["content"] for id, token in added.items()}  # the vocabulary may lack them
    ids = range(spec.vocab_size)
    kinds = gguf.TokenType
    of_added = {id: kinds.CONTROL if token["special"] else kinds.USER_DEFINED for id, token in added.items()}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([by_id.get(id, f"[{id}]") for id in ids])
    writer.add_token_types([of_added.get(id, kinds.NORMAL if id in by_id else kinds.UNUSED) for id in ids])
    writer.add_token_merges(
        [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    )
    for end in spec.eos_token_ids[:1]:
        writer.add_eos_token_id(end)
    writer.add_add_bos_token(False)


def _tensors(source: ModelSource, spec: ModelSpec, gguf: Any, stack: ExitStack) -> list[_Tensor]:
    """Return the tensors in the order of the file, without a tied head, which llama.cpp ties itself."""
    architecture = getattr(gguf.MODEL_ARCH, ARCHITECTURES[spec.architecture].upper())
    known = gguf.get_tensor_name_map(architecture, spec.layers)
    heads_of = {gguf.MODEL_TENSOR.ATTN_Q: spec.heads, gguf.MODEL_TENSOR.ATTN_K: spec.kv_heads}
    found = []
    if spec.rope.kind == "llama3":
        unscaled, size = Rope("default", spec.rope.theta), spec.head_dim
        factors = frequencies(unscaled, size) / frequencies(spec.rope, size)  # [D/2]
        found.append(_Tensor(ROPE_FACTORS, (size // 2,), lambda: factors))
    for name, opened in named_tensors(source, stack).items():
        if IGNORED.fullmatch(name) or spec.leaves_unread(name) or (spec.tied and name == f"{HEAD}.weight"):
            continue
        kind, gguf_name = known.get_type_and_name(name, try_suffixes=(".weight", ".bias"))
        heads = heads_of.get(kind, 0) if architecture == gguf.MODEL_ARCH.LLAMA else 0
        found.append(_Tensor(gguf_name, opened.shape, opened.whole, heads))
    return found


def interleaved(tensor: Tensor, heads: int) -> Tensor:
    """Reorder rows [heads * D, ...] so that channels half a head apart, which RoPE pairs, are neighbours."""
    return tensor.view(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


SUPPORTED = (torch.float32, torch.bfloat16)  # dtypes in which both programs can hold the same weights
MAX_ROWS = 512  # tokens in one physical batch: llama.cpp's default


class LlamaCpp(Contender):
    """A llama.cpp model and context, freed by `close`; it decodes one prompt at a time, greedily."""

    name = method = "llama.cpp"
    batch_sizes = (1,)

    def __init__(self, context: BenchContext) -> None:
        for fits, does, option, value in (
            (context.device.type == "cpu", "runs on the CPU only", "device", context.device),
            (context.dtype in SUPPORTED, "takes float32 or bfloat16", "dtype", dtype_name(context.dtype)),
            (not context.temperature, "decodes greedily", "temperature", context.temperature),
        ):
            if not fits:
                problem = (f"llama.cpp {does} here, but ", Option(option), f" is {value}")
                raise ConfigError(problem, remedy=LEAVE_OUT)
        self._library = module("llama_cpp", self.name)
        self._library.llama_log_set(_log_callback(self._library.llama_log_callback), ctypes.c_void_p(0))
        self._model: Any = None
        self._context: Any = None  # llama.cpp's context: the KV cache and the buffers
        self._batch: Any = None
        self._vocab_size = self._zeros = 0  # tokens that are 0 and that the KV cache begins with
        self._positions = context.positions
        self._folder = tempfile.TemporaryDirectory(prefix="foredraft-")
        try:
            self._load(context)
        except BaseException:
            self.close()
            raise

    def _load(self, shared: BenchContext) -> None:
        library, file = self._library, shared.target.path
        if file.is_dir():  # no GGUF file
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
            problem = f"{self.name} has no memory for {self._positions} positions"
            raise ConfigError(problem, remedy=("lower ", Option("max_length")))
        self._batch = library.llama_batch_init(self._positions, 0, 1)
        self._vocab_size = library.llama_vocab_n_tokens(library.llama_model_get_vocab(self._model))

    def run(self, prompts: list[list[int]], new_tokens: int) -> Timing:
        (prompt,) = prompts
        start = time.perf_counter()
        self._zeros = 0
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
        """Return the seconds of one pass over `rows` tokens after `context` tokens, read once."""
        kept = min(context, self._zeros)
        self._truncate(kept)
        if context > kept:
            self._forward([0] * (context - kept), kept, logits=1)
        self._zeros = context
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


@cache  # the library keeps the callback until the process ends, so it must not be collected
def _log_callback(kind: Any) -> Any:
    """Return a callback of this ctypes type that logs llama.cpp's messages at level DEBUG."""
    return kind(lambda level, text, data: logger.debug("%s", text.decode(errors="replace").rstrip()))
