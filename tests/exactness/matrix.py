"""What holds for every loaded model and all its drafters, in real forwards: tests that the modules of drafters import.

A module gives the fixture `llm`, PROMPTS, GREEDY parameters, POLICIES, and KINDS of drafters, or a function `kinds_of`
the model; the first kind runs a model. It may give WAYS in which passes run, and LAWS over models of few words.
"""

from __future__ import annotations

import functools
import itertools
import random
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft import LLM, SamplingParams
from foredraft.decode import drafting
from foredraft.decode.policy import Fixed, Policy
from foredraft.decode.prefix_cache import PrefixCache
from foredraft.decode.sequence import Sequence
from foredraft.drafters import states
from foredraft.drafters.eagle3 import Eagle3
from foredraft.model.runner.graphs import Graphs
from tests.exactness.test_conformance import CONSTRAINTS
from tests.exactness.test_enumeration import case, check_law
from tests.parity import test_heads as heads
from tests.support import coded
from tests.support.caches import held
from tests.support.checkpoints import reference_model
from tests.support.coded import VOCABULARY
from tests.support.harness import request as request_of
from tests.support.harness import run
from tests.support.heads import FORMATS, save_head
from tests.support.mutation import replaced
from tests.support.parts import LateBan, NoRepeat
from tests.support.recorder import Rerun

__all__ = [
    "GREEDY", "PROMPTS", "few_states_wait",
    "test_a_seed_gives_the_text_of_plain_decoding", "test_choices_share_a_prompt_and_a_second_request_restores_it",
    "test_greedy_ids_in_batches_and_alone", "test_penalties_constraints_and_bans",
]  # fmt: skip
Ids = list[list[int]]
NEW = 64
LENGTHS = (1, 3, 23, 25, 70, 256, 257, 300)  # around a window of 24 and a prefill chunk of 256
GREEDY = SamplingParams(temperature=0, max_new_tokens=NEW, ignore_eos=True)
MODEL_FREE = ("lookup", "none")
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.8},
    {"top_p": 0.8},
    {"top_k": 5, "temperature": 1.3},
    {"min_p": 0.1},
)
FUSED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0}, {"acceptance": "speculative"}, {"top_k": 4, "temperature": 0.7},
)  # fmt: skip


def prompts_of(count: int, vocabulary: int = VOCABULARY) -> Ids:
    """Return random prompts with a repeated half, so that a lookup finds something."""
    dice, made = random.Random(0), []
    for length in LENGTHS[:count]:
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
    llm: LLM,
    kinds: list[str],
    want: Ids,
    prompts: Ids = PROMPTS,
    params: SamplingParams | list[SamplingParams] = GREEDY,
) -> list[Any]:
    """Check the texts of prompts, each with a drafter, and return the outputs."""
    each = params if isinstance(params, list) else [params] * len(kinds)
    outputs = llm.generate(
        prompts, [replace(own, drafter=kind) for own, kind in zip(each, kinds, strict=True)]
    )
    for index, (output, wanted, kind) in enumerate(zip(outputs, want, kinds, strict=True)):
        assert output.token_ids == wanted, f"prompt {index} under {kind}"
    return outputs


@contextmanager
def computed(way: str, llm: LLM) -> Iterator[None]:
    """Let passes compute the padding of a batch, leave it out ("gathered"), or replay recordings ("recorded")."""
    passes = (getattr(drafter, "draft_pass", None) for drafter in llm.loaded.engine.drafters.values())
    runners: list[Any] = [llm.loaded.runner, *(each.runner for each in passes if each is not None)]
    if runners[0].by_kernels and way != "padded":
        pytest.skip("the kernels have one way")
    for runner in runners:
        runner.backend.gathers = way == "gathered"
        runner.backend.graphs = Graphs(Rerun()) if way == "recorded" else None
    yield
    assert way != "recorded" or runners[0].backend.graphs.capturer.replays > 0
    for runner in runners:
        runner.backend.gathers, runner.backend.graphs = None, None


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
        llm.loaded.engine.submit(one)
    try:
        while len(own.new_ids) < count:
            llm.loaded.engine.step()
        yield own
    finally:
        for one in sequences:
            llm.loaded.engine.cancel(one)


