"""Fused drafts: equal to the same drafts a step at a time; planted defects are caught."""

from __future__ import annotations

import functools
import math
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from foredraft import kernels
from foredraft.decode.noise import DRAFT, HashedKeys, Noise, NoiseKeys
from foredraft.decode.params import SamplingParams
from foredraft.decode.sampling import SamplingTable
from foredraft.decode.step_draws import StepLogits, draw, next_in_draw
from foredraft.kernels.vocab import KernelVocabOps
from foredraft.model.cache import KVCache
from foredraft.model.decoder import Decoder
from foredraft.model.runner import DraftInputs, FusedDraft, Runner
from foredraft.model.spec import Plan
from foredraft.model.weights import load_decoder
from tests.support.checkpoints import save_variant
from tests.support.compiling import Defects
from tests.unit.test_kernels_passes import GEMMA4, OPTIONS

pytestmark = pytest.mark.skipif(kernels.library() is None, reason="no C compiler")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CPU = torch.device("cpu")
V = 97
READ = [[5, 9], [11], [7, 8, 30], [2], [13]]  # the tokens that each row reads first
STARTS = [10, 0, 3, 17, 9]
LENGTHS = [4, 1, 6, 0, 3]
PARAMS = (
    SamplingParams(temperature=0.7, top_p=0.8),
    SamplingParams(temperature=1.3, top_k=5),
    SamplingParams(min_p=0.05),
    SamplingParams(top_p=0.9),
    SamplingParams(top_p=0.5, min_p=0.2),
)
GREEDY = [SamplingParams(temperature=0)] * len(PARAMS)
CHOICES = (3, 1)  # of the first two steps


@functools.cache
def decoder(family: str, dtype: torch.dtype) -> Decoder:
    more: dict[str, Any] = OPTIONS.get(family, {}) if family in GEMMA4 else {"num_key_value_heads": 2}
    if family == "gemma2":
        more = {**more, "sliding_window": 12}
    with tempfile.TemporaryDirectory() as temporary:
        return load_decoder(save_variant(Path(temporary), family, **more), dtype=dtype, native=True)


def noise_bits() -> Tensor:
    rows, steps = torch.arange(len(READ)), torch.arange(max(LENGTHS))
    keys = NoiseKeys(rows * 77, steps.expand(len(READ), -1), None, rows, KernelVocabOps())
    return keys.bits(DRAFT)


def filled(runner: Runner) -> KVCache:
    cache = runner.new_cache(len(READ), 64)
    tokens = torch.randint(3, 97, (len(READ), 20), generator=torch.Generator().manual_seed(1))
    runner.forward(cache, tokens, [0] * len(READ))
    return cache


def masks() -> list[Tensor | None]:
    """Return a mask of each row's first step that forbids what the row would say most; rows 1 and 3 have none."""
    third = torch.arange(V) % 3
    return [third == 0, None, third == 1, None, third == 2]


def fused(
    runner: Runner,
    cache: KVCache,
    sampled: bool,
    allowed: list[Tensor | None] | None = None,
    choices: tuple[int, ...] = (),
    **more: Any,
) -> FusedDraft:
    sampling = SamplingTable.of(PARAMS, CPU).sampling_inputs(noise_bits()) if sampled else None
    inputs = DraftInputs(READ, STARTS, LENGTHS, sampling, allowed, choices=choices)
    drafted = runner.draft(cache, inputs, **more)
    assert drafted is not None
    return drafted


class Step(NamedTuple):
    token: int
    probs: Tensor | None
    state: Tensor  # after which the token was drawn
    further: list[int]  # the next in the same draw


def by_steps(
    runner: Runner, cache: KVCache, row: int, sampled: bool, mask: Tensor | None, plan: Plan | None
) -> list[Step]:
    params = PARAMS if sampled else GREEDY
    table = SamplingTable.of([params[row]], CPU, vocab_ops=KernelVocabOps())
    own, start, bits, found = READ[row], STARTS[row], noise_bits()[row : row + 1], list[Step]()
    for step in range(LENGTHS[row]):
        out = runner.forward(cache, torch.tensor([own]), [start], first_row=row, plan=plan, aux_layers=(1,))
        assert out.logits is not None
        logits = out.logits[:, -1:]
        if mask is not None and not step:
            logits = logits.where(mask, -math.inf)
        keys = HashedKeys(torch.zeros(1), KernelVocabOps(), bits[:, step : step + 1])
        given = StepLogits(logits, table, None, None, keys, Noise(), greedy=False)
        drawn = draw(given)
        more = next_in_draw(given, drawn, CHOICES[step])[0, 0].tolist() if step < len(CHOICES) else []
        probs = drawn.q.probs
        state = out.aux_states[1][0, -1]
        found.append(Step(int(drawn.token), None if probs is None else probs[0, 0], state, more))
        start, own = start + len(own), [found[-1].token]
    return found


