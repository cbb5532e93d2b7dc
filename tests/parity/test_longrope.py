"""The factors of LongRoPE follow from `max_length`, once, when a model is loaded."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import pytest

import foredraft
from foredraft.model.spec import ModelSpec
from tests.parity.test_logits import Pair, check_speculation
from tests.support.checkpoints import save_checkpoint
from tests.support.mutation import Mutant, Mutation, assert_caught, defect
from tests.support.variants_llama_like import longrope

ORIGINAL, NEW = 64, 40
SHORT, LONG = range(4, 20), range(70, 86)  # lengths of prompts: the texts end below and begin above ORIGINAL


def check(max_length: int, lengths: range) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = save_checkpoint(Path(temporary), "phi3", **longrope(8, original=ORIGINAL))
        pair = Pair(folder)
        prompts = [pair.tokens[:, at : at + length] for at, length in enumerate(lengths)][::2]
        llm = foredraft.load(
            folder, draft=folder, device="cpu", max_batch=8, max_length=max_length, policy="fixed"
        )
    check_speculation(llm, pair, prompts, NEW)


short_texts = functools.partial(check, ORIGINAL, SHORT)
long_texts = functools.partial(check, 2 * ORIGINAL, LONG)


@pytest.mark.parametrize("check", [short_texts, long_texts], ids=["short", "long"])
def test_texts_equal_those_of_transformers(check: functools.partial[None]) -> None:
    check()


def test_the_boundary_is_the_trained_length() -> None:
    config = {**longrope(8, original=ORIGINAL), "model_type": "phi3"}
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "eos_token_id": 2}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": 2048}
    spec = ModelSpec.from_hf({**config, **sizes, **heads})
    short, long = spec.rope.factors, spec.rope.long_factors
    assert spec.at_length(ORIGINAL).rope.factors == short != long
    assert spec.at_length(ORIGINAL + 1).rope.factors == spec.at_length(None).rope.factors == long


def loaded_for(positions: int | None) -> Mutation:
    return lambda at_length: lambda spec, _: at_length(spec, positions)


MUTANTS = [
    defect("the model loaded for its longest text", ModelSpec.at_length, loaded_for(None), short_texts),
    defect("the model loaded for short texts", ModelSpec.at_length, loaded_for(1), long_texts),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_defect_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(mutant, monkeypatch)