def row_of(llm: LLM, sequence: Sequence, length: int) -> torch.Tensor:
    """[layers, k|v, heads, length, D]"""
    cache = llm.loaded.engine.cache
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
    if llm.loaded.engine.cache.dtype == torch.float32:
        for sequence in steps_of(llm, tokens[: length + 1], None, 1):
            torch.testing.assert_close(row_of(llm, sequence, length), cached, rtol=1e-3, atol=1e-4)
    return drafted


class NowAndThen(Fixed):
    """Drafts after stretches of plain steps, longer than states may wait."""

    name = "now and then"

    def budget(self, sequence: Any) -> int:
        return self.max_draft if len(sequence.tokens) % 21 < 3 else 0


@pytest.fixture(autouse=True)
def few_states_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "MAX_WAITING", 8)


def drafter_of(llm: LLM) -> Any:
    return llm.loaded.engine.drafters[llm.default_drafter or ""]


def in_turn(kinds: Iterable[str], shift: int, count: int = 8) -> list[str]:
    return list(itertools.islice(itertools.cycle(kinds), shift, shift + count))


@pytest.mark.heavy
def test_greedy_ids_in_batches_and_alone(
    llm: LLM, plain: Ids, kinds: list[str], policy: Policy, way: str, request: pytest.FixtureRequest
) -> None:
    """A batch of all kinds, one of a kind that is another for each policy, and prompts alone."""
    prompts, greedy, at = request.module.PROMPTS, request.module.GREEDY, request.module.POLICIES.index(policy)
    llm.loaded.engine.policy = policy
    own = [name for name in kinds if name not in MODEL_FREE]
    one = own[at % len(own)]
    with computed(way, llm):
        counts = [accepted_of(assert_same(llm, [one] * len(prompts), plain, prompts, greedy))]
        for shift in (at, at + 3):
            mixed = in_turn([*own, "none"] if policy.stops_by_content else kinds, shift, len(prompts))
            counts.append(accepted_of(assert_same(llm, mixed, plain, prompts, greedy)))
        for index in (1, 4):
            assert_same(llm, [one], [plain[index]], [prompts[index]], greedy)
    accepted, drafted = map(sum, zip(*counts, strict=True))
    assert 0 < accepted <= drafted


def siblings_of(policies: list[Policy]) -> list[Policy]:
    """Return a policy with siblings, or else the last one."""
    return [next((each for each in policies if getattr(each, "siblings", 0)), policies[-1])]


@pytest.mark.heavy
def test_a_seed_gives_the_text_of_plain_decoding(
    llm: LLM, kinds: list[str], way: str, request: pytest.FixtureRequest
) -> None:
    """Under all kinds of sampling, in batches of all kinds of drafters; choices of a seed differ."""
    prompts = request.module.PROMPTS
    params = [
        SamplingParams(seed=at, max_new_tokens=20, ignore_eos=True, **SAMPLING[at % len(SAMPLING)])
        for at in range(len(prompts))
    ]
    pairs = zip(prompts, params, strict=True)
    plain = [ids for prompt, own in pairs for ids in plain_ids(llm, [prompt], own)]
    drafters, accepted = [name for name in kinds if name != "none"], 0
    with computed(way, llm):
        for shift, policy in enumerate((request.module.POLICIES[0], *siblings_of(request.module.POLICIES))):
            llm.loaded.engine.policy = policy
            fitting = [name for name in drafters if not (policy.stops_by_content and name in MODEL_FREE)]
            outputs = assert_same(llm, in_turn(fitting, shift, len(prompts)), plain, prompts, params)
            accepted += accepted_of(outputs)[0]
    assert accepted > 10
    choices = llm.generate([prompts[1]], replace(params[1], drafter=kinds[0]), n=3)
    assert choices[0].token_ids == plain[1] and len({tuple(output.token_ids) for output in choices}) == 3


