"""Vocabulary operations in C: each equals its definition in PyTorch operators; planted defects are caught."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from ctypes import c_int, c_int64, c_void_p
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import foredraft
from foredraft import kernels
from foredraft.decode.distribution import Distribution
from foredraft.decode.noise import COUPLED, DRAFT, Noise, NoiseKeys
from foredraft.decode.params import SamplingParams
from foredraft.decode.sampling import PenaltyContext, SamplingTable, distribution_of
from foredraft.decode.sequence import Sequence
from foredraft.decode.vocab_ops import TORCH_VOCAB_OPS, TorchVocabOps, VocabOps, least_in_nucleus
from foredraft.kernels.compilation import kernel
from foredraft.kernels.vocab import KernelVocabOps
from tests.support import checkpoints
from tests.support.compiling import Defects, plant
from tests.support.mutation import mutate
from tests.support.vocab_ops_choice import METHODS

pytestmark = pytest.mark.skipif(kernels.library() is None, reason="no C compiler")

WIDTHS = (1, 3, 16, 63, 64, 65, 1000, 40000)
CPU = torch.device("cpu")
PARAMS = (
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=1.3, min_p=0.02, top_p=0.99),
    SamplingParams(top_k=20),
    SamplingParams(top_k=3, top_p=0.7),
    SamplingParams(temperature=0.8, typical_p=0.7, top_p=0.95),
    SamplingParams(),
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.save_pair(tmp_path_factory.mktemp("models"))


def load(pair: Path, kernels: bool, policy: str) -> foredraft.LLM:
    more: Any = {"policy": policy, "kernels": kernels, "max_length": 128}
    return foredraft.load(pair / "big", draft=pair / "small", device="cpu", **more)


def random_logits(width: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(PARAMS), 2, width, generator=generator) * scale


def by_kernels(params: Seq[SamplingParams]) -> SamplingTable:
    return SamplingTable.of(params, CPU, vocab_ops=KernelVocabOps())


def nucleus(probs: Tensor, mass: Tensor) -> Tensor:
    """Return the least probability in the nucleus of each row [..., V], by the kernel alone."""
    mass = mass.expand(probs.shape[:-1]).contiguous()
    least = torch.empty_like(mass)
    run = kernel("nucleus", c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int)
    run(probs.data_ptr(), mass.data_ptr(), mass.numel(), probs.shape[-1], least.data_ptr(), 2)
    return least


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("width", WIDTHS)
def test_distributions_equal_their_definition(width: int) -> None:
    logits = random_logits(width)

    def probs(vocab_ops: VocabOps) -> Tensor:
        distribution, finite = distribution_of(logits, SamplingTable.of(PARAMS, CPU, vocab_ops=vocab_ops))
        assert finite.all()
        assert distribution.probs is not None
        return distribution.probs

    got, want = probs(KernelVocabOps()), probs(TORCH_VOCAB_OPS)
    assert torch.equal(got > 0, want > 0)
    assert torch.allclose(got, want, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 2, "top_p": 1, "min_p": 0},
        {"temperature": 1, "min_p": 1},
        {"temperature": 3, "repetition_penalty": 2, "presence_penalty": 1},
    ],
    ids=str,
)
def test_integer_parameters_equal_floats(options: dict[str, int]) -> None:
    """A request may give its temperature as an integer."""
    logits, found = random_logits(1000), []
    for kind in (int, float):
        given: dict[str, Any] = {name: kind(value) for name, value in options.items()}
        params = [SamplingParams(**given, logit_bias={5: kind(2)})] * len(PARAMS)
        past = PenaltyContext.of([Sequence(0, [5, 7], own, 0) for own in params], CPU)
        found.append(distribution_of(logits, by_kernels(params), penalty_context=past)[0].probs)
    assert found[0] is not None and torch.equal(found[0], found[1])
    assert torch.allclose(found[0].sum(-1), torch.ones(len(PARAMS), 2))


@pytest.mark.parametrize("width", WIDTHS)
def test_a_row_has_the_same_bits_alone_and_in_a_batch(width: int) -> None:
    logits = random_logits(width)
    distribution, _ = distribution_of(logits, by_kernels(PARAMS))
    assert distribution.probs is not None
    torch.set_num_threads(1)
    for row, params in enumerate(PARAMS):
        for column in (0, 1):
            alone = logits[row : row + 1, column : column + 1].contiguous()
            own, _ = distribution_of(alone, by_kernels([params]))
            assert own.probs is not None
            assert torch.equal(own.probs[0, 0], distribution.probs[row, column])


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scale", [0.0, 0.3, 8.0])
def test_nuclei_equal_their_definition(width: int, scale: float) -> None:
    probs = random_logits(width, scale=scale).softmax(-1)
    for mass in (1e-8, 0.05, 0.5, 0.9, 0.999):
        masses = torch.full((len(PARAMS), 1), mass)

        got = (probs >= nucleus(probs, masses)[..., None]).sum(-1)
        want = (probs >= least_in_nucleus(probs, masses)[..., None]).sum(-1)
        # sums in float32 and in double may end a token apart, or more among the faintest tokens
        assert ((got - want).abs() <= 1 + want // 1000).all(), (mass, got, want)


def test_a_nucleus_ends_at_the_token_that_reaches_its_mass() -> None:
    probs = torch.tensor([[0.5, 0.25, 0.125, 0.125, 0.0]])
    ends = {0.0: 0.5, 0.3: 0.5, 0.5: 0.5, 0.50001: 0.25, 0.75: 0.25, 0.8: 0.125, 1.0: 0.125}
    assert {mass: nucleus(probs, torch.tensor([mass])).item() for mass in ends} == ends


@pytest.mark.parametrize("width", WIDTHS)
def test_draws_equal_their_definition(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    weights = random_logits(width).softmax(-1)
    weights[1] = weights[1].where(torch.rand(2, width, generator=generator) < 0.2, 0.0)
    weights[2] *= 7.0  # unnormalised
    positions = torch.arange(2).expand(len(PARAMS), 2)
    for turn in range(20):
        base = torch.randint(-(2**62), 2**62, (len(PARAMS),), generator=generator)
        rounds = torch.full((len(PARAMS),), turn)
        keys = (NoiseKeys(base, positions, None, rounds, ops) for ops in (KernelVocabOps(), TORCH_VOCAB_OPS))
        got, want = (Noise().pick(weights, each, DRAFT) for each in keys)
        assert torch.equal(got, want)


def test_a_draw_without_positive_weights_gives_a_token() -> None:
    weights = torch.stack([torch.zeros(1, 9), torch.full((1, 9), float("nan"))])
    keys = torch.tensor([[7], [8]])
    assert set(KernelVocabOps().gumbel_argmax(weights, keys).flatten().tolist()) <= set(range(9))


@pytest.mark.parametrize("width", WIDTHS)
def test_argmax_equals_its_definition(width: int) -> None:
    logits = random_logits(width).round()  # ties
    ids, finite = KernelVocabOps().argmax(logits)
    assert torch.equal(ids, TORCH_VOCAB_OPS.argmax(logits)[0])
    assert finite.all()


def test_common_prefixes_equal_their_definition() -> None:
    generator = torch.Generator().manual_seed(0)
    for columns in (0, 1, 2, 5):
        drafted, own = (torch.randint(0, 2, (40, columns + more), generator=generator) for more in (0, 1))
        lengths = torch.randint(0, columns + 1, (40,), generator=generator)
        for got, want in zip(
            KernelVocabOps().match_prefix(drafted, own, lengths),
            TORCH_VOCAB_OPS.match_prefix(drafted, own, lengths),
            strict=True,
        ):
            assert torch.equal(got, want)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("one_hot", [False, True])
def test_residuals_equal_their_definition(width: int, one_hot: bool) -> None:
    p, q = random_logits(width).softmax(-1)[:, :1], random_logits(width, seed=1).softmax(-1)[:, :1]
    q[1] = p[1]  # the residual is zero, so the result is p
    ids = torch.randint(0, width, (len(PARAMS), 1), generator=torch.Generator().manual_seed(width))
    where, drafted = torch.arange(len(PARAMS)) != 2, Distribution(ids=ids) if one_hot else Distribution(q)
    both = (Distribution(p, vocab_ops=ops) for ops in (KernelVocabOps(), TORCH_VOCAB_OPS))
    got, want = (each.minus(drafted, where).probs for each in both)
    assert got is not None and want is not None and torch.equal(got, want)


@pytest.mark.parametrize("width", WIDTHS)
def test_what_p_has_beyond_q_equals_its_definition(width: int) -> None:
    p, q = random_logits(width).softmax(-1), random_logits(width, seed=1).softmax(-1)
    weights = torch.linspace(0, 1, p.shape[0] * p.shape[1]).view(p.shape[:2])
    got, want = (ops.excess(p, q, weights) for ops in (KernelVocabOps(), TORCH_VOCAB_OPS))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)
    assert torch.equal(KernelVocabOps().excess(p[1:2], q[1:2], weights[1:2]), got[1:2])


def test_noise_equals_its_definition() -> None:
    generator = torch.Generator().manual_seed(0)
    base, position, attempt, rounds = (
        torch.randint(-(2**62), 2**62, shape, generator=generator) for shape in ((3,), (3, 5), (3, 5), (3,))
    )
    for attempts, purpose in itertools.product((None, attempt), (DRAFT, COUPLED)):
        got, want = (
            NoiseKeys(base, position, attempts, rounds, ops).bits(purpose)
            for ops in (KernelVocabOps(), TORCH_VOCAB_OPS)
        )
        assert torch.equal(got, want)
    assert torch.equal(KernelVocabOps().uniform(position), TORCH_VOCAB_OPS.uniform(position))


@pytest.mark.parametrize("at", [0, 5, 40, 999])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(top_p=0.9)])
def test_non_finite_logits_are_reported(at: int, value: float, params: SamplingParams) -> None:
    logits = torch.zeros(2, 1, 1000)
    logits[1, 0, at] = value
    _, finite = distribution_of(logits, by_kernels([params] * 2))
    assert finite.tolist() == [[True], [False]]


@pytest.mark.parametrize("params", [SamplingParams(**x) for x in ({}, {"top_p": 0.9}, {"typical_p": 0.8})])
def test_strided_rows_have_the_same_bits(params: SamplingParams) -> None:
    """The logits of a padded pass are a strided view."""
    wide = torch.randn(2, 5, 1000, generator=torch.Generator().manual_seed(0)) * 3
    before, apart = wide.clone(), wide[:, :3]
    assert not apart.is_contiguous()
    both, alone = (distribution_of(apart[:n], by_kernels([params] * n))[0].probs for n in (2, 1))
    assert both is not None and alone is not None and torch.equal(both[:1], alone)
    assert torch.equal(wide, before)


@pytest.mark.heavy
def test_a_request_without_work_memory_ends_with_an_error(
    pair: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Here the allocations of the softmax fail; `tests/kernels_memory.c` fails every allocation in turn."""
    old = "return NO_MEMORY;\n    const Softmax"
    plant(monkeypatch, tmp_path, f"if (!sums) {old}", f"if (1) {old}")
    llm = load(pair, True, "fixed")  # a policy that measures no costs, which would fail as the requests do
    for drafter in ("draft-model", "none"):
        params = SamplingParams(max_new_tokens=8, drafter=drafter)
        sampled, greedy = (llm.generate([[5, 6, 7]], x)[0] for x in (params, params.replace(temperature=0)))
        assert sampled.finish_reason == "error" and greedy.error is None
        assert (sampled.error or "").startswith("MemoryError: the kernels got no work memory")
        assert len((sampled.error or "").splitlines()) == 1


