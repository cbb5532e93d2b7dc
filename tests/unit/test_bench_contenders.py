"""The contenders on tiny random checkpoints: the line-up, identical tokens from all, and their timings."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import foredraft
from foredraft import ConfigError, RequestError
from foredraft.bench import contenders, hugging_face
from foredraft.bench.bench_records import DraftCost
from foredraft.bench.contender import BenchContext, ForedraftContender, LineUp
from foredraft.bench.contenders import CONTENDERS, PROGRAMS, resolve_methods
from foredraft.bench.machine_record import Memory, model_record
from foredraft.bench.measurement import CostMeter, mean_log_probability, measure_costs
from foredraft.decode.engine_target import SILENT
from foredraft.decode.policy.cost_table import CostTable
from foredraft.kinds.tables import POLICIES
from foredraft.loading.checkpoints import make_policy
from foredraft.model.locate import resolve
from foredraft.model.source import ModelSource
from foredraft.profiling import profile
from foredraft.profiling.profile import Profile
from foredraft.profiling.timing import RoundTimer, draft_seconds, observed, replaced
from tests.support import checkpoints
from tests.support.gguf_files import write_gguf
from tests.support.loaded import engine_of
from tests.support.mutation import assert_caught, defect

PROMPTS = [list(range(3, 40)), list(range(100, 104)), list(range(50, 70))]
TOKENS = 12
PASSES = {1: TOKENS, 3: TOKENS + 1}  # plain decoding, by batch size: the third prompt joins one round late


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> BenchContext:
    """A target that often generates an end-of-text token, and a weak draft model."""
    base = tmp_path_factory.mktemp("models")
    target = checkpoints.save_checkpoint(
        base / "target", tokenizer=True, seed=1, eos_token_id=list(range(0, 384, 3))
    )
    draft = checkpoints.save_checkpoint(base / "draft", tokenizer=True, seed=2, num_hidden_layers=1)
    llm = foredraft.load(
        target, draft=draft, device="cpu", max_batch=3, max_length=128, max_draft=3, policy="fixed"
    )
    return BenchContext(
        llm, ModelSource(target), ModelSource(draft), torch.float32, torch.device("cpu"), 64, max_draft=3
    )


@pytest.fixture(scope="module")
def texts(context: BenchContext) -> tuple[tuple[int, ...], ...]:
    found = ForedraftContender("plain", context.llm, "none").run(PROMPTS, TOKENS).tokens
    assert all(any(token % 3 == 0 for token in text[:-1]) for text in found), "they contain end tokens"
    return found


class Clock:
    """A fake clock, which the calls that are slow move on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.patch = 0.0, monkeypatch
        monkeypatch.setattr("foredraft.profiling.timing.time.perf_counter", lambda: self.now)

    def slow(self, owner: Any, name: str, seconds: Callable[..., float]) -> None:
        """Let each call of a method take the seconds that a function gives for its arguments."""
        call = getattr(owner, name)

        def run(*given: Any, **named: Any) -> Any:
            self.now += seconds(*given, **named)
            return call(*given, **named)

        self.patch.setattr(owner, name, run)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def line_up(context: BenchContext, names: tuple[str, ...], required: tuple[str, ...] = ()) -> LineUp:
    made = LineUp()
    made.load(context, names, Memory(context.device), 7, required=required)
    return made


def names_of(lineup: LineUp) -> list[str]:
    return [contender.name for contender in lineup.contenders]


@pytest.mark.parametrize("drafter", ["none", "lookup", "draft-model"])
def test_foredraft_decodes_one_prompt_and_a_batch(context: BenchContext, texts: Any, drafter: str) -> None:
    contender = ForedraftContender(drafter, context.llm, drafter)
    for prompts, expected in ((PROMPTS, texts), (PROMPTS[:1], texts[:1])):
        start = time.perf_counter()
        timing = contender.run(prompts, TOKENS)
        wall = time.perf_counter() - start
        assert timing.tokens == expected
        assert timing.decoded_tokens == TOKENS * len(prompts)
        assert timing.stats is not None and timing.stats.tokens == timing.decoded_tokens
        assert timing.stats.seconds == timing.decode_seconds
        assert timing.prefill_seconds > 0 and timing.decode_seconds > 0
        assert timing.prefill_seconds + timing.decode_seconds < wall
        assert timing.passes is not None
        assert timing.stats.rounds / len(prompts) <= timing.passes <= timing.stats.rounds
        assert timing.passes == PASSES[len(prompts)] or drafter != "none"
        assert timing.stats.drafted > 0 or drafter != "draft-model"


