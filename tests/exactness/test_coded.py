"""Targets of 16 and 32 bits, and of codes: every drafter leaves the very tokens and the exact distribution."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from foredraft import LLM, SamplingParams
from foredraft.decode.policy import Fixed
from foredraft.drafters.low_bit import LowBit
from foredraft.kernels.compilation import library
from tests.exactness.test_bits import PROMPTS
from tests.exactness.test_enumeration import case, compare
from tests.support import coded
from tests.support.forking import outputs_of
from tests.support.planting import assert_caught, defect

pytestmark = pytest.mark.skipif(library() is None, reason="no kernels")
DRAFTERS = ("none", "lookup", "draft-model", "layer-skip", "kangaroo", "low-bit")
GREEDY = SamplingParams(temperature=0, max_new_tokens=40, ignore_eos=True)
TARGETS = [(dtype, weights) for dtype in ("float32", "bfloat16") for weights in ("int4", "int8", None)]


@pytest.fixture(scope="module", params=TARGETS, ids=str)
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    found = coded.load(tmp_path_factory.mktemp("model"), "llama", *request.param)
    found._engine.policy = Fixed(4)
    return found


@pytest.fixture(scope="module")
def plain(llm: LLM) -> list[list[int]]:
    """Each prompt alone, one token a pass."""
    return [llm.generate([p], replace(GREEDY, drafter="none"))[0].token_ids for p in PROMPTS]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_ids_in_a_batch_and_alone(llm: LLM, plain: list[list[int]], drafter: str) -> None:
    outputs = llm.generate(PROMPTS, replace(GREEDY, drafter=drafter))
    assert [output.token_ids for output in outputs] == plain
    for index in (1, 4):
        [alone] = llm.generate([PROMPTS[index]], replace(GREEDY, drafter=drafter))
        assert alone.token_ids == plain[index]


def check_distribution(dtype: str, weights: str | None, drafter: str, transform: str) -> None:
    """One row at a time: real logits of an idle row would be drawn from as well."""
    made, one = coded.tiny(dtype, weights), case(transform, drafter, prompt=(1,))
    found = outputs_of(lambda noise: coded.fresh_engine(made, Fixed(2), rows=1, noise=noise), [one])
    compare([one], found, coded.after(made))
    assert found[0].drafted > 0


@pytest.mark.parametrize("transform", [pytest.param("as it is", marks=pytest.mark.slow), "cold top-k"])
@pytest.mark.parametrize("drafter", ["draft-model", "layer-skip", "kangaroo", "low-bit"])
@pytest.mark.parametrize(("dtype", "weights"), TARGETS)
def test_the_exact_distribution(dtype: str, weights: str | None, drafter: str, transform: str) -> None:
    check_distribution(dtype, weights, drafter, transform)


def test_a_copy_that_drafts_over_committed_keys_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The verifying pass does not write them again."""

    def early(step: Any) -> Any:
        return lambda self, tokens, starts, *more: step(
            self, tokens, [max(0, at - 1) for at in starts], *more
        )

    def check() -> None:
        check_distribution("float32", "int8", "low-bit", "as it is")

    check()
    assert_caught(defect("committed keys", LowBit.step, early, check), monkeypatch)