DEFECTS = {
    "mass above the last bin of the nucleus forgotten": ("i < left && above < mass;", "i < left && above < mass / 2;"),
    "noise of the next token": ("mix64(key + at + i)", "mix64(key + at + i + 1)"),
    "noise of the first row": ("(uint64_t)r->keys[s.row]", "(uint64_t)r->keys[0]"),
    "tokens below the bound kept": ("choose(v < bound, (V){0}, v)", "choose(v < bound * 0.01f, (V){0}, v)"),
    "rows without a cut normalised again": ("if (t->cut[s.row]) divide", "divide"),
    "temperature of the first row": ("splat(f->temperature[s.row / f->columns])", "splat(f->temperature[0])"),
    "NaN lost between slices": ("i < SLICES && most == most; i++) most =", "i < SLICES; i++) most ="),
    "zero residual kept": ("if (!found) memcpy(to", "if (found > 1) memcpy(to"),
    "residual of a row without rejection": ("if (where[r] && less)", "if (less)"),
    "one-hot token kept in the residual": ("maximum(v - splat(1), (V){0})", "v"),
    "excess by the first weight": ("splat(weights[r])", "splat(weights[0])"),
    "excess below zero": ("(less + i, n - i, 0), (V){0});\n            sum", "(less + i, n - i, 0), splat(-1));\n            sum"),
    "heap in the wrong order": ("heap[child + 1] < heap[child]) child++", "heap[child + 1] > heap[child]) child++"),
    "one token fewer than top_k": ("return DONE;\n    float *heap", "return DONE;\n    k--;\n    float *heap"),
    "ties at the bound dropped": ("choose(v < bound, (V){0}, exponential", "choose(v <= bound, (V){0}, exponential"),
    "bound of the first row": ("splat(f->least ? f->least[s.row]", "splat(f->least ? f->least[0]"),
    "noise without its purpose": ("fold(base[r], purpose)", "fold(base[r], 0)"),
    "noise without its round": ("if (round) key", "if (0) key"),
    "padding compared": ("at < lengths[r] && drafted", "at < k && drafted"),
    "draft of the first row": ("drafted[r * k + at] ==", "drafted[at] =="),
    "last of several tied tokens": ("if (!(found[r * SLICES + i].value <= best.value))", "if (!(found[r * SLICES + i].value < best.value))"),
}  # fmt: skip