def test_big_little_is_lossy_and_restores_the_engines_policy(context: BenchContext, texts: Any) -> None:
    loaded = engine_of(context.llm).policy
    bild: Any = CONTENDERS["bild"].make(context.llm, replace(context, max_draft=None))
    policy = bild.policy
    assert (bild.name, bild.lossless, policy.threshold, policy.max_draft) == ("bild", False, 0.6, 10)
    assert not CONTENDERS["bild"].lossless
    assert bild._params([1], 3).bound == 5.0
    assert bild.policy_name == "fallback"
    shorter: Any = CONTENDERS["bild"].make(context.llm, context)
    assert shorter.policy.max_draft == 3  # the max_draft of the context
    bild.policy = replace(policy, threshold=0.0)
    timing = bild.run(PROMPTS, TOKENS)
    assert timing.stats is not None and timing.stats.drafted_at[3:], (
        "longer drafts than the engine's policy has"
    )
    assert timing.tokens != texts
    assert engine_of(context.llm).policy is loaded
    assert ForedraftContender("draft-model", context.llm, "draft-model").run(PROMPTS, TOKENS).tokens == texts


def test_prefill_and_decoding_are_timed_separately(context: BenchContext, clock: Clock) -> None:
    clock.slow(context.llm.loaded.runner, "prefill", lambda *_, **__: 1.0)
    clock.slow(context.llm.loaded.runner, "forward", lambda *_, **__: 10.0)
    contender = ForedraftContender("plain", context.llm, "none")
    alone = contender.run(PROMPTS[:1], TOKENS)
    assert (alone.prefill_seconds, alone.decode_seconds) == (1.0, 10.0 * TOKENS)
    all_three = contender.run(PROMPTS, TOKENS)
    assert (all_three.prefill_seconds, all_three.decode_seconds) == (3.0, 10.0 * PASSES[3])
    parts = RoundTimer(engine_of(context.llm))
    with observed(engine_of(context.llm), parts):
        assert contender.run(PROMPTS[:1], TOKENS).decode_seconds == 10.0 * TOKENS
    assert (parts.seconds["verify"], parts.seconds["draft"]) == (10.0 * TOKENS, 0.0)


