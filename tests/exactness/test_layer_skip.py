"""A model that drafts for itself: real forwards, whatever is left out of them, leave the very bits of plain decoding."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import foredraft
from foredraft import LLM, SamplingParams, loading
from foredraft.decode.policy import Fixed, Heuristic
from foredraft.drafters.layer_skip import LayerSkip
from foredraft.drafters.skips import Skips
from foredraft.model.runner import Resume
from foredraft.model.runner.graphs import Graphs
from tests.exactness.test_bits import PROMPTS, VOCABULARY, row_of, steps_of
from tests.support.checkpoints import FAMILIES, layers_of, reference_model
from tests.support.loaded import engine_of
from tests.support.parts import StepByStep
from tests.support.recorder import Rerun

NEW, ROWS = 40, 8
GREEDY = SamplingParams(temperature=0, max_new_tokens=NEW, ignore_eos=True)
BY = ("operators", "kernels")


def skips_of(layers: int) -> dict[str, Skips]:
    every, last = tuple(range(layers)), layers - 1
    return {
        "nothing": Skips(),
        "alternating": Skips(every[1::2], every[::2]),
        "ends": Skips((0, last), (last,)),
        "attention": Skips(every),
        "everything": Skips(every, every),
        "early": Skips(exit=1),
        "late": Skips(exit=last),
    }


def load(folder: Path, family: str, dtype: str, by: str) -> LLM:
    """A model with one drafter for every plan, and a lookup."""
    model = reference_model(family, vocab_size=VOCABULARY, tie_word_embeddings=False)
    model.save_pretrained(folder)
    with pytest.MonkeyPatch.context() as patch:
        if by == "operators":
            patch.setattr(loading.runners, "unserved_because", lambda *_: "for a test")
        llm = foredraft.load(
            folder,
            plan="skip:none",
            dtype=dtype,
            device="cpu",
            max_batch=ROWS,
            max_length=512,
            policy="fixed",
        )
    runner: Any = llm.loaded.runner
    assert runner.by_kernels == (by == "kernels")
    for name, skips in skips_of(llm.loaded.spec.layers).items():
        drafter = LayerSkip(runner, engine_of(llm).cache, skips)
        drafter.name = name
        engine_of(llm).drafters[name] = drafter
    return llm


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


PLANS = tuple(skips_of(3))


@pytest.fixture(scope="module")
def plain(llm: LLM) -> list[list[int]]:
    return plainly(llm)


def plainly(llm: LLM) -> list[list[int]]:
    """Each prompt alone, one token a pass."""
    return [llm.generate([p], replace(GREEDY, drafter="none"))[0].token_ids for p in PROMPTS]


def assert_plain(llm: LLM, kinds: list[str], want: list[list[int]]) -> None:
    outputs = llm.generate(PROMPTS, [replace(GREEDY, drafter=kind) for kind in kinds])
    for index, (output, wanted, kind) in enumerate(zip(outputs, want, kinds, strict=True)):
        assert output.token_ids == wanted, f"prompt {index} under {kind}"


@pytest.mark.parametrize("gamma", [1, 4, 7])
def test_greedy_ids_in_a_batch_of_all_plans(llm: LLM, plain: list[list[int]], gamma: int) -> None:
    """Every plan meets every prompt at some γ; a lookup and plain steps are among them."""
    engine_of(llm).policy = Fixed(gamma)
    assert_plain(llm, list(islice(cycle([*PLANS, "lookup", "none"]), gamma, gamma + len(PROMPTS))), plain)


@pytest.mark.parametrize("name", PLANS)
def test_greedy_ids_of_one_plan(llm: LLM, plain: list[list[int]], name: str) -> None:
    engine_of(llm).policy = Heuristic(7)
    assert_plain(llm, [name] * len(PROMPTS), plain)
    [alone] = llm.generate([PROMPTS[4]], replace(GREEDY, drafter=name))
    assert alone.token_ids == plain[4]


@settings(max_examples=8)
@given(data=st.data())
def test_any_layers_may_be_skipped(llm: LLM, plain: list[list[int]], data: st.DataObject) -> None:
    last = llm.loaded.spec.layers - 1
    layers = st.sets(st.integers(0, last)).map(lambda found: tuple(sorted(found)))
    skips = st.builds(Skips, layers, layers) | st.builds(Skips, exit=st.integers(1, last))
    runner = llm.loaded.runner
    engine_of(llm).drafters["layer-skip"] = LayerSkip(runner, engine_of(llm).cache, data.draw(skips))
    engine_of(llm).policy = Fixed(data.draw(st.integers(1, 7)))
    params = replace(GREEDY, max_new_tokens=16, drafter="layer-skip")
    assert [output.token_ids for output in llm.generate(PROMPTS[1:5], params)] == [
        ids[:16] for ids in plain[1:5]
    ]


@pytest.mark.parametrize("way", ["gathered", "recorded"])
def test_greedy_ids_of_ragged_and_captured_passes(llm: LLM, plain: list[list[int]], way: str) -> None:
    """Gathered, or replayed from recordings, of which each plan has its own."""
    runner: Any = llm.loaded.runner
    if runner.by_kernels:
        pytest.skip("the kernels have one way")
    engine_of(llm).policy = Fixed(4)
    runner.backend.gathers, runner.backend.graphs = (
        way == "gathered",
        Graphs(Rerun()) if way == "recorded" else None,
    )
    try:
        for shift in range(3):
            assert_plain(llm, list(islice(cycle(PLANS), shift, shift + len(PROMPTS))), plain)
        assert runner.backend.graphs is None or runner.backend.graphs.capturer.replays > 0
    finally:
        runner.backend.gathers, runner.backend.graphs = None, None


@pytest.mark.parametrize("name", PLANS)
def test_the_cache_after_rollbacks(llm: LLM, name: str) -> None:
    """The very bits that plain decoding leaves behind."""
    engine_of(llm).policy = Fixed(5)
    prompt, length = PROMPTS[4], len(PROMPTS[4]) + NEW - 1
    for sequence in steps_of(llm, prompt, name, NEW):
        tokens, cached = list(sequence.tokens), row_of(llm, sequence, length)
        assert name == "nothing" or any(turn.accepted < turn.drafted for turn in sequence.rounds)
    for sequence in steps_of(llm, prompt, None, NEW):
        assert sequence.tokens[: length + 1] == tokens[: length + 1]
        assert torch.equal(row_of(llm, sequence, length), cached)


def test_seeded_text_with_and_without_speculation(llm: LLM) -> None:
    engine_of(llm).policy = Fixed(4)
    wish = SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_new_tokens=NEW, ignore_eos=True)
    [want] = llm.generate([PROMPTS[3]], replace(wish, drafter="none"))
    outputs = llm.generate([PROMPTS[3]] * len(PLANS), [replace(wish, drafter=name) for name in PLANS])
    assert [output.token_ids for output in outputs] == [want.token_ids] * len(PLANS)


def test_drafts_of_a_plan_that_skips_nothing_are_accepted_whole(llm: LLM) -> None:
    engine_of(llm).policy = Fixed(4)
    for output in llm.generate(PROMPTS, replace(GREEDY, drafter="nothing")):
        assert output.stats.accepted == output.stats.drafted > 0


def test_the_verifying_pass_resumes_from_the_drafts_states(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pending token and all drafted ones but the last are known, of the rows that exit early."""
    engine_of(llm).policy = Fixed(3)
    seen: list[Resume | None] = []
    forward = llm.loaded.runner.forward

    def spy(*args: Any, resume: Resume | None = None, **more: Any) -> Any:
        if "plan" not in more:
            seen.append(resume)
        return forward(*args, resume=resume, **more)

    monkeypatch.setattr(llm.loaded.runner, "forward", spy)
    outputs = llm.generate(PROMPTS[:2], [replace(GREEDY, drafter=name) for name in ("early", "ends")])
    resumes = [resume for resume in seen if resume is not None]
    assert {resume.depth for resume in resumes} == {1}
    assert all(1 <= resume.known[0] <= 3 and not any(resume.known[1:]) for resume in resumes)
    assert sum(resume.known[0] for resume in resumes) == outputs[0].stats.drafted


