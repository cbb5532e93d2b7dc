"""Contenders on tiny random checkpoints: who there is, the same tokens from all, and what their clocks say."""

from __future__ import annotations

import inspect
import threading
import time
from collections import deque
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from foredraft.bench.bare import draft_seconds
from foredraft.decode.calibration import Measured

import foredraft
from foredraft import ConfigError, RequestError
from foredraft.bench import contenders, hugging_face
from foredraft.bench.contender import BenchContext
from foredraft.bench.contenders import CONTENDERS, PROGRAMS, chosen
from foredraft.bench.costs import measure_costs
from foredraft.bench.foredraft_contender import BigLittle, ForedraftContender
from foredraft.bench.lineup import LineUp
from foredraft.bench.machine import Memory
from foredraft.bench.records import DraftCost
from foredraft.bench.timing import parted, wrapped
from foredraft.bench.weights import weigh
from foredraft.decode.policy import Alone
from foredraft.kinds import DRAFTERS, POLICIES, suits
from foredraft.loading.policies import make_policy
from tests.support import checkpoints

PROMPTS = [list(range(3, 40)), list(range(100, 104)), list(range(50, 70))]
TOKENS = 12
PASSES = {1: TOKENS, 3: TOKENS + 1}  # of plain decoding: the third one joins a round later than the others


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> BenchContext:
    """A target that often says its end-of-text token, and a weak draft."""
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
def texts(setting: BenchContext) -> tuple[tuple[int, ...], ...]:
    return ForedraftContender("plain", setting.llm, "none").run(PROMPTS, TOKENS).tokens


def test_the_fixture_ends_texts(setting: BenchContext, texts: tuple[tuple[int, ...], ...]) -> None:
    assert all(any(token % 3 == 0 for token in text[:-1]) for text in texts)


@pytest.mark.parametrize("drafter", ["none", "lookup", "draft-model"])
def test_ours_decodes_one_and_several(setting: BenchContext, texts: Any, drafter: str) -> None:
    contender = ForedraftContender(drafter, setting.llm, drafter)
    for prompts, expected in ((PROMPTS, texts), (PROMPTS[:1], texts[:1])):
        start = time.perf_counter()
        timing = contender.run(prompts, TOKENS)
        wall = time.perf_counter() - start
        assert timing.tokens == expected
        assert timing.decoded == TOKENS * len(prompts)
        assert timing.stats is not None and timing.stats.tokens == timing.decoded
        assert timing.stats.seconds == timing.decode_seconds
        assert timing.prefill_seconds > 0 and timing.decode_seconds > 0
        assert timing.prefill_seconds + timing.decode_seconds < wall
        assert timing.passes is not None
        assert timing.stats.rounds / len(prompts) <= timing.passes <= timing.stats.rounds
        assert timing.passes == PASSES[len(prompts)] or drafter != "none"
        assert timing.stats.drafted > 0 or drafter != "draft-model"


def test_big_little_is_lossy_and_leaves_the_others_their_policy(setting: BenchContext, texts: Any) -> None:
    """By its defaults, and with an endless bound, where everything drafted stands."""
    policy = setting.llm.engine.policy
    bild: Any = CONTENDERS["bild"].make(setting.llm, replace(setting, max_draft=None))
    decides = bild.decides
    assert (bild.name, bild.lossless, decides.threshold, decides.max_draft) == ("bild", False, 0.6, 10)
    assert isinstance(bild, BigLittle) and not CONTENDERS["bild"].lossless
    assert bild._params([1], 3).bound == 5.0
    assert bild.policy == "fallback"
    shorter: Any = CONTENDERS["bild"].make(setting.llm, setting)
    assert shorter.decides.max_draft == 3  # as was asked for
    bild.decides = replace(decides, threshold=0.0)
    timing = bild.run(PROMPTS, TOKENS)
    assert timing.stats is not None and timing.stats.drafted_at[3:], (
        "longer drafts than the engine's policy has"
    )
    assert timing.tokens != texts
    assert setting.llm.engine.policy is policy
    assert ForedraftContender("draft-model", setting.llm, "draft-model").run(PROMPTS, TOKENS).tokens == texts


