"""Gemma 4's assistant, a random one: q of transformers' own module, the tokens of plain decoding, the exact law."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import foredraft
from foredraft import LLM, SamplingParams
from foredraft.decode.policy import Fixed, Heuristic
from foredraft.drafters import gemma4_assistant
from foredraft.drafters.gemma4_assistant import Assistant, Gemma4Assistant
from foredraft.errors import CheckpointError, ConfigError
from foredraft.kernels.compilation import library
from foredraft.model import attention
from tests.exactness import test_conformance as conformance
from tests.exactness.matrix import *  # noqa: F403
from tests.exactness.matrix import accepted_of
from tests.exactness.matrix import test_the_exact_distribution as test_the_exact_distribution
from tests.parity.test_heads import Recorder
from tests.support import assistants, coded
from tests.support.assistants import CENTROIDS, WORDS
from tests.support.checkpoints import save_checkpoint
from tests.support.mutation import Mutant, Mutation, assert_caught, caught_by
from tests.support.mutations import Function, around, before, holding, instead

NAME = Gemma4Assistant.name
NEW = 40
GREEDY = SamplingParams(temperature=0, max_new_tokens=NEW, ignore_eos=True)
LENGTHS = (1, 2, 3, 7, 9, 20, 33, 300)  # around the window, and past a chunk of a prompt
PROMPTS = [[(3 * at + at * at // 2 + length) % WORDS for at in range(length)] for length in LENGTHS]
NEEDS_KERNELS = pytest.mark.skipif(library() is None, reason="no kernels")


class Reference:
    """Draft steps by transformers: the target's keys and values of committed positions, and its module."""

    def __init__(self, kind: str, target: Path, centroids: bool) -> None:
        self.target: Any = transformers.AutoModelForCausalLM.from_pretrained(
            target, attn_implementation="eager", dtype=torch.float32
        ).eval()
        self.module: Any = assistants.reference_assistant(kind, **(CENTROIDS if centroids else {}))

    @functools.cache  # noqa: B019 - as short as the test
    def committed(self, tokens: tuple[int, ...]) -> tuple[Any, Tensor]:
        """Return the shared keys and values of positions, and the state after the final norm of the last."""
        given: Any = {"output_hidden_states": True, "return_shared_kv_states": True}
        out = self.target(torch.tensor([tokens]), use_cache=False, **given)
        return out.shared_kv_states, out.hidden_states[-1][:, -1:]

    @torch.inference_mode()
    def logits(self, text: list[int], drafted: list[int]) -> Tensor:
        """Return the logits [V] of a step; the last token of the text is pending."""
        *before, pending = text
        shared, state = self.committed(tuple(before))
        embed = self.target.get_input_embeddings()
        for token in [pending, *drafted]:
            out = self.module(
                inputs_embeds=torch.cat([embed(torch.tensor([[token]])), state], -1),
                position_ids=torch.tensor([[len(before)]]),
                attention_mask=None,
                shared_kv_states=dict(shared),
            )
            state = out.last_hidden_state
        return out.logits[0, 0]


def check_q(kind: str, by: str, centroids: bool) -> None:
    """Compare the draft steps of a batch of texts, sampled, so that drafts are accepted and rejected."""
    with tempfile.TemporaryDirectory() as folder:
        llm = assistants.load(Path(folder), kind, "float32", by, **(CENTROIDS if centroids else {}))
        reference = Reference(kind, Path(folder) / "target", centroids)
    llm.loaded.engine.policy = Fixed(3)
    record = Recorder(llm)
    params = SamplingParams(seed=1, acceptance="speculative", max_new_tokens=16, ignore_eos=True)
    accepted, drafted = accepted_of(llm.generate(PROMPTS[1:7], params))
    assert 0 < accepted < drafted
    assert {len(logits) for *_, logits in record.drafts} == {1, 2, 3}
    assert any(len(text) > 2 * assistants.WINDOW for text, *_ in record.drafts)
    for text, tokens, steps in record.drafts:
        for at, found in enumerate(steps):
            wanted, known = reference.logits(text, tokens[:at]), found.isfinite()
            assert int(known.sum()) == (2 if centroids else WORDS)
            if centroids:  # transformers gives the others a number below the least
                assert bool((wanted[~known] < wanted[known].min()).all())
                wanted = wanted.where(known, -torch.inf)
            torch.testing.assert_close(found.softmax(-1), wanted.softmax(-1), rtol=0, atol=1e-5)


# Cases are pairs that cover every kind, back end and head: all of them together would take minutes.
@pytest.mark.heavy
@pytest.mark.parametrize(
    ("by", "centroids"),
    [("operators", False), pytest.param("kernels", True, marks=NEEDS_KERNELS)],
    ids=["operators-head", "kernels-centroids"],
)
def test_q_is_that_of_transformers(by: str, centroids: bool) -> None:
    """transformers shares keys and values of those targets alone whose own layers share them."""
    check_q("shared", by, centroids)


LOADED = [
    ("shared", "float32", "operators"),
    pytest.param(("shared", "bfloat16", "kernels"), marks=NEEDS_KERNELS),
    pytest.param(("unified", "float32", "kernels"), marks=NEEDS_KERNELS),
]
KINDS = (NAME, "lookup", "none")
POLICIES = [Fixed(4), Heuristic(6)]
LAWS = [
    (functools.partial(assistants.tiny, "shared", "float32", "operators", True), "cold top-k"),
    pytest.param(
        (functools.partial(assistants.tiny, "unified", "float32", "kernels"), "as it is"), marks=NEEDS_KERNELS
    ),
]


