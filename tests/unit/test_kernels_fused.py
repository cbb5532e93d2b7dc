"""Fused drafts: equal to the same drafts a step at a time; planted defects are caught."""

from __future__ import annotations

import functools
import itertools
import math
import tempfile
from pathlib import Path

import pytest
import torch
from torch import Tensor

from foredraft import kernels
from foredraft.decode.noise import DRAFT, DrawKeys, Noise, NoiseKeys
from foredraft.decode.params import SamplingParams
from foredraft.decode.sampling import SamplingTable, distribution_of
from foredraft.decode.step_draws import StepLogits, draw, next_in_draw
from foredraft.kernels.vocab import KernelVocabOps
from foredraft.model.cache import KVCache
from foredraft.model.decoder import Decoder
from foredraft.model.plan import Plan
from foredraft.model.runner import DraftInputs, FusedDraft, Runner
from foredraft.model.weights import load_decoder
from tests.support.checkpoints import save_checkpoint
from tests.support.compiling import QUICK, compile_anew, plant

pytestmark = pytest.mark.skipif(kernels.library() is None, reason="no C compiler")

DTYPES = (torch.float32, torch.bfloat16)
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


@functools.cache
def decoder(family: str, dtype: torch.dtype) -> Decoder:
    windowed = {"sliding_window": 12} if family == "gemma2" else {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = save_checkpoint(Path(temporary), family, num_key_value_heads=2, **windowed)
        return load_decoder(folder, dtype=dtype, native=True)


@pytest.fixture(scope="module", autouse=True)
def sound_decoders() -> None:
    """Build the decoders before a test plants a defect: the kernels pack their weights."""
    for family, dtype in itertools.product(("llama", "gemma2"), DTYPES):
        decoder(family, dtype)


def noise(rows: int = len(READ)) -> NoiseKeys:
    return NoiseKeys(
        torch.arange(rows) * 77,
        torch.arange(max(LENGTHS)).expand(rows, -1),
        None,
        torch.arange(rows),
        KernelVocabOps(),
    )


def filled(runner: Runner) -> KVCache:
    """Return a cache whose rows hold 20 tokens."""
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
    plan: Plan | None = None,
    allowed: list[Tensor | None] | None = None,
) -> FusedDraft:
    table = SamplingTable.of(PARAMS, CPU)
    sampling_inputs = table.sampling_inputs(noise().bits(DRAFT)) if sampled else None
    drafted = runner.draft(cache, DraftInputs(READ, STARTS, LENGTHS, sampling_inputs, allowed), plan=plan)
    assert drafted is not None
    return drafted


def by_steps(
    runner: Runner,
    cache: KVCache,
    row: int,
    sampled: bool,
    plan: Plan | None = None,
    mask: Tensor | None = None,
) -> tuple[list[int], list[Tensor]]:
    """Draft for one row a step at a time, and return its tokens and their distributions."""
    params = PARAMS[row] if sampled else SamplingParams(temperature=0)
    table, own, start = SamplingTable.of([params], CPU, vocab_ops=KernelVocabOps()), READ[row], STARTS[row]
    tokens, distributions = [], []
    for step in range(LENGTHS[row]):
        logits = runner.forward(cache, torch.tensor([own]), [start], first_row=row, plan=plan).logits
        assert logits is not None
        first = None if mask is None or step else mask[None, None]
        distribution, finite = distribution_of(logits[:, -1:], table, first)
        assert finite.all()
        keys = noise().column(step)
        token = distribution.draw(
            lambda w, keys=keys: Noise().pick(w.expand(len(READ), -1, -1), keys, DRAFT)[row : row + 1]  # type: ignore[misc]
        )
        tokens.append(int(token))
        distributions.append(torch.zeros(0) if distribution.probs is None else distribution.probs[0, 0])
        start, own = start + len(own), [tokens[-1]]
    return tokens, distributions


