"""Logits equal those of transformers (eager attention, float32) on tiny random checkpoints of every variant."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import foredraft
from foredraft import SamplingParams
from foredraft.model.runner import Runner
from foredraft.model.spec import ModelSpec
from foredraft.model.weights import load_decoder
from tests.support.checkpoints import FAMILIES, SCALED, VARIANTS, save_checkpoint, save_variant
from tests.support.mutation import Mutant, Mutation, assert_caught, defect
from tests.support.variants_llama_like import longrope

PROMPT = 300  # longer than a prefill chunk and than every sliding window
TOTAL = 320


def close(got: Tensor, expected: Tensor) -> bool:
    return bool((got - expected).abs().max() <= 1e-4 * expected.abs().max())


class Pair:
    """One checkpoint, loaded by transformers and by foredraft."""

    def __init__(
        self, folder: Path, reference: Path | None = None, kind: Any = AutoModelForCausalLM, ids: int = 97
    ) -> None:
        self.reference: PreTrainedModel = kind.from_pretrained(
            reference or folder, attn_implementation="eager", dtype=torch.float32
        ).eval()
        self.runner = Runner(load_decoder(folder, length=TOTAL))
        self.tokens = torch.randint(3, ids, (1, TOTAL), generator=torch.Generator().manual_seed(7))  # [1, T]
        with torch.inference_mode():
            self.expected = self._logits(self.tokens)  # [T, V]

    def _logits(self, tokens: Tensor) -> Tensor:
        """Return the reference logits; with a dynamic base token by token, as only there it depends on the position alone."""
        if "dynamic" not in str(getattr(self.reference.config, "rope_parameters", None)):
            return self.reference(tokens).logits[0]
        cache, rows = None, []
        for column in range(tokens.shape[1]):
            out = self.reference(tokens[:, column : column + 1], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            rows.append(out.logits[0])
        return torch.cat(rows)


def prompt_logits(runner: Runner, tokens: Tensor) -> Tensor:
    """Return the logits [T, V] of tokens [1, T], by the widest passes that the runner makes on this machine."""
    cache, width = runner.new_cache(1, tokens.shape[1]), min(64, runner.max_queries)
    found = []
    for at in range(0, tokens.shape[1], width):
        cache.lengths[0] = at
        logits = runner.forward(cache, tokens[:, at : at + width], [at]).logits
        assert logits is not None
        found.append(logits[0])
    return torch.cat(found)


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(save_variant(tmp_path_factory.mktemp("variant"), request.param))


def test_prompt_logits_equal_those_of_transformers(pair: Pair) -> None:
    assert close(prompt_logits(pair.runner, pair.tokens), pair.expected)


def test_decoding_logits_equal_those_of_transformers(pair: Pair) -> None:
    runner, cache = pair.runner, pair.runner.new_cache(2, TOTAL)
    ids = pair.tokens[0].tolist()
    runner.prefill(cache, 1, ids[:256], 0)
    runner.prefill(cache, 1, ids[256:PROMPT], 256)
    for position in range(PROMPT, TOTAL):
        step = pair.tokens[:, position : position + 1]
        cache.lengths[1] = position
        got = runner.forward(cache, step, [position], first_row=1).logits
        assert got is not None
        assert close(got[0, 0], pair.expected[position])


def greedy(pair: Pair, prompt: Tensor, count: int) -> list[int]:
    chosen = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    attended = torch.ones_like(prompt)
    ids = pair.reference.generate(prompt, attention_mask=attended, max_new_tokens=count, **chosen)
    return ids[0, prompt.shape[1] :].tolist()


def decoded(runner: Runner, prompt: Tensor, count: int) -> list[int]:
    length = prompt.shape[1]
    cache = runner.new_cache(1, length + count)
    runner.prefill(cache, 0, prompt[0, :-1].tolist(), 0)
    tokens = [int(prompt[0, -1])]
    for position in range(length - 1, length - 1 + count):
        cache.lengths[0] = position
        logits = runner.forward(cache, torch.tensor([tokens[-1:]]), [position]).logits
        assert logits is not None
        tokens.append(int(logits[0, 0].argmax()))
    return tokens[1:]


def test_64_greedy_tokens_equal_those_of_transformers(pair: Pair) -> None:
    prompt = pair.tokens[:, :20]
    assert decoded(pair.runner, prompt, 64) == greedy(pair, prompt, 64)


def check_speculation(
    llm: foredraft.LLM,
    pair: Pair,
    prompts: list[Tensor],
    new: int,
    drafters: Sequence[str] = ("none", "lookup", "draft-model"),
) -> None:
    """Compare greedy texts under drafters, alone and in a batch, with those of transformers."""
    expected = [greedy(pair, prompt, new) for prompt in prompts]
    for drafter in drafters:
        params = SamplingParams(temperature=0, max_new_tokens=new, ignore_eos=True, drafter=drafter)
        for count in (1, len(prompts)):
            outputs = llm.generate([prompt[0].tolist() for prompt in prompts[:count]], params)
            assert [output.token_ids for output in outputs] == expected[:count]


@pytest.mark.heavy
@pytest.mark.parametrize("family", SCALED)
def test_speculation_past_the_trained_length_keeps_the_greedy_tokens(tmp_path: Path, family: str) -> None:
    """With a dynamic rotary base, 48 trained positions and 144 usable ones."""
    pair = Pair(save_variant(tmp_path, f"{family}-dynamic"))
    llm = foredraft.load(tmp_path, draft=tmp_path, device="cpu", max_batch=4, policy="fixed")
    assert llm.max_length == 144
    check_speculation(llm, pair, [pair.tokens[:, :20], pair.tokens[:, 30:33]], 60)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.25), (torch.float16, 0.04)], ids=str)
def test_low_precision_logits_are_as_accurate_as_those_of_transformers(
    tmp_path: Path, name: str, dtype: torch.dtype, tolerance: float
) -> None:
    """`tolerance` is a share of the norm of the logits; the large weights of these small models amplify rounding."""
    pair = Pair(save_variant(tmp_path, name))
    runner = Runner(load_decoder(tmp_path, dtype=dtype, length=TOTAL))
    ours = prompt_logits(runner, pair.tokens)
    low = pair.reference.to(dtype)
    with torch.inference_mode():
        theirs = low(pair.tokens).logits[0].float()
    assert (ours - pair.expected).norm() <= 1.1 * (theirs - pair.expected).norm()
    assert (ours - theirs).norm() <= tolerance * pair.expected.norm()


# --- the factors of LongRoPE follow from `max_length`, once, when a model is loaded ------------------------------

ORIGINAL, NEW = 64, 40
SHORT, LONG = range(4, 20), range(70, 86)  # lengths of prompts: the texts end below and begin above ORIGINAL


def check_longrope(max_length: int, lengths: range) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = save_checkpoint(Path(temporary), "phi3", **longrope(8, original=ORIGINAL))
        pair = Pair(folder)
        prompts = [pair.tokens[:, at : at + length] for at, length in enumerate(lengths)][::2]
        llm = foredraft.load(
            folder, draft=folder, device="cpu", max_batch=8, max_length=max_length, policy="fixed"
        )
    check_speculation(llm, pair, prompts, NEW)


short_texts = functools.partial(check_longrope, ORIGINAL, SHORT)
long_texts = functools.partial(check_longrope, 2 * ORIGINAL, LONG)


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
