"""Targets with weights in few bits, and every drafter that fits beside them, in real forwards."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import foredraft
from foredraft import LLM
from foredraft.decode.drafter import Drafter
from foredraft.decode.policy import Policy
from foredraft.drafters.draft_model import STRETCH, DraftModel
from foredraft.drafters.kangaroo import Kangaroo
from foredraft.drafters.layer_skip import LayerSkip, LowBit
from foredraft.drafters.lookup import Lookup, PredictedOutputs
from foredraft.drafters.retokenize import Retokenize
from foredraft.model.tokenizer import Tokenizer
from foredraft.verify.sampler import PlainTarget
from tests.exactness.test_bits import VOCABULARY, save_pair
from tests.support import alphabets
from tests.support.adapters import save_adapter
from tests.support.distributions import Logits
from tests.support.harness import ForkingEngine, forking_engine
from tests.support.loaded import engine_of
from tests.support.parts import letters

POSITIONS = 64
WORDS = 5  # of the vocabulary of `tiny`


def load(
    folder: Path, family: str, dtype: str, weights: str | None, copy: str | None, rows: int = 8, **keys: Any
) -> LLM:
    """Load a target with every drafter of its own tokenizer; without a `copy`, low-bit runs the target itself."""
    target, draft = save_pair(folder, family, **keys)
    adapter = save_adapter(target, folder / "adapter")
    llm = foredraft.load(
        target, draft=draft, adapter=adapter, plan="skip:attn=1/mlp=0", dtype=dtype, weights=weights,
        draft_weights=copy, drafter="layer-skip", policy="fixed", device="cpu", max_batch=rows, max_length=512,
    )  # fmt: skip
    engine: Any = engine_of(llm)
    if copy is None:
        engine.drafters["low-bit"] = LowBit(engine.target, engine.cache)
    return llm


def load_foreign(folder: Path, dtype: str, weights: str | None, rows: int = 8) -> LLM:
    folders = save_pair(folder, "llama")
    for path, tokenizer in zip(folders, tokenizers(VOCABULARY), strict=True):
        alphabets.save(tokenizer.inner, path)
    target, draft = folders
    options: Any = {"dtype": dtype, "weights": weights, "max_batch": rows, "max_length": 512}
    return foredraft.load(target, draft=draft, policy="fixed", device="cpu", **options)


def tokenizers(size: int) -> tuple[Tokenizer, Tokenizer]:
    """Return the target's tokenizer and a draft model's: ids mean the same, but for those of merged letters."""
    return letters(size, ["ab", "ca"], special=0), letters(size, ["bc", "ba"], special=0)


@functools.cache
def tiny(dtype: str, weights: str | None, copy: str | None) -> LLM:
    ids: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    with tempfile.TemporaryDirectory() as folder:
        return load(Path(folder), "llama", dtype, weights, copy, vocab_size=WORDS, num_hidden_layers=2, **ids)


def after(llm: LLM) -> Logits:
    """Return the function of a text that gives the target's logits, one token a pass."""
    plain = PlainTarget(llm.loaded, POSITIONS)
    return lambda context: plain.logits(context[:1], context[1:]).tolist()


def fresh_engine(llm: LLM, policy: Policy, *, rows: int = 2, noise: Any = None) -> ForkingEngine:
    loaded: Any = engine_of(llm)
    cache = loaded.target.new_cache(rows, POSITIONS)
    draft = loaded.drafters["draft-model"].draft_pass.runner
    drafters: list[Drafter] = [
        Lookup(),
        PredictedOutputs(),
        DraftModel(draft, rows, POSITIONS),
        LayerSkip(loaded.target, cache, loaded.drafters["layer-skip"].skips),
        Kangaroo(loaded.target, cache, loaded.drafters["kangaroo"].adapter),
        LowBit(loaded.drafters["low-bit"].draft_pass.runner, cache),
        Retokenize(draft, rows, STRETCH * POSITIONS, *tokenizers(WORDS)),
    ]
    return forking_engine(llm, cache, policy, drafters, noise)
