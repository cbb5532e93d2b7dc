"""Published heads in real forwards, random ones, over so few words that their drafts are accepted at times."""

from __future__ import annotations

import functools
import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from foredraft import LLM, SamplingParams
from foredraft.decode.policy import Confidence, Fixed, Heuristic, Policy
from foredraft.drafters.eagle3 import Eagle3
from foredraft.drafters.medusa import Medusa
from foredraft.kernels.compilation import library
from tests.exactness import matrix as heads
from tests.exactness import test_conformance as conformance
from tests.exactness.matrix import *  # noqa: F403
from tests.exactness.matrix import NowAndThen, prompts_of
from tests.exactness.matrix import test_the_exact_distribution as test_the_exact_distribution
from tests.exactness.test_enumeration import check_joint_law
from tests.parity.test_heads import V, check_parity, load
from tests.support import coded
from tests.support.compiling import Defects
from tests.support.heads import FORMATS
from tests.support.mutation import assert_caught, defect

NEW = 40
GREEDY = SamplingParams(temperature=0, max_new_tokens=NEW, ignore_eos=True)
PROMPTS = prompts_of(8, V)
MADE = [
    *itertools.product(("safeailab", "qwen3"), ("float32", "bfloat16"), ("operators", "kernels")),
    ("specforge", "float32", "kernels"),
    ("eagle-1", "bfloat16", "kernels"),
    ("fasterdecoding", "float32", "operators"),
    ("vllm", "bfloat16", "kernels"),
    ("p-eagle speculators", "bfloat16", "kernels"),
    ("p-eagle specforge", "float32", "operators"),
    ("block z-lab", "bfloat16", "kernels"),
    ("block dflash 2", "float32", "operators"),
    ("block gated", "float32", "operators"),
]
POLICIES = [Fixed(1), Fixed(4), Heuristic(7), Confidence(6, threshold=0.2), NowAndThen(3)]


@pytest.fixture(scope="module", params=MADE, ids="-".join)
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    format, dtype, by = request.param
    return load(tmp_path_factory.mktemp("model"), format, by, dtype, max_batch=8)


def kinds_of(llm: LLM) -> list[str]:
    return [heads.drafter_of(llm).name, "lookup", "none"]


@pytest.mark.parametrize("policy", [Fixed(1), Fixed(4), NowAndThen(3)], ids=str)
def test_the_heads_caches_are_those_of_a_fresh_prefill(llm: LLM, policy: Policy) -> None:
    if llm.loaded.engine.cache.dtype == torch.bfloat16 or isinstance(heads.drafter_of(llm), Medusa):
        pytest.skip("compared in float32, of heads with keys and values")
    heads.check_caches(llm, heads.drafter_of(llm).name, policy, [PROMPTS[1], PROMPTS[4]], NEW)


@pytest.mark.heavy
def test_a_head_of_nan_leaves_the_text_as_it_is(llm: LLM, plain: list[list[int]]) -> None:
    drafter = heads.drafter_of(llm)
    weight = drafter.head.heads[0].blocks[0].bias if isinstance(drafter, Medusa) else drafter.head.norm
    if weight is None:
        pytest.skip("its blocks have no bias, its end no norm")
    heads.check_nan_weights(llm, getattr(weight, "weight", weight), GREEDY, PROMPTS[2:4], plain[2:4])


OFTEN = (
    "specforge",
    "whole",
    "p-eagle specforge",
    "eagle-1",
    "fasterdecoding",
    "vllm",
    "block z-lab",
    "block gated",
)
OFTEN += ("block dflash 2",)
CONSTRAINED = {
    "block z-lab": "no repeat",
    "specforge": "late ban",
    "vllm": "late ban",
    "block gated": "late ban",
    "p-eagle specforge": "late ban",
    "block dflash 2": "no repeat",
}
SELDOM = ("specforge", "whole", "block speculators", "block rnn")
LAWS = [
    *((functools.partial(heads.tiny, format), "cold top-k") for format in OFTEN),
    *((functools.partial(heads.tiny, format), "cold top-k", under) for format, under in CONSTRAINED.items()),
    *(
        pytest.param((functools.partial(heads.tiny, format), "as it is"), marks=pytest.mark.slow)
        for format in SELDOM
    ),
]


