"""Peers on a GPU, timed without prefill: `transformers` on the same weight tensors, with each kind of cache.

vLLM, where it is installed, has the same shape and dtype, and reads a checkpoint from a folder.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from transformers.generation import CompileConfig, LogitsProcessor, LogitsProcessorList
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from benchmarks.random_model import Pair
from foredraft.model.memory import synchronise

# Options of `generate`: a dynamic cache, a static cache, and a static cache with a compiled forward.
WAYS: dict[str, dict[str, Any]] = {
    "eager": {},
    "static": {"cache_implementation": "static", "disable_compile": True},
    "compiled": {"cache_implementation": "static"},
}


class _FirstToken(LogitsProcessor):  # type: ignore[misc]
    """A logits processor that notes when the prefill pass has finished."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seen: float | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.seen is None:
            synchronise(self.device)
            self.seen = time.perf_counter()
        return scores


def model_of(config: dict[str, Any], tensors: dict[str, Tensor], device: torch.device) -> Any:
    """Return the model of `transformers` whose parameters are these tensors, without a copy."""
    made = transformers.LlamaConfig(**{key: value for key, value in config.items() if key != "architectures"})
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(made)
    model.load_state_dict(tensors, assign=True)
    with device:
        model.model.rotary_emb = LlamaRotaryEmbedding(made)  # its buffers are not in the state dict
    return model.eval()


def contender(
    model: Any, way: str, prompt: list[int], new_tokens: int, backend: str
) -> Callable[[], tuple[float, list[int]]]:
    """Return a run of `new_tokens` + 1 tokens, of which the prefill pass makes the first.

    The run returns the seconds of the other `new_tokens`, one step each, and all new token ids. `backend` is
    that of torch.compile, for the way "compiled".
    """
    options = dict(WAYS[way])
    if way == "compiled":
        options["compile_config"] = CompileConfig(backend=backend)
        options["compile_config"]._compile_all_devices = True  # by default it compiles on GPUs only
    ids = torch.tensor([prompt], device=model.device)
    mask = torch.ones_like(ids)

    def run() -> tuple[float, list[int]]:
        first = _FirstToken(model.device)
        out = model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=new_tokens + 1,
            min_new_tokens=new_tokens + 1,
            logits_processor=LogitsProcessorList([first]),
            **options,
        )
        synchronise(model.device)
        assert first.seen is not None
        return time.perf_counter() - first.seen, out[0, len(prompt) :].tolist()

    return run


def save_pair(pair: Pair, config: dict[str, Any], folder: Path) -> None:
    """Write the target of a pair as a checkpoint; vLLM takes prompts of token ids, so it has no tokenizer."""
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    save_file({name: x.contiguous() for name, x in pair.tensors.items()}, folder / "model.safetensors")


def vllm_contender(folder: str, prompt: list[int], new_tokens: int) -> Callable[[], float]:
    """Return a run that decodes greedily; it returns the seconds, less those of a run of one new token."""
    vllm: Any = import_module("vllm")
    model = vllm.LLM(model=folder, skip_tokenizer_init=True, max_model_len=len(prompt) + new_tokens + 8)

    def seconds(tokens: int) -> float:
        params = vllm.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        model.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        return time.perf_counter() - start

    return lambda: seconds(new_tokens + 1) - seconds(1)
