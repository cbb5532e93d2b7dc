"""Kangaroo, in real forwards: the bits of plain decoding, the distribution, and an adapter's cache that never lags.

The adapters are the target's last layer, spoilt: at the depth of that layer, and without noise, q is p.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
import torch

import foredraft
from foredraft import LLM, SamplingParams, loading
from foredraft.decode.policy import (
    AdaptiveExit,
    Auto,
    Confidence,
    CostTable,
    Fallback,
    Fixed,
    Heuristic,
    Policy,
)
from foredraft.decode.prefix_cache import PrefixCache
from foredraft.decode.sequence import Sequence
from foredraft.drafters import waiting_states
from foredraft.drafters.adapter import load_adapter
from foredraft.drafters.adapter_files import read_adapter
from foredraft.drafters.kangaroo import Kangaroo
from foredraft.drafters.layer_skip import LayerSkip
from foredraft.drafters.skips import Skips
from foredraft.model.runner import Resume
from tests.exactness.head_checks import check_fused_drafts
from tests.exactness.test_bits import PROMPTS, VOCABULARY, steps_of
from tests.support.adapters import save_adapter
from tests.support.caches import held
from tests.support.checkpoints import FAMILIES, reference_model
from tests.support.chi import assert_distributed
from tests.support.distributions import outputs
from tests.support.loaded import engine_of
from tests.support.nan_weights import check_nan_weights

NEW, ROWS = 40, 8
GREEDY = SamplingParams(temperature=0, max_new_tokens=NEW, ignore_eos=True)
BY = ("operators", "kernels")
HALF = list(range(0, VOCABULARY, 2))
ADAPTERS: dict[str, dict[str, Any]] = {
    "perfect": {"noise": 0.0},
    "good": {"noise": 0.3},
    "attention": {"noise": 0.3, "kind": "attention"},
    "early": {"noise": 0.5, "depth": 1},
    "half": {"noise": 0.1, "vocabulary": HALF},
}
POLICIES = (
    Fixed(4),
    Heuristic(7),
    Confidence(6, threshold=0.3),
    AdaptiveExit(6, target=0.5, first=0.3, epsilon=0.05, beta1=0.5, beta2=0.9),
    Fallback(6, threshold=0.2),
)


def load(folder: Path, family: str, dtype: str, by: str, **more: Any) -> LLM:
    """A model with one drafter for every adapter, and a lookup."""
    model = reference_model(family, **{"vocab_size": VOCABULARY, "tie_word_embeddings": False, **more})
    model.save_pretrained(folder / "target")
    for name, options in ADAPTERS.items():
        save_adapter(folder / "target", folder / name, **options)
    with pytest.MonkeyPatch.context() as patch:
        if by == "operators":
            patch.setattr(loading.runners, "unserved_because", lambda *_: "for a test")
        llm = foredraft.load(
            folder / "target", drafter="kangaroo", adapter=folder / "perfect", dtype=dtype, device="cpu",
            max_batch=ROWS, max_length=512, policy="fixed",
        )  # fmt: skip
    engine: Any = engine_of(llm)
    assert engine.target.by_kernels == (by == "kernels")
    for name in ADAPTERS:
        adapter = load_adapter(folder / name, read_adapter(folder / name), engine.target)
        add(llm, Kangaroo(engine.target, engine.cache, adapter), name)
    return llm


def add(llm: LLM, drafter: Any, name: str) -> None:
    """Add a drafter, whose caches get rows."""
    drafter.name = name
    engine_of(llm).drafters[name] = drafter
    engine_of(llm).rows.caches = list(dict.fromkeys([*engine_of(llm).rows.caches, *drafter.caches]))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            (family, dtype, by), marks=[pytest.mark.slow] * ((dtype, by) == ("float32", "operators"))
        )
        for family in ("llama", "gemma2")
        for dtype in ("bfloat16", "float32")
        for by in BY
    ],
    ids="-".join,
)
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return load(tmp_path_factory.mktemp("model"), *request.param)


def plainly(llm: LLM) -> list[list[int]]:
    """Each prompt alone, one token a pass."""
    return [llm.generate([p], replace(GREEDY, drafter="none"))[0].token_ids for p in PROMPTS]


@pytest.fixture(scope="module")
def plain(llm: LLM) -> list[list[int]]:
    return plainly(llm)


def assert_plain(llm: LLM, kinds: list[str], want: list[list[int]]) -> None:
    found = llm.generate(PROMPTS, [replace(GREEDY, drafter=kind) for kind in kinds])
    for index, (output, wanted, kind) in enumerate(zip(found, want, kinds, strict=True)):
        assert output.token_ids == wanted, f"prompt {index} under {kind}"


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_greedy_ids_in_a_batch_of_all_adapters(llm: LLM, plain: list[list[int]], policy: Policy) -> None:
    """A lookup, plain steps and an early exit, whose depth is another, are among them."""
    add(llm, LayerSkip(llm.loaded.runner, engine_of(llm).cache, Skips(exit=2)), "exit")  # type: ignore[arg-type]
    engine_of(llm).policy = policy
    others = [] if policy.stops_by_content else ["lookup"]
    for shift in (0, 3):
        kinds = list(islice(cycle([*ADAPTERS, "exit", *others, "none"]), shift, shift + len(PROMPTS)))
        assert_plain(llm, kinds, plain)


def test_greedy_ids_under_the_cost_model(llm: LLM, plain: list[list[int]]) -> None:
    """It chooses among the adapters by costs that make all of them pay at times."""
    engine_of(llm).policy = auto = Auto(6)
    steps = {name: {1: (0.1, 0.1), ROWS: (0.1, 0.1)} for name in engine_of(llm).drafters}
    auto.use(CostTable({1: {1: 1.0, 7: 1.1}, ROWS: {ROWS: 1.0, 7 * ROWS: 1.1}}, steps, {}))
    assert_plain(llm, ["auto"] * len(PROMPTS), plain)


@pytest.mark.parametrize("name", ADAPTERS)
def test_greedy_ids_alone(llm: LLM, plain: list[list[int]], name: str) -> None:
    engine_of(llm).policy = Heuristic(7)
    for prompt, want in zip(PROMPTS[2:5], plain[2:5], strict=True):
        [alone] = llm.generate([prompt], replace(GREEDY, drafter=name))
        assert alone.token_ids == want
        assert alone.stats.drafted > 0


@pytest.mark.parametrize(
    ("family", "by"),
    [
        pytest.param(family, by, marks=[pytest.mark.slow] * (family.startswith("gemma4") and by != "kernels"))
        for family in FAMILIES
        for by in BY
    ],
)
def test_every_family(family: str, by: str, tmp_path: Path) -> None:
    llm = load(tmp_path, family, "float32", by)
    want = plainly(llm)
    engine_of(llm).policy = Fixed(4)
    for shift in (0, 2):
        assert_plain(llm, list(islice(cycle(ADAPTERS), shift, shift + len(PROMPTS))), want)
    if llm.loaded.spec.windows[-1] is None:  # an adapter has no window
        for output in llm.generate(PROMPTS[:5], replace(GREEDY, drafter="perfect")):
            assert output.stats.accepted == output.stats.drafted > 0


@pytest.mark.parametrize("name", ["good", "half"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_fused_drafts_are_those_of_single_steps(family: str, name: str, tmp_path: Path) -> None:
    check_fused_drafts(load(tmp_path, family, "float32", "kernels"), name, PROMPTS[:4])


@pytest.mark.parametrize("name", ["good", "half"])
def test_a_seed_gives_the_text_of_plain_decoding(llm: LLM, name: str) -> None:
    engine_of(llm).policy = Fixed(4)
    params = [SamplingParams(seed=n, max_new_tokens=NEW, temperature=0.7) for n in range(len(PROMPTS))]
    want = llm.generate(PROMPTS, [replace(each, drafter="none") for each in params])
    found = llm.generate(PROMPTS, [replace(each, drafter=name) for each in params])
    assert [output.token_ids for output in found] == [output.token_ids for output in want]
    assert sum(output.stats.accepted for output in found) > NEW


@functools.cache
def tiny(by: str) -> tuple[LLM, Any]:
    """A target of few words, and the model of transformers with its weights."""
    words = {"vocab_size": 5, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setitem(ADAPTERS, "half", {"noise": 0.3, "vocabulary": [0, 2, 3]})
        made = load(Path(folder), "llama", "float32", by, **words, num_hidden_layers=2)
    return made, reference_model("llama", **words, tie_word_embeddings=False, num_hidden_layers=2)


def check_joint(by: str, name: str, **options: Any) -> None:
    """Check the joint distribution of three sampled tokens."""
    made, model = tiny(by)
    engine_of(made).policy = Fixed(3)
    params = SamplingParams(
        max_new_tokens=5, drafter=name, seed=3, acceptance="speculative", ignore_eos=True, **options
    )
    samples = made.generate([[1, 0]], params, n=3000)

    @torch.inference_mode()
    def after(context: list[int]) -> list[float]:
        logits: list[float] = model(torch.tensor([context]), use_cache=False).logits[0, -1].tolist()
        return logits

    drafted = sum(sample.stats.drafted for sample in samples)
    assert 0.1 * drafted < sum(sample.stats.accepted for sample in samples) < 0.95 * drafted
    want = outputs(after, [1, 0], params.replace(drafter=None, seed=None), limit=3)
    assert_distributed([sample.token_ids[:3] for sample in samples], want, name)


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize(
    ("name", "options"), [("good", {}), ("half", {"temperature": 0.8}), ("early", {"top_k": 3})]
)
def test_the_joint_distribution_of_three_tokens(by: str, name: str, options: dict[str, Any]) -> None:
    check_joint(by, name, **options)


def check_resumed(llm: LLM) -> None:
    """Check that no verifying pass runs the first layers on what a step read, nor on anything committed."""
    engine_of(llm).policy = Fixed(3)
    seen: list[tuple[Resume | None, list[int]]] = []
    forward = llm.loaded.runner.forward

    def spy(*args: Any, resume: Resume | None = None, counts: Any = None, **more: Any) -> Any:
        seen.append((resume, list(counts)))
        return forward(*args, resume=resume, counts=counts, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.loaded.runner, "forward", spy)
        found = llm.generate(PROMPTS[:3], replace(GREEDY, drafter="early"))
    assert sum(resume.known[row] for resume, _ in seen if resume for row in range(len(resume.known))) == sum(
        output.stats.drafted for output in found
    )
    for resume, counts in seen:
        known = [0] * len(counts) if resume is None else resume.known
        assert all(count - n == min(count, 1) for count, n in zip(counts, known, strict=True))


def test_the_verifying_pass_resumes_from_the_drafts_states(llm: LLM) -> None:
    check_resumed(llm)


def test_resuming_changes_nothing(llm: LLM, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits of a resumed pass are those of a full one, to the bit."""
    engine_of(llm).policy = Fixed(4)
    target = llm.loaded.runner
    forward, compared = target.forward, 0

    def both(cache: Any, tokens: Any, starts: Any, *, resume: Resume | None = None, **more: Any) -> Any:
        nonlocal compared
        made = forward(cache, tokens, starts, resume=resume, **more)
        if resume is not None:
            whole = forward(cache, tokens, starts, **more)
            for row, count in enumerate(more["counts"]):
                assert torch.equal(made.logits[row, :count], whole.logits[row, :count])
                compared += count
        return made

    monkeypatch.setattr(target, "forward", both)
    assert_plain(llm, ["good"] * len(PROMPTS), plain)
    assert compared > len(PROMPTS) * NEW


