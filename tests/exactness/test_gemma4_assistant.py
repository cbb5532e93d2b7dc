"""Gemma 4's assistant: q of transformers' own module, the tokens of plain decoding, the exact distribution.

The assistants are random, so they are weak: of few words, a draft is accepted by chance.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import foredraft
from foredraft import LLM, SamplingParams
from foredraft.decode.policy import Fixed, Heuristic
from foredraft.decode.prefix_cache import PrefixCache
from foredraft.drafters.gemma4_assistant import Assistant, Gemma4Assistant
from foredraft.errors import CheckpointError, ConfigError
from foredraft.kernels.compilation import library
from tests.exactness.test_conformance import World, check_rejections, check_rewound
from tests.exactness.test_enumeration import case, compare
from tests.support import assistants
from tests.support.assistants import CENTROIDS, WORDS
from tests.support.checkpoints import save_checkpoint
from tests.support.forking import outputs_of
from tests.support.harness import ForkingEngine, request
from tests.support.loaded import engine_of
from tests.support.planting import Edit, Mutant, Spoiler, assert_caught, defect

NAME = Gemma4Assistant.name
NEW = 40
GREEDY = SamplingParams(temperature=0, max_new_tokens=NEW, ignore_eos=True)
LENGTHS = (1, 2, 3, 7, 9, 20, 33, 300)  # around the window, and past a chunk of a prompt
PROMPTS = [[(3 * at + at * at // 2 + length) % WORDS for at in range(length)] for length in LENGTHS]
NEEDS_KERNELS = pytest.mark.skipif(library() is None, reason="no kernels")


# --- q is that of transformers --------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One draft step of one row: the tokens that are committed or drafted before it, and its logits."""

    committed: list[int]  # the pending token last
    drafted: list[int]
    logits: Tensor  # [V]


def recorded(llm: LLM, prompts: list[list[int]], new: int = 16) -> list[Step]:
    """Return the draft steps of a batch of texts, sampled, so that drafts are accepted and rejected."""
    engine: Any = assistants.fresh_engine(llm, Fixed(3), rows=len(prompts))
    drafter, steps, drafts = engine.drafters[NAME], list[Step](), dict[int, list[int]]()
    sound = drafter.step

    def noted(tokens: Tensor, starts: list[int], counts: Any, idle: list[bool], at: Any) -> Tensor:
        logits: Tensor = sound(tokens, starts, counts, idle, at)
        for row, sequence in enumerate(engine.rows.sequences):
            if idle[row]:
                continue
            first = starts[row] == len(sequence.tokens) - 1
            drafts[row] = [] if first else [*drafts[row], int(tokens[row, 0])]
            steps.append(Step(list(sequence.tokens), list(drafts[row]), logits[row].clone()))
        return logits

    drafter.step = noted
    texts = [request(prompt, NAME, seed=at, max_new_tokens=new) for at, prompt in enumerate(prompts)]
    for text in texts:
        engine.submit(text)
    while not engine.scheduler.idle:
        engine.step()
    turns = [turn for text in texts for turn in text.rounds]
    assert any(turn.accepted for turn in turns) and any(turn.accepted < turn.drafted for turn in turns)
    return steps