@pytest.mark.heavy
def test_choices_share_a_prompt_and_a_second_request_restores_it(
    llm: LLM, plain: Ids, kinds: list[str], request: pytest.FixtureRequest
) -> None:
    """With all that the drafter has of it: choices, and both requests, draft alike."""
    prompts, greedy = request.module.PROMPTS, request.module.GREEDY
    params, told = replace(greedy, max_new_tokens=12, drafter=kinds[0]), dict[int, set[tuple[int, int]]]()
    llm.loaded.engine.policy = Fixed(3)
    with replaced(llm.loaded.engine, "prefix_cache", PrefixCache(2**30)):
        for index in (4, 7, 4, 7):
            outputs = llm.generate([prompts[index]], params, n=11)
            assert [output.token_ids for output in outputs] == [plain[index][:12]] * 11
            drafted = {(output.stats.drafted, output.stats.accepted) for output in outputs}
            assert len(drafted) == 1 and told.setdefault(index, drafted) == drafted
        assert llm.loaded.engine.prefix_cache.hits >= 256


@pytest.mark.heavy
def test_penalties_constraints_and_bans(
    llm: LLM, plain: Ids, kinds: list[str], request: pytest.FixtureRequest
) -> None:
    """Each text is banned from going on as it would, which is found late; its neighbour never repeats a token."""
    llm.loaded.engine.policy, words = Fixed(4), llm.loaded.spec.vocab_size
    prompts, params = (
        request.module.PROMPTS,
        {"temperature": 0, "max_new_tokens": request.module.GREEDY.max_new_tokens},
    )
    barred = {"logit_bias": {plain[0][2]: -100.0, plain[1][3]: -100.0}, "repetition_penalty": 1.3}

    def texts(drafters: list[str | None]) -> Ids:
        constraints = [
            LateBan(words, tuple(own[4:8])) if n % 2 else NoRepeat(words) for n, own in enumerate(plain)
        ]
        sequences = [
            request_of(prompt, drafter, constraint=constraint, **params)
            for prompt, drafter, constraint in zip(prompts, drafters, constraints, strict=True)
        ]
        penalised = [
            request_of(*each, **params, **barred) for each in zip(prompts[:3], drafters, strict=False)
        ]
        found = run(llm.loaded.engine, [*sequences, *penalised])
        assert any(getattr(constraint, "rollbacks", 0) for constraint in constraints)
        return found

    own = [name for name in kinds if name not in MODEL_FREE]
    assert texts(list(in_turn(own, 0, len(prompts)))) == texts([None] * len(prompts))


def test_the_exact_distribution(law: tuple[Any, ...]) -> None:
    """A law: what loads the model, then arguments of `check_distribution`."""
    load, *given = law
    check_distribution(load(), *given)


def check_distribution(
    made: LLM, transform: str, constraint: str = "free", drafter: str | None = None
) -> None:
    one = case(transform, drafter or drafter_of(made).name, prompt=(3, 1, 2))
    one = replace(one, constraint=CONSTRAINTS.get(constraint, one.constraint))
    check_law(functools.partial(coded.fresh_engine, made), one, coded.after(made))


def check_nan_weights(llm: LLM, weight: Tensor, params: SamplingParams, prompts: Ids, plain: Ids) -> None:
    """Check that a drafter whose states are no numbers drafts nothing, and leaves the text as it is."""
    llm.loaded.engine.policy = Fixed(4)
    sound = weight.clone()
    weight.fill_(float("nan"))
    try:
        found = llm.generate(prompts, params)
    finally:
        weight.copy_(sound)
    assert [output.token_ids for output in found] == plain
    assert all(output.stats.drafted == 0 for output in found)