def check_all() -> None:
    for width in (65, 1000):
        test_distributions_equal_their_definition(width)
        test_a_row_has_the_same_bits_alone_and_in_a_batch(width)
        test_draws_equal_their_definition(width)
        test_argmax_equals_its_definition(width)
        for one_hot in (False, True):
            test_residuals_equal_their_definition(width, one_hot)
        test_what_p_has_beyond_q_equals_its_definition(width)
    test_noise_equals_its_definition()
    test_common_prefixes_equal_their_definition()
    test_a_nucleus_ends_at_the_token_that_reaches_its_mass()
    for at in (5, 40, 999):
        test_non_finite_logits_are_reported(at, float("nan"), SamplingParams(top_p=0.9))


PLANTED = Defects(DEFECTS.values())


@pytest.mark.heavy
@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTED.assert_caught(check_all, DEFECTS[name], monkeypatch)


def test_noise_is_hashed_once_per_purpose(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    hashed = TorchVocabOps.hash_keys
    monkeypatch.setattr(TorchVocabOps, "hash_keys", lambda *fields: calls.append(0) or hashed(*fields))
    keys = NoiseKeys(torch.arange(3), torch.arange(6).expand(3, 6), None, torch.zeros(3, dtype=torch.int64))
    whole = keys.bits(DRAFT)
    count = len(calls)
    assert torch.equal(keys.first(4).column(2).bits(DRAFT), whole[:, 2:3])
    assert torch.equal(keys.columns(torch.tensor([5, 0, 3])).bits(DRAFT)[:, 0], whole[range(3), [5, 0, 3]])
    assert len(calls) == count


REQUESTS = (
    SamplingParams(temperature=0, max_new_tokens=8, prompt_logprobs=1),
    SamplingParams(top_k=20, top_p=0.9, max_new_tokens=8),
    SamplingParams(seed=5, max_new_tokens=8),
    SamplingParams(acceptance="bild", rollback=2.0, max_new_tokens=8),
)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[type]:
    counted: Counter[type] = Counter()

    def counting(kind: type, run: Any) -> Any:
        return lambda *given: (counted.update([kind]), run(*given))[1]

    for kind in (TorchVocabOps, KernelVocabOps):
        for name in METHODS:
            monkeypatch.setattr(kind, name, counting(kind, getattr(kind, name)))
    return counted


@pytest.mark.heavy
def test_two_models_of_one_process_use_their_own_operations(pair: Path, calls: Counter[type]) -> None:
    kinds = {True: KernelVocabOps, False: TorchVocabOps}
    models = {native: load(pair, native, "auto") for native in kinds}
    for params in REQUESTS:
        for native, llm in models.items():
            calls.clear()
            llm.generate([[5, 9, 5, 9, 7], [3, 4]], params)
            assert calls[kinds[native]] > 0 and calls[kinds[not native]] == 0, params


@pytest.mark.heavy
def test_a_lost_choice_is_noticed(pair: Path, calls: Counter[type], monkeypatch: pytest.MonkeyPatch) -> None:
    def choice_lost(of: Any) -> Any:
        return lambda *args, **more: replace(of(*args, **more), vocab_ops=TORCH_VOCAB_OPS)

    mutate(monkeypatch, SamplingTable.of, choice_lost)
    with pytest.raises(AssertionError):
        test_two_models_of_one_process_use_their_own_operations(pair, calls)