def assert_equal_drafts(
    family: str,
    dtype: torch.dtype,
    sampled: bool,
    masked: bool = False,
    plan: Plan | None = None,
    exit: int | None = None,
    choices: tuple[int, ...] = (),
) -> None:
    runner, allowed = Runner(decoder(family, dtype)), masks() if masked else None
    cache, other = filled(runner), filled(runner)
    drafted = fused(runner, cache, sampled, allowed, choices, plan=plan, exit=exit)
    assert (drafted.probs is not None) is sampled
    for row, count in enumerate(LENGTHS):
        steps = by_steps(runner, other, row, sampled, allowed[row] if allowed else None, plan)
        assert drafted.tokens[row].tolist() == [each.token for each in steps] + [0] * (max(LENGTHS) - count)
        assert drafted.finite[row, :count].all() and not drafted.finite[row, count:].any()
        for place, step in enumerate(steps):
            if drafted.probs is not None:
                assert step.probs is not None and torch.equal(drafted.probs[row, place], step.probs)
            if exit is not None:
                assert drafted.states is not None and torch.equal(drafted.states[row, place], step.state)
            if choices:
                assert drafted.further is not None
                rest = [-1] * (max(choices) - len(step.further))
                assert drafted.further[row, place].tolist() == step.further + rest
        assert drafted.states is None or not drafted.states[row, count:].any()
        assert drafted.further is None or (drafted.further[row, count:] == -1).all()
    assert all(map(torch.equal, cache.planes, other.planes)), "no other position was written"


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["llama", "gemma2", *GEMMA4])
def test_fused_drafts_equal_steps(family: str, dtype: torch.dtype, sampled: bool, masked: bool) -> None:
    assert_equal_drafts(family, dtype, sampled, masked)