def assert_equal_drafts(
    family: str,
    dtype: torch.dtype,
    sampled: bool,
    plan: Plan | None = None,
    allowed: list[Tensor | None] | None = None,
) -> None:
    runner = Runner(decoder(family, dtype))
    cache, other = filled(runner), filled(runner)
    drafted = fused(runner, cache, sampled, plan, allowed)
    for row, count in enumerate(LENGTHS):
        mask = None if allowed is None else allowed[row]
        tokens, distributions = by_steps(runner, other, row, sampled, plan, mask)
        assert drafted.tokens[row].tolist() == tokens + [0] * (max(LENGTHS) - count)
        assert drafted.finite[row, :count].all() and not drafted.finite[row, count:].any()
        for step, distribution in enumerate(distributions):
            assert not sampled or (
                drafted.probs is not None and torch.equal(drafted.probs[row, step], distribution)
            )
    assert torch.equal(cache.memory, other.memory)  # no other position was written


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_fused_draft_equals_single_steps(
    family: str, dtype: torch.dtype, sampled: bool, masked: bool
) -> None:
    assert_equal_drafts(family, dtype, sampled, allowed=masks() if masked else None)


def test_a_mask_without_a_finite_logit_draws_nothing() -> None:
    runner = Runner(decoder("llama", torch.float32))
    nothing: list[Tensor | None] = [torch.zeros(V, dtype=torch.bool), *[None] * (len(READ) - 1)]
    for sampled in (False, True):
        drafted = fused(runner, filled(runner), sampled, allowed=nothing)
        assert drafted.tokens[0, 0] == -1 and drafted.finite[0, 0]
        assert (drafted.tokens[1:] >= 0).all()
        assert not drafted.tokens[0, 1:].any() and not drafted.finite[0, 1:].any(), "the draft ended"