class Reference:
    """The same steps by transformers: the target's keys and values of committed positions, and its module."""

    def __init__(self, kind: str, centroids: bool, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.target: Any = AutoModelForCausalLM.from_pretrained(
            assistants.save_target(folder, kind), attn_implementation="eager", dtype=torch.float32
        ).eval()
        self.module: Any = assistants.reference_assistant(kind, **(CENTROIDS if centroids else {}))

    @functools.cache  # noqa: B019 - as short as the test
    def committed(self, tokens: tuple[int, ...]) -> tuple[Any, Tensor]:
        """Return the shared keys and values of positions, and the state after the final norm of the last."""
        out = self.target(
            torch.tensor([tokens]), use_cache=False, output_hidden_states=True, return_shared_kv_states=True
        )
        return out.shared_kv_states, out.hidden_states[-1][:, -1:]

    @torch.inference_mode()
    def logits(self, step: Step) -> Tensor:
        """Return the logits [V] of a step."""
        *before, pending = step.committed
        shared, state = self.committed(tuple(before))
        embed = self.target.get_input_embeddings()
        for token in [pending, *step.drafted]:
            out = self.module(
                inputs_embeds=torch.cat([embed(torch.tensor([[token]])), state], -1),
                position_ids=torch.tensor([[len(before)]]),
                attention_mask=None,
                shared_kv_states=dict(shared),
            )
            state = out.last_hidden_state
        logits: Tensor = out.logits[0, 0]
        return logits


def check_q(kind: str, by: str, centroids: bool, folder: Path) -> None:
    llm, reference = assistants.tiny(kind, "float32", by, centroids), Reference(kind, centroids, folder)
    steps = recorded(llm, PROMPTS[1:7])
    assert len({len(step.drafted) for step in steps}) == 3
    assert any(len(step.committed) > 2 * assistants.WINDOW for step in steps)
    for step in steps:
        found, wanted = step.logits, reference.logits(step)
        known = found.isfinite()
        assert int(known.sum()) == (2 if centroids else WORDS)
        if centroids:  # transformers gives the others a number below the least
            assert bool((wanted[~known] < wanted[known].min()).all())
            wanted = wanted.where(known, -torch.inf)
        torch.testing.assert_close(found.softmax(-1), wanted.softmax(-1), rtol=0, atol=1e-5)


# Cases are pairs that cover every kind, back end and head: all of them together would take minutes.
@pytest.mark.parametrize(
    ("by", "centroids"),
    [("operators", False), pytest.param("kernels", True, marks=NEEDS_KERNELS)],
    ids=["operators-head", "kernels-centroids"],
)
def test_q_is_that_of_transformers(by: str, centroids: bool, tmp_path: Path) -> None:
    """transformers shares keys and values of those targets alone whose own layers share them."""
    check_q("shared", by, centroids, tmp_path)


# --- the text is the target's ---------------------------------------------------------------------------


def plain_ids(llm: LLM) -> list[list[int]]:
    """Each prompt alone, one token a pass."""
    return [llm.generate([prompt], replace(GREEDY, drafter="none"))[0].token_ids for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("kind", "by", "dtype"),
    [
        ("shared", "operators", "float32"),
        pytest.param("shared", "kernels", "bfloat16", marks=NEEDS_KERNELS),
        pytest.param("unified", "kernels", "float32", marks=NEEDS_KERNELS),
    ],
)
def test_greedy_ids_in_a_batch_and_alone(kind: str, by: str, dtype: str) -> None:
    llm = assistants.tiny(kind, dtype, by)
    plain = plain_ids(llm)
    for policy in (Fixed(4), Heuristic(6)):
        engine_of(llm).policy = policy
        outputs = llm.generate(PROMPTS, replace(GREEDY, drafter=NAME))
        assert [output.token_ids for output in outputs] == plain
        accepted, drafted = (sum(getattr(o.stats, name) for o in outputs) for name in ("accepted", "drafted"))
        assert 0.02 < accepted / drafted < 0.95
    for index, prompt in enumerate(PROMPTS):
        [alone] = llm.generate([prompt], replace(GREEDY, drafter=NAME))
        assert alone.token_ids == plain[index]


@pytest.mark.parametrize(
    ("kind", "by", "centroids", "transform"),
    [
        ("shared", "operators", True, "cold top-k"),
        pytest.param("unified", "kernels", False, "as it is", marks=NEEDS_KERNELS),
    ],
    ids=["shared", "unified"],
)
def test_the_exact_distribution(kind: str, by: str, centroids: bool, transform: str) -> None:
    check_distribution(kind, by, centroids, transform)


def check_distribution(kind: str, by: str, centroids: bool, transform: str) -> None:
    made, one = assistants.tiny(kind, "float32", by, centroids), case(transform, NAME, prompt=(3, 1, 2))
    found = outputs_of(lambda noise: assistants.fresh_engine(made, Fixed(2), rows=8, noise=noise), [one])
    compare([one], found, assistants.after(made))
    assert found[0].drafted > 0


def test_a_text_of_one_token_is_drafted_for_uniformly() -> None:
    """There is no position before it to attend to."""
    llm = assistants.tiny("shared", "float32", "operators")
    engine: Any = assistants.fresh_engine(llm, Fixed(2))
    engine.cache.wipe(0, 0)
    for plane in engine.cache.planes:
        plane.fill_(3.0)  # of an earlier text
    _, sequence = begun(engine, [2])
    drafter = engine.drafters[NAME]
    logits = drafter.step(torch.tensor([[2]]), [0], [1], [False], None)
    assert sequence.tokens == [2] and bool((logits == 0).all())


def begun(engine: ForkingEngine, tokens: list[int]) -> Any:
    """Let an engine read a prompt; returns it and the text."""
    sequence = request(tokens, NAME, seed=1, acceptance="speculative", max_new_tokens=20)
    engine.submit(sequence)
    engine._start(engine.scheduler.admit())
    while engine.scheduler.prefilling:
        engine._prefill(sequence)
    return engine, sequence


# --- rewinding ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AssistantWorld(World):
    """A real target and its assistant."""

    kind: str = "shared"
    by: str = "operators"

    def engine(self) -> ForkingEngine:
        return assistants.fresh_engine(assistants.tiny(self.kind, "float32", self.by), self.policy(3))


WORLDS = [
    AssistantWorld(kind="unified", by="operators"),
    pytest.param(AssistantWorld(stepwise=True, kind="shared", by="kernels"), marks=NEEDS_KERNELS),
]


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: f"{world.kind}-{world.by}")
def test_a_rewound_assistant_equals_a_fresh_one(world: World) -> None:
    check_rewound(world, NAME)


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: f"{world.kind}-{world.by}")
def test_a_rejection_at_every_place_leaves_no_trace(world: World) -> None:
    check_rejections(world, NAME)


