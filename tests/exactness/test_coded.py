"""Targets of 16 and 32 bits, and of codes: every drafter leaves the very tokens and the exact distribution."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foredraft import LLM, SamplingParams
from foredraft.decode.accept import speculative
from foredraft.decode.engine import Engine
from foredraft.decode.noise import NoiseKeys
from foredraft.decode.policy import Fixed, Policy
from foredraft.decode.vocab_ops import leading
from foredraft.drafters.layer_skip import LowBit, low_bit_copy
from foredraft.kernels.compilation import library
from foredraft.model.runner.native.products import NativeCodes
from tests.exactness.matrix import *  # noqa: F403
from tests.exactness.matrix import PROMPTS, accepted_of, assert_same, plain_ids
from tests.exactness.matrix import test_the_exact_distribution as test_the_exact_distribution
from tests.exactness.test_enumeration import check_joint_law
from tests.support import coded
from tests.support.mutation import Mutation, assert_caught, defect
from tests.support.mutations import argument, holding, padding_kept
from tests.support.parts import RandomBudgets

pytestmark = pytest.mark.skipif(library() is None, reason="no kernels")
KINDS = ("draft-model", "layer-skip", "kangaroo", "low-bit", "lookup", "none")
GREEDY = SamplingParams(temperature=0, max_new_tokens=40, ignore_eos=True)
Loaded = tuple[Any, ...]  # of `coded.tiny`
WEIGHTS = (("int4", None), ("int8", "int4"), (None, "int4"), (None, "int8"))  # of the target and its copy
POLICIES = [Fixed(4), Fixed(1), Fixed(3, siblings=4), Fixed(2)]
TARGETS: list[Loaded] = [(dtype, *weights) for dtype in ("float32", "bfloat16") for weights in WEIGHTS]
HYBRIDS: list[Loaded] = [("float32", "int8", "int4", "qwen3_5"), ("bfloat16", None, "int8", "qwen3_5")]


@pytest.fixture(scope="module", params=TARGETS, ids=str)
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    found = coded.load(tmp_path_factory.mktemp("model"), "llama", *request.param)
    drafter: Any = found.loaded.engine.drafters["low-bit"]
    _, weights, copy = request.param
    products = drafter.draft_pass.runner.decoder.products
    bits = {product.code_format.bits if isinstance(product, NativeCodes) else None for product in products}
    assert bits == {int((copy or weights).removeprefix("int"))}
    return found


def check_foreign_ids(llm: LLM, plain: list[list[int]]) -> list[Any]:
    """Check all prompts in a batch, and two of them alone; return the outputs of the batch."""
    for index in (1, 4):
        assert_same(llm, ["retokenize"], [plain[index]], [PROMPTS[index]], GREEDY)
    return assert_same(llm, ["retokenize"] * len(PROMPTS), plain, params=GREEDY)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_greedy_ids_with_a_draft_model_of_another_tokenizer(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = coded.load_foreign(tmp_path, dtype, "int8")
    llm.loaded.engine.policy = Fixed(4)
    plain = plain_ids(llm, params=GREEDY)
    accepted, drafted = accepted_of(check_foreign_ids(llm, plain))
    assert 0.03 < accepted / drafted < 0.95
    check = functools.partial(check_foreign_ids, llm, plain)
    by_copy = defect("verified by a copy", Engine._verify, by_a_copy(4), check)
    assert_caught(by_copy, monkeypatch)


def by_a_copy(bits: int) -> Mutation:

    def copied(engine: Any, inputs: Any, draft: Any) -> tuple[Any, str, Any]:
        return engine, "target", low_bit_copy(engine.target, bits) if draft.tokens.shape[1] else engine.target

    return holding(copied)


LAWS = [
    pytest.param((load, transform, "free", drafter), marks=[pytest.mark.slow] * (transform == "as it is"))
    for load in (functools.partial(coded.tiny, *loaded) for loaded in [*TARGETS, *HYBRIDS])
    for drafter in ("draft-model", "layer-skip", "kangaroo", "low-bit", "retokenize")
    for transform in ("as it is", "cold top-k")
]
PAIRS = (
    ("low-bit", "low-bit"),
    ("kangaroo", "low-bit"),
    ("low-bit", None),
    ("draft-model", "layer-skip"),
    ("low-bit", "retokenize"),
)


def check_two_rows(
    loaded: Loaded,
    drafters: tuple[str, str | None],
    policy: Policy | None = None,
    transform: str = "cold top-k",
) -> None:
    made = coded.tiny(*loaded)
    engine = functools.partial(coded.fresh_engine, made)
    found = check_joint_law(engine, drafters, coded.after(made), policy, transform)
    assert found.accepted > 0


@pytest.mark.parametrize(
    ("drafters", "policy"), [*((pair, None) for pair in PAIRS), (PAIRS[0], RandomBudgets(2))], ids=str
)
@pytest.mark.parametrize("loaded", [*TARGETS, *HYBRIDS], ids=str)
def test_the_joint_law_of_two_rows(
    loaded: Loaded, drafters: tuple[str, str | None], policy: Policy | None
) -> None:
    check_two_rows(loaded, drafters, policy)


@pytest.mark.slow
@pytest.mark.parametrize("drafters", PAIRS, ids=str)
def test_the_joint_distribution_over_all_words(drafters: tuple[str, str | None]) -> None:
    check_two_rows(("float32", "int8", "int4"), drafters, transform="as it is")


def q_of_the_other_row(draft: Any) -> Any:
    probs = None if draft.q.probs is None else draft.q.probs.flip(0)
    return replace(draft, q=replace(draft.q, probs=probs))


# one position early in all rows but the first: the verifying pass does not write that one again
over_committed_keys = argument(2, lambda starts: [*starts[:1], *(max(0, at - 1) for at in starts[1:])])
noise_of_the_first_row = argument(0, lambda keys: replace(keys, base=keys.base[:1].expand_as(keys.base)))
DEFECTS = [
    ("committed keys overwritten", LowBit.step, over_committed_keys),
    ("noise shared by rows", NoiseKeys._hash, noise_of_the_first_row),
    ("q of the other row", speculative, argument(0, q_of_the_other_row)),
    ("padding accepted", leading, padding_kept),
    ("verified by a copy of 4 bits", Engine._verify, by_a_copy(4)),
]
BY_8_BITS = ("verified by a copy of 8 bits", Engine._verify, by_a_copy(8))  # a target of 8 bits is that copy
DEFECTIVE: list[tuple[Loaded, Any]] = [
    *((("float32", "int8", "int4"), made) for made in DEFECTS),
    *(((dtype, None, "int8"), made) for dtype in ("float32", "bfloat16") for made in (*DEFECTS, BY_8_BITS)),
]


@pytest.mark.parametrize(("loaded", "made"), DEFECTIVE, ids=[f"{own}-{made[0]}" for own, made in DEFECTIVE])
def test_a_defect_of_two_rows_is_caught(loaded: Loaded, made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(defect(*made, lambda: check_two_rows(loaded, ("low-bit", "low-bit"))), monkeypatch)