def test_a_plan_skips_sub_layers() -> None:
    full = Plan.full(decoder("llama", torch.float32).spec.layers)
    assert_equal_drafts("llama", torch.float32, True, full.without(attention=[0], mlp=[1]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_tapped_states_are_those_of_single_steps(family: str, dtype: torch.dtype) -> None:
    """Each is the state after which a token was drawn; the draft is the same as without them."""
    runner = Runner(decoder(family, dtype))
    cache, other = filled(runner), filled(runner)
    plain = fused(runner, filled(runner), sampled=False)
    drafted = runner.draft(cache, DraftInputs(READ, STARTS, LENGTHS), tap=1)
    assert drafted is not None and drafted.states is not None
    assert torch.equal(drafted.tokens, plain.tokens)
    for row, count in enumerate(LENGTHS):
        own, start = READ[row], STARTS[row]
        for step in range(count):
            forward = runner.forward(other, torch.tensor([own]), [start], first_row=row, taps=(1,))
            assert torch.equal(drafted.states[row, step], forward.taps[1][0, -1])
            start, own = start + len(own), [int(drafted.tokens[row, step])]
        assert not drafted.states[row, count:].any()
    assert torch.equal(cache.memory, other.memory)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("sampled", [False, True])
def test_further_choices_are_the_next_in_each_draw(sampled: bool, masked: bool) -> None:
    """As the definition gives them; the draft is the same as without them."""
    runner = Runner(decoder("llama", torch.float32))
    allowed = masks() if masked else None
    table = SamplingTable.of(PARAMS, CPU)
    sampling_inputs = table.sampling_inputs(noise().bits(DRAFT)) if sampled else None
    asked = DraftInputs(READ, STARTS, LENGTHS, sampling_inputs, allowed, choices=(3, 1))
    plain, drafted = (
        fused(runner, filled(runner), sampled, allowed=allowed),
        runner.draft(filled(runner), asked),
    )
    assert drafted is not None and drafted.further is not None
    assert torch.equal(drafted.tokens, plain.tokens)
    if drafted.probs is not None:
        assert plain.probs is not None and torch.equal(drafted.probs, plain.probs)
    other = filled(runner)
    for row, count in enumerate(LENGTHS):
        params = PARAMS[row] if sampled else SamplingParams(temperature=0)
        own, start = READ[row], STARTS[row]
        for step in range(count):
            logits = runner.forward(other, torch.tensor([own]), [start], first_row=row).logits
            assert logits is not None
            mask = None if allowed is None or step else allowed[row]
            seen = logits[:, -1:] if mask is None else logits[:, -1:].where(mask, -math.inf)
            of_row = SamplingTable.of([params], CPU, vocab_ops=KernelVocabOps())
            key = OneKey(noise().bits(DRAFT)[row : row + 1, step : step + 1])
            by = StepLogits(seen, of_row, None, None, key, Noise(), greedy=False)
            drawn = draw(by)
            assert int(drawn.token) == drafted.tokens[row, step]
            want = next_in_draw(by, drawn, (3, 1, 0, 0, 0, 0)[step])[0, 0] if step < 2 else torch.empty(0)
            assert drafted.further[row, step].tolist() == want.tolist() + [-1] * (3 - len(want))
            start, own = start + len(own), [int(drawn.token)]
        assert (drafted.further[row, count:] == -1).all()


class OneKey(DrawKeys):
    """The key of one draw, [1, 1]."""

    vocab_ops = KernelVocabOps()

    def __init__(self, key: Tensor) -> None:
        self.key = key

    def bits(self, purpose: int) -> Tensor:
        return self.key


CHOICE_DEFECTS = {
    "weights stay without the choices": ("while (found--) weights[tokens[found]] = before[found];", ""),
    "a choice may come again": ("weights[token] = d->probs ? 0 : -INFINITY;", ""),
    "every step has the choices of the first": ("d->choices[step], logits", "d->choices[0], logits"),
    "a token without weight is chosen": ("if (weights[token] == (d->probs ? 0 : -INFINITY)) token = -1;", ""),
}


@pytest.mark.parametrize("name", CHOICE_DEFECTS)
def test_wrong_choices_are_caught(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    decoder("llama", torch.float32)  # loaded before the defect
    plant(monkeypatch, tmp_path, *CHOICE_DEFECTS[name])

    def check() -> None:
        for sampled, masked in ((True, True), (False, True), (True, False)):
            test_further_choices_are_the_next_in_each_draw(sampled, masked)

    with pytest.raises(AssertionError):
        check()


@pytest.mark.parametrize("size", [3, 97, 5000, 40000])
def test_top_probabilities_equal_those_of_softmax(size: int) -> None:
    x = torch.randn(6, size, generator=torch.Generator().manual_seed(size)) * torch.arange(1, 7)[:, None]
    found = KernelVocabOps().max_prob(x)
    assert found is not None
    assert torch.allclose(found, x.softmax(-1).amax(-1), rtol=1e-5, atol=0)
    assert all(
        torch.equal(KernelVocabOps().max_prob(x[row : row + 1]), found[row : row + 1]) for row in range(6)
    )
    x[1, size // 2], x[2, 0], x[3] = float("nan"), float("inf"), float("-inf")
    broken = KernelVocabOps().max_prob(x)
    assert broken is not None
    assert broken.isnan().tolist() == [False, True, True, True, False, False]


def test_non_finite_logits_are_reported() -> None:
    runner = Runner(decoder("llama", torch.float32))
    cache = filled(runner)
    cache.memory[0, 1, 2, 0, 1] = float("nan")
    for sampled in (False, True):
        drafted = fused(runner, cache, sampled)
        assert not drafted.finite[2].any()
        assert all(drafted.finite[row, :count].all() for row, count in enumerate(LENGTHS) if row != 2)
        assert not fused(runner, cache, sampled, allowed=masks()).finite[2].any()


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
    test_a_fused_draft_equals_single_steps("gemma2", torch.float32, True, True)
    test_a_mask_without_a_finite_logit_draws_nothing()
    test_non_finite_logits_are_reported()
    test_a_plan_skips_sub_layers()
    test_tapped_states_are_those_of_single_steps("gemma2", torch.bfloat16)


DEFECTS = {
    "first column of a group in place of its last": ("memmove(x + g * hidden, x + last_column(&pass, g)", "memmove(x + g * hidden, x + first[g]"),
    "states of the first column": ("       x + last_column(&pass, g)", "       x + first[g]"),
    "states of another row": ("d->slot[origin[g]] * d->steps", "d->slot[g] * d->steps"),
    "states of the first step": ("* d->steps + step) * hidden,", "* d->steps) * hidden,"),
    "states below the tapped layer": ("attention, mlp, 0, tap, scratch", "attention, mlp, 0, tap - 1, scratch"),
    "the tapped layer run twice": ("attention, mlp, tap, stop, scratch", "attention, mlp, tap - (tap > 0), stop, scratch"),
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
    "skipped sub-layers run": ("attention, mlp, tap, stop, scratch", "mlp, mlp, tap, stop, scratch"),
}  # fmt: skip


def test_the_checks_pass_where_only_the_optimisation_differs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The defects below are compiled so."""
    compile_anew(monkeypatch, tmp_path, QUICK)
    check_all()


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_caught(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plant(monkeypatch, tmp_path, *DEFECTS[name])
    with pytest.raises(AssertionError):
        check_all()