def test_a_prompt_that_is_not_read_again_is_drafted_for_as_well() -> None:
    """The target's states of a kept prefix, and of a sibling's prompt, are copied with its keys and values."""
    llm = assistants.tiny("unified", "float32", "operators")
    engine: Any = assistants.fresh_engine(llm, Fixed(3), rows=3)
    engine.prefix_cache = PrefixCache(2**24)
    drafter, chunk = engine.drafters[NAME], engine.target.chunk
    assert chunk > assistants.POSITIONS, "a chunk does not fit: the prefix is tested over a longer cache"
    prompt = PROMPTS[6]
    one = request(prompt, NAME, seed=1, group=7, max_new_tokens=4)
    two = request(prompt, NAME, seed=2, group=7, sample=1, max_new_tokens=4)
    for sequence in (one, two):
        engine.submit(sequence)
    while not engine.scheduler.idle:
        engine.step()
        for sequence in engine.rows.sequences:
            if sequence.decoding:
                assert drafter.cache.lengths[sequence.row] == len(sequence.tokens) - 1


# --- what does not fit is refused -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"backbone_hidden_size": 32}, "states of size 32"),
        ({"vocab_size": 10}, "a vocabulary of 10"),
        ({"num_key_value_heads": 4}, "in layers with a window, key heads and their size of \\(4, 16\\)"),
        ({"global_head_dim": 16}, "in layers with full attention, key heads and their size of \\(2, 16\\)"),
    ],
    ids=str,
)
def test_the_assistant_of_another_target_is_refused(keys: dict[str, Any], named: str, tmp_path: Path) -> None:
    target = assistants.save_target(tmp_path / "target", "shared")
    words = keys.get("vocab_size", WORDS)
    model = assistants.reference_assistant("shared", words, **keys)
    model.save_pretrained(tmp_path / "assistant")
    with pytest.raises(ConfigError, match=named):
        foredraft.load(target, draft=tmp_path / "assistant", device="cpu", max_length=64)


def test_an_assistant_is_no_model(tmp_path: Path) -> None:
    assistants.save_assistant(tmp_path, "shared")
    with pytest.raises(CheckpointError, match="gemma4_assistant"):
        foredraft.load(tmp_path, device="cpu")


def test_a_whole_model_is_no_assistant(tmp_path: Path) -> None:
    for name in ("target", "draft"):
        save_checkpoint(tmp_path / name)
    with pytest.raises(ConfigError, match="is a whole model"):
        foredraft.load(
            tmp_path / "target", draft=tmp_path / "draft", drafter=NAME, device="cpu", max_length=64
        )


def test_the_option_draft_finds_the_assistant(tmp_path: Path) -> None:
    llm = assistants.load(tmp_path, "shared", "float32", "operators")
    assert llm.default_drafter == NAME
    assert {"lookup", NAME} <= set(engine_of(llm).drafters)
    assert "draft-model" not in engine_of(llm).drafters


# --- planted defects ------------------------------------------------------------------------------------


def a_rejected_position_seen(step: Callable[..., Any]) -> Callable[..., Any]:
    """Attend to one position past the committed ones, at the same rotation."""

    def spoilt(
        own: Assistant, cache: Any, tokens: Tensor, states: Tensor, starts: list[int], idle: Any
    ) -> Any:
        tables = own.runner.backend._tables
        own.runner.backend.use_rotary_tables({rope: table.roll(1, 0) for rope, table in tables.items()})
        try:
            return step(own, cache, tokens, states, [start + 1 for start in starts], idle)
        finally:
            own.runner.backend.use_rotary_tables(tables)

    return spoilt


