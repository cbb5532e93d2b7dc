"""`Runner.forward`: plans, auxiliary layers, resumed passes, chosen columns, idle rows, ragged batches, errors."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

import foredraft
from foredraft import kernels, loading
from foredraft.kernels.compilation import level_in_use
from foredraft.model import decoder as decoder_module
from foredraft.model.attention import PassInputs
from foredraft.model.layers import Linear, RowSpan, product
from foredraft.model.runner import Forward, Resume, Runner, compiled
from foredraft.model.runner.compiled import PackedLinear, pack
from foredraft.model.runner.invariant_shapes import ANY_SHAPE, InvariantShapes, fallback
from foredraft.model.runner.torch_backend import RaggedRule, TorchBackend
from foredraft.model.spec import Plan
from foredraft.model.weights import load_decoder
from tests.support.checkpoints import reference_model, save_checkpoint, save_variant

BASE = 40  # positions before the tested pass; beyond the window of 24


class Case:
    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.runner = Runner(load_decoder(save_variant(folder, name)))
        self.layers = self.runner.decoder.spec.layers
        self.ids = torch.randint(3, 97, (3, 64), generator=torch.Generator().manual_seed(3))  # [B, T]
        self.cache = self.runner.new_cache(3, 200)
        for row in range(3):
            self.runner.prefill(self.cache, row, self.ids[row, :BASE].tolist(), 0)

    def forward(self, columns: int = 6, **options: Any) -> Forward:
        return self.runner.forward(self.cache, self.ids[:, BASE : BASE + columns], [BASE] * 3, **options)

    def full(self, columns: int = 6) -> Forward:
        return self.forward(columns, aux_layers=range(self.layers + 1))


@pytest.fixture(scope="module", params=["llama", "gemma2", "gemma3"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(params=[False, True], ids=["padded", "ragged"])
def case(made: Case, request: pytest.FixtureRequest) -> Case:
    made.runner.backend.gathers = request.param
    return made


def logits(forward: Forward) -> Tensor:
    assert forward.logits is not None
    return forward.logits


def test_auxiliary_states_enter_their_layer(case: Case) -> None:
    out = case.full()
    tokens = case.ids[:, BASE : BASE + 6]
    assert torch.equal(out.aux_states[0], case.runner.decoder.embed(tokens))
    assert torch.equal(out.aux_states[case.layers], out.hidden)
    for depth in range(case.layers):
        stopped = case.forward(stop=depth)
        assert torch.equal(stopped.hidden, out.aux_states[depth])
        assert stopped.logits is None
    assert len({own.sum().item() for own in out.aux_states.values()}) == case.layers + 1


@pytest.mark.parametrize("known", [[0, 0, 0], [6, 6, 6], [2, 2, 2], [0, 3, 6], [5, 1, 4], [6, 6, 5]])
@pytest.mark.parametrize("depth", [1, 2])
def test_resume_equals_the_full_forward(case: Case, depth: int, known: list[int]) -> None:
    full = case.full()
    kept = case.cache.data.clone()
    state = full.aux_states[depth].clone()
    for row, count in enumerate(known):  # a drafter computes neither states nor keys and values of the others
        state[row, count:] = 9.0
        case.cache.data[:depth, :, row, :, BASE + count :] = 0.0
    case.cache.data[depth:, :, :, :, BASE:] = 0.0
    resumed = case.forward(resume=Resume(depth, state, known), aux_layers=(depth, case.layers))
    assert torch.equal(logits(resumed), logits(full))
    assert torch.equal(resumed.aux_states[depth], full.aux_states[depth])
    assert torch.equal(case.cache.data[..., BASE : BASE + 6, :], kept[..., BASE : BASE + 6, :])
    other = case.forward(resume=Resume(depth, state + 1.0, known))
    assert torch.equal(logits(other), logits(full)) is not any(known), "the known states are used"


def test_a_plan_skips_its_sub_layers(case: Case) -> None:
    """The reference is transformers, with the outputs of the skipped sub-layers set to zero."""
    last = case.layers - 1
    for attention, mlp in (((), (last,)), ((last,), (last,)), ((0, 1), (0, 2))):
        model = reference_model(case.name)
        for layer in attention:
            silenced = model.model.layers[layer].self_attn
            silenced.register_forward_hook(lambda _, __, out: (torch.zeros_like(out[0]), out[1]))
        for layer in mlp:
            model.model.layers[layer].mlp.register_forward_hook(lambda _, __, out: torch.zeros_like(out))
        with torch.inference_mode():
            expected = model(case.ids[:1]).logits
        plan = Plan.full(case.layers).without(attention, mlp)
        got = case.runner.forward(case.runner.new_cache(1, 100), case.ids[:1], [0], plan=plan)
        torch.testing.assert_close(logits(got), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_skipped_attention_writes_no_keys(case: Case) -> None:
    case.full()
    before, plan = case.cache.data.clone(), Plan.full(case.layers)
    case.runner.forward(case.cache, case.ids[:, :4], [BASE] * 3, plan=plan.without(attention=(1,)))
    assert torch.equal(case.cache.data[1], before[1])
    assert not torch.equal(case.cache.data[0], before[0])
    every, decoder = range(case.layers), case.runner.decoder
    got, embedded = case.forward(plan=plan.without(every, every)), decoder.embed(case.ids[:, BASE : BASE + 6])
    assert torch.equal(got.hidden, embedded)
    torch.testing.assert_close(logits(got), decoder.head(embedded))


def test_logits_of_chosen_columns_equal_those_of_all(case: Case) -> None:
    full, at = logits(case.full()), torch.tensor([5, 0, 2])
    assert torch.equal(logits(case.forward(at=at)), full[torch.arange(3), at][:, None])
    assert case.forward(want_logits=False).logits is None


@pytest.mark.parametrize("kind", ["invariant", "any shape", "resumed"])
def test_idle_rows_are_finite_and_change_no_sequence(case: Case, kind: str) -> None:
    full = case.full()
    before, scratch = case.cache.data.clone(), case.cache.scratch
    idle = [True, False, True]
    resume = Resume(2, full.aux_states[2], [0, 3, 0]) if kind == "resumed" else None
    tokens, starts = case.ids[:, BASE : BASE + 6], [BASE, BASE, 0]
    out = case.runner.forward(
        case.cache, tokens, starts, idle=idle, resume=resume, invariant=kind != "any shape"
    )
    assert logits(out).isfinite().all() and case.cache.data.isfinite().all()
    assert kind == "any shape" or torch.equal(logits(out)[1], logits(full)[1])
    for row in (0, 2):
        assert torch.equal(case.cache.data[:, :, row, :, :scratch], before[:, :, row, :, :scratch])
        if not case.runner.backend.gathers:  # a ragged pass writes nothing for idle rows
            assert not torch.equal(case.cache.data[:, :, row, :, scratch:], before[:, :, row, :, scratch:])


@pytest.mark.parametrize("counts", [[6, 6, 6], [1, 6, 2], [3, 1, 1], [0, 5, 1]])
@pytest.mark.parametrize("columns", [6, 7])  # 7 is padded to 8
def test_a_ragged_pass_has_the_bits_of_the_padded_one(case: Case, counts: list[int], columns: int) -> None:
    full = case.full(columns)
    kept = case.cache.data.clone()
    case.cache.data[..., BASE:, :] = 5.0
    before = case.cache.data.clone()
    tokens = case.ids[:, BASE : BASE + columns].clone()
    for row, count in enumerate(counts):
        tokens[row, count:] = 1  # other tokens as padding
    idle = [count == 0 for count in counts]
    out = case.runner.forward(
        case.cache, tokens, [BASE] * 3, counts=counts, idle=idle, aux_layers=range(case.layers + 1)
    )
    assert logits(out).isfinite().all()
    for row, count in enumerate(counts):
        end = BASE + count
        assert torch.equal(logits(out)[row, :count], logits(full)[row, :count])
        assert torch.equal(out.hidden[row, :count], full.hidden[row, :count])
        for depth, own in out.aux_states.items():
            assert torch.equal(own[row, :count], full.aux_states[depth][row, :count])
        assert torch.equal(case.cache.data[:, :, row, :, :end], kept[:, :, row, :, :end])
        if case.runner.backend.gathers:
            assert torch.equal(case.cache.data[:, :, row, :, end:], before[:, :, row, :, end:])
    case.cache.data.copy_(kept)


def test_a_ragged_pass_chooses_columns_and_resumes(case: Case) -> None:
    full = case.full()
    counts, known = [6, 2, 4], [2, 2, 0]
    state = full.aux_states[1].clone()
    for row, count in enumerate(known):
        state[row, count:] = 9.0
    at = torch.tensor([5, 1, 2])
    got = case.forward(counts=counts, resume=Resume(1, state, known), at=at)
    assert torch.equal(logits(got)[:, 0], logits(full)[torch.arange(3), at])
    for row, count in enumerate(counts):
        assert torch.equal(got.hidden[row, :count], full.hidden[row, :count])


def test_products_of_a_ragged_pass_have_the_real_columns_only(case: Case, monkeypatch: Any) -> None:
    seen = Mock(wraps=product)
    monkeypatch.setattr(decoder_module, "product", seen)
    case.runner.forward(case.cache, case.ids[:, :6], [BASE] * 3, counts=[6, 1, 2], idle=[False, False, True])
    rows = {len(call.args[1]) for call in seen.call_args_list}
    assert rows == ({7} if case.runner.backend.gathers else {18})


def test_a_pass_is_ragged_where_the_rule_says_so(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    ragged: list[bool] = []
    compute = TorchBackend._compute

    def watching(self: TorchBackend, cache: Any, shape: Any, inputs: PassInputs) -> Forward:
        ragged.append(inputs.real is not None)
        return compute(self, cache, shape, inputs)

    monkeypatch.setattr(TorchBackend, "_compute", watching)
    monkeypatch.setattr(case.runner.backend, "gathers", None)
    monkeypatch.setattr(case.runner.backend, "_ragged_rule", RaggedRule(free_rows=4, min_saved=6))
    tokens = case.ids[:, :6]
    for counts, idle in (([6, 6, 0], None), ([6, 6, 1], None), ([6, 6, 6], [False, False, True])):
        case.runner.forward(case.cache, tokens, [BASE] * 3, counts=counts, idle=idle)
    case.runner.forward(case.cache, tokens[:1], [BASE], counts=[1])
    assert ragged == [True, False, True, False]


PACKED = r"(packed weights|weights not packed \(mkldnn.*\))"  # PyTorch packs none where the CPU has only AVX2
BY_OPERATORS = (
    rf"bfloat16 on cpu; {PACKED}; batch-invariant shapes: .*; layers not compiled; no CUDA graphs;"
    " ragged passes where they save 241 rows beyond 8; no kernels: for a test"
)
BY_KERNELS = rf"bfloat16 on cpu; C kernels of {level_in_use()}, batch-invariant at any shape"
NEEDS_KERNELS = pytest.mark.skipif(kernels.library() is None, reason="no C compiler")


@pytest.mark.parametrize(
    "line", [BY_OPERATORS, pytest.param(BY_KERNELS, marks=NEEDS_KERNELS)], ids=["operators", "kernels"]
)
def test_loading_logs_in_one_line_how_passes_run(
    line: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_checkpoint(tmp_path)
    if line == BY_OPERATORS:
        monkeypatch.setattr(loading.runners, "unserved_because", lambda *_: "for a test")
    with caplog.at_level("INFO", "foredraft.loading.runners"):
        foredraft.load(folder, dtype="bfloat16", device="cpu", max_batch=1, max_length=512)
    own = [record.getMessage() for record in caplog.records if record.levelname == "INFO"]
    assert len(own) == 1 and re.fullmatch(f"{re.escape(str(folder))}: {line}", own[0])


def test_packing_that_fails_leaves_ordinary_products(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the log says why."""
    fails = Mock(side_effect=RuntimeError("mkldnn: no such primitive\nstack"))
    for linear in (fails, lambda x, weight, bias: torch.zeros(x.shape[0], weight.shape[0])):
        compiled._fault.cache_clear()
        monkeypatch.setattr(compiled, "_linear", linear)
        assert type(pack(torch.randn(48, 64))) is Linear
        assert "weights not packed (" + "mkldnn: no such primitive" * (linear is fails) in case.runner.choices
    monkeypatch.undo()
    compiled._fault.cache_clear()
    assert isinstance(pack(torch.randn(48, 64)), PackedLinear)


