"""The contenders on tiny random checkpoints: the line-up, identical tokens from all, and their timings."""

from __future__ import annotations

import threading
import time
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
from foredraft.bench.contender import BenchContext
from foredraft.bench.contenders import CONTENDERS, PROGRAMS, resolve_methods
from foredraft.bench.foredraft_contender import BigLittle, ForedraftContender
from foredraft.bench.forward_costs import measure_costs
from foredraft.bench.lineup import LineUp
from foredraft.bench.machine_record import Memory
from foredraft.bench.model_size import model_record
from foredraft.bench.text_score import mean_log_probability
from foredraft.decode.observer import SILENT
from foredraft.decode.policy import CostTable, Policy
from foredraft.kinds import POLICIES
from foredraft.loading.policy_choice import make_policy
from foredraft.model.hub import resolve
from foredraft.profiling import profile
from foredraft.profiling.forwards import draft_seconds
from foredraft.profiling.phases import RoundClock, observed
from foredraft.profiling.profile import Profile
from foredraft.profiling.timing import replaced
from tests.support import checkpoints
from tests.support.gguf_files import write_gguf
from tests.support.loaded import engine_of
from tests.support.planting import assert_caught, defect

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
    return BenchContext(llm, target, draft, torch.float32, torch.device("cpu"), 64, max_draft=3)


@pytest.fixture(scope="module")
def texts(context: BenchContext) -> tuple[tuple[int, ...], ...]:
    return ForedraftContender("plain", context.llm, "none").run(PROMPTS, TOKENS).tokens


def test_plain_texts_contain_end_tokens(context: BenchContext, texts: tuple[tuple[int, ...], ...]) -> None:
    assert all(any(token % 3 == 0 for token in text[:-1]) for text in texts)


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
    """With its published defaults, and with a threshold at which every drafted token is accepted."""
    loaded = engine_of(context.llm).policy
    bild: Any = CONTENDERS["bild"].make(context.llm, replace(context, max_draft=None))
    policy = bild.policy
    assert (bild.name, bild.lossless, policy.threshold, policy.max_draft) == ("bild", False, 0.6, 10)
    assert isinstance(bild, BigLittle) and not CONTENDERS["bild"].lossless
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


