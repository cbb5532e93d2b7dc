"""Few bits: a quantised target, and one that drafts with its own copy, say what plain decoding says, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
import torch

import foredraft
from foredraft import LLM, ConfigError, SamplingParams
from foredraft.decode.policy import Fixed
from foredraft.drafters.low_bit import LowBit, low_bit_copy
from foredraft.drafters.skips import Skips
from foredraft.kernels.compilation import library
from foredraft.model.quantisation import quantise
from foredraft.model.runner.native import NativeCodes
from foredraft.model.weights import weight_bytes
from tests.exactness.test_bits import PROMPTS, VOCABULARY
from tests.support.checkpoints import reference_model
from tests.support.loaded import engine_of
from tests.support.planting import assert_caught, defect

pytestmark = pytest.mark.skipif(library() is None, reason="no kernels")
NEW, ROWS = 40, 8
GREEDY = SamplingParams(temperature=0, max_new_tokens=NEW, ignore_eos=True)
DRAFTERS = ("low-bit", "skipping", "eight", "lookup", "none")
WHOLE = {"hidden_size": 64, "intermediate_size": 96}  # whole groups of 32


def load(folder: Path, family: str, dtype: str, weights: str | None, **more: Any) -> LLM:
    model = reference_model(family, vocab_size=VOCABULARY, tie_word_embeddings=False, **WHOLE)
    model.save_pretrained(folder)
    return foredraft.load(
        folder, dtype=dtype, device="cpu", weights=weights, max_batch=ROWS, max_length=512, policy="fixed",
        **{"drafter": "low-bit", **more},
    )  # fmt: skip


@pytest.fixture(
    scope="module",
    params=[
        ("llama", "bfloat16", None),
        ("llama", "bfloat16", "int8"),
        ("llama", "float32", "int8"),
        ("gemma2", "bfloat16", None),
        ("qwen3", "bfloat16", "int8"),
        ("gemma2", "float32", "int8"),
    ],
    ids=str,
)
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    found = load(tmp_path_factory.mktemp("model"), *request.param)
    engine: Any = engine_of(found)
    copies = {
        "skipping": LowBit(low_bit_copy(engine.target, 4), engine.cache, Skips((1,), (0, 2))),
        "eight": LowBit(low_bit_copy(engine.target, 8), engine.cache),
    }
    for name, drafter in copies.items():
        drafter.name = name
        engine.drafters[name] = drafter
    return found


@pytest.fixture(scope="module")
def plain(llm: LLM) -> list[list[int]]:
    """Each prompt alone, one token a pass."""
    return [llm.generate([p], replace(GREEDY, drafter="none"))[0].token_ids for p in PROMPTS]


def test_the_products_are_coded(llm: LLM) -> None:
    drafter: Any = engine_of(llm).drafters["low-bit"]
    products = drafter.draft_pass.runner.decoder.products
    assert all(isinstance(product, NativeCodes) and product.coding.bits == 4 for product in products)


@pytest.mark.parametrize("gamma", [1, 4, 7])
def test_greedy_ids_in_a_batch_of_all_drafters(llm: LLM, plain: list[list[int]], gamma: int) -> None:
    engine_of(llm).policy = Fixed(gamma)
    kinds = list(islice(cycle(DRAFTERS), gamma, gamma + len(PROMPTS)))
    outputs = llm.generate(PROMPTS, [replace(GREEDY, drafter=kind) for kind in kinds])
    assert [output.token_ids for output in outputs] == plain
    [alone] = llm.generate([PROMPTS[4]], replace(GREEDY, drafter="low-bit"))
    assert alone.token_ids == plain[4]


def test_sampled_ids_are_those_of_plain_decoding(llm: LLM) -> None:
    params = SamplingParams(
        temperature=1, seed=3, max_new_tokens=NEW, ignore_eos=True, acceptance="coupled", drafter="none"
    )
    engine_of(llm).policy = Fixed(4)
    want, *others = (
        [output.token_ids for output in llm.generate(PROMPTS, replace(params, drafter=drafter))]
        for drafter in ("none", "low-bit", "skipping", "eight")
    )
    assert all(found == want for found in others)


def test_a_copy_of_eight_bits_agrees_with_a_target_of_eight_bits(llm: LLM) -> None:
    """Such a target is its own copy, so every draft is accepted."""
    engine_of(llm).policy = Fixed(4)
    outputs = llm.generate(PROMPTS, replace(GREEDY, drafter="eight"))
    accepted, drafted = (sum(getattr(o.stats, name) for o in outputs) for name in ("accepted", "drafted"))
    target = llm.loaded.runner
    if isinstance(target.decoder.output, NativeCodes):
        assert accepted == drafted
    assert accepted > 0.8 * drafted


@pytest.mark.parametrize("kernels", [True, False])
def test_a_quantised_target_is_the_model_of_its_codes(tmp_path: Path, kernels: bool) -> None:
    """Against transformers, given the weights that the codes stand for."""
    llm = load(
        tmp_path / "a", "llama", "float32", "int4", drafter="lookup", kernels=None if kernels else False
    )
    model = reference_model("llama", vocab_size=VOCABULARY, tie_word_embeddings=False, **WHOLE)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, (torch.nn.Linear, torch.nn.Embedding)):
                module.weight.copy_(quantise(module.weight, 4).expand(torch.float32))
        ids = torch.tensor([PROMPTS[4][:20]])
        want = model(ids).logits[0]
    runner = llm.loaded.runner
    cache = runner.new_cache(1, 64)
    found = runner.forward(cache, ids, [0]).logits
    assert found is not None
    torch.testing.assert_close(found[0], want, rtol=1e-4, atol=1e-4)
    bits = 4 if kernels else None
    spec, held = (
        runner.decoder.spec,
        sum(product.weight.numel() for product in runner.decoder.products if bits),
    )  # type: ignore[attr-defined]
    whole = weight_bytes(spec, torch.device("cpu"), torch.float32, native=True, bits=None)
    if kernels:
        coded = weight_bytes(spec, torch.device("cpu"), torch.float32, native=True, bits=4)
        assert held < coded < whole / 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"weights": "int3"}, "weights"),
        ({"draft_weights": "int3"}, "draft_weights"),
        ({"weights": "int4", "drafter": "low-bit"}, "the target has 4 bits itself"),
        ({"kernels": False, "drafter": "low-bit"}, "they are off"),
        ({"kernels": False, "drafter": "lookup", "draft_weights": "int8"}, "they are off"),
    ],
    ids=str,
)
def test_what_cannot_be_honoured_is_refused(tmp_path: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load(tmp_path, "llama", "bfloat16", options.pop("weights", None), **options)


def check_overwritten(llm: LLM, plain: list[list[int]]) -> None:
    engine_of(llm).policy = Fixed(4)
    outputs = llm.generate(PROMPTS, replace(GREEDY, drafter="low-bit"))
    assert [output.token_ids for output in outputs] == plain


def test_a_copy_that_drafts_where_it_has_committed_is_caught(
    llm: LLM, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its keys then stay in place of the target's."""

    def early(sound: Any) -> Any:
        return lambda self, inputs: sound(
            self, replace(inputs, starts=[max(0, at - 1) for at in inputs.starts])
        )

    check_overwritten(llm, plain)
    assert_caught(
        defect("committed keys", LowBit.fused_draft, early, lambda: check_overwritten(llm, plain)),
        monkeypatch,
    )