def test_clocks_run_while_prompts_are_read_and_rounds_last(
    setting: BenchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every prefill pass takes a second and every forward of a round ten, on a clock of our own."""
    now = 0.0
    target: Any = setting.llm.engine.target
    prefill, forward = target.prefill, target.forward

    def advance(action: Any, seconds: float) -> Any:
        def run(*given: Any, **named: Any) -> Any:
            nonlocal now
            now += seconds
            return action(*given, **named)

        return run

    monkeypatch.setattr(target, "prefill", advance(prefill, 1.0))
    monkeypatch.setattr(target, "forward", advance(forward, 10.0))
    monkeypatch.setattr("foredraft.bench.timing.time.perf_counter", lambda: now)
    contender = ForedraftContender("plain", setting.llm, "none")
    alone = contender.run(PROMPTS[:1], TOKENS)
    assert (alone.prefill_seconds, alone.decode_seconds) == (1.0, 10.0 * TOKENS)
    all_three = contender.run(PROMPTS, TOKENS)
    assert (all_three.prefill_seconds, all_three.decode_seconds) == (3.0, 10.0 * PASSES[3])
    with parted(setting.llm.engine) as parts:
        assert contender.run(PROMPTS[:1], TOKENS).decode_seconds == 10.0 * TOKENS
    assert (parts.verify, parts.draft) == (10.0 * TOKENS, 0.0)


def test_a_prompt_that_a_drafter_reads_late_is_no_decoding(
    setting: BenchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it reads of the answer is: every token takes it a second, on a clock of our own."""
    now = 0.0
    drafter: Any = setting.llm.engine.drafters["draft-model"]
    read = drafter.read

    def slow(sequence: Any, start: int, stop: int) -> None:
        nonlocal now
        now += stop - start
        read(sequence, start, stop)

    class Late(Alone):
        name = "late"
        weighs = True

        def budget(self, sequence: Any) -> int:
            return 2 if sequence.round_count == 3 else 0

    monkeypatch.setattr(drafter, "read", slow)
    monkeypatch.setattr("foredraft.bench.timing.time.perf_counter", lambda: now)
    timing = ForedraftContender("draft-model", setting.llm, "draft-model", decides=Late()).run(
        PROMPTS[:1], TOKENS
    )
    assert (timing.prefill_seconds, timing.decode_seconds) == (len(PROMPTS[0]), 2)


def test_parts_of_a_round_are_the_drafters_and_the_targets(
    setting: BenchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    engine = setting.llm.engine
    drafter: Any = engine.drafters["draft-model"]
    step = drafter.step

    def slow(*given: Any) -> Any:
        nonlocal now
        now += 1.0
        return step(*given)

    monkeypatch.setattr(drafter, "step", slow)
    monkeypatch.setattr(drafter, "draft", lambda *_: None)  # so that its steps come one by one
    monkeypatch.setattr("foredraft.bench.timing.time.perf_counter", lambda: now)
    with parted(engine) as parts:
        timing = ForedraftContender("draft-model", setting.llm, "draft-model").run(PROMPTS[:1], TOKENS)
    assert timing.stats is not None
    assert parts.draft == timing.stats.drafted == timing.decode_seconds
    assert parts.verify == 0


def test_the_engine_is_left_as_it_was(setting: BenchContext, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = setting.llm.engine

    def methods() -> list[Any]:
        drafters: Any = engine.drafters
        own = [drafters["lookup"].propose, drafters["draft-model"].step]
        return [engine.step, engine.round, engine.target.forward, *own]

    def broken(*given: Any, **named: Any) -> Any:
        assert "step" in vars(engine) and "round" in vars(engine)
        raise RequestError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(setting.llm, "generate", broken)
        with pytest.raises(RequestError), parted(engine):
            ForedraftContender("plain", setting.llm, "none").run(PROMPTS, TOKENS)
    assert all(map(inspect.ismethod, methods()))  # and no function that wraps one


def test_a_request_that_fails_is_no_run(setting: BenchContext, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any, **named: Any) -> Any:
        raise RuntimeError("out of order")

    monkeypatch.setattr(setting.llm.engine.target, "forward", broken)
    with pytest.raises(RequestError, match="plain: RuntimeError: out of order"):
        ForedraftContender("plain", setting.llm, "none").run(PROMPTS, TOKENS)


def test_the_coupled_rule_has_one_text_a_prompt_and_fresh_noise_many(setting: BenchContext) -> None:
    coupled = [
        ForedraftContender(name, setting.llm, name, temperature=1.0, coupled=True).run(PROMPTS, TOKENS).tokens
        for name in ("none", "draft-model", "none")
    ]
    assert coupled[0] == coupled[1] == coupled[2]
    free = ForedraftContender("none", setting.llm, "none", temperature=1.0)
    assert len({free.run(PROMPTS, TOKENS).tokens for _ in range(3)}) == 3


@pytest.fixture(scope="module")
def models(setting: BenchContext) -> hugging_face.Checkpoints:
    return hugging_face.Checkpoints(setting)


@pytest.mark.parametrize("way", [hugging_face.plain, hugging_face.assisted, hugging_face.prompt_lookup])
def test_transformers_says_the_same(setting: BenchContext, models: Any, texts: Any, way: Any) -> None:
    contender = way(models, setting)
    for prompts, expected in ((PROMPTS[:1], texts[:1]), (PROMPTS[1:2], texts[1:2])):
        timing = contender.run(prompts, TOKENS)
        assert timing.tokens == expected
        assert 0 < timing.decoded < TOKENS
        assert timing.decoded == TOKENS - 1 or contender.name != "transformers"
        assert timing.passes == (TOKENS - 1 if contender.name == "transformers" else None)
        assert timing.prefill_seconds > 0 and timing.decode_seconds > 0
    assert contender.batches == (None if contender.name == "transformers" else (1,))


def test_transformers_takes_several_prompts(setting: BenchContext, models: Any, texts: Any) -> None:
    timing = hugging_face.plain(models, setting).run(PROMPTS, TOKENS)
    assert timing.tokens == texts
    assert timing.decoded == 3 * (TOKENS - 1) and timing.passes == TOKENS - 1


def test_transformers_notes_where_its_first_token_ends(
    setting: BenchContext, models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    forward = models.target.forward

    def slow(*given: Any, **named: Any) -> Any:
        nonlocal now
        now += 100.0 if named["input_ids"].shape[1] > 1 else 1.0
        return forward(*given, **named)

    monkeypatch.setattr(models.target, "forward", slow)
    monkeypatch.setattr("foredraft.bench.hugging_face.time.perf_counter", lambda: now)
    timing = hugging_face.plain(models, setting).run(PROMPTS[:1], TOKENS)
    assert (timing.prefill_seconds, timing.decode_seconds) == (100.0, TOKENS - 1.0)


def test_transformers_samples_without_cuts(setting: BenchContext, models: Any) -> None:
    warm = BenchContext(
        setting.llm, setting.target, None, torch.float32, torch.device("cpu"), 64, temperature=50.0
    )
    timing = hugging_face.plain(models, warm).run(PROMPTS[:1] * 200, 2)
    assert len({text[0] for text in timing.tokens}) > 50  # nearly uniform over 384: the library cuts at 50


def test_costs_are_of_every_width_and_drafter(setting: BenchContext) -> None:
    made = measure_costs(setting.llm, 1, 40, 3, 1e-3, repeats=2)
    assert [cost.rows for cost in made.verifying] == [1, 2, 3, 4, 8, 16, 32]
    assert made.verifying[0].v == 1 and all(cost.seconds.count == 2 for cost in made.verifying)
    assert made.step_seconds == made.verifying[0].seconds.median
    assert made.drafting["lookup"] == DraftCost(0.0, 0.0)
    assert made.drafting["draft-model"].of(3) > 0
    assert made.bandwidth_share == pytest.approx(1e-3 / made.step_seconds)
    two = measure_costs(setting.llm, 2, 40, 3, repeats=1)
    assert [cost.rows for cost in two.verifying] == [1, 2, 3, 4] and two.bandwidth_share is None


def test_costs_are_in_plain_steps(setting: BenchContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock of our own: a target's forward takes 9 and 1 more a row; 5 more after another width, as the
    caches are left then, and 3 more after a draft, whose weights took the place of its own. A draft's step
    takes 1, but 4 after the target. So a round of 3 takes 6 + 16, and a verifying pass 13; a round of 1 takes
    4 + 14, and its pass 11."""
    now, last, width = 0.0, "", 0
    engine = setting.llm.engine
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
    )  # so that its steps come one by one
    monkeypatch.setattr("foredraft.bench.timing.time.perf_counter", lambda: now)
    made = measure_costs(setting.llm, 1, 40, 3, 1.0, repeats=4)
    assert made.step_seconds == 10 and set(made.drafting) == {"lookup", "draft-model"}
    draft = made.drafting["draft-model"]
    assert (draft.first, draft.further) == pytest.approx((0.7, 0.1))
    assert [cost.v for cost in made.verifying[:4]] == [1.0, 1.1, 1.2, 1.3]
    assert made.bandwidth_share == 0.1


def test_a_draft_takes_what_its_round_has_beyond_the_pass_of_the_same_repeat() -> None:
    """The machine slows down threefold, once before a pass and once before a round."""
    assert draft_seconds([4.0, 5.0, 14.0, 13.0, 5.0], [2.0, 2.0, 11.0, 11.0, 12.0]) == 2.0
    assert draft_seconds([1.0], [1.5]) == 0.0


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("gemma2", True), ("qwen2", False)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_weighs_what_its_file_holds(tmp_path: Path, family: str, tied: bool, dtype: str) -> None:
    folder = checkpoints.save_checkpoint(tmp_path, family, tie_word_embeddings=tied)
    runner: Any = foredraft.load(folder, device="cpu", dtype=dtype, max_batch=1).engine.target
    reference = checkpoints.reference_model(family, tie_word_embeddings=tied)
    parameters = sum(weight.numel() for weight in reference.parameters())
    found = weigh("target", "tiny", runner)
    assert found.parameters == parameters
    embedding = reference.get_input_embeddings().weight.numel()
    size = 4 if dtype == "float32" else 2
    assert found.step_bytes == size * (parameters - (0 if tied else embedding))
    assert found.dtype == dtype


# --- who takes part ----------------------------------------------------------------------------------


def test_plain_always_takes_part_and_comes_first() -> None:
    assert chosen(("lookup",)) == ("plain", "lookup")
    assert chosen(("lookup", "plain", "lookup")) == ("plain", "lookup")
    lossless = tuple(name for name in CONTENDERS if name != "bild")
    assert chosen(None) == chosen(("all",)) == lossless
    assert chosen(("all", "bild")) == (*lossless, "bild")
    assert next(iter(CONTENDERS)) == "plain"


def test_an_unknown_method_is_named_with_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match="methods is 'lookup,hope', but there is no 'hope'; give all, or some of plain, l"
    ):
        chosen(("lookup", "hope"))


def test_who_can_follow_which_policy() -> None:
    everybody = {name for name in DRAFTERS if name != "none"}
    steppers = {"draft-model", "layer-skip"}
    assert {policy: {name for name in everybody if suits(name, policy)} for policy in POLICIES} == {
        "auto": everybody,
        "fixed": everybody - {"auto"},
        "heuristic": everybody - {"auto"},
        "target-confidence": everybody - {"auto"},
        "confidence": steppers,
        "adaptive-exit": steppers,
        "fallback": steppers,
    }


def test_drafters_take_part_under_several_policies(setting: BenchContext, texts: Any) -> None:
    """On one loaded engine, whose own policy is as before after every run."""
    engine = setting.llm.engine
    own = engine.policy
    field = LineUp()
    names = ("plain", "lookup", "draft-model", "bild")
    field.enter(setting, names, Memory(setting.device), 7, wanted=names)
    others = [name for name in POLICIES if name != own.name]
    field.under(setting, tuple(POLICIES))
    assert [(one.method, one.policy) for one in field.contenders] == [
        ("plain", None),
        ("lookup", "fixed"),
        *(("lookup", name) for name in ("auto", "heuristic", "target-confidence")),
        ("draft-model", "fixed"),
        *(("draft-model", policy) for policy in others),
        ("bild", "fallback"),
    ]
    assert len({one.name for one in field.contenders}) == len(field.contenders) == len(field.loaded)
    assert field.notes == [
        "left out: lookup cannot follow confidence, adaptive-exit, fallback",
        "left out: bild cannot follow auto, fixed, heuristic, confidence, adaptive-exit, target-confidence",
    ]
    used: list[str] = []
    round = engine.round

    def noted() -> Any:
        used.append(engine.policy.name)
        return round()

    with wrapped(engine, "round", noted):
        for contender in field.contenders[1:-1]:
            used.clear()
            timing = contender.run(PROMPTS, TOKENS)
            assert timing.tokens == texts and set(used) == {contender.policy}
            assert engine.policy is own
            assert timing.stats is not None and len(timing.stats.drafted_at) <= 3


def test_a_policy_that_weighs_costs_measures_them_once_for_all_who_have_it(
    setting: BenchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    target: Any = setting.llm.engine.target
    policy = make_policy("auto", {}, 3, target)
    told: list[int] = []

    def take(measured: Measured, engine: Any) -> None:
        told.append(measured.longest)
        trials = (None, 0), ("filler", 3), ("draft-model", 1), ("draft-model", 3)
        measured.rounds = {trial: deque([1.0]) for trial in trials}

    monkeypatch.setattr(Measured, "take", take)
    monkeypatch.setattr("foredraft.decode.calibration.RARE", 1e12)
    for drafter in ("lookup", "draft-model", "lookup"):
        ForedraftContender(drafter, setting.llm, drafter).under(policy).run(PROMPTS[:1], TOKENS)
    assert told == [3]
    made: Any = policy
    assert made.table.drafts["draft-model"] == {1: (0.0, 0.0)}


def test_a_policy_that_nobody_can_follow_is_refused(setting: BenchContext) -> None:
    field = LineUp()
    field.enter(setting, ("plain", "lookup"), Memory(setting.device), 7)
    with pytest.raises(ConfigError, match="policies is 'confidence', but none of the methods can follow"):
        field.under(setting, ("confidence",))
    field.under(setting, ("confidence", "fixed"))  # one of them it has
    assert [one.policy for one in field.contenders] == [None, "fixed"]


def test_who_cannot_follow_the_policy_that_is_loaded_is_left_out(
    setting: BenchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent(monkeypatch, "transformers", "llama-cpp-python")
    target: Any = setting.llm.engine.target
    with wrapped(setting.llm.engine, "policy", make_policy("confidence", {}, 3, target)):
        with pytest.raises(ConfigError, match="lookup cannot follow policy='confidence'; give another"):
            LineUp().enter(setting, ("lookup",), Memory(setting.device), 0, wanted=("lookup",))
        field = LineUp()
        field.enter(setting, chosen(None), Memory(setting.device), 0)
    assert [one.name for one in field.contenders] == ["plain", "draft-model"]
    assert "left out: lookup cannot follow policy='confidence'; give another" in field.notes


def test_a_policy_is_made_anew_only_for_who_drafts_less_far(setting: BenchContext) -> None:
    """With the numbers that were given for it."""
    target: Any = setting.llm.engine.target
    settings = {"threshold": 0.3}
    given = replace(setting, max_draft=None, policy_options=settings, planned=7)
    with wrapped(setting.llm.engine, "policy", make_policy("confidence", settings, None, target, 7)):
        own, other = (given.policy(drafter, "confidence") for drafter in ("layer-skip", "draft-model"))
        assert own is setting.llm.engine.policy
        assert (other.max_draft, other.threshold) == (10, 0.3)  # type: ignore[attr-defined]
        fallback: Any = given.policy("draft-model", "fallback")
        assert (fallback.max_draft, fallback.threshold) == (10, 0.6)
        assert given.policy("draft-model", "fallback") is fallback
        assert given.policy("layer-skip", "auto") is given.policy("draft-model", "auto")


def absent(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    def version(name: str) -> str:
        if name in packages:
            raise metadata.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(contenders, "version", version)


def test_one_that_is_not_installed_is_an_error_only_if_asked_for(
    setting: BenchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent(monkeypatch, "transformers", "llama-cpp-python")
    with pytest.raises(
        ConfigError, match="'transformers-lookup', but transformers is not installed; pip install"
    ):
        chosen(("transformers-lookup",))
    field = LineUp()
    field.enter(setting, chosen(None), Memory(setting.device), 7)
    assert [one.name for one in field.contenders] == ["plain", "lookup", "draft-model"]
    assert field.loaded == {"plain": 7, "lookup": 7, "draft-model": 7}
    assert len(field.notes) == 7
    assert "left out: auto needs a policy that chooses; give policy='auto'" in field.notes
    assert field.notes[-1].startswith("left out: llama.cpp: llama-cpp-python is not installed")


def test_what_needs_a_draft_says_so(setting: BenchContext, monkeypatch: pytest.MonkeyPatch) -> None:
    absent(monkeypatch, "llama-cpp-python")
    alone = foredraft.load(setting.target, device="cpu", max_batch=1, max_length=64)
    without = BenchContext(alone, setting.target, None, torch.float32, torch.device("cpu"), 64)
    for name in ("draft-model", "retokenize", "bild", "transformers-assisted"):
        with pytest.raises(ConfigError, match=f"{name} needs a draft model"):
            LineUp().enter(without, (name,), Memory(setting.device), 0, wanted=(name,))
    with pytest.raises(ConfigError, match="bild needs a draft model"):
        LineUp().enter(without, ("lookup", "bild"), Memory(setting.device), 0, wanted=("all", "bild"))
    field = LineUp()
    field.enter(without, chosen(("all",)), Memory(setting.device), 0, wanted=("all",))
    assert [one.name for one in field.contenders] == [
        "plain", "lookup", "auto", "transformers", "transformers-lookup"
    ]  # fmt: skip


def test_a_peer_that_cannot_load_this_model_leaves_the_others(
    setting: BenchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(setting: BenchContext) -> Any:
        raise KeyError("rope")

    monkeypatch.setitem(PROGRAMS, "transformers", contenders.Program(broken))
    absent(monkeypatch, "llama-cpp-python")
    field = LineUp()
    field.enter(setting, chosen(None), Memory(setting.device), 0)
    assert [one.name for one in field.contenders] == ["plain", "lookup", "draft-model"]
    assert "left out: transformers cannot load this model (KeyError: 'rope')" in field.notes


def test_a_peer_whose_copy_of_the_weights_does_not_fit_is_not_loaded(
    setting: BenchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foredraft.bench.lineup.free_memory", lambda device: 2**10, raising=False)
    monkeypatch.setattr(hugging_face, "Checkpoints", lambda setting: pytest.fail("it was loaded"))
    found = LineUp()
    found.enter(setting, ("plain", "transformers"), Memory(setting.device), 0)
    assert [contender.name for contender in found.contenders] == ["plain"]
    [note] = found.notes
    assert note.startswith("left out: transformers needs 0.00") and "0.000 GiB are free on cpu" in note


def test_memory_that_a_run_takes_is_seen_at_its_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, looks = Memory(torch.device("cpu")), threading.Semaphore(0)
    held = memory.held

    def look() -> int:
        try:
            return held()
        finally:
            looks.release()

    with memory.peak() as peak:
        monkeypatch.setattr(memory, "held", look)
        values = torch.ones(2**24)  # 64 MiB
        for _ in range(2):  # the first may have begun before
            assert looks.acquire(timeout=60)
        del values
        assert looks.acquire(timeout=60)
    monkeypatch.undo()
    assert 2**25 < peak[0] < 2**27  # what else was given back meanwhile counts against it
    with memory.peak() as peak:
        pass
    assert peak[0] < 2**24
