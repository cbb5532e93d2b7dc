"""Real forwards: greedy ids, seeded ids and cache contents are the same bits for every drafter and batch."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import foredraft
from foredraft import LLM, SamplingParams, demo, loading
from foredraft.decode.policy import Fixed, Heuristic
from foredraft.decode.sequence import Sequence
from foredraft.model.layers import Linear
from foredraft.model.runner import packed
from foredraft.model.runner.graphs import Graphs
from tests.support.caches import held
from tests.support.checkpoints import FAMILIES, reference_model
from tests.support.loaded import engine_of
from tests.support.recorder import Rerun

NEW, VOCABULARY, ROWS = 64, 97, 8
LENGTHS = (1, 3, 23, 25, 70, 256, 257, 300)  # around a window of 24 and a prefill chunk of 256
GAMMAS = (1, 3, 5, 7)
GREEDY = SamplingParams(temperature=0, max_new_tokens=NEW, ignore_eos=True)
LONG = replace(GREEDY, max_new_tokens=2 * NEW)
KINDS = ("none", "draft-model", "lookup")
SEEDS = {
    "gemma4": 1,
    "gemma4-unified": 1,
    "gpt_neox": 5,
    "olmo2": 1,
    "phi": 5,
    "starcoder2": 1,
}  # where those of 0 repeat a few tokens for ever


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


# float16 runs through the same operators in every family
PAIRS = [*itertools.product(FAMILIES, ("bfloat16", "float32")), ("llama", "float16"), ("gemma3", "float16")]
# The other pairs run with -m slow. With operators they add float16, and biases of projections, which
# test_greedy_ids_without_packed_weights has; with kernels, whose bits test_kernels_passes compares for every pair,
# the other dtype of each family.
OFTEN = {
    "operators": (("llama", "float32"), ("gemma2", "bfloat16"), ("gemma3", "bfloat16")),
    "kernels": tuple(zip(FAMILIES, itertools.cycle(("bfloat16", "float32")), strict=False)),
}
BY = [
    pytest.param((*pair, by), marks=[pytest.mark.slow] * (pair not in OFTEN[by]))
    for by in OFTEN
    for pair in PAIRS
    if by == "operators" or pair[1] != "float16"
]


@pytest.fixture(scope="module", params=BY, ids="-".join)
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """Its passes by PyTorch's operators, or by the kernels where they serve."""
    family, dtype, by = request.param
    target, draft = save_pair(tmp_path_factory.mktemp(family), family)
    with pytest.MonkeyPatch.context() as patch:
        if by == "operators":
            patch.setattr(loading.runners, "unserved_because", lambda *_: "for a test")
        yield load_pair(target, draft, dtype)


def load_pair(target: Path, draft: Path, dtype: str) -> LLM:
    return foredraft.load(
        target, draft=draft, dtype=dtype, device="cpu", max_batch=ROWS, max_length=512, policy="fixed"
    )


