"""A tiny random model with every kind of drafter that a GPU runs, on the CPU without kernels or on a GPU."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import foredraft
from foredraft import LLM
from foredraft.model.runner import compiled
from tests.support.adapters import save_adapter
from tests.support.assistants import save_assistant, save_target
from tests.support.checkpoints import save_checkpoint, tiny_tokenizer
from tests.support.heads import save_head
from tests.support.hybrids import add_mtp, rewrite, save_hybrid

DRAFT = 4  # tokens of a draft
WORDS = 384  # of the vocabulary
COMMON = {"dtype": "float32", "max_length": 512, "max_batch": 4, "policy": "fixed", "max_draft": DRAFT}
# what is loaded beside the target: options of `load`, with the names of folders, and the drafters that there are;
# a target that has an assistant has two kinds of heads, and so two tensors of keys and values
LOADED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "draft model": ({"draft": "small", "recent_texts": 4}, ("draft-model", "none", "lookup", "suffix")),
    "other tokenizer": ({"draft": "other"}, ("retokenize",)),
    "eagle3": ({"draft": "head", "drafter": "eagle3"}, ("eagle3",)),
    "eagle": ({"draft": "eagle", "drafter": "eagle"}, ("eagle",)),
    "medusa": ({"draft": "medusa", "drafter": "medusa"}, ("medusa",)),
    "dflash": ({"draft": "dflash", "drafter": "dflash"}, ("dflash",)),
    "p-eagle": ({"draft": "p-eagle", "drafter": "p-eagle"}, ("p-eagle",)),
    "dflash 2": ({"draft": "dflash 2", "drafter": "dflash"}, ("dflash",)),
    "dspark": ({"draft": "dspark", "drafter": "dspark"}, ("dspark",)),
    "early exit": ({"plan": "exit:3"}, ("layer-skip",)),
    "skipped layers": ({"plan": "skip:attn=1/mlp=2"}, ("layer-skip",)),
    "adapter": ({"adapter": "adapter"}, ("kangaroo",)),
    "gemma4": ({"target": "gemma4", "draft": "gemma4-assistant"}, ("gemma4-assistant", "none")),
    "gemma4 unified": (
        {"target": "gemma4-unified", "draft": "gemma4-unified-assistant"},
        ("gemma4-assistant",),
    ),
    "further": ({"target": "further"}, ("mtp",)),
    "hybrid": ({"target": "hybrid"}, ("mtp", "lookup")),
}
AUX = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
DRAFTERS = {loaded: drafters for loaded, (_, drafters) in LOADED.items()}


def save_models(folder: Path) -> Path:
    keys: dict[str, Any] = {"tokenizer": True, "hidden_size": 64, "num_hidden_layers": 4}
    target = save_checkpoint(folder / "target", seed=1, **keys)
    _save_spoilt(target, folder / "small")
    save_checkpoint(folder / "other", seed=3, **{**keys, "num_hidden_layers": 1}, vocab_size=300)
    save_head(folder / "head", "speculators", WORDS, draft_vocab=200, config=AUX)
    save_head(folder / "eagle", "eagle-2", WORDS)
    save_head(folder / "medusa", "vllm", WORDS)
    save_head(folder / "dflash", "block speculators", WORDS, config={"aux_hidden_state_layer_ids": [1, 3]})
    save_head(folder / "dspark", "block gated", WORDS, config={"aux_hidden_state_layer_ids": [1, 3]})
    save_head(folder / "p-eagle", "p-eagle speculators", WORDS, draft_vocab=200, config=AUX)
    save_head(
        folder / "dflash 2",
        "block dflash 2 of speculators",
        WORDS,
        config={"aux_hidden_state_layer_ids": [1, 3]},
    )
    save_adapter(target, folder / "adapter")
    for kind, name in (("shared", "gemma4"), ("unified", "gemma4-unified")):
        own = save_target(folder / name, kind, WORDS, bos_token_id=1, eos_token_id=2, pad_token_id=0)
        tiny_tokenizer(WORDS).save(str(own / "tokenizer.json"))
        save_assistant(folder / f"{name}-assistant", kind, WORDS)
    _save_further(target, folder / "further", **keys)
    add_mtp(save_hybrid(folder / "hybrid", vocab_size=WORDS))
    return folder


def _save_spoilt(target: Path, folder: Path) -> None:
    shutil.copytree(target, folder)
    random = torch.Generator().manual_seed(2)
    tensors = {
        name: weight + 0.1 * weight.std() * torch.randn(weight.shape, generator=random)
        for name, weight in load_file(target / "model.safetensors").items()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _save_further(target: Path, folder: Path, **keys: Any) -> None:
    """Save a model with a layer behind its own that predicts further tokens, as DeepSeek and GLM name it."""
    shutil.copytree(target, folder)
    layer = load_file(
        save_checkpoint(folder / "layer", seed=4, **{**keys, "num_hidden_layers": 1}) / "model.safetensors"
    )
    random, size, place = (
        torch.Generator().manual_seed(5),
        keys["hidden_size"],
        f"model.layers.{keys['num_hidden_layers']}.",
    )
    own = {place + name[15:]: weight for name, weight in layer.items() if name.startswith("model.layers.0.")}
    own |= {f"{place}{name}.weight": torch.ones(size) for name in ("enorm", "hnorm", "shared_head.norm")}
    own |= {f"{place}eh_proj.weight": torch.randn(size, 2 * size, generator=random) / 8}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    rewrite(folder, lambda tensors: tensors | own)


def load(folder: Path, loaded: str, device: str) -> LLM:
    """Load the target with what LOADED names; on a CPU without kernels and with weights as they are on a GPU."""
    options = {**COMMON, "target": "target", **LOADED[loaded][0]}
    options |= {key: str(folder / options[key]) for key in ("target", "draft", "adapter") if key in options}
    more = {"kernels": False} if device == "cpu" else {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "_fault", lambda dtype: "for a comparison")
        return foredraft.load(options.pop("target"), device=device, **options, **more)