def test_shapes_are_described_for_the_log() -> None:
    one = "one shape for all passes, because no two agree: 8 columns, 8 to 8 rows by 8"
    described = {
        ANY_SHAPE: "any shape, not deterministic",
        # which does not attend what no row has committed
        fallback(torch.device("cpu")): f"{one}, lengths by 1024, attention row by row",
        fallback(torch.device("cuda", 0)): f"{one}, the whole cache, attention row by row",
        InvariantShapes(
            (1, 8), RowSpan(1, 64), 256
        ): "batch-invariant shapes: 1, 8 columns, 1 to 64 rows, lengths by 256",
    }
    assert [str(shapes) for shapes in described] == [*described.values()]


@pytest.mark.parametrize("deterministic", [True, False])
def test_inexact_passes_are_close_to_exact_ones(case: Case, deterministic: bool) -> None:
    """Those of a pass that need not be exact, and those of a runner without batch-invariant shapes."""
    runner = case.runner if deterministic else Runner(case.runner.decoder, deterministic=False)
    got = runner.forward(case.cache, case.ids[:, BASE : BASE + 6], [BASE] * 3, invariant=not deterministic)
    torch.testing.assert_close(logits(got), logits(case.full()), rtol=1e-4, atol=1e-4)


def test_forwarded_counts_the_real_columns(case: Case) -> None:
    runner = case.runner
    before = runner.forwarded
    case.forward(4)
    case.forward(4, idle=[False, True, False])
    case.forward(4, counts=[4, 2, 1])
    case.forward(4, counts=[4, 2, 1], idle=[True, False, False])
    runner.prefill(runner.new_cache(1, 100), 0, [5, 6, 7], 0)
    assert runner.forwarded - before == 12 + 8 + 7 + 3 + 3