@pytest.mark.heavy
@pytest.mark.parametrize("drafters", [("own", "own"), ("own", None), ("lookup", "own")], ids=str)
@pytest.mark.parametrize("format", ["specforge", "block gated"])
def test_the_joint_distribution_of_two_rows(format: str, drafters: tuple[str | None, ...]) -> None:
    made = heads.tiny(format)
    names = [heads.drafter_of(made).name if name == "own" else name for name in drafters]
    check_joint_law(functools.partial(coded.fresh_engine, made), names, coded.after(made))


@pytest.fixture
def near(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare q but for rounding: the passes of a head have any shape."""

    def same(one: Any, other: Any) -> None:
        assert one.lengths.tolist() == other.lengths.tolist()
        assert one.tokens.tolist() == other.tokens.tolist()
        torch.testing.assert_close(one.q.dense(coded.WORDS), other.q.dense(coded.WORDS), rtol=1e-3, atol=1e-5)

    monkeypatch.setattr(conformance, "same", same)


CHECKS: dict[str, Callable[[conformance.World, str], None]] = {
    "rewound": conformance.test_a_rewound_drafter_equals_a_fresh_one,
    "rejections": conformance.test_a_rejection_at_every_place_leaves_no_trace,
    "plain steps": conformance.test_a_drafter_catches_up_after_plain_steps,
}


@pytest.mark.usefixtures("near")
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize(
    "format",
    ["specforge", "whole", "p-eagle specforge", "eagle-1", "fasterdecoding", "block z-lab", "block gated"],
)
def test_a_rewound_head_equals_a_fresh_one(format: str, check: str) -> None:
    world = conformance.World(functools.partial(heads.tiny, format))
    CHECKS[check](world, heads.drafter_of(heads.tiny(format)).name)


def test_states_of_the_wrong_positions_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def check() -> None:
        world = conformance.World(functools.partial(heads.tiny, "fasterdecoding"))
        conformance.test_a_rejection_at_every_place_leaves_no_trace(world, "medusa")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conformance, "GAMMA", 2)
        check()
        early = conformance.states_of_the_position_before
        assert_caught(defect("a state early", Medusa.observe, early, check), monkeypatch)


NEEDS_KERNELS = pytest.mark.skipif(library() is None, reason="needs the C kernels")
EAGLES = [name for name, form in FORMATS.items() if form["of"] in ("eagle", "eagle3")]


def check_fused(format: str, dtype: str = "float32") -> None:
    """Check the drafts of texts, whose rows have read less and more than the pending token's pair."""
    unread, reads = Eagle3._unread, set[int]()

    def noted(self: Eagle3, *given: Any) -> Any:
        found = unread(self, *given)
        reads.update(map(len, found[0]))
        return found

    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as place:
        patch.setattr(Eagle3, "_unread", noted)
        llm = load(Path(place), format, "kernels", dtype)
        heads.check_fused_drafts(llm, FORMATS[format]["of"], prompts_of(4, V))
    assert len(reads) > 2


@NEEDS_KERNELS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("format", EAGLES)
def test_fused_drafts_are_those_of_single_steps(format: str, dtype: str) -> None:
    check_fused(format, dtype)


parity = functools.partial(functools.partial, check_parity)
fused = functools.partial(functools.partial, check_fused)
# name: what stands in the sources and what takes its place, and a check
DEFECTS: dict[str, tuple[str, str, Callable[[], None]]] = {
    "the state as embedding": ("(const E *)p->inputs + c * n, to", "x + c * n, to", parity("qwen3")),
    "the empty slot attended": ("seen &= key > 0;", "seen &= key >= 0;", parity("safeailab")),
    "the residual normed": ("m->residual && c <", "c <", parity("safeailab")),
    "the raw state recurs": ("if (m->recurs)", "if (0)", fused("qwen3")),
    "the state of an ended row": ("memmove(x + left * hidden", "memmove(x + g * hidden", fused("safeailab")),
    "draft tokens in their own order": ("full[draft_vocab[i]] =", "full[i] =", fused("safeailab")),
}


PLANTED = Defects(edit for *edit, _ in DEFECTS.values())


@NEEDS_KERNELS
@pytest.mark.heavy
@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    *edit, check = DEFECTS[name]
    PLANTED.assert_caught(check, edit, monkeypatch)
