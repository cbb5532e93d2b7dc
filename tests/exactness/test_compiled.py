"""Compiled parts of layers: the bits hold among compiled passes; a missing compiler is named before loading."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config

import foredraft
from foredraft import LLM, ConfigError, SamplingParams, loading
from foredraft.cli import main
from foredraft.decode.policy import Fixed
from foredraft.model.decoder import EAGER_PARTS, LayerParts
from foredraft.model.layers import RowSpan
from foredraft.model.runner import Runner, compiled, torch_backend
from foredraft.model.weights import load_decoder
from tests.exactness import matrix as bits
from tests.support.checkpoints import save_checkpoint
from tests.support.coded import load_pair, save_pair

SEEDED = SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_new_tokens=24, ignore_eos=True)
# warnings of PyTorch's compiler itself
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.timeout(600),
]
OTHERS = (("llama", "float32"), ("gemma2", "bfloat16"), ("gemma3", "float32"), ("qwen3", "float16"))
PAIRS = [("llama", "bfloat16"), *(pytest.param(pair, marks=pytest.mark.slow) for pair in OTHERS)]


@pytest.fixture(scope="module", params=PAIRS, ids=str)
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    family, dtype = request.param
    return load_pair(*save_pair(tmp_path_factory.mktemp(family), family), dtype, compile=True)


@pytest.mark.heavy
def test_greedy_and_seeded_ids(llm: LLM) -> None:
    wishes = [replace(bits.GREEDY, max_new_tokens=24) if i % 2 else SEEDED for i in range(len(bits.PROMPTS))]
    plain = [bits.plain_ids(llm, [ids], wish)[0] for ids, wish in zip(bits.PROMPTS, wishes, strict=True)]
    assert len({tuple(ids) for ids in plain}) == len(plain)
    for gamma, way in itertools.product((3, 7), ("padded", "gathered", "recorded")):
        llm.loaded.engine.policy = Fixed(gamma)
        with bits.computed(way, llm):
            bits.assert_same(
                llm, bits.in_turn(("none", "draft-model", "lookup"), gamma), plain, params=wishes
            )


@pytest.mark.heavy
def test_compiled_passes_are_close_to_the_others(llm: LLM) -> None:
    target: Any = llm.loaded.runner
    assert target.compiled and not target.by_kernels
    plain = Runner(target.decoder)
    caches = [runner.new_cache(2, 300) for runner in (target, plain)]
    tokens = torch.randint(3, 97, (2, 40), generator=torch.Generator().manual_seed(0))
    got, want = (
        runner.forward(cache, tokens, [0, 7]).logits
        for runner, cache in zip((target, plain), caches, strict=True)
    )
    assert (got - want).norm() <= (0.1 if target.decoder.dtype != torch.float32 else 1e-4) * want.norm()


@pytest.mark.heavy
def test_nothing_is_compiled_once_shapes_vary(llm: LLM) -> None:
    """Rows, columns, lengths and depths of all kinds, after one pass of several rows and one of a single."""
    target = llm.loaded.runner
    cache = target.new_cache(8, 1200)
    ids = torch.full((8, 9), 5)
    target.forward(cache, ids[:1, :1], [3], invariant=False)
    target.forward(cache, ids, [3] * 8)
    with torch.compiler.set_stance("fail_on_recompile"):
        for batch, width, start in ((1, 1, 3), (1, 9, 700), (2, 1, 0), (8, 9, 300), (5, 3, 1100), (7, 9, 9)):
            for invariant in (True, False):
                target.forward(cache, ids[:batch, :width], [start] * batch, invariant=invariant)
        target.prefill(cache, 0, [5] * 100, 256)


@pytest.mark.parametrize("rows", [1, 2, 5, 8, 19, 40])
@pytest.mark.parametrize("span", [None, RowSpan(4, 16), RowSpan(8, 8, 8), RowSpan(1, 64)], ids=str)
def test_parts_see_rows_within_the_span(
    llm: LLM, rows: int, span: RowSpan | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    monkeypatch.setattr(compiled, "_compiled", lambda step: lambda *a: seen.append(len(a[2])) or step(*a))
    parts, target = compiled.compiled_parts(), llm.loaded.runner
    spec, layer = target.decoder.spec, target.decoder.layers[0]
    random = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, spec.hidden_size, generator=random).to(target.decoder.dtype)
    attended = torch.randn(rows, spec.heads * spec.head_dim, generator=random).to(target.decoder.dtype)
    both = (parts, span), (EAGER_PARTS, None)
    pairs = [tuple(own.project(spec, layer.attention, x, rows) for own, rows in both)]
    for given, mlp in itertools.product((attended, None), (True, False)):
        pairs.append(tuple(own.finish(spec, layer, x, given, mlp, rows) for own, rows in both))
    for got, want in pairs:
        torch.testing.assert_close(got, want, rtol=0.05, atol=0.05)
    if span is not None:
        assert all(span.low <= count <= span.high and count % span.step == 0 for count in seen)


@pytest.mark.heavy
def test_models_have_their_own_compilations() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x * 2 + 1

    with torch._dynamo.config.patch(recompile_limit=1):
        for columns in (3, 4, 5):
            x = torch.ones(2, columns)
            assert torch.equal(compiled._compiled(step)(x), step(x))


def test_the_shape_check_runs_the_compiled_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused kernels whose bits depend on the rows: no bucket agrees in which they would differ."""

    def finish(spec: Any, layer: Any, x: Any, attended: Any, mlp: bool, span: Any) -> Any:
        return EAGER_PARTS.finish(spec, layer, x, attended, mlp, span) * (1.001 if len(x) < 13 else 1.0)

    monkeypatch.setattr(torch_backend, "compiled_parts", lambda: LayerParts(EAGER_PARTS.project, finish))
    decoder = load_decoder(save_checkpoint(tmp_path))
    plain, found = Runner(decoder).shapes, Runner(decoder, compile=True).shapes
    assert plain.query_buckets[-1] == 64
    assert found.query_buckets == tuple(n for n in plain.query_buckets if 2 * n < 13)


def test_a_missing_compiler_is_named_before_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", ("/nowhere/g++",))
    monkeypatch.setattr(loading.checkpoints, "resolve", lambda *_: pytest.fail("loaded"))
    with pytest.raises(
        ConfigError,
        match=r"compile needs a working compiler, .*cannot compile here \(.*\); install a C\+\+ compiler",
    ) as error:
        foredraft.load(tmp_path, compile=True, device="cpu")
    assert "\n" not in str(error.value)
    assert main(["generate", "--model", str(tmp_path), "--compile", "--device", "cpu", "x"]) == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    assert "install a C++ compiler" in line
