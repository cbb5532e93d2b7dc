"""On a GPU: the model's own logits, greedy ids of every method, one wait for the device a round, and memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import foredraft
from foredraft import SamplingParams
from foredraft.decode import round_results
from foredraft.decode.sampling import SamplingTable, distribution_of
from foredraft.loading.machine_limits import free_memory
from foredraft.loading.runners import check_dtype
from foredraft.model.runner import Runner
from foredraft.model.weights import load_decoder, weight_bytes
from tests.support.checkpoints import VARIANTS, save_variant

pytestmark = pytest.mark.gpu

LENGTHS = (1, 3, 25, 70, 256, 300)
PROMPTS = [[3 + (7 * i + j * j) % 90 for j in range(length)] for i, length in enumerate(LENGTHS)]


@pytest.fixture(params=["bfloat16", "float32"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def load(folder: Path, dtype: str, **more: Any) -> foredraft.LLM:
    target, draft = save_variant(folder / "target", "llama"), save_variant(folder / "draft", "llama")
    return foredraft.load(
        target, draft=draft, dtype=dtype, device="cuda", max_batch=8, max_length=512, policy="fixed", **more
    )


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_those_of_the_cpu(tmp_path: Path, name: str) -> None:
    folder = save_variant(tmp_path, name)
    tokens = torch.randint(3, 97, (1, 200), generator=torch.Generator().manual_seed(7))
    found = []
    for device in ("cpu", "cuda"):
        runner = Runner(load_decoder(folder, device=torch.device(device)), deterministic=False)
        cache = runner.new_cache(1, 256)
        parts = [runner.forward(cache, tokens[:, i : i + 8].to(device), [i]).logits for i in range(0, 200, 8)]
        found.append(torch.cat([part.cpu() for part in parts if part is not None], 1))
    assert (found[0] - found[1]).abs().max() <= 1e-3 * found[0].abs().max()


PLANS = ["skip:none", "skip:attn=0,2/mlp=1", "skip:attn=0-2/mlp=0-2", "exit:1", "exit:2"]


@pytest.mark.parametrize("plan", [None, *PLANS])
def test_greedy_ids(tmp_path: Path, dtype: str, plan: str | None) -> None:
    """Steps of every plan are recorded, those of an early exit at batch-invariant shapes."""
    llm = load(tmp_path, dtype, **({} if plan is None else {"plan": plan}))
    alone = [llm.generate([p], SamplingParams(**_options("none")))[0].token_ids for p in PROMPTS]
    for name in ("none", "draft-model", "lookup") if plan is None else ("layer-skip",):
        outputs = llm.generate(PROMPTS, SamplingParams(**_options(name)))
        assert [o.token_ids for o in outputs] == alone, name
        assert plan is None or all(o.stats.drafted > 0 for o in outputs)


@pytest.mark.parametrize("compile", [False, True], ids=["operators", "compiled"])
def test_captured_passes_have_the_bits_of_the_others(tmp_path: Path, dtype: str, compile: bool) -> None:
    decoder = load_decoder(save_variant(tmp_path, "llama"), torch.device("cuda"), getattr(torch, dtype))
    recording, plain = (Runner(decoder, compile=compile) for _ in range(2))
    plain.backend.graphs = None
    caches = [runner.new_cache(3, 1100) for runner in (recording, plain)]
    ids = torch.randint(3, 97, (3, 1100), generator=torch.Generator().manual_seed(1))
    starts = [3, 250, 1010]
    for turn in range(12):
        for batch, width in ((1, 1), (1, 5), (3, 1), (3, 6)):
            tokens = torch.stack([ids[b, starts[b] : starts[b] + width] for b in range(batch)])
            got, want = (
                runner.forward(cache, tokens, starts[:batch], aux_layers=(1,))
                for runner, cache in zip((recording, plain), caches, strict=True)
            )
            assert torch.equal(got.logits, want.logits)
            assert torch.equal(got.aux_states[1], want.aux_states[1])
        assert torch.equal(caches[0].data, caches[1].data)
        starts = [start + 1 + turn % 3 for start in starts]
    assert not recording.backend.graphs.failures
    assert any(recording.backend.graphs._kept[caches[0]].values())


def _options(drafter: str) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": 128, "ignore_eos": True, "drafter": drafter}


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_a_round_waits_for_the_device_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As PyTorch itself sees it; the rehearsal counts the same on a pretended device, in more cases."""
    llm = load(tmp_path, "bfloat16")
    same: dict[str, Any] = {"seed": 1, "acceptance": "speculative"}
    penalties = {"logprobs": 2, "repetition_penalty": 1.2, "frequency_penalty": 0.3}
    several = [
        SamplingParams(max_new_tokens=24, ignore_eos=True, top_p=0.9, **same, **more)
        for more in ({}, penalties, {"typical_p": 0.9})
    ]
    for params in [*several, *several]:
        llm.generate(
            PROMPTS, params, trace=True
        )  # the first passes of a shape may synchronise: they allocate and capture
    read, round_ = round_results.download, llm.loaded.engine.round

    def may_wait(*args: Any) -> Any:
        torch.cuda.set_sync_debug_mode("default")
        try:
            return read(*args)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    def must_not_wait() -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return round_()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(round_results, "download", may_wait)
    monkeypatch.setattr(llm.loaded.engine, "round", must_not_wait)
    for params in several:
        outputs = llm.generate(PROMPTS, params, trace=True)
        assert {o.finish_reason for o in outputs} == {"length"}, outputs


def test_memory_is_known_before_it_is_taken(tmp_path: Path, dtype: str) -> None:
    """The allocator gives out multiples of 512 bytes."""
    device, chosen = torch.device("cuda"), getattr(torch, dtype)
    check_dtype(device, chosen)
    folder = save_variant(tmp_path, "llama-gqa-tied")
    before, free = torch.cuda.memory_allocated(device), free_memory(device)
    decoder = load_decoder(folder, device, chosen)
    taken = torch.cuda.memory_allocated(device) - before
    tensors = 2 + 6 * decoder.spec.layers
    promised = weight_bytes(decoder.spec, device, chosen)
    assert promised <= taken <= promised + 512 * tensors
    assert 0 < free_memory(device) < free


@pytest.mark.parametrize("options", [{"top_p": 0.9}, {"typical_p": 0.8}, {"min_p": 0.05}, {}], ids=str)
@pytest.mark.parametrize("vocabulary", [50_257, 128_256])
def test_a_row_has_one_distribution_alone_and_in_a_batch(options: dict[str, Any], vocabulary: int) -> None:
    device = torch.device("cuda")
    logits = torch.randn(3, 6, vocabulary, generator=torch.Generator().manual_seed(0)).to(device) * 3
    one, all_ = (SamplingTable.of([SamplingParams(**options)] * rows, device) for rows in (1, 3))
    together = distribution_of(logits, all_)[0].dense(vocabulary)
    for row in range(3):
        for column in range(6):
            alone = distribution_of(logits[row : row + 1, column : column + 1], one)[0].dense(vocabulary)
            assert torch.equal(alone[0, 0], together[row, column])