@pytest.fixture(scope="module", params=LOADED, ids="-".join)
def llm(request: pytest.FixtureRequest) -> LLM:
    return assistants.tiny(*request.param)


def test_a_text_of_one_token_is_drafted_for_uniformly() -> None:
    """There is no position before it to attend to."""
    llm = assistants.tiny("shared", "float32", "operators")
    engine: Any = coded.fresh_engine(llm, Fixed(2))
    engine.cache.wipe(0, 0)
    for plane in engine.cache.planes:
        plane.fill_(3.0)  # of an earlier text
    _, sequence = conformance.begin([2], NAME, engine=engine)
    logits = engine.drafters[NAME].step(torch.tensor([[2]]), [0], [1], [False], None)
    assert sequence.tokens == [2] and bool((logits == 0).all())


UNIFIED, SHARED = (
    functools.partial(assistants.tiny, kind, "float32", "operators") for kind in ("unified", "shared")
)
BY_KERNELS = functools.partial(assistants.tiny, "shared", "float32", "kernels")
WORLDS = [
    conformance.World(UNIFIED), pytest.param(conformance.World(BY_KERNELS, stepwise=True), marks=NEEDS_KERNELS),
]  # fmt: skip


@pytest.mark.heavy
@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_a_rewound_assistant_equals_a_fresh_one(world: conformance.World) -> None:
    conformance.test_a_rewound_drafter_equals_a_fresh_one(world, NAME)
    conformance.test_a_rejection_at_every_place_leaves_no_trace(world, NAME)


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


def test_an_assistant_is_no_model_and_a_model_no_assistant(tmp_path: Path) -> None:
    assistants.save_assistant(tmp_path / "assistant", "shared")
    with pytest.raises(CheckpointError, match="gemma4_assistant"):
        foredraft.load(tmp_path / "assistant", device="cpu")
    target = save_checkpoint(tmp_path / "target")
    with pytest.raises(ConfigError, match="is a whole model"):
        foredraft.load(target, draft=target, drafter=NAME, device="cpu", max_length=64)


def test_the_option_draft_finds_the_assistant(tmp_path: Path) -> None:
    llm = assistants.load(tmp_path, "shared", "float32", "operators")
    assert llm.default_drafter == NAME
    assert {"lookup", NAME} <= set(llm.loaded.engine.drafters)
    assert "draft-model" not in llm.loaded.engine.drafters


@around
def a_rejected_position_seen(
    step: Function, own: Assistant, cache: Any, tokens: Tensor, states: Tensor, starts: list[int], idle: Any
) -> Any:
    """Attend to one position past the committed ones, at the same rotation."""
    tables = own.runner.backend._tables
    own.runner.backend.use_rotary_tables({rope: table.roll(1, 0) for rope, table in tables.items()})
    try:
        return step(own, cache, tokens, states, [start + 1 for start in starts], idle)
    finally:
        own.runner.backend.use_rotary_tables(tables)


def advance_the_position(own: Gemma4Assistant, *_: Any) -> None:
    if own._states is not None:
        own._at = [at + 1 for at in own._at]


def window_of(change: int) -> Mutation:

    @around
    def mutation(masks: Function, spec: Any, *rest: Any) -> Any:
        if not spec.rotated_ahead:
            return masks(spec, *rest)
        other = replace(spec, windows=tuple(window and window + change for window in spec.windows))
        return dict(zip(spec.windows, masks(other, *rest).values(), strict=False))

    return mutation


rotated_with_the_last_committed = around(lambda tables, x, *rest: tables(replace(x, rotated_ahead=0), *rest))
# read the first layers with keys and values of their own instead of the last
the_first_producers = instead(
    lambda spec: {spec.windows[n] is None: n for n in reversed(range(spec.layers)) if spec.stores(n)}
)


@around
def states_kept(rewind: Function, own: Gemma4Assistant, sequence: Any) -> None:
    states = own._states
    rewind(own, sequence)
    own._states = states


DEFECTS = {
    functools.partial(check_q, "shared", "operators", False): [
        ("a rejected position visible", Assistant.step, a_rejected_position_seen),
        ("position advanced within a round", Gemma4Assistant.step, before(advance_the_position)),
        ("window one wider", attention.causal_masks, window_of(1)),
        ("window one narrower", attention.causal_masks, window_of(-1)),
        ("rotated with the last committed position", attention.rope_tables, rotated_with_the_last_committed),
        (
            "states before the final norm",
            Gemma4Assistant.step,
            holding(lambda own, *given: (own, "_norm", torch.nn.Identity())),
        ),
        ("keys and values of the first layers", gemma4_assistant.producers, the_first_producers),
    ],
    functools.partial(test_a_rewound_assistant_equals_a_fresh_one, conformance.World(SHARED)): [
        ("states one position early", Gemma4Assistant.observe, conformance.states_of_the_position_before),
        (
            "a draft that never ends",
            ((Gemma4Assistant.resume, lambda _: lambda own: None), (Gemma4Assistant.rewind, states_kept)),
        ),
    ],
}


@pytest.mark.parametrize("mutant", caught_by(DEFECTS), ids=lambda mutant: mutant.name)
def test_a_defect_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(mutant, monkeypatch)