def check_fused_drafts(llm: LLM, kind: str, prompts: list[list[int]]) -> None:
    """Check that drafts by one call are those of single steps, to the bit, in a batch whose rows end early."""
    by_one_call, size, steps = drafting._fused_draft, llm.loaded.spec.vocab_size, 0

    def compared(*given: Any) -> Any:
        nonlocal steps
        draft, single = by_one_call(*given), drafting._draft_loop(*given, drafting._by_logits(*given))
        if draft is None:  # its first token has nothing to read
            return single
        assert draft.lengths.tolist() == single.lengths.tolist()
        assert draft.tokens.tolist() == single.tokens.tolist()
        if draft.q.probs is not None:
            for row, length in enumerate(draft.lengths.tolist()):
                assert torch.equal(draft.q.dense(size)[row, :length], single.q.dense(size)[row, :length])
        steps += draft.tokens.shape[1]
        return draft

    llm.loaded.engine.policy = Fixed(4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafting, "_fused_draft", compared)
        for more in FUSED:
            params = [
                SamplingParams(seed=n, max_new_tokens=9 + 3 * n, ignore_eos=True, drafter=kind, **more)
                for n in range(len(prompts))
            ]
            llm.generate(prompts, params)
    assert steps > 40


def rows_of(llm: LLM, kind: str, sequence: Any) -> list[Tensor]:
    """Return what a drafter's caches hold of all committed tokens, once it has read those that wait."""
    drafter: Any = llm.loaded.engine.drafters[kind]
    drafter.settle(sequence)
    row, length = sequence.row, len(sequence.tokens) - 1
    if isinstance(drafter, Eagle3):
        drafter._read(sequence, length)
    assert [cache.lengths[row] for cache in drafter.own] == [length] * len(drafter.own)
    first = int(isinstance(drafter, Eagle3))  # a slot that holds nothing
    return [held(cache, row, length)[..., first * (cache is drafter.cache) :, :] for cache in drafter.own]


def check_caches(llm: LLM, kind: str, policy: Policy, prompts: list[list[int]], new: int) -> None:
    """Check that a drafter's rows hold after rounds what they hold after a prefill of the same text."""
    for cache in llm.loaded.engine.rows.caches:
        for row in range(cache.rows):  # keys of an earlier text could stand in for missing ones
            cache.zero_row(row)
    llm.loaded.engine.policy = policy
    batch = [prompts[0], prompts[-1]]
    for prompt in prompts:
        for sequence in steps_of(llm, prompt, kind, new, batch):
            text, grown = list(sequence.tokens), rows_of(llm, kind, sequence)
            rounds = [turn for turn in sequence.rounds if turn.drafted]
        for sequence in steps_of(llm, text, kind, 1, batch):
            for one, other in zip(grown, rows_of(llm, kind, sequence), strict=True):
                shared = min(one.shape[-2], other.shape[-2])
                torch.testing.assert_close(one[..., :shared, :], other[..., :shared, :], rtol=2e-3, atol=2e-4)
        assert any(turn.accepted < turn.drafted for turn in rounds)
        assert policy.max_draft > 1 or any(turn.accepted for turn in rounds)


@functools.cache
def tiny(format: str) -> LLM:
    """A target of few words, few enough to enumerate its outputs, and a head."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        keys = {**heads.KEYS, "vocab_size": coded.WORDS, "num_hidden_layers": 2}
        reference_model(**keys).save_pretrained(folder / "target")
        form, more = FORMATS[format], dict[str, Any]()
        if format == "block z-lab":
            more["config"] = {"num_target_layers": None}
            more["section"] = {"target_layer_ids": [0], "mask_token_id": 2}
        elif format == "block dflash 2":  # its selector chooses among fewer tokens than there are
            more["section"] = {"target_layer_ids": [-1, 0], "mask_token_id": 2, "selector_top_k": 3}
            more["config"] = {"num_target_layers": None}
        elif format.startswith("block"):
            more["config"] = {"aux_hidden_state_layer_ids": [0, 2], "mask_token_id": 2}
        elif form["of"] == "eagle3":
            more["config"] = {"eagle_config": None, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
        elif form["of"] == "p-eagle":
            more["config"] = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
            more["beside"] = {"mask_token_id": 2}
        draft_vocab = 3 if "draft_vocab" in form or format == "block rnn" else None
        save_head(folder / format, format, coded.WORDS, draft_vocab=draft_vocab, **more)
        return heads.load(folder, format, max_batch=8)
