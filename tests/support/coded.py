"""Targets with a draft model, or with every drafter that fits beside them, in real forwards; fresh engines over them."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import foredraft
from foredraft import LLM, loading
from foredraft.decode.drafter import Drafter
from foredraft.decode.policy import Policy
from foredraft.drafters.draft_model import STRETCH, DraftModel
from foredraft.drafters.layer_skip import LowBit
from foredraft.drafters.lookup import Lookup, PredictedOutputs
from foredraft.drafters.retokenize import Retokenize
from foredraft.model.tokenizer import Tokenizer
from foredraft.verify.sampler import PlainTarget
from tests.support import alphabets
from tests.support.adapters import save_adapter
from tests.support.checkpoints import reference_model
from tests.support.distributions import Logits
from tests.support.harness import ForkingEngine
from tests.support.parts import letters
from tests.support.variants_hybrids import FULL, LINEAR

VOCABULARY, ROWS = 97, 8
LOADED: dict[str, Any] = {"device": "cpu", "max_batch": ROWS, "max_length": 512, "policy": "fixed"}
# where the texts of seed 0 repeat a few tokens for ever
SEEDS = {"gemma4": 1, "gemma4-unified": 1, "gpt_neox": 5, "olmo2": 1, "phi": 5, "starcoder2": 1}
POSITIONS = 96
WORDS = 5  # of the vocabulary of `tiny`


@contextmanager
def loading_by(by: str) -> Iterator[None]:
    """Let models that are loaded compute by PyTorch's operators, or by the kernels where they serve."""
    with pytest.MonkeyPatch.context() as patch:
        if by == "operators":
            patch.setattr(loading.runners, "unserved_because", lambda *_: "for a test")
        yield


def save_pair(folder: Path, family: str, **keys: Any) -> tuple[Path, Path]:
    """A target, and a draft model that is the target with some noise on its weights: weak, but not blind."""
    # untied: a tiny random model with a tied head repeats one token for ever
    chosen = {"vocab_size": VOCABULARY, "tie_word_embeddings": False, "seed": SEEDS.get(family, 0), **keys}
    model = reference_model(family, **chosen)
    model.save_pretrained(folder / "target")
    random_ = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.03 * weight.std().nan_to_num() * torch.randn(weight.shape, generator=random_)
    model.save_pretrained(folder / "draft")
    return folder / "target", folder / "draft"


def load_pair(target: Path, draft: Path, dtype: str, **more: Any) -> LLM:
    return foredraft.load(target, draft=draft, dtype=dtype, **LOADED, **more)


def load(folder: Path, family: str, dtype: str, weights: str | None, copy: str | None, **keys: Any) -> LLM:
    """Load a target with every drafter of its own tokenizer; without a `copy`, low-bit runs the target itself."""
    target, draft = save_pair(folder, family, **keys)
    adapter = save_adapter(target, folder / "adapter")
    llm = foredraft.load(
        target, draft=draft, adapter=adapter, plan="skip:attn=1/mlp=0", dtype=dtype, weights=weights,
        draft_weights=copy, drafter="layer-skip", **LOADED,
    )  # fmt: skip
    engine: Any = llm.loaded.engine
    if copy is None:
        engine.drafters["low-bit"] = LowBit(engine.target, engine.cache)
    return llm


def load_foreign(folder: Path, dtype: str, weights: str | None) -> LLM:
    folders = save_pair(folder, "llama")
    for path, tokenizer in zip(folders, tokenizers(VOCABULARY), strict=True):
        alphabets.save(tokenizer.inner, path)
    return load_pair(*folders, dtype, weights=weights)


def tokenizers(size: int) -> tuple[Tokenizer, Tokenizer]:
    """Return the target's tokenizer and a draft model's: ids mean the same, but for those of merged letters."""
    return letters(size, ["ab", "ca"], special=0), letters(size, ["bc", "ba"], special=0)


@functools.cache
def tiny(dtype: str, weights: str | None, copy: str | None, family: str = "llama") -> LLM:
    keys: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    keys |= {"layer_types": [LINEAR, FULL]} if family == "qwen3_5" else {}
    with tempfile.TemporaryDirectory() as folder:
        return load(Path(folder), family, dtype, weights, copy, vocab_size=WORDS, num_hidden_layers=2, **keys)


def after(llm: LLM) -> Logits:
    """Return the function of a text that gives the target's logits, one token a pass."""
    plain = PlainTarget(llm.loaded, POSITIONS)
    return lambda context: plain.logits(context[:1], context[1:]).tolist()


def fresh_engine(llm: LLM, policy: Policy, *, rows: int = 2, noise: Any = None) -> ForkingEngine:
    """Return an engine with caches and drafters like the loaded one's that saw nothing."""
    loaded: Any = llm.loaded.engine
    cache = loaded.target.new_cache(rows, POSITIONS)
    drafters = {name: _fresh(own, loaded.target, cache, rows) for name, own in loaded.drafters.items()}
    if "draft-model" in drafters:
        draft = loaded.drafters["draft-model"].draft_pass.runner
        drafters["retokenize"] = Retokenize(draft, rows, STRETCH * POSITIONS, *tokenizers(WORDS))
    given = {"vocabulary": loaded.vocabulary, "vocab_ops": loaded.vocab_ops}
    return ForkingEngine(loaded.target, cache, policy, drafters, noise=noise, **given)


def _fresh(own: Any, target: Any, cache: Any, rows: int) -> Drafter:
    parts: tuple[Any, ...]
    match own:
        case Lookup() | PredictedOutputs():
            parts = ()
        case DraftModel():
            parts = own.draft_pass.runner, rows, POSITIONS
        case LowBit():
            parts = own.draft_pass.runner, cache
        case _:  # what it has beside the target
            names = ("skips", "adapter", "assistant", "head")
            parts = target, cache, next(getattr(own, name) for name in names if hasattr(own, name))
    return type(own)(*parts)
