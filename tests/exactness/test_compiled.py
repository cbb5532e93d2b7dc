"""Compiled parts of layers: the bits of greedy and seeded decoding hold among compiled passes; where nothing compiles, the
mistake is named before a model is loaded.

Seen to fail on: the row span left out, confirmation by uncompiled parts, code shared between two models.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import foredraft
from foredraft import LLM, ConfigError, SamplingParams, loading
from foredraft.decode.policy import Fixed
from foredraft.model.decoder import EAGER_PARTS, LayerParts
from foredraft.model.layers import RowSpan
from foredraft.model.runner import Runner, torch_backend
from foredraft.model.runner.compiled import compiled_parts
from foredraft.model.runner.graphs import Graphs
from foredraft.model.weights import load_decoder
from tests.exactness.test_bits import GREEDY, KINDS, PROMPTS, save_pair
from tests.support.checkpoints import save_checkpoint
from tests.support.loaded import engine_of
from tests.support.recorder import Rerun

SEEDED = SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_new_tokens=48, ignore_eos=True)
# warnings of PyTorch's compiler itself
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.timeout(600),
]
PAIRS = [
    ("llama", "bfloat16"),
    *(
        pytest.param((family, dtype), marks=pytest.mark.slow)
        for family, dtype in (
            ("llama", "float32"),
            ("gemma2", "bfloat16"),
            ("gemma3", "float32"),
            ("qwen3", "float16"),
        )
    ),
]


@pytest.fixture(scope="module", params=PAIRS, ids=str)
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    family, dtype = request.param
    target, draft = save_pair(tmp_path_factory.mktemp(family), family)
    return foredraft.load(
        target,
        draft=draft,
        dtype=dtype,
        device="cpu",
        max_batch=8,
        max_length=512,
        compile=True,
        policy="fixed",
    )


def runners_of(llm: LLM) -> list[Any]:
    drafter: Any = engine_of(llm).drafters["draft-model"]
    return [llm.loaded.runner, drafter.draft_pass.runner]


def test_greedy_and_seeded_ids(llm: LLM) -> None:
    """Alone and plain, against batches of all drafters, padded, ragged and captured."""
    wishes = [replace(GREEDY, max_new_tokens=48) if i % 2 else SEEDED for i in range(len(PROMPTS))]
    plain = [
        llm.generate([prompt], replace(wish, drafter="none"))[0].token_ids
        for prompt, wish in zip(PROMPTS, wishes, strict=True)
    ]
    assert len({tuple(ids) for ids in plain}) == len(plain)
    for gamma, way in itertools.product((3, 7), ("padded", "gathered", "recorded")):
        engine_of(llm).policy = Fixed(gamma)
        for runner in runners_of(llm):
            runner.backend.gathers = way == "gathered"
            runner.backend.graphs = Graphs(Rerun()) if way == "recorded" else None
        kinds = [KINDS[(gamma + i) % 3] for i in range(len(PROMPTS))]
        params = [replace(wish, drafter=kind) for wish, kind in zip(wishes, kinds, strict=True)]
        outputs = llm.generate(PROMPTS, params)
        assert [output.token_ids for output in outputs] == plain, (gamma, way)
    for runner in runners_of(llm):
        runner.backend.gathers, runner.backend.graphs = None, None


def test_compiled_passes_are_close_to_the_others(llm: LLM) -> None:
    target: Any = llm.loaded.runner
    assert all(runner.compiled and not runner.by_kernels for runner in runners_of(llm))
    plain = Runner(target.decoder)
    caches = [runner.new_cache(2, 300) for runner in (target, plain)]
    tokens = torch.randint(3, 97, (2, 40), generator=torch.Generator().manual_seed(0))
    got, want = (
        runner.forward(cache, tokens, [0, 7]).logits
        for runner, cache in zip((target, plain), caches, strict=True)
    )
    assert got is not None
    assert want is not None
    assert (got - want).norm() <= (0.1 if target.decoder.dtype != torch.float32 else 1e-4) * want.norm()


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
    from foredraft.model.runner import compiled

    seen: list[int] = []
    monkeypatch.setattr(compiled, "_compiled", lambda step: lambda *a: seen.append(len(a[2])) or step(*a))
    parts, target = compiled_parts(), llm.loaded.runner
    spec, layer = target.decoder.spec, target.decoder.layers[0]
    random = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, spec.hidden_size, generator=random).to(target.decoder.dtype)
    attended = torch.randn(rows, spec.heads * spec.head_dim, generator=random).to(target.decoder.dtype)
    close = {"rtol": 0.05, "atol": 0.05}
    torch.testing.assert_close(
        parts.project(spec, layer.attention, x, span),
        EAGER_PARTS.project(spec, layer.attention, x, None),
        **close,
    )
    for given, mlp in ((attended, True), (None, True), (attended, False), (None, False)):
        got = parts.finish(spec, layer, x, given, mlp, span)
        torch.testing.assert_close(got, EAGER_PARTS.finish(spec, layer, x, given, mlp, None), **close)
    if span is not None:
        assert all(span.low <= count <= span.high and count % span.step == 0 for count in seen)


def test_models_have_their_own_compilations() -> None:
    from foredraft.model.runner.compiled import _compiled

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * 2 + 1

    with torch._dynamo.config.patch(recompile_limit=1):
        for columns in (3, 4, 5):
            x = torch.ones(2, columns)
            assert torch.equal(_compiled(step)(x), step(x))


def test_the_shape_check_runs_the_compiled_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused kernels whose bits depend on the rows: no bucket agrees in which they would differ."""

    def finish(spec: Any, layer: Any, x: Any, attended: Any, mlp: bool, span: Any) -> Any:
        return EAGER_PARTS.finish(spec, layer, x, attended, mlp, span) * (1.001 if len(x) < 13 else 1.0)

    monkeypatch.setattr(torch_backend, "compiled_parts", lambda: LayerParts(EAGER_PARTS.project, finish))
    decoder = load_decoder(save_checkpoint(tmp_path))
    plain, compiled = Runner(decoder).shapes, Runner(decoder, compile=True).shapes
    assert plain.query_buckets[-1] == 64
    assert compiled.query_buckets == tuple(n for n in plain.query_buckets if 2 * n < 13)


def test_a_missing_compiler_is_named_before_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.config

    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", ("/nowhere/g++",))
    monkeypatch.setattr(loading.checkpoints, "resolve", lambda *_: pytest.fail("loaded"))
    with pytest.raises(
        ConfigError,
        match=r"compile needs a working compiler, .*cannot compile here \(.*\); install a C\+\+ compiler",
    ) as error:
        foredraft.load(tmp_path, compile=True, device="cpu")
    assert "\n" not in str(error.value)


def test_the_command_names_the_remedy() -> None:
    command = [sys.executable, "-m", "foredraft.cli", "generate", "--compile", "--device", "cpu", "x"]
    ended = subprocess.run(command, env=os.environ | {"CXX": "/nowhere/g++"}, capture_output=True, text=True)
    assert ended.returncode == 2
    [line] = ended.stderr.strip().splitlines()
    assert "install a C++ compiler" in line