def test_a_failed_request_ends_observation(context: BenchContext, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(context.llm)

    def broken(*given: Any, **named: Any) -> Any:
        assert engine.observer is not SILENT
        raise RuntimeError("out of order")

    monkeypatch.setattr(context.llm.loaded.runner, "forward", broken)
    with pytest.raises(RequestError, match="plain failed: RuntimeError: out of order"):  # noqa: SIM117
        with observed(engine, RoundTimer(engine)):
            ForedraftContender("plain", context.llm, "none").run(PROMPTS, TOKENS)
    assert engine.observer is SILENT


def test_coupled_runs_repeat_their_text_and_others_draw_fresh_noise(context: BenchContext) -> None:
    coupled = [
        ForedraftContender(name, context.llm, name, temperature=1.0, acceptance="coupled")
        .run(PROMPTS, TOKENS)
        .tokens
        for name in ("none", "draft-model", "none")
    ]
    assert coupled[0] == coupled[1] == coupled[2]
    free = ForedraftContender("none", context.llm, "none", temperature=1.0)
    assert len({free.run(PROMPTS, TOKENS).tokens for _ in range(3)}) == 3


@pytest.fixture(scope="module")
def models(context: BenchContext) -> hugging_face.TransformersModels:
    return hugging_face.TransformersModels(context)


@pytest.mark.parametrize("name", ["transformers", "transformers-assisted", "transformers-lookup"])
def test_transformers_writes_equal_tokens(context: BenchContext, models: Any, texts: Any, name: str) -> None:
    contender = hugging_face.Generate(name, models, context)
    plain = contender.name == "transformers"
    for prompts, expected in ((PROMPTS[:1], texts[:1]), (PROMPTS[1:2], texts[1:2])):
        timing = contender.run(prompts, TOKENS)
        assert timing.tokens == expected
        assert 0 < timing.decoded_tokens < TOKENS
        assert timing.decoded_tokens == TOKENS - 1 or not plain
        assert timing.passes == (TOKENS - 1 if plain else None)
        assert timing.prefill_seconds > 0 and timing.decode_seconds > 0
    assert contender.batch_sizes == (None if plain else (1,))
    if plain:
        timing = contender.run(PROMPTS, TOKENS)
        assert timing.tokens == texts
        assert timing.decoded_tokens == 3 * (TOKENS - 1) and timing.passes == TOKENS - 1


def test_transformers_prefill_ends_at_one_token(context: BenchContext, models: Any, clock: Clock) -> None:
    clock.slow(models.target, "forward", lambda **named: 100.0 if named["input_ids"].shape[1] > 1 else 1.0)
    timing = hugging_face.Generate("transformers", models, context).run(PROMPTS[:1], TOKENS)
    assert (timing.prefill_seconds, timing.decode_seconds) == (100.0, TOKENS - 1.0)


def test_transformers_samples_without_truncation(context: BenchContext, models: Any) -> None:
    warm = replace(context, draft=None, max_draft=None, temperature=50.0)
    timing = hugging_face.Generate("transformers", models, warm).run(PROMPTS[:1] * 200, 2)
    # nearly uniform over 384 tokens; the library's default top_k is 50
    assert len({text[0] for text in timing.tokens}) > 50


def test_costs_cover_every_row_count_and_drafter(context: BenchContext) -> None:
    made = measure_costs(context.llm.loaded, 1, 40, 3, repeats=2)
    assert [cost.rows for cost in made.verifying] == [1, 2, 3, 4, 8, 16, 32]
    assert made.verifying[0].v == 1 and all(cost.seconds.count == 2 for cost in made.verifying)
    assert made.step_seconds == made.verifying[0].seconds.median
    assert made.drafting["lookup"] == DraftCost(0.0, 0.0)
    assert made.drafting["draft-model"].of(3) > 0
    two = measure_costs(context.llm.loaded, 2, 40, 3, repeats=1)
    assert [cost.rows for cost in two.verifying] == [1, 2, 3, 4] and two.bandwidth_share is None


def test_costs_are_plain_steps(context: BenchContext, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """In seconds, a target's forward takes 9, plus 1 per row, plus 5 after a forward of another width, plus 3
    after a draft (both leave the CPU caches cold). A draft step takes 1, or 4 after the target. So a round with
    3 drafted tokens takes 6 + 16, and a verifying pass alone 13; a round with 1 takes 4 + 14, and the pass 11."""
    last, width = "", 0
    engine = engine_of(context.llm)
    runner = engine.drafters["draft-model"].draft_pass.runner  # type: ignore[union-attr]

    def passes(cache: Any, tokens: Any, *_: Any, **__: Any) -> float:
        nonlocal last, width
        rows = tokens.shape[1]
        seconds = 9.0 + rows + (5.0 if width != rows else 0.0) + (3.0 if last == "draft" else 0.0)
        last, width = "target", rows
        return seconds

    def steps(*_: Any, **__: Any) -> float:
        nonlocal last
        seconds = 4.0 if last == "target" else 1.0
        last = "draft"
        return seconds

    clock.slow(engine.target, "forward", passes)
    clock.slow(runner, "forward", steps)
    monkeypatch.setattr(runner, "draft", lambda *_, **__: None)  # so that the drafter takes single steps
    meter = CostMeter(context.llm.loaded, 1, 40, 3)
    for _ in range(4):
        meter.turn()
    made = meter.costs(1.0, "texts")
    assert made.step_seconds == 10 and set(made.drafting) == {"lookup", "prediction", "draft-model"}
    draft = made.drafting["draft-model"]
    assert (draft.first, draft.further) == pytest.approx((0.7, 0.1))
    assert [cost.v for cost in made.verifying[:4]] == [1.0, 1.1, 1.2, 1.3]
    assert made.bandwidth_share == 0.1


def test_draft_seconds_subtract_the_verifying_pass_within_each_repeat() -> None:
    """The machine becomes slower once before a pass and once before a round."""
    assert draft_seconds([4.0, 5.0, 14.0, 13.0, 5.0], [2.0, 2.0, 11.0, 11.0, 12.0]) == 2.0
    assert draft_seconds([1.0], [1.5]) == 0.0


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("gemma2", True), ("qwen2", False)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_record_counts_all_parameters(tmp_path: Path, family: str, tied: bool, dtype: str) -> None:
    folder = checkpoints.save_checkpoint(tmp_path, family, tie_word_embeddings=tied)
    runner = foredraft.load(folder, device="cpu", dtype=dtype, max_batch=1).loaded.runner
    reference = checkpoints.reference_model(family, tie_word_embeddings=tied)
    parameters = sum(weight.numel() for weight in reference.parameters())
    found = model_record("target", "tiny", runner)
    assert found.parameters == parameters
    embedding = reference.get_input_embeddings().weight.numel()
    size = 4 if dtype == "float32" else 2
    assert found.step_bytes == size * (parameters - (0 if tied else embedding))
    assert found.dtype == dtype


# --- the line-up ------------------------------------------------------------------------------------


def test_plain_always_takes_part_and_comes_first() -> None:
    assert resolve_methods(("lookup",)) == ("plain", "lookup")
    assert resolve_methods(("lookup", "plain", "lookup")) == ("plain", "lookup")
    lossless = tuple(name for name, kind in CONTENDERS.items() if kind.lossless)
    assert resolve_methods(None) == resolve_methods(("all",)) == lossless
    assert resolve_methods(("all", "bild")) == (*lossless, "bild")
    assert next(iter(CONTENDERS)) == "plain"


def test_drafters_run_under_several_policies(context: BenchContext, texts: Any) -> None:
    engine = engine_of(context.llm)
    own = engine.policy
    names = ("plain", "lookup", "draft-model", "bild")
    lineup = line_up(context, names, names)
    others = [name for name in POLICIES if name != own.name]
    lineup.add_policies(context, tuple(POLICIES))
    assert [(one.method, one.policy_name) for one in lineup.contenders] == [
        ("plain", None),
        ("lookup", "fixed"),
        *(("lookup", name) for name in ("auto", "heuristic", "target-confidence")),
        ("draft-model", "fixed"),
        *(("draft-model", policy) for policy in others),
        ("bild", "fallback"),
    ]
    assert len({*names_of(lineup)}) == len(lineup.contenders) == len(lineup.loaded_bytes)
    assert lineup.notes == [
        "left out: lookup cannot follow confidence, adaptive-exit, fallback",
        "left out: bild cannot follow auto, fixed, heuristic, confidence, adaptive-exit, target-confidence",
    ]
    used: list[str] = []
    round = engine.round
    with replaced(engine, "round", lambda: used.append(engine.policy.name) or round()):
        for contender in lineup.contenders[1:-1]:
            used.clear()
            timing = contender.run(PROMPTS, TOKENS)
            assert timing.tokens == texts and set(used) == {contender.policy_name}
            assert engine.policy is own
            assert timing.stats is not None and len(timing.stats.drafted_at) <= 3


def test_contenders_share_their_policys_costs(context: BenchContext, monkeypatch: pytest.MonkeyPatch) -> None:
    target = context.llm.loaded.runner
    policy: Any = make_policy("auto", {}, 3, target)
    longest_drafts: list[int] = []

    def measured(engine: Any, longest: int, progress: Any) -> Profile:
        longest_drafts.append(longest)
        table = CostTable({1: {1: 1.0}}, {"draft-model": {1: (0.5, 0.25)}})
        return Profile(table, table)

    monkeypatch.setattr(profile, "load_profile", measured)
    for drafter in ("lookup", "draft-model", "lookup"):
        ForedraftContender(drafter, context.llm, drafter).with_policy(policy).run(PROMPTS[:1], TOKENS)
    assert longest_drafts == [3]
    assert policy.greedy.drafts["draft-model"] == {1: (0.5, 0.25)}


def test_a_policy_that_no_contender_can_follow_is_refused(context: BenchContext) -> None:
    lineup = line_up(context, ("plain", "lookup"))
    with pytest.raises(ConfigError, match="policies is 'confidence', but none of the methods can follow it"):
        lineup.add_policies(context, ("confidence",))
    lineup.add_policies(context, ("confidence", "fixed"))
    assert [one.policy_name for one in lineup.contenders] == [None, "fixed"]


def test_a_gguf_file_leaves_transformers_out_in_one_line(context: BenchContext, tmp_path: Path) -> None:
    folder = checkpoints.save_checkpoint(tmp_path / "model", tokenizer=True)
    shared = replace(context, target=resolve(write_gguf(folder, tmp_path / "m.gguf")))
    names = ("plain", "transformers", "transformers-assisted", "transformers-lookup")
    line = "transformers takes no GGUF file here, as m.gguf is; give a checkpoint folder to compare with it"
    lineup = line_up(shared, names)
    assert lineup.notes == [f"left out: {line}"] and len(lineup.contenders) == 1
    with pytest.raises(ConfigError, match=f"^{line}$"):
        line_up(shared, names, ("transformers-lookup",))


def test_a_drafter_that_cannot_follow_is_out(context: BenchContext, monkeypatch: pytest.MonkeyPatch) -> None:
    absent(monkeypatch, "transformers", "llama-cpp-python")
    policy = make_policy("confidence", {}, 3, context.llm.loaded.runner)
    reason = "lookup cannot follow policy='confidence'; give another policy"
    with replaced(engine_of(context.llm), "policy", policy):
        with pytest.raises(ConfigError, match=reason):
            line_up(context, ("lookup",), ("lookup",))
        lineup = line_up(context, resolve_methods(None))
    assert names_of(lineup) == ["plain", "draft-model"] and f"left out: {reason}" in lineup.notes


def test_contenders_may_share_a_policy(context: BenchContext, monkeypatch: pytest.MonkeyPatch) -> None:
    target = context.llm.loaded.runner
    settings = {"threshold": 0.3}
    monkeypatch.setitem(
        engine_of(context.llm).drafters, "layer-skip", SimpleNamespace(planned=7, longest_draft=0)
    )
    given = replace(context, max_draft=None, policy_options=settings)
    with replaced(engine_of(context.llm), "policy", make_policy("confidence", settings, None, target, 7)):
        own, other = (given.policy_for(drafter, "confidence") for drafter in ("layer-skip", "draft-model"))
        assert own is engine_of(context.llm).policy
        assert (other.max_draft, other.threshold) == (10, 0.3)  # type: ignore[attr-defined]
        fallback: Any = given.policy_for("draft-model", "fallback")
        assert (fallback.max_draft, fallback.threshold) == (10, 0.6)
        assert given.policy_for("draft-model", "fallback") is fallback
        assert given.policy_for("layer-skip", "auto") is given.policy_for("draft-model", "auto")


def absent(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    def version(name: str) -> str:
        if name in packages:
            raise metadata.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(contenders, "version", version)


def test_a_missing_program_fails_if_named(context: BenchContext, monkeypatch: pytest.MonkeyPatch) -> None:
    absent(monkeypatch, "transformers", "llama-cpp-python")
    with pytest.raises(ConfigError, match="'transformers-lookup', but transformers is not installed; pip"):
        resolve_methods(("transformers-lookup",))
    lineup = line_up(context, resolve_methods(None))
    assert names_of(lineup) == ["plain", "lookup", "draft-model"]
    assert lineup.loaded_bytes == {"plain": 7, "lookup": 7, "draft-model": 7}
    assert len(lineup.notes) == 16
    assert "left out: auto needs a policy that chooses among drafters; give policy='auto'" in lineup.notes
    assert lineup.notes[-1].startswith("left out: llama.cpp: llama-cpp-python is not installed")


def test_methods_lacking_a_draft_are_refused(context: BenchContext, monkeypatch: pytest.MonkeyPatch) -> None:
    absent(monkeypatch, "llama-cpp-python")
    alone = foredraft.load(context.target.path, device="cpu", max_batch=1, max_length=64)
    without = BenchContext(alone, context.target, None, torch.float32, torch.device("cpu"), 64)
    for name in ("draft-model", "retokenize", "bild", "transformers-assisted"):
        with pytest.raises(ConfigError, match=f"{name} needs a draft model"):
            line_up(without, (name,), (name,))
    with pytest.raises(ConfigError, match="bild needs a draft model"):
        line_up(without, ("lookup", "bild"), ("all", "bild"))
    lineup = line_up(without, resolve_methods(("all",)), ("all",))
    assert names_of(lineup) == ["plain", "lookup", "auto", "transformers", "transformers-lookup"]


def test_a_program_that_cannot_load_is_out(context: BenchContext, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(context: BenchContext) -> Any:
        raise KeyError("rope")

    monkeypatch.setitem(PROGRAMS, "transformers", contenders.Program(broken))
    absent(monkeypatch, "llama-cpp-python")
    lineup = line_up(context, resolve_methods(None))
    assert names_of(lineup) == ["plain", "lookup", "draft-model"]
    assert "left out: transformers cannot load this model (KeyError: 'rope')" in lineup.notes


def test_programs_beyond_memory_stay_out(context: BenchContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foredraft.bench.contender.free_memory", lambda device: 2**10, raising=False)
    monkeypatch.setattr(hugging_face, "TransformersModels", lambda context: pytest.fail("it was loaded"))
    lineup = line_up(context, ("plain", "transformers"))
    assert names_of(lineup) == ["plain"]
    [note] = lineup.notes
    assert note.startswith("left out: transformers needs 0.00") and "0.000 GiB are free on cpu" in note


def test_peak_memory_includes_freed_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, sampled = Memory(torch.device("cpu")), threading.Semaphore(0)
    held = memory.held

    def held_and_told() -> int:
        try:
            return held()
        finally:
            sampled.release()

    with memory.peak() as peak:
        monkeypatch.setattr(memory, "held", held_and_told)
        values = torch.ones(2**24)  # 64 MiB
        for _ in range(2):  # the first sample may have begun before the allocation
            assert sampled.acquire(timeout=60)
        del values
        assert sampled.acquire(timeout=60)
    monkeypatch.undo()
    assert 2**25 < peak[0] < 2**27  # other memory freed meanwhile lowers the peak
    with memory.peak() as peak:
        pass
    assert peak[0] < 2**24


# --- beam search ----------------------------------------------------------------------------------------------


def test_beam_search_finds_likelier_texts_than_greedy_decoding(context: BenchContext, texts: Any) -> None:
    models = hugging_face.TransformersModels(context)
    contender = hugging_face.Generate("beam", models, replace(context, temperature=1.0))
    assert not contender.lossless and not CONTENDERS["beam"].lossless and "beam" not in resolve_methods(None)
    runner = context.llm.loaded.runner
    timing = contender.run(PROMPTS, TOKENS)
    assert timing.tokens == contender.run(PROMPTS, TOKENS).tokens, "it draws nothing"
    assert timing.decoded_tokens == (TOKENS - 1) * len(PROMPTS) and timing.prefill_seconds > 0
    gains = []
    for prompt, found, greedy in zip(PROMPTS, timing.tokens, texts, strict=True):
        assert len(found) == TOKENS
        gains.append(check_score(runner, prompt, found) - check_score(runner, prompt, greedy))
    assert max(gains) > 0.01, gains


def check_score(runner: Any, prompt: list[int], tokens: Any) -> float:
    """Check the mean log-probability of a text against the product of the model's next-token distributions."""
    score = mean_log_probability(runner, prompt, tokens)
    total, text = 0.0, list(prompt)
    for token in tokens:
        cache = runner.new_cache(1, len(text))
        logits = runner.head(runner.prefill(cache, 0, text, 0).hidden)[0, len(text) - 1]
        total += float(logits.float().log_softmax(-1)[token])
        text.append(token)
    assert score == pytest.approx(total / len(tokens), abs=1e-4)
    return score


def test_a_score_one_token_late_is_caught(context: BenchContext, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(sound: Any) -> Any:
        return lambda runner, prompt, tokens: sound(runner, prompt, [*tokens[1:], tokens[0]])

    runner = context.llm.loaded.runner
    check = partial(check_score, runner, PROMPTS[2], (5, 9, 4))
    assert_caught(defect("late", mean_log_probability, late, check), monkeypatch)
