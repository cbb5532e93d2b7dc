"""`Runner.forward`: plans, taps, resumed passes, chosen columns, idle rows, ragged batches, errors.

These tests fail where a resumed pass takes a computed state in place of a known one, where a plan is ignored, where
taps are taken after their layer, where the mask of idle rows is not clipped, and where idle rows write at their
start.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import foredraft
from foredraft import SamplingParams, kernels, loading
from foredraft.model import decoder as decoder_module
from foredraft.model.forward_context import PassInputs
from foredraft.model.layers import Product, RowSpan, product
from foredraft.model.plan import Plan
from foredraft.model.runner import Forward, InvariantShapes, Resume, Runner
from foredraft.model.runner.invariant_shapes import ANY_SHAPE, fallback
from foredraft.model.runner.ragged import COSTS, RaggedRule
from foredraft.model.runner.torch_backend import TorchBackend
from foredraft.model.weights import load_decoder
from tests.support.checkpoints import reference_model, save_checkpoint, save_variant
from tests.support.loaded import engine_of

BASE = 40  # positions before the tested pass; beyond the window of 24


class Case:
    """A runner with a prompt of BASE tokens in every row of a cache."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.runner = Runner(load_decoder(save_variant(folder, name)))
        self.layers = self.runner.decoder.spec.layers
        self.ids = torch.randint(3, 97, (3, 64), generator=torch.Generator().manual_seed(3))  # [B, T]
        self.cache = self.runner.new_cache(3, 200)
        for row in range(3):
            self.runner.prefill(self.cache, row, self.ids[row, :BASE].tolist(), 0)

    def full(self, columns: int = 6) -> Forward:
        taps = range(self.layers + 1)
        return self.runner.forward(self.cache, self.ids[:, BASE : BASE + columns], [BASE] * 3, taps=taps)


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


def test_results_have_their_shapes_and_dtypes(case: Case) -> None:
    out = case.full()
    assert logits(out).shape == (3, 6, 97)
    assert logits(out).dtype == torch.float32
    assert out.hidden.shape == (3, 6, 64)
    assert all(tap.shape == (3, 6, 64) for tap in out.taps.values())


def test_taps_are_the_states_entering_their_layer(case: Case) -> None:
    out = case.full()
    tokens = case.ids[:, BASE : BASE + 6]
    assert torch.equal(out.taps[0], case.runner.decoder.embed(tokens))
    assert torch.equal(out.taps[case.layers], out.hidden)
    for depth in range(case.layers):
        stopped = case.runner.forward(case.cache, tokens, [BASE] * 3, stop=depth)
        assert torch.equal(stopped.hidden, out.taps[depth])
        assert stopped.logits is None
    assert len({tap.sum().item() for tap in out.taps.values()}) == case.layers + 1