def position_advanced(step: Callable[..., Any]) -> Callable[..., Any]:
    """Take each step of a draft one position further."""

    def spoilt(own: Gemma4Assistant, tokens: Tensor, starts: list[int], *rest: Any) -> Tensor:
        if own._states is not None:
            own._at = [at + 1 for at in own._at]
        logits: Tensor = step(own, tokens, starts, *rest)
        return logits

    return spoilt


def window_of(change: int) -> Spoiler:
    """Attend with a window that is `change` wider than that of transformers."""

    def spoiler(masks: Callable[..., Any]) -> Callable[..., Any]:
        def spoilt(spec: Any, *rest: Any) -> Any:
            if not spec.rotated_ahead:
                return masks(spec, *rest)
            other = replace(spec, windows=tuple(window and window + change for window in spec.windows))
            return dict(zip(spec.windows, masks(other, *rest).values(), strict=False))

        return spoilt

    return spoiler


def rotated_with_the_last_committed(tables: Callable[..., Any]) -> Callable[..., Any]:
    return lambda spec, *rest: tables(replace(spec, rotated_ahead=0), *rest)


def states_before_the_norm(last: Callable[..., Any]) -> Callable[..., Any]:
    def spoilt(own: Gemma4Assistant, starts: list[int]) -> Tensor:
        norm, own._norm = own._norm, torch.nn.Identity()  # type: ignore[assignment]
        try:
            found: Tensor = last(own, starts)
        finally:
            own._norm = norm
        return found

    return spoilt


def the_first_producers(producers: Callable[..., Any]) -> Callable[..., Any]:
    """Read the first layers with keys and values of their own instead of the last."""

    def spoilt(spec: Any) -> Any:
        return {
            spec.windows[layer] is None: layer for layer in reversed(range(spec.layers)) if spec.stores(layer)
        }

    return spoilt


def q_only(folder: Path) -> None:
    assistants.tiny.cache_clear()
    check_q("shared", "operators", False, folder)


def MASKS() -> Any:
    from foredraft.model import forward_context

    return forward_context.causal_masks


def TABLES() -> Any:
    from foredraft.model import forward_context

    return forward_context.rope_tables


def PRODUCERS() -> Any:
    from foredraft.drafters import assistant_config

    return assistant_config.producers


DEFECTS: dict[str, tuple[Callable[[], Any], Spoiler]] = {
    "a rejected position visible": (lambda: Assistant.step, a_rejected_position_seen),
    "position advanced within a round": (lambda: Gemma4Assistant.step, position_advanced),
    "window one wider": (MASKS, window_of(1)),
    "window one narrower": (MASKS, window_of(-1)),
    "rotated with the last committed position": (TABLES, rotated_with_the_last_committed),
    "states before the final norm": (lambda: Gemma4Assistant._last_states, states_before_the_norm),
    "keys and values of the first layers": (PRODUCERS, the_first_producers),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_of_q_is_caught(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seam, spoiler = DEFECTS[name]
    try:
        assert_caught(defect(name, seam(), spoiler, lambda: q_only(tmp_path)), monkeypatch)
    finally:
        assistants.tiny.cache_clear()


def states_of_the_position_before(observe: Callable[..., Any]) -> Callable[..., Any]:
    return lambda drafter, sequence, start, states: observe(
        drafter, sequence, start, {depth: own.roll(1, 0) for depth, own in states.items()}
    )


def never_reset(resume: Callable[..., Any]) -> Callable[..., Any]:
    return lambda own: None


def states_kept(rewind: Callable[..., Any]) -> Callable[..., Any]:
    """Go on from the state of the last draft step after a round."""

    def spoilt(own: Gemma4Assistant, sequence: Any) -> None:
        states = own._states
        rewind(own, sequence)
        own._states = states

    return spoilt


EDITS: dict[str, tuple[Edit, ...]] = {
    "states one position early": ((Gemma4Assistant.observe, states_of_the_position_before),),
    "a draft that never ends": (
        (Gemma4Assistant.resume, never_reset),
        (Gemma4Assistant.rewind, states_kept),
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_drafter_with_wrong_states_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = AssistantWorld(kind="shared", by="operators")

    def check() -> None:
        check_rewound(world, NAME)
        check_rejections(world, NAME)

    assert_caught(Mutant(name, EDITS[name], check), monkeypatch)
