"""Real forwards: greedy ids, seeded ids and cache contents are the same bits for every drafter and batch."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
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
from foredraft.model.runner import compiled
from foredraft.model.runner.graphs import Graphs
from tests.support.caches import held
from tests.support.checkpoints import FAMILIES, reference_model
from tests.support.loaded import engine_of
from tests.support.recorder import Rerun

Ids = list[list[int]]
NEW, VOCABULARY, ROWS = 64, 97, 8
LOADED: dict[str, Any] = {"device": "cpu", "max_batch": ROWS, "max_length": 512, "policy": "fixed"}
LENGTHS = (1, 3, 23, 25, 70, 256, 257, 300)  # around a window of 24 and a prefill chunk of 256
GAMMAS = (1, 3, 5, 7)
GREEDY = SamplingParams(temperature=0, max_new_tokens=NEW, ignore_eos=True)
KINDS = ("none", "draft-model", "lookup")
# where the texts of seed 0 repeat a few tokens for ever
SEEDS = {"gemma4": 1, "gemma4-unified": 1, "gpt_neox": 5, "olmo2": 1, "phi": 5, "starcoder2": 1}


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
# test_greedy_ids_of_unpacked_weights has; with kernels, whose bits test_kernels_passes compares for every pair,
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


@contextmanager
def loading_by(by: str) -> Iterator[None]:
    """Let models that are loaded compute by PyTorch's operators, or by the kernels where they serve."""
    with pytest.MonkeyPatch.context() as patch:
        if by == "operators":
            patch.setattr(loading.runners, "unserved_because", lambda *_: "for a test")
        yield


@pytest.fixture(scope="module", params=BY, ids="-".join)
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    family, dtype, by = request.param
    target, draft = save_pair(tmp_path_factory.mktemp(family), family)
    with loading_by(by):
        return load_pair(target, draft, dtype)


def load_pair(target: Path, draft: Path, dtype: str, **more: Any) -> LLM:
    return foredraft.load(target, draft=draft, dtype=dtype, **LOADED, **more)