def test_taps_of_prefill_equal_those_of_forward(case: Case) -> None:
    cache = case.runner.new_cache(1, 100)
    ids = case.ids[0, :30]
    taps = case.runner.prefill(cache, 0, ids.tolist(), 0, taps=(0, 2)).taps
    again = case.runner.forward(cache, ids[None], [0], taps=(0, 2)).taps
    assert taps[2].shape == (1, 30, 64)
    assert torch.equal(taps[0], again[0])
    torch.testing.assert_close(taps[2], again[2], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("known", [[0, 0, 0], [6, 6, 6], [2, 2, 2], [0, 3, 6], [5, 1, 4], [6, 6, 5]])
@pytest.mark.parametrize("depth", [1, 2])
def test_resume_equals_the_full_forward(case: Case, depth: int, known: list[int]) -> None:
    full = case.full()
    kept = case.cache.data.clone()
    state = full.taps[depth].clone()
    for row, count in enumerate(known):  # a drafter computes neither states nor keys and values of the others
        state[row, count:] = 9.0
        case.cache.data[:depth, :, row, :, BASE + count :] = 0.0
    case.cache.data[depth:, :, :, :, BASE:] = 0.0
    resumed = case.runner.forward(
        case.cache,
        case.ids[:, BASE : BASE + 6],
        [BASE] * 3,
        resume=Resume(depth, state, known),
        taps=(depth, case.layers),
    )
    assert torch.equal(logits(resumed), logits(full))
    assert torch.equal(resumed.taps[depth], full.taps[depth])
    assert torch.equal(case.cache.data[..., BASE : BASE + 6, :], kept[..., BASE : BASE + 6, :])


def test_a_resumed_pass_uses_the_known_states(case: Case) -> None:
    full = case.full()
    wrong = Resume(1, full.taps[1] + 1.0, [6, 6, 6])
    resumed = case.runner.forward(case.cache, case.ids[:, BASE : BASE + 6], [BASE] * 3, resume=wrong)
    assert not torch.equal(logits(resumed), logits(full))


def test_a_resumed_pass_refuses_taps_below_its_depth(case: Case) -> None:
    resume = Resume(2, torch.zeros(1, 4, 64), [0])
    with pytest.raises(ValueError, match="below the resumed depth"):
        case.runner.forward(case.cache, case.ids[:1, :4], [BASE], resume=resume, taps=(1,))


def test_a_plan_skips_its_sub_layers(case: Case) -> None:
    """The reference is transformers, with the outputs of the skipped sub-layers set to zero."""
    last = case.layers - 1
    for attention, mlp in (((0,), ()), ((), (last,)), ((last,), (last,)), ((1,), (0, 2)), ((0, 1), (1,))):
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


def test_a_plan_that_skips_everything_applies_the_head_to_the_embedding(case: Case) -> None:
    every = range(case.layers)
    plan = Plan.full(case.layers).without(every, every)
    tokens = case.ids[:, BASE : BASE + 4]
    got = case.runner.forward(case.cache, tokens, [BASE] * 3, plan=plan)
    decoder = case.runner.decoder
    assert torch.equal(got.hidden, decoder.embed(tokens))
    torch.testing.assert_close(logits(got), decoder.head(decoder.embed(tokens)))


def test_skipped_attention_writes_no_keys(case: Case) -> None:
    case.full()
    before = case.cache.data.clone()
    plan = Plan.full(case.layers).without(attention=(1,))
    case.runner.forward(case.cache, case.ids[:, :4], [BASE] * 3, plan=plan)
    assert torch.equal(case.cache.data[1], before[1])
    assert not torch.equal(case.cache.data[0], before[0])


def test_a_plan_refuses_layers_that_do_not_exist() -> None:
    with pytest.raises(ValueError, match=r"\[3\]"):
        Plan.full(3).without(mlp=(3,))


def test_logits_of_chosen_columns_equal_those_of_all(case: Case) -> None:
    full = logits(case.full())
    at = torch.tensor([5, 0, 2])
    got = case.runner.forward(case.cache, case.ids[:, BASE : BASE + 6], [BASE] * 3, at=at)
    assert torch.equal(logits(got), full[torch.arange(3), at][:, None])


def test_logits_are_computed_only_where_wanted(case: Case) -> None:
    tokens = case.ids[:, BASE : BASE + 6]
    assert case.runner.forward(case.cache, tokens, [BASE] * 3, want_logits=False).logits is None


@pytest.mark.parametrize("invariant", [True, False])
def test_idle_rows_are_finite_and_change_no_sequence(case: Case, invariant: bool) -> None:
    full = logits(case.full())
    before = case.cache.data.clone()
    idle = [True, False, True]
    out = case.runner.forward(
        case.cache, case.ids[:, BASE : BASE + 6], [BASE, BASE, 0], idle=idle, invariant=invariant
    )
    assert logits(out).isfinite().all()
    assert case.cache.data.isfinite().all()
    if invariant:
        assert torch.equal(logits(out)[1], full[1])
    scratch = case.cache.scratch
    for row in (0, 2):
        assert torch.equal(case.cache.data[:, :, row, :, :scratch], before[:, :, row, :, :scratch])
        if not case.runner.backend.gathers:  # a ragged pass writes nothing for idle rows
            assert not torch.equal(case.cache.data[:, :, row, :, scratch:], before[:, :, row, :, scratch:])


def test_idle_rows_in_a_resumed_pass_change_no_sequence(case: Case) -> None:
    full = case.full()
    before = case.cache.data.clone()
    out = case.runner.forward(
        case.cache,
        case.ids[:, BASE : BASE + 6],
        [BASE] * 3,
        idle=[False, True, False],
        resume=Resume(2, full.taps[2], [3, 0, 4]),
    )
    assert logits(out).isfinite().all()
    assert torch.equal(logits(out)[[0, 2]], logits(full)[[0, 2]])
    scratch = case.cache.scratch
    assert torch.equal(case.cache.data[:, :, 1, :, :scratch], before[:, :, 1, :, :scratch])


@pytest.mark.parametrize("counts", [[6, 6, 6], [1, 6, 2], [3, 1, 1], [0, 5, 1]])
@pytest.mark.parametrize("columns", [6, 7])  # 7 is padded to 8
def test_a_ragged_pass_has_the_bits_of_the_padded_one(case: Case, counts: list[int], columns: int) -> None:
    """Logits, states, taps, keys and values of the real columns are equal."""
    full = case.full(columns)
    kept = case.cache.data.clone()
    case.cache.data[..., BASE:, :] = 5.0
    before = case.cache.data.clone()
    tokens = case.ids[:, BASE : BASE + columns].clone()
    for row, count in enumerate(counts):
        tokens[row, count:] = 1  # other tokens as padding
    idle = [count == 0 for count in counts]
    out = case.runner.forward(
        case.cache, tokens, [BASE] * 3, counts=counts, idle=idle, taps=range(case.layers + 1)
    )
    assert logits(out).isfinite().all()
    for row, count in enumerate(counts):
        end = BASE + count
        assert torch.equal(logits(out)[row, :count], logits(full)[row, :count])
        assert torch.equal(out.hidden[row, :count], full.hidden[row, :count])
        for depth, tap in out.taps.items():
            assert torch.equal(tap[row, :count], full.taps[depth][row, :count])
        assert torch.equal(case.cache.data[:, :, row, :, :end], kept[:, :, row, :, :end])
        if case.runner.backend.gathers:
            assert torch.equal(case.cache.data[:, :, row, :, end:], before[:, :, row, :, end:])
    case.cache.data.copy_(kept)


def test_a_ragged_pass_chooses_columns_and_resumes(case: Case) -> None:
    full = case.full()
    counts, known = [6, 2, 4], [2, 2, 0]
    state = full.taps[1].clone()
    for row, count in enumerate(known):
        state[row, count:] = 9.0
    got = case.runner.forward(
        case.cache,
        case.ids[:, BASE : BASE + 6],
        [BASE] * 3,
        counts=counts,
        resume=Resume(1, state, known),
        at=torch.tensor([5, 1, 2]),
    )
    assert torch.equal(logits(got)[:, 0], logits(full)[torch.arange(3), torch.tensor([5, 1, 2])])
    for row, count in enumerate(counts):
        assert torch.equal(got.hidden[row, :count], full.hidden[row, :count])


def test_products_of_a_ragged_pass_have_the_real_columns_only(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[int] = set()

    def watching(weights: Product, x: Tensor, span: RowSpan | None) -> Tensor:
        seen.add(len(x))
        return product(weights, x, span)

    monkeypatch.setattr(decoder_module, "product", watching)
    case.runner.forward(case.cache, case.ids[:, :6], [BASE] * 3, counts=[6, 1, 2], idle=[False, False, True])
    assert seen == ({7} if case.runner.backend.gathers else {18})


def test_the_ragged_rule_weighs_saved_rows_against_moves(case: Case) -> None:
    spec = case.runner.decoder.spec
    layer = case.runner.decoder.layers[0]
    products = (layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down)
    weights = sum(math.prod(product.shape) for product in products)
    free, moves = COSTS["cpu"]
    assert RaggedRule.of(spec, torch.device("cpu")) == RaggedRule(free, moves // weights + 1)
    rule = RaggedRule(free_rows=8, min_saved=11)
    assert not rule.pays(18, 8)
    assert rule.pays(19, 8)
    assert not rule.pays(18, 1)  # the first eight rows are free
    assert not rule.pays(40, 30)
    assert rule.pays(41, 30)


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


def test_loading_logs_in_one_line_how_passes_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_checkpoint(tmp_path)
    monkeypatch.setattr(loading.runners, "unserved_because", lambda *_: "for a test")
    with caplog.at_level("INFO", "foredraft.loading.runners"):
        foredraft.load(folder, dtype="bfloat16", device="cpu", max_batch=1, max_length=512)
    [line] = [record.getMessage() for record in caplog.records if record.levelname == "INFO"]
    assert line.startswith(f"{folder}: bfloat16 on cpu; packed weights; batch-invariant shapes: ")
    assert line.endswith(
        "layers not compiled; no CUDA graphs; ragged passes where they save 241 rows beyond 8"
        "; no kernels: for a test"
    )


@pytest.mark.skipif(kernels.library() is None, reason="no C compiler")
def test_loading_logs_that_kernels_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = save_checkpoint(tmp_path)
    with caplog.at_level("INFO", "foredraft.loading.runners"):
        foredraft.load(folder, device="cpu", max_batch=1, max_length=512)
    assert caplog.messages == [f"{folder}: float32 on cpu; C kernels, batch-invariant at any shape"]


def test_the_log_says_why_weights_are_not_packed(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    from foredraft.model.runner import packed

    def missing(*_: object) -> Tensor:
        raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute '_linear_pointwise'")

    packed._fault.cache_clear()
    monkeypatch.setattr(packed, "_linear", missing)
    try:
        assert "weights not packed ('_OpNamespace' 'mkldnn' object has no" in case.runner.choices
    finally:
        packed._fault.cache_clear()


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        (ANY_SHAPE, "any shape, not deterministic"),
        (
            fallback(torch.device("cpu")),  # which does not attend what no row has committed
            "one shape for all passes, because no two agree: 8 columns, 8 to 8 rows by 8, lengths by 1024,"
            " attention row by row",
        ),
        (
            fallback(torch.device("cuda", 0)),
            "one shape for all passes, because no two agree: 8 columns, 8 to 8 rows by 8, the whole cache,"
            " attention row by row",
        ),
        (
            InvariantShapes((1, 8), 1, 64, 256),
            "batch-invariant shapes: 1, 8 columns, 1 to 64 rows, lengths by 256",
        ),
    ],
)
def test_shapes_are_described_for_the_log(shapes: InvariantShapes, expected: str) -> None:
    assert str(shapes) == expected


def test_an_all_idle_batch_is_refused(case: Case) -> None:
    with pytest.raises(ValueError, match="idle"):
        case.runner.forward(case.cache, case.ids[:1, :1], [0], idle=[True])


def test_inexact_passes_are_close_to_exact_ones(case: Case) -> None:
    full = logits(case.full())
    loose = case.runner.forward(case.cache, case.ids[:, BASE : BASE + 6], [BASE] * 3, invariant=False)
    torch.testing.assert_close(logits(loose), full, rtol=1e-4, atol=1e-4)


def test_a_runner_without_batch_invariant_shapes_is_close(case: Case) -> None:
    runner = Runner(case.runner.decoder, deterministic=False)
    cache = runner.new_cache(3, 200)
    for row in range(3):
        runner.prefill(cache, row, case.ids[row, :BASE].tolist(), 0)
    got = runner.forward(cache, case.ids[:, BASE : BASE + 6], [BASE] * 3)
    torch.testing.assert_close(logits(got), logits(case.full()), rtol=1e-4, atol=1e-4)


def test_forwarded_counts_the_real_columns(case: Case) -> None:
    runner = case.runner
    before = runner.forwarded
    runner.forward(case.cache, case.ids[:, :4], [BASE] * 3)
    runner.forward(case.cache, case.ids[:, :4], [BASE] * 3, idle=[False, True, False])
    runner.forward(case.cache, case.ids[:, :4], [BASE] * 3, counts=[4, 2, 1])
    runner.forward(case.cache, case.ids[:, :4], [BASE] * 3, counts=[4, 2, 1], idle=[True, False, False])
    runner.prefill(runner.new_cache(1, 100), 0, [5, 6, 7], 0)
    assert runner.forwarded - before == 12 + 8 + 7 + 3 + 3


def test_a_chunk_that_crosses_a_multiple_is_refused(case: Case) -> None:
    cache = case.runner.new_cache(1, 600)
    with pytest.raises(ValueError, match="between multiples of 256"):
        case.runner.prefill(cache, 0, [5] * 20, 250)
    with pytest.raises(ValueError, match="0 tokens"):
        case.runner.prefill(cache, 0, [], 0)


def test_a_pass_may_end_in_the_slack_and_not_beyond(case: Case) -> None:
    cache = case.runner.new_cache(2, 100)
    out = case.runner.forward(cache, case.ids[:2, :6], [99, 3])  # its padding lies in the slack
    assert logits(out).isfinite().all()
    with pytest.raises(ValueError, match="overrun a cache row of 100 positions"):
        case.runner.forward(cache, case.ids[:2, :6], [cache.scratch - 2, 3])


def test_too_many_columns_are_refused(case: Case) -> None:
    tokens = case.ids.repeat(1, 5)[:1]
    with pytest.raises(
        ValueError, match=f"exceed the widest batch-invariant pass \\({case.runner.max_queries}\\)"
    ):
        case.runner.forward(case.cache, tokens[:, : case.runner.max_queries + 1], [0])
    with pytest.raises(ValueError, match="slack of 256"):
        case.runner.forward(case.cache, tokens[:, :257], [0], invariant=False)


def test_float16_gives_the_same_ids_with_and_without_drafts(tmp_path: Path) -> None:
    """The dtype comes from the checkpoint, or from the option."""
    save_checkpoint(tmp_path / "half", "qwen3", dtype=torch.float16)
    save_checkpoint(tmp_path / "whole", "qwen3")
    prompts, said = [[3, 4, 5, 6] * 10, [7, 8, 9]], []
    for folder, dtype in (("half", None), ("whole", "float16")):
        llm = foredraft.load(tmp_path / folder, dtype=dtype, device="cpu", max_batch=2, max_length=256)
        assert engine_of(llm).cache.dtype == torch.float16
        for drafter in ("none", "lookup"):
            params = SamplingParams(temperature=0, max_new_tokens=48, ignore_eos=True, drafter=drafter)
            said.append([output.token_ids for output in llm.generate(prompts, params)])
    assert said[1:] == said[:-1]
