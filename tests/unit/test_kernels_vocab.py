"""What is decided over a vocabulary: each kernel against its definition in PyTorch's operators, and planted defects."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from ctypes import c_int, c_int64, c_void_p
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import foredraft
from foredraft import kernels
from foredraft.decode.distribution import Distribution
from foredraft.decode.noise import COUPLED, DRAFT, Noise, NoiseKeys
from foredraft.decode.params import SamplingParams
from foredraft.decode.penalty_context import PenaltyContext
from foredraft.decode.sampling import SamplingTable, distribution_of
from foredraft.decode.sequence import Sequence
from foredraft.decode.vocab_ops import TORCH_VOCAB_OPS, TorchVocabOps, VocabOps, least_in_nucleus
from foredraft.kernels import vocab
from foredraft.kernels.vocab import KernelVocabOps
from tests.support import checkpoints
from tests.support.compiling import plant

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


def random_logits(width: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(PARAMS), 2, width, generator=generator) * scale


def by_kernels(params: Seq[SamplingParams]) -> SamplingTable:
    return SamplingTable.of(params, CPU, vocab_ops=KernelVocabOps())


def nucleus(probs: Tensor, mass: Tensor) -> Tensor:
    """The least probability kept of each row [..., V], by the kernel alone."""
    kernels = vocab.library()
    assert kernels is not None
    mass = mass.expand(probs.shape[:-1]).contiguous()
    least = torch.empty_like(mass)
    run = kernels.foredraft_nucleus
    run.argtypes = c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int
    run.restype = None
    run(probs.data_ptr(), mass.data_ptr(), mass.numel(), probs.shape[-1], least.data_ptr(), 2)
    return least


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("width", WIDTHS)
def test_laws(width: int) -> None:
    logits = random_logits(width)

    def probs(vocab_ops: VocabOps) -> Tensor:
        law, finite = distribution_of(logits, SamplingTable.of(PARAMS, CPU, vocab_ops=vocab_ops))
        assert finite.all()
        assert law.probs is not None
        return law.probs

    got, want = probs(KernelVocabOps()), probs(TORCH_VOCAB_OPS)
    assert torch.equal(got > 0, want > 0)
    assert torch.allclose(got, want, rtol=2e-5, atol=1e-7)


def test_whole_numbers_mean_what_they_say() -> None:
    """A request may give its temperature as an integer."""
    logits = random_logits(1000)
    for whole in (
        SamplingParams(temperature=2, top_p=1, min_p=0),
        SamplingParams(temperature=1, min_p=1),
        SamplingParams(temperature=3, repetition_penalty=2, presence_penalty=1, logit_bias={5: 2}),
    ):
        given = {name: getattr(whole, name) for name in ("temperature", "top_p", "min_p")}
        given |= {name: getattr(whole, name) for name in ("repetition_penalty", "presence_penalty")}
        exact = SamplingParams(**{k: float(v) for k, v in given.items()}, logit_bias=whole.logit_bias)
        penalty_context = PenaltyContext.of(
            [Sequence(0, [5, 7], params, 0) for params in [whole] * len(PARAMS)], CPU
        )
        got, want = (
            distribution_of(logits, by_kernels([params] * len(PARAMS)), penalty_context=penalty_context)[
                0
            ].probs
            for params in (whole, exact)
        )
        assert got is not None and want is not None
        assert torch.equal(got, want)
        assert torch.allclose(got.sum(-1), torch.ones(len(PARAMS), 2))


@pytest.mark.parametrize("width", WIDTHS)
def test_a_row_alone_has_the_same_bits(width: int) -> None:
    logits = random_logits(width)
    law, _ = distribution_of(logits, by_kernels(PARAMS))
    assert law.probs is not None
    torch.set_num_threads(1)
    for row, params in enumerate(PARAMS):
        for column in (0, 1):
            alone = logits[row : row + 1, column : column + 1].contiguous()
            own, _ = distribution_of(alone, by_kernels([params]))
            assert own.probs is not None
            assert torch.equal(own.probs[0, 0], law.probs[row, column])


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scale", [0.0, 0.3, 8.0])
def test_nuclei(width: int, scale: float) -> None:
    probs = random_logits(width, scale=scale).softmax(-1)
    for mass in (1e-8, 0.05, 0.5, 0.9, 0.999):
        masses = torch.full((len(PARAMS), 1), mass)

        got = (probs >= nucleus(probs, masses)[..., None]).sum(-1)
        want = (probs >= least_in_nucleus(probs, masses)[..., None]).sum(-1)
        # running sums of float32 and of double may end a token apart, where tokens are next to nothing
        assert ((got - want).abs() <= 1 + want // 1000).all(), (mass, got, want)


def test_a_nucleus_ends_where_it_is_full() -> None:
    probs = torch.tensor([[0.5, 0.25, 0.125, 0.125, 0.0]])
    for mass, least in (
        (0.0, 0.5),
        (0.3, 0.5),
        (0.5, 0.5),
        (0.50001, 0.25),
        (0.75, 0.25),
        (0.8, 0.125),
        (1.0, 0.125),
    ):
        assert nucleus(probs, torch.tensor([mass])).item() == least, mass


@pytest.mark.parametrize("width", WIDTHS)
def test_races(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    weights = random_logits(width).softmax(-1)
    weights[1] = weights[1].where(torch.rand(2, width, generator=generator) < 0.2, 0.0)
    weights[2] *= 7.0  # unnormalised
    positions = torch.arange(2).expand(len(PARAMS), 2)
    for turn in range(20):
        base = torch.randint(-(2**62), 2**62, (len(PARAMS),), generator=generator)
        got, want = (
            Noise().pick(
                weights,
                NoiseKeys(base, positions, None, torch.full((len(PARAMS),), turn), vocab_ops),
                DRAFT,
            )
            for vocab_ops in (KernelVocabOps(), TORCH_VOCAB_OPS)
        )
        assert torch.equal(got, want)


def test_a_race_that_nobody_runs_gives_some_id() -> None:
    weights = torch.stack([torch.zeros(1, 9), torch.full((1, 9), float("nan"))])
    keys = torch.tensor([[7], [8]])
    assert set(KernelVocabOps().gumbel_argmax(weights, keys).flatten().tolist()) <= set(range(9))


@pytest.mark.parametrize("width", WIDTHS)
def test_the_best(width: int) -> None:
    logits = random_logits(width).round()  # ties
    ids, finite = KernelVocabOps().argmax(logits)
    assert torch.equal(ids, TORCH_VOCAB_OPS.argmax(logits)[0])
    assert finite.all()


def test_matches() -> None:
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
def test_residuals(width: int, one_hot: bool) -> None:
    p, q = random_logits(width).softmax(-1)[:, :1], random_logits(width, seed=1).softmax(-1)[:, :1]
    q[1] = p[1]  # nothing is left: p
    ids = torch.randint(0, width, (len(PARAMS), 1), generator=torch.Generator().manual_seed(width))
    where = torch.arange(len(PARAMS)) != 2

    def left(vocab_ops: VocabOps) -> Tensor:
        rest = (
            Distribution(p, vocab_ops=vocab_ops)
            .minus(Distribution(ids=ids) if one_hot else Distribution(q), where)
            .probs
        )
        assert rest is not None
        return rest

    assert torch.equal(left(KernelVocabOps()), left(TORCH_VOCAB_OPS))


def test_noise() -> None:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randint(-(2**62), 2**62, shape, generator=generator)

    base, position, attempt, rounds = random(3), random(3, 5), random(3, 5), random(3)
    for attempts in (None, attempt):
        for purpose in (DRAFT, COUPLED):
            got, want = (
                NoiseKeys(base, position, attempts, rounds, vocab_ops).bits(purpose)
                for vocab_ops in (KernelVocabOps(), TORCH_VOCAB_OPS)
            )
            assert torch.equal(got, want)
    assert torch.equal(KernelVocabOps().uniform(position), TORCH_VOCAB_OPS.uniform(position))


@pytest.mark.parametrize("at", [0, 5, 40, 999])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(top_p=0.9)])
def test_what_is_not_finite_is_seen(at: int, value: float, params: SamplingParams) -> None:
    logits = torch.zeros(2, 1, 1000)
    logits[1, 0, at] = value
    _, finite = distribution_of(logits, by_kernels([params] * 2))
    assert finite.tolist() == [[True], [False]]


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(top_p=0.9), SamplingParams(typical_p=0.8)]
)
def test_rows_that_lie_apart_have_the_same_bits(params: SamplingParams) -> None:
    """What a pass computes is padded where others share it, and then cut."""
    wide = torch.randn(2, 5, 1000, generator=torch.Generator().manual_seed(0)) * 3
    apart = wide[:, :3]
    assert not apart.is_contiguous()
    before = wide.clone()
    law, _ = distribution_of(apart, by_kernels([params] * 2))
    alone, _ = distribution_of(apart[:1], by_kernels([params]))
    assert law.probs is not None
    assert alone.probs is not None
    assert torch.equal(law.probs[:1], alone.probs)
    assert torch.equal(wide, before)


def test_without_memory_a_request_ends_with_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`tests/kernels_memory.c` has every allocation fail; here, those of the softmax do."""
    pair, changed = checkpoints.save_pair(tmp_path), tmp_path / "changed"
    changed.mkdir()
    old = "return NO_MEMORY;\n    float *top"
    plant(monkeypatch, changed, f"if (!sums) {old}", f"if (1) {old}")
    llm = foredraft.load(pair / "big", draft=pair / "small", device="cpu", kernels=True, max_length=64)
    params = SamplingParams(max_new_tokens=8), SamplingParams(max_new_tokens=8, temperature=0)
    for drafts in ("draft-model", "none"):
        sampled, greedy = (llm.generate([[5, 6, 7]], replace(own, drafter=drafts))[0] for own in params)
        assert sampled.finish_reason == "error"
        assert sampled.error is not None and sampled.error.startswith(
            "MemoryError: the kernels get no memory"
        )
        assert len(sampled.error.splitlines()) == 1
        assert greedy.error is None


