"""The rehearsal finds what fails on a GPU: planted defects, each by its own sign."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import foredraft
from foredraft import LLM, SamplingParams
from foredraft.decode import round_results, sampling, step_draws, vocab_ops
from foredraft.decode.accept import ONCE
from foredraft.kernels import vocab
from foredraft.kernels.vocab import KernelVocabOps
from foredraft.model import attention, memory
from foredraft.model.runner import Runner, graphs
from foredraft.model.runner.graphs import CapturedGraph, CudaGraphCapturer
from foredraft.model.runner.passes import Forward
from foredraft.model.runner.torch_backend import TorchBackend
from tests.rehearsal.graphs import Graph
from tests.rehearsal.rounds import costs_of_rounds
from tests.rehearsal.tensors import Pretended
from tests.support.checkpoints import save_pair
from tests.support.mutation import Edit, mutate
from tests.support.mutations import Function, after, argument, around, before, instead

PROMPTS = [[3 + (7 * i + j * j) % 90 for j in range(length)] for i, length in enumerate((5, 25))]
GREEDY = SamplingParams(temperature=0, max_new_tokens=10, ignore_eos=True, drafter="draft-model")
SAMPLED = GREEDY.replace(temperature=1, seed=1, top_p=0.9, frequency_penalty=0.1)


def load(folder: Path) -> LLM:
    return foredraft.load(
        folder / "big", draft=folder / "small", device="cuda", max_batch=4, max_length=256, policy="fixed"
    )


def ids(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    outputs = llm.generate(prompts, params)
    assert not [o.error for o in outputs if o.error], str([o.error for o in outputs])
    return [o.token_ids for o in outputs]


def check(folder: Path) -> None:
    llm = load(folder)
    made = Graph.made
    runs = [(PROMPTS[:1], GREEDY), (PROMPTS, SAMPLED)]
    found = [[ids(llm, *run) for _ in range(2)] for run in runs]
    assert Graph.made > made, "no graph was captured"
    with costs_of_rounds(llm) as costs:
        again = [ids(llm, *run) for run in runs]
    waits = {cost.waits for cost in costs if not cost.captures}
    assert waits == {1}, f"waits of rounds: {waits}"
    engine = llm.loaded.engine
    engine.replays = ONCE
    with engine.target.uncaptured():
        plain = [ids(llm, *run) for run in runs]
    assert again == plain == [texts[-1] for texts in found], "a graph changes the text"
    llm.close()


# --- the defects -------------------------------------------------------------------------------------------

_starts: list[int] = []


@around
def noting(run: Function, self: TorchBackend, pass_: Any) -> Any:
    _starts[:] = pass_.starts
    return run(self, pass_)


@around
def baked(
    build: Function, spec: Any, tables: Any, cache: Any, shape: Any, starts: Any, real: Any = None
) -> Any:
    """Take the position of a single row from the host."""
    if isinstance(starts, Tensor) and shape.batch == 1 and _starts:
        starts = torch.full_like(starts, _starts[0])
    return build(spec, tables, cache, shape, starts, real)


@instead
def pageable(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    made = values if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype)
    return made.to(device, non_blocking=True)


def reused(upload: Function) -> Function:
    """Keep one pinned buffer for each shape."""
    buffers: dict[Any, Tensor] = {}

    def mutated(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
        made = values if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype)
        if made.device.type != "cpu":
            return upload(values, device, dtype)
        with torch.inference_mode(False):
            key = (made.shape, made.dtype)
            if key not in buffers:
                buffers[key] = torch.zeros(made.shape, dtype=made.dtype).pin_memory()
            buffers[key].copy_(made)
        return buffers[key].to(device, non_blocking=True)

    return mutated


def unheld(capture: Function) -> Function:
    """Read a graph's results where they lay, after their memory went back to the pool."""

    def there(x: Tensor) -> Tensor:
        assert isinstance(x, Pretended)
        return Pretended(x.inner, x.device.index)  # type: ignore[no-any-return]

    def mutated(self: CudaGraphCapturer, compute: Callable[[], Forward]) -> CapturedGraph:
        graph = capture(self, compute)
        if not isinstance(graph.output, Forward):
            return graph
        logits, hidden = graph.output.logits, graph.output.hidden
        return CapturedGraph(
            graph.replay, Forward(None if logits is None else there(logits), there(hidden), {})
        )

    return mutated