def test_passes_that_cannot_be_are_refused(case: Case) -> None:
    runner, ids = case.runner, case.ids.repeat(1, 5)[:1]
    cache, widest = runner.new_cache(1, 600), runner.max_queries
    resume, wide = Resume(2, torch.zeros(1, 4, 64), [0]), rf"the widest batch-invariant pass \({widest}\)"
    refused: dict[str, Callable[[], object]] = {
        "the resumed depth": lambda: runner.forward(cache, ids[:, :4], [40], resume=resume, aux_layers=(1,)),
        r"\[3\]": lambda: Plan.full(3).without(mlp=(3,)),
        "idle": lambda: runner.forward(cache, ids[:, :1], [0], idle=[True]),
        "between multiples of 256": lambda: runner.prefill(cache, 0, [5] * 20, 250),
        "0 tokens": lambda: runner.prefill(cache, 0, [], 0),
        "overrun a cache row of 600 p": lambda: runner.forward(cache, ids[:, :6], [cache.scratch - 2]),
        f"exceed {wide}": lambda: runner.forward(cache, ids[:, : widest + 1], [0]),
        "slack of 256": lambda: runner.forward(cache, ids[:, :257], [0], invariant=False),
    }
    for message, run in refused.items():
        with pytest.raises(ValueError, match=message):
            run()
    out = runner.forward(runner.new_cache(2, 100), case.ids[:2, :6], [99, 3])  # its padding lies in the slack
    assert logits(out).isfinite().all()