def test_a_plan_skips_sub_layers() -> None:
    full = Plan.full(decoder("llama", torch.float32).spec.layers)
    assert_equal_drafts("llama", torch.float32, True, plan=full.without(attention=[0], mlp=[1]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_exit_states_are_those_of_single_steps(family: str, dtype: torch.dtype) -> None:
    assert_equal_drafts(family, dtype, False, exit=1)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("sampled", [False, True])
def test_further_choices_are_the_next_in_each_draw(sampled: bool, masked: bool) -> None:
    assert_equal_drafts("llama", torch.float32, sampled, masked, choices=CHOICES)


@pytest.mark.parametrize("sampled", [False, True])
def test_a_mask_without_a_finite_logit_draws_nothing(sampled: bool) -> None:
    runner = Runner(decoder("llama", torch.float32))
    nothing: list[Tensor | None] = [torch.zeros(V, dtype=torch.bool), *[None] * (len(READ) - 1)]
    drafted = fused(runner, filled(runner), sampled, nothing)
    assert drafted.tokens[0, 0] == -1 and drafted.finite[0, 0]
    assert (drafted.tokens[1:] >= 0).all()
    assert not drafted.tokens[0, 1:].any() and not drafted.finite[0, 1:].any(), "the draft ended"


@pytest.mark.parametrize("sampled", [False, True])
def test_non_finite_logits_are_reported(sampled: bool) -> None:
    runner = Runner(decoder("llama", torch.float32))
    cache = filled(runner)
    cache.data[0, 1, 2, 0, 1] = float("nan")
    drafted = fused(runner, cache, sampled)
    assert not drafted.finite[2].any()
    assert all(drafted.finite[row, :count].all() for row, count in enumerate(LENGTHS) if row != 2)
    assert not fused(runner, cache, sampled, masks()).finite[2].any()


@pytest.mark.parametrize("size", [3, 97, 5000, 40000])
def test_top_probabilities_equal_those_of_softmax(size: int) -> None:
    x = torch.randn(6, size, generator=torch.Generator().manual_seed(size)) * torch.arange(1, 7)[:, None]
    found = KernelVocabOps().max_prob(x)
    assert found is not None
    assert torch.allclose(found, x.softmax(-1).amax(-1), rtol=1e-5, atol=0)
    for row in range(6):
        assert torch.equal(KernelVocabOps().max_prob(x[row : row + 1]), found[row : row + 1]), row
    x[1, size // 2], x[2, 0], x[3] = float("nan"), float("inf"), float("-inf")
    broken = KernelVocabOps().max_prob(x)
    assert broken is not None and broken.isnan().tolist() == [False, True, True, True, False, False]


def test_forwarded_counts_the_columns_of_a_fused_draft() -> None:
    runner = Runner(decoder("llama", torch.float32))
    cache = filled(runner)
    before = runner.forwarded
    fused(runner, cache, sampled=False)
    assert runner.forwarded - before == (2 + 3) + 1 + (3 + 5) + (1 + 2)


def test_a_draft_past_the_cache_is_refused() -> None:
    runner = Runner(decoder("llama", torch.float32))
    cache = runner.new_cache(1, 64)
    with pytest.raises(ValueError, match="64 positions"):
        runner.draft(cache, DraftInputs([[1]], [cache.scratch - 1], [3]))


def check_all() -> None:
    assert_equal_drafts("gemma2", torch.float32, True, True)
    assert_equal_drafts("gemma4-shared", torch.float32, False)
    test_exit_states_are_those_of_single_steps("gemma2", torch.bfloat16)
    test_a_plan_skips_sub_layers()
    for sampled in (True, False):
        test_a_mask_without_a_finite_logit_draws_nothing(sampled)
        test_non_finite_logits_are_reported(sampled)
    for sampled, masked in ((True, True), (False, True), (True, False)):
        test_further_choices_are_the_next_in_each_draw(sampled, masked)


# name: (old source, new source)
DEFECTS = {
    "first column of a group in place of its last": ("memmove(x + g * hidden, x + last_column(&pass, g)", "memmove(x + g * hidden, x + first[g]"),
    "states of the first column": ("       x + last_column(&pass, g)", "       x + first[g]"),
    "states of another row": ("d->slot[origin[g]] * d->steps", "d->slot[g] * d->steps"),
    "states of the first step": ("* d->steps + step) * hidden,", "* d->steps) * hidden,"),
    "states below the exit layer": ("mlp, 0, exit_layer,", "mlp, 0, exit_layer - 1,"),
    "the exit layer run twice": ("mlp, exit_layer, stop", "mlp, exit_layer - (exit_layer > 0), stop"),
    "positions one behind": ("start[left] = start[g] + count[g];", "start[left] = start[g] + count[g] - 1;"),
    "limit of the longest row for all": ("step + 1 == d->length[from]", "step + 1 == d->steps"),
    "cache row of another group": ("row[left] = row[g];", "row[left] = left;"),
    "parameters of another row": ("        d->sampling, row, logits", "        d->sampling, 0, logits"),
    "mask of another row": ("d->allowed[at]", "d->allowed[4 - at]"),
    "mask of the first step in all": ("step == 0 && d->allowed ?", "d->allowed ?"),
    "mask not applied": ("logits[i] = allowed[i] ? logits[i]", "logits[i] = 1 ? logits[i]"),
    "a token drawn though none is allowed": ("d->drawn[cell] = -1;", ";"),
    "faults hidden by a mask": ("if (allowed) d->finite[cell] = finite;", ";"),
    "noise of the step before": ("d->keys ? d->keys + cell : NULL", "d->keys ? d->keys + cell - (step > 0) : NULL"),
    "skipped sub-layers run": ("attention, mlp, exit_layer, stop", "mlp, mlp, exit_layer, stop"),
    "weights stay without the choices": ("while (found--) weights[tokens[found]] = before[found];", ""),
    "a choice may come again": ("weights[token] = d->probs ? 0 : -INFINITY;", ""),
    "every step has the choices of the first": ("d->choices[step], logits", "d->choices[0], logits"),
    "a token without weight is chosen": ("if (weights[token] == (d->probs ? 0 : -INFINITY)) token = -1;", ""),
    "inputs of the first step in all": ("if (m->input_size)\n", "if (m->input_size && !step)\n"),
}  # fmt: skip


PLANTED = Defects(DEFECTS.values())


@pytest.mark.heavy
@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTED.assert_caught(check_all, DEFECTS[name], monkeypatch)