# --- the adapter's cache ------------------------------------------------------------------------------------


def adapter_row(llm: LLM, name: str, sequence: Sequence) -> torch.Tensor:
    """Return the adapter's keys and values of all committed positions, [1, k|v, heads, length, D]."""
    drafter: Any = engine_of(llm).drafters[name]
    drafter.settle(sequence)
    length = len(sequence.tokens) - 1
    assert drafter.cache.lengths[sequence.row] == length
    return held(drafter.cache, sequence.row, length)


def check_cache(llm: LLM, name: str, policy: Fixed) -> None:
    """Check it against one that a fresh prefill of the same text leaves behind."""
    for row in range(ROWS):  # keys of an earlier text could stand in for missing ones
        for cache in engine_of(llm).rows.caches:
            cache.zero_row(row)
    engine_of(llm).policy = policy
    for prompt in (PROMPTS[1], PROMPTS[4], PROMPTS[7]):
        for sequence in steps_of(llm, prompt, name, NEW):
            text, grown = list(sequence.tokens), adapter_row(llm, name, sequence)
            rounds = list(sequence.rounds)
        for sequence in steps_of(llm, text, name, 1):
            fresh = adapter_row(llm, name, sequence)[:, :, :, : len(text) - 1]
        torch.testing.assert_close(grown, fresh, rtol=2e-3, atol=2e-4)
        assert any(turn.accepted < turn.drafted for turn in rounds)
        assert policy.max_draft > 1 or any(turn.accepted == turn.drafted for turn in rounds)