def prompts_of(count: int, vocabulary: int = VOCABULARY, seed: int = 0) -> list[list[int]]:
    """Return random prompts with a repeated half, so that a lookup finds something."""
    dice = random.Random(seed)
    made = []
    for _, length in zip(range(count), itertools.cycle(LENGTHS), strict=False):
        half = [dice.randrange(3, vocabulary) for _ in range((length + 1) // 2)]
        made.append((half + half)[:length])
    return made


PROMPTS = prompts_of(len(LENGTHS))


@pytest.fixture(scope="module")
def plain(llm: LLM) -> list[list[int]]:
    """Each prompt alone, one token a pass."""
    return [llm.generate([p], replace(GREEDY, drafter="none"))[0].token_ids for p in PROMPTS]


def first_difference(one: list[int], other: list[int]) -> int | None:
    return next((i for i, (a, b) in enumerate(itertools.zip_longest(one, other)) if a != b), None)


def assert_same(
    llm: LLM,
    kinds: list[str],
    want: list[list[int]],
    prompts: list[list[int]] | None = None,
    params: SamplingParams = GREEDY,
) -> None:
    outputs = llm.generate(prompts or PROMPTS, [replace(params, drafter=kind) for kind in kinds])
    for index, (output, wanted, kind) in enumerate(zip(outputs, want, kinds, strict=True)):
        where = first_difference(output.token_ids, wanted)
        assert where is None, f"prompt {index} under {kind} differs from token {where} on"


@pytest.fixture(params=["padded", "gathered", "recorded"])
def way(llm: LLM, request: pytest.FixtureRequest) -> Iterator[None]:
    """Let passes compute the padding of a batch, leave it out, or replay recordings."""
    drafter: Any = engine_of(llm).drafters["draft-model"]
    target: Any = llm.loaded.runner
    if target.by_kernels and request.param != "padded":
        pytest.skip("the kernels have one way")
    for runner in (target, drafter.draft_pass.runner):
        runner.backend.gathers = request.param == "gathered"
        runner.backend.graphs = Graphs(Rerun()) if request.param == "recorded" else None
    yield
    assert target.backend.graphs is None or target.backend.graphs.capturer.replays > 0
    for runner in (target, drafter.draft_pass.runner):
        runner.backend.gathers, runner.backend.graphs = None, None


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("gamma", [pytest.param(n, marks=[pytest.mark.slow] * (n in (1, 5))) for n in GAMMAS])
def test_greedy_ids_in_a_batch(llm: LLM, plain: list[list[int]], gamma: int) -> None:
    engine_of(llm).policy = Fixed(gamma)
    assert_same(llm, [KINDS[1 + (gamma // 2 + i) % 2] for i in range(len(PROMPTS))], plain)


def test_greedy_ids_alone_and_mixed(llm: LLM, plain: list[list[int]]) -> None:
    engine_of(llm).policy = Heuristic(7)
    for index, kind in ((1, "draft-model"), (4, "lookup"), (7, "draft-model")):
        assert_same(llm, [kind], plain[index : index + 1], PROMPTS[index : index + 1])
    assert_same(llm, ["none"] * len(PROMPTS), plain)
    assert_same(llm, [KINDS[i % 3] for i in range(len(PROMPTS))], plain)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_greedy_ids_without_packed_weights(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading.runners, "unserved_because", lambda *_: "for a test")
    monkeypatch.setattr(packed, "_fault", lambda dtype: "absent")
    target, draft = save_pair(tmp_path, "qwen2")
    llm = load_pair(target, draft, dtype)
    runner = llm.loaded.runner
    assert isinstance(runner.decoder.output, Linear)
    alone = [llm.generate([p], replace(GREEDY, drafter="none"))[0].token_ids for p in PROMPTS]
    for runner.backend.gathers in (False, True):
        assert_same(llm, [KINDS[i % 3] for i in range(len(PROMPTS))], alone)


def test_the_drafts_are_neither_blind_nor_perfect(llm: LLM) -> None:
    """Or the tests above would say little."""
    engine_of(llm).policy = Fixed(3)
    for output in llm.generate(PROMPTS[3:5], replace(GREEDY, drafter="draft-model")):
        rate = output.stats.acceptance_rate
        assert rate is not None
        assert 0.1 < rate < 0.95
        assert len(output.token_ids) == NEW
        assert len(set(output.token_ids)) > 15


def test_seeded_text_with_and_without_speculation(llm: LLM) -> None:
    engine_of(llm).policy = Fixed(4)
    runner = llm.loaded.runner
    wishes = [
        SamplingParams(temperature=0.7, seed=1, max_new_tokens=48, ignore_eos=True),
        SamplingParams(temperature=1.0, top_p=0.8, seed=2, max_new_tokens=48, ignore_eos=True),
        SamplingParams(temperature=1.3, top_k=5, seed=3, max_new_tokens=48, ignore_eos=True),
        SamplingParams(temperature=0.9, min_p=0.1, seed=4, max_new_tokens=48, ignore_eos=True),
    ]
    prompts = [PROMPTS[i] for i in (1, 4, 7, 3)]
    alone = [
        llm.generate([p], replace(w, drafter="none"))[0].token_ids
        for p, w in zip(prompts, wishes, strict=True)
    ]
    for kind, runner.backend.gathers in itertools.product(KINDS, (False, True)):
        together = llm.generate(prompts, [replace(w, drafter=kind) for w in wishes])
        assert [output.token_ids for output in together] == alone
    runner.backend.gathers = None
    siblings = llm.generate([prompts[1]], replace(wishes[1], drafter="draft-model"), n=3)
    assert siblings[0].token_ids == alone[1]
    assert len({tuple(output.token_ids) for output in siblings}) == 3


def steps_of(llm: LLM, prompt: list[int], drafter: str | None, count: int) -> Iterator[Sequence]:
    """A greedy request, held after `count` new tokens or a few more: its row is still there to look at.

    With a drafter it has neighbours, without one it is alone."""
    params = replace(GREEDY, max_new_tokens=count + 20)
    drafters = (drafter,) if drafter else ()
    sequence = Sequence(-1, prompt, params, 0, drafters=drafters)
    neighbours = [Sequence(-2 - i, PROMPTS[i], params, 0, drafters=drafters) for i in (0, 2, 3) if drafter]
    for one in [*neighbours[:2], sequence, *neighbours[2:]]:
        engine_of(llm).submit(one)
    try:
        while len(sequence.new_ids) < count:
            engine_of(llm).step()
        yield sequence
    finally:
        for one in [sequence, *neighbours]:
            engine_of(llm).cancel(one)


def row_of(llm: LLM, sequence: Sequence, length: int) -> torch.Tensor:
    """[layers, k|v, heads, length, D]"""
    cache = engine_of(llm).cache
    assert cache.lengths[sequence.row] == len(sequence.tokens) - 1
    return held(cache, sequence.row, length)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("prompt", [PROMPTS[1], PROMPTS[4], PROMPTS[7]], ids=len)
@pytest.mark.parametrize("drafter", KINDS[1:])
def test_the_cache_after_rollbacks(llm: LLM, drafter: str, prompt: list[int]) -> None:
    """The very bits that plain decoding leaves behind, and a fresh prefill of the text within rounding."""
    engine_of(llm).policy = Fixed(5)
    count = 40
    length = len(prompt) + count - 1
    for sequence in steps_of(llm, prompt, drafter, count):
        tokens, cached = list(sequence.tokens), row_of(llm, sequence, length)
        assert any(turn.accepted < turn.drafted for turn in sequence.rounds)
    for sequence in steps_of(llm, prompt, None, count):
        assert sequence.tokens[: length + 1] == tokens[: length + 1]
        assert torch.equal(row_of(llm, sequence, length), cached)
    if engine_of(llm).cache.dtype == torch.float32:
        for sequence in steps_of(llm, tokens[: length + 1], None, 1):
            torch.testing.assert_close(row_of(llm, sequence, length), cached, rtol=1e-3, atol=1e-4)


def test_a_sibling_that_copied_the_prompt_gives_the_same_text(llm: LLM, plain: list[list[int]]) -> None:
    engine_of(llm).policy = Fixed(3)
    for index in (4, 7):
        outputs = llm.generate([PROMPTS[index]], replace(GREEDY, max_new_tokens=32), n=ROWS + 3)
        assert [output.token_ids for output in outputs] == [plain[index][:32]] * (ROWS + 3)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_two_hundred_prompts(llm: LLM) -> None:
    prompts = prompts_of(200, seed=1)
    want = [output.token_ids for output in llm.generate(prompts, replace(LONG, drafter="none"))]
    for gamma in GAMMAS:
        engine_of(llm).policy = Fixed(gamma)
        assert_same(llm, [KINDS[(gamma + i) % 3] for i in range(200)], want, prompts, LONG)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_two_hundred_prompts_of_the_demo(dtype: str) -> None:
    if not demo.target_path().is_dir():
        pytest.skip("the demo pair is not in this tree")
    llm = foredraft.load(dtype=dtype, device="cpu", max_batch=ROWS, max_length=512, policy="fixed")
    prompts = prompts_of(200, llm.loaded.spec.vocab_size, seed=2)
    want = [output.token_ids for output in llm.generate(prompts, replace(LONG, drafter="none"))]
    for gamma in GAMMAS:
        engine_of(llm).policy = Fixed(gamma)
        assert_same(llm, [KINDS[1 + (gamma // 2 + i) % 2] for i in range(200)], want, prompts, LONG)