def test_prefill_and_decoding_are_timed_separately(
    context: BenchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a fake clock, a prefill pass takes 1 s and a forward of a round 10 s."""
    now = 0.0
    target = context.llm.loaded.runner
    prefill, forward = target.prefill, target.forward

    def advance(action: Any, seconds: float) -> Any:
        def run(*given: Any, **named: Any) -> Any:
            nonlocal now
            now += seconds
            return action(*given, **named)

        return run

    monkeypatch.setattr(target, "prefill", advance(prefill, 1.0))
    monkeypatch.setattr(target, "forward", advance(forward, 10.0))
    monkeypatch.setattr("foredraft.profiling.timing.time.perf_counter", lambda: now)
    contender = ForedraftContender("plain", context.llm, "none")
    alone = contender.run(PROMPTS[:1], TOKENS)
    assert (alone.prefill_seconds, alone.decode_seconds) == (1.0, 10.0 * TOKENS)
    all_three = contender.run(PROMPTS, TOKENS)
    assert (all_three.prefill_seconds, all_three.decode_seconds) == (3.0, 10.0 * PASSES[3])
    parts = RoundClock(engine_of(context.llm))
    with observed(engine_of(context.llm), parts):
        assert contender.run(PROMPTS[:1], TOKENS).decode_seconds == 10.0 * TOKENS
    assert (parts.seconds["verify"], parts.seconds["draft"]) == (10.0 * TOKENS, 0.0)


def test_a_drafters_late_prompt_reading_counts_as_prefill(
    context: BenchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading generated tokens counts as decoding. On a fake clock, the drafter reads a token in 1 s."""
    now = 0.0
    drafter: Any = engine_of(context.llm).drafters["draft-model"]
    read = drafter.read

    def slow(sequence: Any, start: int, stop: int) -> None:
        nonlocal now
        now += stop - start
        read(sequence, start, stop)

    class Late(Policy):
        name, max_draft = "late", 2
        uses_costs = True

        def budget(self, sequence: Any) -> int:
            return 2 if sequence.round_count == 3 else 0

    monkeypatch.setattr(drafter, "read", slow)
    monkeypatch.setattr("foredraft.profiling.timing.time.perf_counter", lambda: now)
    timing = ForedraftContender("draft-model", context.llm, "draft-model", policy=Late()).run(
        PROMPTS[:1], TOKENS
    )
    assert (timing.prefill_seconds, timing.decode_seconds) == (len(PROMPTS[0]), 2)


def test_round_parts_separate_drafter_and_target(
    context: BenchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    engine = engine_of(context.llm)
    drafter: Any = engine.drafters["draft-model"]
    step = drafter.step

    def slow(*given: Any) -> Any:
        nonlocal now
        now += 1.0
        return step(*given)

    monkeypatch.setattr(drafter, "step", slow)
    monkeypatch.setattr(drafter, "fused_draft", lambda *_: None)  # so that the drafter takes single steps
    monkeypatch.setattr("foredraft.profiling.timing.time.perf_counter", lambda: now)
    parts = RoundClock(engine)
    with observed(engine, parts):
        timing = ForedraftContender("draft-model", context.llm, "draft-model").run(PROMPTS[:1], TOKENS)
    assert timing.stats is not None
    assert parts.seconds["draft"] == timing.stats.drafted == timing.decode_seconds
    assert parts.seconds["verify"] == parts.host == 0


def test_an_error_leaves_the_engine_unobserved(
    context: BenchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(context.llm)

    def broken(*given: Any, **named: Any) -> Any:
        assert engine.observer is not SILENT
        raise RequestError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(context.llm, "generate", broken)
        with pytest.raises(RequestError), observed(engine, RoundClock(engine)):
            ForedraftContender("plain", context.llm, "none").run(PROMPTS, TOKENS)
    assert engine.observer is SILENT


def test_a_failed_request_raises_request_error(
    context: BenchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*given: Any, **named: Any) -> Any:
        raise RuntimeError("out of order")

    monkeypatch.setattr(context.llm.loaded.runner, "forward", broken)
    with pytest.raises(RequestError, match="plain failed: RuntimeError: out of order"):
        ForedraftContender("plain", context.llm, "none").run(PROMPTS, TOKENS)


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


@pytest.mark.parametrize("make", [hugging_face.plain, hugging_face.assisted, hugging_face.prompt_lookup])
def test_transformers_generates_the_same_tokens(
    context: BenchContext, models: Any, texts: Any, make: Any
) -> None:
    contender = make(models, context)
    for prompts, expected in ((PROMPTS[:1], texts[:1]), (PROMPTS[1:2], texts[1:2])):
        timing = contender.run(prompts, TOKENS)
        assert timing.tokens == expected
        assert 0 < timing.decoded_tokens < TOKENS
        assert timing.decoded_tokens == TOKENS - 1 or contender.name != "transformers"
        assert timing.passes == (TOKENS - 1 if contender.name == "transformers" else None)
        assert timing.prefill_seconds > 0 and timing.decode_seconds > 0
    assert contender.batch_sizes == (None if contender.name == "transformers" else (1,))


def test_transformers_decodes_a_batch(context: BenchContext, models: Any, texts: Any) -> None:
    timing = hugging_face.plain(models, context).run(PROMPTS, TOKENS)
    assert timing.tokens == texts
    assert timing.decoded_tokens == 3 * (TOKENS - 1) and timing.passes == TOKENS - 1


def test_transformers_prefill_ends_at_the_first_token(
    context: BenchContext, models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    forward = models.target.forward

    def slow(*given: Any, **named: Any) -> Any:
        nonlocal now
        now += 100.0 if named["input_ids"].shape[1] > 1 else 1.0
        return forward(*given, **named)

    monkeypatch.setattr(models.target, "forward", slow)
    monkeypatch.setattr("foredraft.bench.hugging_face.time.perf_counter", lambda: now)
    timing = hugging_face.plain(models, context).run(PROMPTS[:1], TOKENS)
    assert (timing.prefill_seconds, timing.decode_seconds) == (100.0, TOKENS - 1.0)


def test_transformers_samples_without_truncation(context: BenchContext, models: Any) -> None:
    warm = BenchContext(
        context.llm, context.target, None, torch.float32, torch.device("cpu"), 64, temperature=50.0
    )
    timing = hugging_face.plain(models, warm).run(PROMPTS[:1] * 200, 2)
    assert (
        len({text[0] for text in timing.tokens}) > 50
    )  # nearly uniform over 384 tokens; the library's default top_k is 50


def test_costs_cover_every_row_count_and_drafter(context: BenchContext) -> None:
    made = measure_costs(context.llm.loaded, 1, 40, 3, read_seconds=1e-3, repeats=2)
    assert [cost.rows for cost in made.verifying] == [1, 2, 3, 4, 8, 16, 32]
    assert made.verifying[0].v == 1 and all(cost.seconds.count == 2 for cost in made.verifying)
    assert made.step_seconds == made.verifying[0].seconds.median
    assert made.drafting["lookup"] == DraftCost(0.0, 0.0)
    assert made.drafting["draft-model"].of(3) > 0
    assert made.bandwidth_share == pytest.approx(1e-3 / made.step_seconds)
    two = measure_costs(context.llm.loaded, 2, 40, 3, repeats=1)
    assert [cost.rows for cost in two.verifying] == [1, 2, 3, 4] and two.bandwidth_share is None


def test_costs_are_in_plain_steps(context: BenchContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a fake clock, in seconds: a target's forward takes 9, plus 1 per row, plus 5 after a forward of
    another width, plus 3 after a draft (both leave the CPU caches cold). A draft step takes 1, or 4 after the
    target. So a round with 3 drafted tokens takes 6 + 16, and a verifying pass alone 13; a round with 1 takes
    4 + 14, and the pass 11."""
    now, last, width = 0.0, "", 0
    engine = engine_of(context.llm)
    drafter: Any = engine.drafters["draft-model"]

    def slow(name: str, runner: Any, seconds: Any) -> Any:
        forward = runner.forward

        def run(cache: Any, tokens: Any, *given: Any, **named: Any) -> Any:
            nonlocal now, last
            now += seconds(tokens.shape[1])
            last = name
            return forward(cache, tokens, *given, **named)

        return run

    def passes(rows: int) -> float:
        nonlocal width
        before, width = width, rows
        return 9.0 + rows + (5.0 if before != rows else 0.0) + (3.0 if last == "draft" else 0.0)

    monkeypatch.setattr(engine.target, "forward", slow("target", engine.target, passes))
    drafts = slow("draft", drafter.draft_pass.runner, lambda rows: 4.0 if last == "target" else 1.0)
    monkeypatch.setattr(drafter.draft_pass.runner, "forward", drafts)
    monkeypatch.setattr(
        drafter.draft_pass.runner, "draft", lambda *_, **__: None
    )  # so that the drafter takes single steps
    monkeypatch.setattr("foredraft.profiling.timing.time.perf_counter", lambda: now)
    made = measure_costs(context.llm.loaded, 1, 40, 3, read_seconds=1.0, repeats=4)
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
def test_model_record_counts_the_checkpoints_parameters(
    tmp_path: Path, family: str, tied: bool, dtype: str
) -> None:
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


def test_an_unknown_method_is_refused_with_the_known_names() -> None:
    with pytest.raises(
        ConfigError, match="methods is 'lookup,hope', but there is no 'hope'; give all, or some of plain, l"
    ):
        resolve_methods(("lookup", "hope"))


def test_drafters_run_under_several_policies(context: BenchContext, texts: Any) -> None:
    """All on one engine, which gets its own policy back after every run."""
    engine = engine_of(context.llm)
    own = engine.policy
    lineup = LineUp()
    names = ("plain", "lookup", "draft-model", "bild")
    lineup.load(context, names, Memory(context.device), 7, required=names)
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
    assert len({one.name for one in lineup.contenders}) == len(lineup.contenders) == len(lineup.loaded_bytes)
    assert lineup.notes == [
        "left out: lookup cannot follow confidence, adaptive-exit, fallback",
        "left out: bild cannot follow auto, fixed, heuristic, confidence, adaptive-exit, target-confidence",
    ]
    used: list[str] = []
    round = engine.round

    def noted() -> Any:
        used.append(engine.policy.name)
        return round()

    with replaced(engine, "round", noted):
        for contender in lineup.contenders[1:-1]:
            used.clear()
            timing = contender.run(PROMPTS, TOKENS)
            assert timing.tokens == texts and set(used) == {contender.policy_name}
            assert engine.policy is own
            assert timing.stats is not None and len(timing.stats.drafted_at) <= 3


def test_contenders_with_the_same_policy_share_its_measured_costs(
    context: BenchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    lineup = LineUp()
    lineup.load(context, ("plain", "lookup"), Memory(context.device), 7)
    with pytest.raises(
        ConfigError, match="policies is 'confidence', but none of the methods can follow it; give others"
    ):
        lineup.add_policies(context, ("confidence",))
    lineup.add_policies(context, ("confidence", "fixed"))
    assert [one.policy_name for one in lineup.contenders] == [None, "fixed"]


def test_a_gguf_file_leaves_transformers_out_in_one_line(context: BenchContext, tmp_path: Path) -> None:
    folder = checkpoints.save_checkpoint(tmp_path / "model", tokenizer=True)
    file = write_gguf(folder, tmp_path / "model.gguf")
    shared = replace(context, target=resolve(file))
    names = ("plain", "transformers", "transformers-assisted", "transformers-lookup")
    line = (
        "transformers takes no GGUF file here, as model.gguf is; give a checkpoint folder to compare with it"
    )
    lineup = LineUp()
    lineup.load(shared, names, Memory(context.device), 7)
    assert lineup.notes == [f"left out: {line}"] and len(lineup.contenders) == 1
    with pytest.raises(ConfigError, match=f"^{line}$"):
        LineUp().load(shared, names, Memory(context.device), 7, required=("transformers-lookup",))


def test_a_drafter_that_cannot_follow_the_loaded_policy_is_left_out(
    context: BenchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent(monkeypatch, "transformers", "llama-cpp-python")
    target = context.llm.loaded.runner
    with replaced(engine_of(context.llm), "policy", make_policy("confidence", {}, 3, target)):
        with pytest.raises(
            ConfigError, match="lookup cannot follow policy='confidence'; give another policy"
        ):
            LineUp().load(context, ("lookup",), Memory(context.device), 0, required=("lookup",))
        lineup = LineUp()
        lineup.load(context, resolve_methods(None), Memory(context.device), 0)
        other = LineUp(lambda option: f"--{option.name} {option.value}")
        other.load(context, ("plain", "lookup"), Memory(context.device), 0)
    assert [one.name for one in lineup.contenders] == ["plain", "draft-model"]
    assert "left out: lookup cannot follow policy='confidence'; give another policy" in lineup.notes
    (note,) = other.notes
    assert note.startswith("left out: lookup cannot follow --policy confidence;")


def test_contenders_share_a_policy_unless_their_longest_drafts_differ(
    context: BenchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy made anew keeps the given options."""
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


def test_a_missing_program_is_an_error_only_if_named(
    context: BenchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent(monkeypatch, "transformers", "llama-cpp-python")
    with pytest.raises(
        ConfigError, match="'transformers-lookup', but transformers is not installed; pip install"
    ):
        resolve_methods(("transformers-lookup",))
    lineup = LineUp()
    lineup.load(context, resolve_methods(None), Memory(context.device), 7)
    assert [one.name for one in lineup.contenders] == ["plain", "lookup", "draft-model"]
    assert lineup.loaded_bytes == {"plain": 7, "lookup": 7, "draft-model": 7}
    assert len(lineup.notes) == 14
    assert "left out: auto needs a policy that chooses among drafters; give policy='auto'" in lineup.notes
    assert lineup.notes[-1].startswith("left out: llama.cpp: llama-cpp-python is not installed")


def test_methods_without_their_draft_model_are_refused(
    context: BenchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent(monkeypatch, "llama-cpp-python")
    alone = foredraft.load(context.target, device="cpu", max_batch=1, max_length=64)
    without = BenchContext(alone, context.target, None, torch.float32, torch.device("cpu"), 64)
    for name in ("draft-model", "retokenize", "bild", "transformers-assisted"):
        with pytest.raises(ConfigError, match=f"{name} needs a draft model"):
            LineUp().load(without, (name,), Memory(context.device), 0, required=(name,))
    with pytest.raises(ConfigError, match="bild needs a draft model"):
        LineUp().load(without, ("lookup", "bild"), Memory(context.device), 0, required=("all", "bild"))
    lineup = LineUp()
    lineup.load(without, resolve_methods(("all",)), Memory(context.device), 0, required=("all",))
    assert [one.name for one in lineup.contenders] == [
        "plain", "lookup", "auto", "transformers", "transformers-lookup"
    ]  # fmt: skip


def test_a_program_that_cannot_load_the_model_is_left_out(
    context: BenchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(context: BenchContext) -> Any:
        raise KeyError("rope")

    monkeypatch.setitem(PROGRAMS, "transformers", contenders.Program(broken))
    absent(monkeypatch, "llama-cpp-python")
    lineup = LineUp()
    lineup.load(context, resolve_methods(None), Memory(context.device), 0)
    assert [one.name for one in lineup.contenders] == ["plain", "lookup", "draft-model"]
    assert "left out: transformers cannot load this model (KeyError: 'rope')" in lineup.notes


def test_a_program_without_memory_for_the_weights_is_not_loaded(
    context: BenchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foredraft.bench.lineup.free_memory", lambda device: 2**10, raising=False)
    monkeypatch.setattr(hugging_face, "TransformersModels", lambda context: pytest.fail("it was loaded"))
    lineup = LineUp()
    lineup.load(context, ("plain", "transformers"), Memory(context.device), 0)
    assert [contender.name for contender in lineup.contenders] == ["plain"]
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
    """By the target's own sum of log p, which a plain forward of the whole text gives, too."""
    models = hugging_face.TransformersModels(context)
    contender = hugging_face.beam(models, replace(context, temperature=1.0))
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