@pytest.mark.parametrize("name", ["good", "early", "attention"])
@pytest.mark.parametrize("policy", [Fixed(1), Fixed(4)], ids=["1", "4"])
def test_the_adapters_cache_is_that_of_a_fresh_prefill(llm: LLM, name: str, policy: Fixed) -> None:
    if engine_of(llm).cache.dtype == torch.bfloat16:
        pytest.skip("compared in float32")
    check_cache(llm, name, policy)


WAITING = 64  # states that wait, at most: so few that texts here pass it more than once


@pytest.fixture(autouse=True)
def few_states_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_states, "MAX_WAITING", WAITING)


class NowAndThen(Fixed):
    """Drafts after long stretches of plain steps."""

    def budget(self, sequence: Sequence) -> int:
        return self.max_draft if len(sequence.tokens) % (WAITING + 9) < 3 else 0


def stretches(by: str) -> Iterator[tuple[LLM, list[int]]]:
    with tempfile.TemporaryDirectory() as folder:
        yield load(Path(folder), "llama", "float32", by), PROMPTS[4]


@pytest.mark.parametrize("by", BY)
def test_plain_steps_and_prompts_are_read_from_the_targets_states(by: str) -> None:
    """A perfect adapter drafts perfectly whenever it is asked, so it lacks nothing."""
    for llm, prompt in stretches(by):
        engine_of(llm).policy = NowAndThen(4)
        params = replace(GREEDY, drafter="perfect", max_new_tokens=190)
        outputs = llm.generate([prompt, PROMPTS[6], PROMPTS[2]], params)
        for output in outputs:
            assert output.stats.accepted == output.stats.drafted >= 8