# leave the first tensor of a graph as it was captured
stale = around(lambda fill, into, values: fill(into[1:], values[1:]))

PLACES = (
    # which asks for a tensor of the host
    (vocab._rows, lambda sound: lambda x: x),
    (vocab_ops.vocab_ops_of, lambda sound: lambda runner: KernelVocabOps()),
)
OTHER_TEXT, OTHER_DEVICE = "a graph changes the text", "to be on the same device"
WAITS, CAPTURING = "waits of", "not permitted when stream is capturing"
BAKED = (TorchBackend.run, noting), (attention.build_context, baked)
on_the_cpu = argument(1, lambda positions: positions.cpu())
read_verdict = before(lambda sequences, draft, given, found, *rest: found.verdict.accepted.tolist())
read_keys = before(lambda runner, cache, row, tokens, start: int(cache.data[0, 0, row, 0, start, 0]))
read_counts = before(
    lambda cls, sequences, device: torch.tensor([len(s.tokens) for s in sequences], device=device)
)
# name: edits, and how the check fails
DEFECTS: dict[str, tuple[tuple[Edit, ...], str]] = {
    "a host number baked into a graph": (BAKED, OTHER_TEXT),
    "an input that is not copied into a graph": (
        ((graphs.fill, stale),), f"{OTHER_TEXT}|finite|out of (range|bounds)",
    ),
    "a mask made on the CPU": (((attention.causal_masks, on_the_cpu),), f"{OTHER_DEVICE}|{CAPTURING}"),
    "an upload from pageable memory": (((memory.upload, pageable),), WAITS),
    "a pinned buffer reused before its wait": (((memory.upload, reused),), "a pinned buffer changed"),
    "a pool's memory read after a replay": (
        ((CudaGraphCapturer.capture, unheld),), "not finite|changes the text",
    ),
    "a device address given to a C kernel": (PLACES, "address of a device tensor"),
    "a read of the verdict": (((round_results.fetch_results, read_verdict),), WAITS),
    "two reads": (
        ((memory.download, lambda download: lambda tensors: [download([x])[0] for x in tensors]),), WAITS,
    ),
    "a read of an accepted length": (((vocab_ops.leading, after(lambda found: found.sum().item())),), WAITS),
    "finite rows by a mask": (((sampling.distribution_of, after(lambda made: made[1][made[1]])),), WAITS),
    "a read of every draft step": (((step_draws.draw, after(lambda drawn: drawn.token.cpu())),), WAITS),
    "counts uploaded with a wait": (((sampling.PenaltyContext.of, read_counts),), WAITS),
    "a read of a prompt's keys": (((Runner.prefill, read_keys),), "waits of a prompt"),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pair(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("fails", [False, True])
def test_a_capture_warms_up_and_leaves_the_stream_as_it_was(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams, waits, before = list[object](), list[tuple[object, object]](), torch.cuda.current_stream()
    monkeypatch.setattr(type(before), "wait_stream", lambda own, other: waits.append((own, other)))

    def compute() -> None:
        streams.append(torch.cuda.current_stream())
        if fails and len(streams) > graphs.WARM_UP:
            raise RuntimeError("planted")

    capturer = CudaGraphCapturer(torch.device("cuda"))
    with pytest.raises(RuntimeError, match="previous error") if fails else nullcontext():
        capturer.capture(compute)
    assert torch.cuda.current_stream() is before
    assert streams == [capturer.stream] * (graphs.WARM_UP + 1)
    assert waits == [(capturer.stream, before), (before, capturer.stream)]


def test_without_a_defect_the_check_passes(folder: Path) -> None:
    check(folder)


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    edits, sign = DEFECTS[name]
    for point, mutation in edits:
        mutate(monkeypatch, point, mutation)
    with pytest.raises((AssertionError, RuntimeError, IndexError), match=sign):
        check(folder)