def prompts_of(count: int, vocabulary: int = VOCABULARY, seed: int = 0) -> Ids:
    """Return random prompts with a repeated half, so that a lookup finds something."""
    dice = random.Random(seed)
    made = []
    for _, length in zip(range(count), itertools.cycle(LENGTHS), strict=False):
        half = [dice.randrange(3, vocabulary) for _ in range((length + 1) // 2)]
        made.append((half + half)[:length])
    return made


PROMPTS = prompts_of(len(LENGTHS))


def plain_ids(llm: LLM, prompts: Ids = PROMPTS, params: SamplingParams = GREEDY) -> Ids:
    """Each prompt alone, one token a pass."""
    return [llm.generate([p], replace(params, drafter="none"))[0].token_ids for p in prompts]


def accepted_of(outputs: list[Any]) -> tuple[int, int]:
    return sum(output.stats.accepted for output in outputs), sum(output.stats.drafted for output in outputs)


def assert_same(
    llm: LLM, kinds: list[str], want: Ids, prompts: Ids | None = None, params: SamplingParams = GREEDY
) -> None:
    outputs = llm.generate(prompts or PROMPTS, [replace(params, drafter=kind) for kind in kinds])
    for index, (output, wanted, kind) in enumerate(zip(outputs, want, kinds, strict=True)):
        assert output.token_ids == wanted, f"prompt {index} under {kind}"


@contextmanager
def computed(way: str, *runners: Any) -> Iterator[None]:
    """Let passes compute the padding of a batch, leave it out ("gathered"), or replay recordings ("recorded")."""
    for runner in runners:
        runner.backend.gathers = way == "gathered"
        runner.backend.graphs = Graphs(Rerun()) if way == "recorded" else None
    yield
    assert way != "recorded" or runners[0].backend.graphs.capturer.replays > 0
    for runner in runners:
        runner.backend.gathers, runner.backend.graphs = None, None


def runners_of(llm: LLM) -> list[Any]:
    drafter: Any = engine_of(llm).drafters["draft-model"]
    return [llm.loaded.runner, drafter.draft_pass.runner]


@pytest.fixture(params=["padded", "gathered", "recorded"])
def way(llm: LLM, request: pytest.FixtureRequest) -> Iterator[None]:
    runners = runners_of(llm)
    if runners[0].by_kernels and request.param != "padded":
        pytest.skip("the kernels have one way")
    with computed(request.param, *runners):
        yield


@pytest.mark.heavy
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("gamma", [pytest.param(n, marks=[pytest.mark.slow] * (n in (1, 5))) for n in GAMMAS])
def test_greedy_ids_in_a_batch(llm: LLM, plain: Ids, gamma: int) -> None:
    engine_of(llm).policy = Fixed(gamma)
    assert_same(llm, [KINDS[1 + (gamma // 2 + i) % 2] for i in range(len(PROMPTS))], plain)


def test_greedy_ids_alone_and_mixed(llm: LLM, plain: Ids) -> None:
    engine_of(llm).policy = Heuristic(7)
    for index, kind in ((1, "draft-model"), (4, "lookup"), (7, "draft-model")):
        assert_same(llm, [kind], plain[index : index + 1], PROMPTS[index : index + 1])
    assert_same(llm, ["none"] * len(PROMPTS), plain)
    assert_same(llm, [KINDS[i % 3] for i in range(len(PROMPTS))], plain)


@pytest.mark.heavy
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_greedy_ids_of_unpacked_weights(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_fault", lambda dtype: "absent")
    with loading_by("operators"):
        llm = load_pair(*save_pair(tmp_path, "qwen2"), dtype)
    runner = llm.loaded.runner
    assert type(runner.decoder.output) is Linear
    alone = plain_ids(llm)
    for runner.backend.gathers in (False, True):
        assert_same(llm, [KINDS[i % 3] for i in range(len(PROMPTS))], alone)


def test_the_drafts_are_neither_blind_nor_perfect(llm: LLM) -> None:
    engine_of(llm).policy = Fixed(3)
    for output in llm.generate(PROMPTS[3:5], replace(GREEDY, drafter="draft-model")):
        rate = output.stats.acceptance_rate
        assert rate is not None
        assert 0.1 < rate < 0.95
        assert len(output.token_ids) == NEW
        assert len(set(output.token_ids)) > 15


@pytest.mark.heavy
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
    alone = [plain_ids(llm, [p], w)[0] for p, w in zip(prompts, wishes, strict=True)]
    for kind, runner.backend.gathers in itertools.product(KINDS, (False, True)):
        together = llm.generate(prompts, [replace(w, drafter=kind) for w in wishes])
        assert [output.token_ids for output in together] == alone
    runner.backend.gathers = None
    choices = llm.generate([prompts[1]], replace(wishes[1], drafter="draft-model"), n=3)
    assert choices[0].token_ids == alone[1]
    assert len({tuple(output.token_ids) for output in choices}) == 3


def steps_of(
    llm: LLM, prompt: list[int], drafter: str | None, count: int, batch: Ids | None = None
) -> Iterator[Sequence]:
    """A greedy request, beside others if it has a drafter, held after `count` new tokens or a few more."""
    params = replace(GREEDY, max_new_tokens=count + 20)
    drafters = (drafter,) if drafter else ()
    first, *others = [PROMPTS[i] for i in (0, 2, 3)] if batch is None else batch
    prompts = [first, prompt, *others] if drafter else [prompt]
    sequences = [Sequence(-1 - i, text, params, 0, drafters=drafters) for i, text in enumerate(prompts)]
    own = sequences[len(prompts) > 1]
    for one in sequences:
        engine_of(llm).submit(one)
    try:
        while len(own.new_ids) < count:
            engine_of(llm).step()
        yield own
    finally:
        for one in sequences:
            engine_of(llm).cancel(one)


def row_of(llm: LLM, sequence: Sequence, length: int) -> torch.Tensor:
    """[layers, k|v, heads, length, D]"""
    cache = engine_of(llm).cache
    assert cache.lengths[sequence.row] == len(sequence.tokens) - 1
    return held(cache, sequence.row, length)


def check_cache(llm: LLM, drafter: str, prompt: list[int], count: int) -> Sequence:
    """Check that rounds leave the very bits in the cache that plain decoding leaves there; return the drafted text."""
    length = len(prompt) + count - 1
    for drafted in steps_of(llm, prompt, drafter, count):
        tokens, cached = list(drafted.tokens), row_of(llm, drafted, length)
    for sequence in steps_of(llm, prompt, None, count):
        assert sequence.tokens[: length + 1] == tokens[: length + 1]
        assert torch.equal(row_of(llm, sequence, length), cached)
    if engine_of(llm).cache.dtype == torch.float32:
        for sequence in steps_of(llm, tokens[: length + 1], None, 1):
            torch.testing.assert_close(row_of(llm, sequence, length), cached, rtol=1e-3, atol=1e-4)
    return drafted


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("prompt", [PROMPTS[1], PROMPTS[4], PROMPTS[7]], ids=len)
@pytest.mark.parametrize("drafter", KINDS[1:])
def test_the_cache_after_rollbacks(llm: LLM, drafter: str, prompt: list[int]) -> None:
    engine_of(llm).policy = Fixed(5)
    assert any(turn.accepted < turn.drafted for turn in check_cache(llm, drafter, prompt, 40).rounds)


def test_a_choice_that_copied_the_prompt_gives_the_same_text(llm: LLM, plain: Ids) -> None:
    engine_of(llm).policy = Fixed(3)
    for index in (4, 7):
        outputs = llm.generate([PROMPTS[index]], replace(GREEDY, max_new_tokens=32), n=ROWS + 3)
        assert [output.token_ids for output in outputs] == [plain[index][:32]] * (ROWS + 3)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_two_hundred_prompts_of_the_demo(dtype: str) -> None:
    if not demo.target_path().is_dir():
        pytest.skip("the demo pair is not in this tree")
    llm = foredraft.load(dtype=dtype, **LOADED)
    prompts = prompts_of(200, llm.loaded.spec.vocab_size, seed=2)
    params = replace(GREEDY, max_new_tokens=2 * NEW)
    want = [output.token_ids for output in llm.generate(prompts, replace(params, drafter="none"))]
    for gamma in GAMMAS:
        engine_of(llm).policy = Fixed(gamma)
        each = [KINDS[1 + (gamma // 2 + i) % 2] for i in range(len(prompts))]
        assert_same(llm, each, want, prompts, params)
