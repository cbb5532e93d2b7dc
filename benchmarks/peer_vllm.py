"""vLLM on the same shape and dtype, where it is installed: it reads a checkpoint from a folder."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from benchmarks.random_model import Pair

__all__ = ["save_pair", "vllm_contender"]


def save_pair(pair: Pair, config: dict[str, Any], folder: Path) -> None:
    """Write the target of a pair as a checkpoint; vLLM takes prompts of token ids, so it has no tokenizer."""
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    save_file({name: x.contiguous() for name, x in pair.tensors.items()}, folder / "model.safetensors")


def vllm_contender(folder: str, prompt: list[int], new_tokens: int) -> Callable[[], float]:
    """Return a run that decodes `new_tokens` tokens greedily, and returns the seconds of decoding.

    A run of one new token reads the prompt alone; its seconds are taken off.
    """
    vllm: Any = import_module("vllm")
    model = vllm.LLM(model=folder, skip_tokenizer_init=True, max_model_len=len(prompt) + new_tokens + 8)

    def seconds(tokens: int) -> float:
        params = vllm.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        model.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        return time.perf_counter() - start

    return lambda: seconds(new_tokens + 1) - seconds(1)
