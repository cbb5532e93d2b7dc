"""The factors of LongRoPE follow from `max_length`, once, when a model is loaded."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

import foredraft
from foredraft import SamplingParams
from foredraft.model.spec import ModelSpec
from tests.parity.test_logits import Pair, greedy
from tests.support.checkpoints import save_checkpoint
from tests.support.planting import Mutant, assert_caught, defect
from tests.support.variants_llama_like import longrope

ORIGINAL, NEW = 64, 40
SHORT, LONG = range(4, 20), range(70, 86)  # lengths of prompts: the texts end below and begin above ORIGINAL


def check(max_length: int, lengths: range) -> None:
    """Compare greedy texts of batches of 1 and 8, under drafters, with those of transformers."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = save_checkpoint(Path(temporary), "phi3", **longrope(8, original=ORIGINAL))
        pair = Pair(folder)
        prompts = [pair.tokens[:, at : at + length] for at, length in enumerate(lengths)][::2]
        expected = [greedy(pair, prompt, NEW) for prompt in prompts]
        llm = foredraft.load(
            folder, draft=folder, device="cpu", max_batch=8, max_length=max_length, policy="fixed"
        )
    for drafter in ("none", "lookup", "draft-model"):
        params = SamplingParams(temperature=0, max_new_tokens=NEW, ignore_eos=True, drafter=drafter)
        for count in (1, 8):
            outputs = llm.generate([prompt[0].tolist() for prompt in prompts[:count]], params)
            assert [output.token_ids for output in outputs] == expected[:count]


def short_texts() -> None:
    check(ORIGINAL, SHORT)


def long_texts() -> None:
    check(2 * ORIGINAL, LONG)


@pytest.mark.parametrize("texts", [short_texts, long_texts], ids=lambda texts: texts.__name__)
def test_texts_equal_those_of_transformers(texts: object) -> None:
    assert callable(texts)
    texts()


def test_the_boundary_is_the_trained_length() -> None:
    config = {**longrope(8, original=ORIGINAL), "model_type": "phi3"}
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "eos_token_id": 2}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": 2048}
    spec = ModelSpec.from_hf({**config, **sizes, **heads})
    short, long = spec.rope.factors, spec.rope.long_factors
    assert spec.at_length(ORIGINAL).rope.factors == short != long
    assert spec.at_length(ORIGINAL + 1).rope.factors == spec.at_length(None).rope.factors == long


MUTANTS = [
    defect(
        "the model loaded for its longest text",
        ModelSpec.at_length,
        lambda sound: lambda spec, positions: sound(spec, None),
        short_texts,
    ),
    defect(
        "the model loaded for short texts",
        ModelSpec.at_length,
        lambda sound: lambda spec, positions: sound(spec, 1),
        long_texts,
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_defect_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(mutant, monkeypatch)