@pytest.mark.parametrize("by", [pytest.param("operators", marks=pytest.mark.slow), "kernels"])
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("llama", "gemma2")])
def test_every_family(family: str, by: str, tmp_path: Path) -> None:
    llm = load(tmp_path, family, "float32", by)
    want = plainly(llm)
    engine_of(llm).policy = Fixed(4)
    for shift in (0, 3):
        assert_plain(llm, list(islice(cycle(PLANS), shift, shift + len(PROMPTS))), want)


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("family", FAMILIES)
def test_an_early_exit_drafts_the_tokens_of_the_shorter_model(family: str, by: str, tmp_path: Path) -> None:
    """The shorter model is that of transformers without the layers from the exit on."""
    model: Any = reference_model(family, vocab_size=VOCABULARY, tie_word_embeddings=False)
    llm = load(tmp_path, family, "float32", by)
    drafted: list[list[int]] = []
    step, fused_draft = LayerSkip.step, LayerSkip.fused_draft

    def spy_step(self: LayerSkip, tokens: torch.Tensor, *rest: Any) -> torch.Tensor:
        logits = step(self, tokens, *rest)
        drafted[-1].append(int(logits[0].argmax()))
        return logits

    def spy_fused(self: LayerSkip, *args: Any) -> Any:
        draft = fused_draft(self, *args)
        drafted[-1] += [] if draft is None else draft.tokens[0].tolist()
        return draft

    engine_of(llm).policy = Fixed(4)
    holder, name = layers_of(model)
    setattr(holder, name, getattr(holder, name)[: llm.loaded.spec.layers - 1])
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(LayerSkip, "step", spy_step)
        patch.setattr(LayerSkip, "fused_draft", spy_fused)
        for prompt in PROMPTS[1:5]:
            drafted.append([])
            [output] = llm.generate([prompt], replace(GREEDY, max_new_tokens=5, drafter="late"))
            text = list(prompt)
            assert len(drafted[-1]) >= 4
            for token in drafted[-1][:4]:
                assert int(model(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()) == token
                text.append(token)
            assert output.stats.drafted >= 4


def test_nonfinite_drafts_leave_the_text_as_it_is(llm: LLM, plain: list[list[int]]) -> None:
    """The verifying pass overwrites them in every layer of the cache before the target attends to them."""
    engine_of(llm).policy = Fixed(4)
    drafter: Any = engine_of(llm).drafters["nothing"]
    draft_pass, decoder = drafter.draft_pass, drafter.draft_pass.runner.decoder
    embedding, passes = decoder.embedding.clone(), 0

    def broken(*args: Any, **more: Any) -> Any:
        nonlocal passes
        passes += 1
        decoder.embedding.fill_(float("nan"))  # in place: the kernels have its address
        made = draft_pass(*args, **more)
        decoder.embedding.copy_(embedding)
        return made

    drafter.draft_pass = StepByStep(broken)
    try:
        outputs = llm.generate(PROMPTS[2:4], replace(GREEDY, drafter="nothing"), trace=True)
    finally:
        drafter.draft_pass = draft_pass
    assert [output.token_ids for output in outputs] == plain[2:4]
    assert all(output.stats.drafted == 0 for output in outputs), "no logits to draw from"
    assert passes >= 8 and not any(one.discarded for output in outputs for one in output.trace)


def test_a_plan_of_a_deeper_model_is_refused(llm: LLM) -> None:
    runner = llm.loaded.runner
    with pytest.raises(foredraft.ConfigError, match="plan exits before layer 9; give 1 to"):
        LayerSkip(runner, engine_of(llm).cache, Skips(exit=9))