DEFECTS = {
    "the nucleus forgets what is above its last bin": ("i < left && above < mass[r]", "i < left && above < mass[r] / 2"),
    "the noise of a neighbour": ("mixed(key + at + i)", "mixed(key + at + i + 1)"),
    "a race over the support's keys of another row": ("(uint64_t)keys[p.row]", "(uint64_t)keys[0]"),
    "a token too faint is drawn": ("pick(v < bound, (V){0}, v)", "pick(v < bound * 0.01f, (V){0}, v)"),
    "rows that are not cut are divided too": ("if (!cut[p.row]) continue;", ""),
    "the temperature of the first row": ("splat(temperature[p.row / each])", "splat(temperature[0])"),
    "NaN lost between pieces": ("i < PIECES && most == most; i++) most =", "i < PIECES; i++) most ="),
    "a residual where nothing is left": ("if (!found) memcpy(to", "if (found > 1) memcpy(to"),
    "a residual where nothing was rejected": ("if (where[r] && less)", "if (less)"),
    "a certain token kept": ("larger(v - splat(1), (V){0})", "v"),
    "a token less than the k likeliest": ("heap[child + 1] < heap[child]) child++", "heap[child + 1] > heap[child]) child++"),
    "one too few of the likeliest": ("return DONE;\n    float *heap", "return DONE;\n    k--;\n    float *heap"),
    "ties at the cut dropped": ("pick(v < bound, (V){0}, exponential", "pick(v <= bound, (V){0}, exponential"),
    "the bound of the first row": ("splat(least ? least[p.row]", "splat(least ? least[0]"),
    "noise without its purpose": ("folded(base[r], purpose)", "folded(base[r], 0)"),
    "noise without its round": ("if (round) key", "if (0) key"),
    "padding is matched": ("at < lengths[r] && drafted", "at < k && drafted"),
    "the draft of the first row": ("drafted[r * k + at] ==", "drafted[at] =="),
    "the last of several that tie": ("if (!(found[r * PIECES + i].value <= best.value))", "if (!(found[r * PIECES + i].value < best.value))"),
}  # fmt: skip


def check_all() -> None:
    for width in (65, 1000):
        test_laws(width)
        test_a_row_alone_has_the_same_bits(width)
        test_races(width)
        test_the_best(width)
        for one_hot in (False, True):
            test_residuals(width, one_hot)
    test_noise()
    test_matches()
    test_a_nucleus_ends_where_it_is_full()
    for at in (5, 40, 999):
        test_what_is_not_finite_is_seen(at, float("nan"), SamplingParams(top_p=0.9))


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_caught(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plant(monkeypatch, tmp_path, *DEFECTS[name])
    with pytest.raises(AssertionError):
        check_all()


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
