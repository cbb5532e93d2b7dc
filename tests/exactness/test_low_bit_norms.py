"""Few bits and left-out layers on families with layer norms, biases, parallel residuals and learned positions.

A copy in few bits shares with the target whatever is no linear layer: norms, positions, biases. Drafts of a copy
that lacks one are still verified, so the text alone does not show it: a copy in eight bits must agree, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

import foredraft
from foredraft import LLM, SamplingParams
from foredraft.decode.policy import Fixed
from foredraft.drafters import low_bit
from foredraft.drafters.layer_skip import LayerSkip
from foredraft.drafters.low_bit import LowBit, low_bit_copy
from foredraft.drafters.skips import Skips
from foredraft.kernels.compilation import library
from foredraft.model.decoder import Decoder
from tests.exactness.test_bits import PROMPTS, SEEDS
from tests.support.checkpoints import VARIANTS, save_variant
from tests.support.loaded import engine_of
from tests.support.planting import Mutant, assert_caught, defect

pytestmark = pytest.mark.skipif(library() is None, reason="no kernels")
NAMES = ("cohere2", "gpt2", "gpt_neox", "opt-sums-normed", "phi", "stablelm-head-norms")
GREEDY = SamplingParams(temperature=0, max_new_tokens=32, ignore_eos=True)
TEXTS = PROMPTS[1:6]
KINDS = ("low-bit", "eight", "layer-skip", "skipping", "low-bit")


@pytest.fixture(scope="module", params=NAMES)
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = save_variant(
        tmp_path_factory.mktemp("model"),
        request.param,
        tie_word_embeddings=False,
        seed=SEEDS.get(VARIANTS[request.param][0], 0),
    )
    options: dict[str, Any] = {"dtype": "bfloat16", "device": "cpu", "max_batch": 8, "max_length": 512}
    with foredraft.load(folder, drafter="low-bit", policy="fixed", **options) as found:
        engine: Any = engine_of(found)
        skips = Skips((1,), (0, 2))
        engine.drafters["layer-skip"] = LayerSkip(engine.target, engine.cache, skips)
        engine.drafters["eight"] = LowBit(low_bit_copy(engine.target, 8), engine.cache)
        engine.drafters["skipping"] = LowBit(low_bit_copy(engine.target, 4), engine.cache, skips)
        for name, drafter in engine.drafters.items():
            drafter.name = name
        engine.policy = Fixed(4)
        yield found


@pytest.fixture(scope="module")
def plain(llm: LLM) -> list[list[int]]:
    """Each prompt alone, one token a pass."""
    return [llm.generate([text], replace(GREEDY, drafter="none"))[0].token_ids for text in TEXTS]


def said(llm: LLM, kinds: tuple[str, ...]) -> list[list[int]]:
    outputs = llm.generate(TEXTS, [replace(GREEDY, drafter=kind) for kind in kinds])
    assert all(output.stats.drafted > 0 for output in outputs)
    return [output.token_ids for output in outputs]


def test_greedy_ids_are_those_of_plain_decoding(llm: LLM, plain: list[list[int]]) -> None:
    assert said(llm, KINDS) == plain
    assert said(llm, KINDS[1:] + KINDS[:1]) == plain


def check_agreement(llm: LLM) -> None:
    """Check that most drafts of a copy in eight bits, made now, are accepted."""
    engine: Any = engine_of(llm)
    engine.drafters["eight"] = LowBit(low_bit_copy(engine.target, 8), engine.cache)
    engine.drafters["eight"].name = "eight"
    outputs = llm.generate(TEXTS, replace(GREEDY, drafter="eight"))
    accepted, drafted = (sum(getattr(o.stats, name) for o in outputs) for name in ("accepted", "drafted"))
    assert accepted > 0.8 * drafted


def test_a_copy_in_eight_bits_agrees(llm: LLM) -> None:
    check_agreement(llm)


Function = Callable[..., Any]


def without_positions(decoder: Function) -> Function:
    """Leave out the learned positions of the copy."""

    def spoilt(own: Decoder, *parts: Any) -> None:
        decoder(own, *parts[:5])
        own.learned_positions = None

    return spoilt


def with_spec(**changed: Any) -> Function:
    return lambda init: lambda own, spec, *parts: init(own, replace(spec, **changed), *parts)


# family -> a defect of its copy
DEFECTS: dict[str, tuple[str, Function]] = {
    "gpt2": ("learned positions left out", without_positions),
    "gpt_neox": ("parallel residual made sequential", with_spec(parallel_residual=False)),
    "opt-sums-normed": ("norms of outputs instead of sums", with_spec(sum_norms=False)),
}


def test_a_copy_that_lacks_a_part_is_caught(
    llm: LLM, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = request.node.callspec.params["llm"]
    if name not in DEFECTS:
        pytest.skip("no defect of this family")
    what, spoiler = DEFECTS[name]
    mutant: Mutant = defect(what, Decoder.__init__, spoiler, lambda: check_agreement(llm))
    assert low_bit.Decoder is Decoder
    assert_caught(mutant, monkeypatch)