def test_siblings_share_the_prompts_states(llm: LLM) -> None:
    engine_of(llm).policy = Fixed(4)
    for output in llm.generate([PROMPTS[4]], replace(GREEDY, drafter="perfect", temperature=0.0), n=4):
        assert output.stats.accepted == output.stats.drafted > 0


def test_a_parked_row_comes_back_with_all_that_was_read(llm: LLM, plain: list[list[int]]) -> None:
    """More requests than rows: the paused one gives its row away, with states that wait."""
    engine_of(llm).policy = NowAndThen(4)
    engine = engine_of(llm)
    params = replace(GREEDY, drafter="perfect", max_new_tokens=230)
    paused = Sequence(-1, PROMPTS[4], params, 0, drafters=("perfect",))
    engine.submit(paused)
    while len(paused.new_ids) < 20:
        engine.step()
    engine.pause(paused)
    others = [Sequence(-2 - n, PROMPTS[n % 5], GREEDY, 0, drafters=()) for n in range(ROWS)]
    for other in others:
        engine.submit(other)
    while any(other.finish is None for other in others):
        engine.step()
        if engine.rows.sequences and all(s is not paused for s in engine.rows.sequences):
            parked = True
    assert parked
    engine.resume(paused)
    while paused.finish is None:
        engine.step()
    assert paused.new_ids[:NEW] == plain[4]
    drafted = [turn for turn in paused.rounds if turn.drafted]
    assert len(drafted) > 2 and all(turn.accepted == turn.drafted for turn in drafted)


def test_a_prefix_is_restored_with_the_adapters_part_of_it(llm: LLM) -> None:
    """A beginning that was kept without it is read again; then it is there."""
    engine_of(llm).policy = Fixed(4)
    engine_of(llm).prefix_cache = cache = PrefixCache(2**30)
    try:
        prompt = PROMPTS[7]
        hits = []
        for drafter in ("none", "perfect", "perfect", "none"):
            before = cache.hits
            [output] = llm.generate([prompt], replace(GREEDY, drafter=drafter))
            hits.append(cache.hits - before)
            assert output.stats.accepted == output.stats.drafted
        assert hits == [0, 0, 256, 256]
    finally:
        engine_of(llm).prefix_cache = None


def check_rollback(llm: LLM, plain: list[list[int]]) -> None:
    """Check that it drafts, once a ban has taken tokens back, as if the text had ended there."""
    engine: Any = engine_of(llm)
    engine.policy = Fixed(3)
    drafter = engine.drafters["perfect"]
    for length in (1, 5, 11):
        for sequence in steps_of(llm, PROMPTS[4], "perfect", 20):
            while len(sequence.new_ids) < 20:
                engine.step()
            sequence._roll_back(length)
            sequence.attempts.clear()
            engine.cache.lengths[sequence.row] = len(sequence.tokens) - 1
            drafter.rewind(sequence)
            adapter_row(llm, "perfect", sequence)
            before = len(sequence.rounds)
            engine.step()
            turn = sequence.rounds[before]
            assert turn.drafted == turn.accepted == 3
            assert sequence.new_ids == plain[4][: len(sequence.new_ids)]


def test_a_bans_rollback_takes_back_the_adapters_part(llm: LLM, plain: list[list[int]]) -> None:
    check_rollback(llm, plain)


def test_an_adapter_of_nan_leaves_the_text_as_it_is(llm: LLM, plain: list[list[int]]) -> None:
    drafter: Any = engine_of(llm).drafters["early"]
    params = replace(GREEDY, drafter="early")
    check_nan_weights(llm, drafter.adapter.norm.weight, params, PROMPTS[2:4], plain[2:4])
