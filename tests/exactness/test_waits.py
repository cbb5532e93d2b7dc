"""The host waits for the device once a round, and never while a prompt is read: counted on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import foredraft
from foredraft import LLM, SamplingParams, loading
from foredraft.decode import round_results, sampling, vocab_ops
from foredraft.drafters import draft_model
from foredraft.model import memory as device
from foredraft.model.runner import Runner
from tests.support import checkpoints
from tests.support.loaded import engine_of
from tests.support.mutation import Mutant, Mutation, assert_caught
from tests.support.mutations import Function, after, around, before
from tests.support.parts import StopUnsure
from tests.support.waits import Waits, counted

PROMPTS = [[3 + (7 * i + j * j) % 90 for j in range(length)] for i, length in enumerate((1, 3, 25, 300))]
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "as it is": {"temperature": 1},
    "cuts": {"top_k": 20, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.95},
    "coupled": {"seed": 3, "acceptance": "coupled"},
    "block": {"acceptance": "block"},
    "penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.1},
    "scores": {"logprobs": 2, "top_p": 0.9},
    "bias": {"logit_bias": {5: 1.0, 9: -3.0}, "min_new_tokens": 4},
}


@pytest.fixture(scope="module", autouse=True)
def kernels() -> Iterator[None]:
    """None, as on a GPU: the operators are PyTorch's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "HOST", ())
        patch.setattr(loading.runners, "unserved_because", lambda *_: "for a test")
        yield


@pytest.fixture(scope="module")
def llm(kernels: None, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    pair = checkpoints.save_pair(tmp_path_factory.mktemp("models"))
    options: dict[str, Any] = {"max_batch": 4, "max_length": 512, "policy": "fixed"}
    return foredraft.load(pair / "big", draft=pair / "small", plan="exit:2", device="cpu", **options)


def watch(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> tuple[list[list[str]], list[list[str]]]:
    """Return lists that gather the waits of each round, and of each chunk of a prompt."""
    rounds: list[list[str]] = []
    chunks: list[list[str]] = []
    monkeypatch.setattr(engine_of(llm), "round", counted(engine_of(llm).round, rounds))
    monkeypatch.setattr(engine_of(llm), "_prefill", counted(engine_of(llm)._prefill, chunks))
    return rounds, chunks


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize(
    "drafters",
    [["none"], ["draft-model"], ["lookup"], ["layer-skip"], ["none", "lookup", "draft-model", "layer-skip"]],
    ids="+".join,
)
@pytest.mark.parametrize("rows", [1, 4])
def test_a_round_synchronises_once(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, name: str, drafters: list[str], rows: int
) -> None:
    rounds, chunks = watch(llm, monkeypatch)
    params = [
        SamplingParams(
            max_new_tokens=12, ignore_eos=True, drafter=drafters[n % len(drafters)], **PARAMS[name]
        )
        for n in range(rows)
    ]
    outputs = llm.generate(PROMPTS[-rows:], params, trace=name == "as it is")
    assert all(output.error is None for output in outputs)
    if "draft-model" in drafters and rows > 2:
        assert any(output.stats.drafted for output in outputs)
    assert len(rounds) >= 3 and {len(found) for found in rounds} == {1}, rounds
    assert len(chunks) >= 2 and not any(chunks), chunks


def test_each_step_that_a_policy_may_end_waits_once_more(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds, _ = watch(llm, monkeypatch)
    monkeypatch.setattr(engine_of(llm), "policy", StopUnsure(4, least=0.1))
    params = SamplingParams(max_new_tokens=16, ignore_eos=True, drafter="draft-model")
    outputs = llm.generate(PROMPTS, params)
    assert all(output.error is None and output.stats.drafted for output in outputs)
    assert {1} < {len(found) for found in rounds} <= {1, 2, 3, 4}, rounds


def test_drafts_in_another_tokenizer_wait_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many tokens it has: it drafts greedily, and is read at the end."""
    for name, size in (("big", 384), ("small", 300)):
        checkpoints.save_checkpoint(tmp_path / name, tokenizer=True, vocab_size=size, eos_token_id=None)
    big, small = tmp_path / "big", tmp_path / "small"
    llm = foredraft.load(big, draft=small, device="cpu", max_length=256, policy="fixed")
    rounds, _ = watch(llm, monkeypatch)
    outputs = llm.generate(["the target checks", "a b c"], SamplingParams(temperature=0, max_new_tokens=16))
    assert all(output.stats.drafted for output in outputs)
    assert {len(found) for found in rounds} <= {1, 2} and [] not in rounds, rounds


X = torch.arange(6.0).view(2, 3)


@pytest.mark.parametrize(
    ("count", "work"),
    [
        (1, lambda: bool(X.any())),
        (1, lambda: [1, 2, 3][X.long()[0, 1]]),
        (1, lambda: X.cpu().numpy()),
        (1, lambda: [part.tolist() for part in torch.split(X.cpu().view(-1), 2)]),
        (1, lambda: [part.tolist() for part in device.download([X, X.long()])]),
        (1, lambda: np.asarray(X)),
        (1, lambda: X.clone().__setitem__(X > 2, 0.0)),
        (1, lambda: X[[0, 1]]),
        (1, lambda: torch.where(X > 2)),
        (1, lambda: torch.equal(X, X)),
        (0, lambda: device.upload([1, 2], X.device)),
        (0, lambda: X[X.long().argmax(0) * 0]),
        (0, lambda: torch.where(X > 2, X, 0.0)),
        (0, lambda: X.masked_fill(X > 2, 0.0)),
        (0, lambda: X.sort(-1).values.cumsum(-1).topk(2)),
        (0, lambda: torch.nn.functional.one_hot(X.long(), 8)),
        (0, lambda: [row.shape for row in X]),
    ],
)  # fmt: skip
def test_the_counter_finds_each_synchronisation(count: int, work: Callable[[], object]) -> None:
    for mode in (nullcontext, torch.inference_mode):
        with Waits() as waits, mode():
            work()
        assert len(waits.found) == count, waits.found


@around
def made_on_the_host(
    upload: Function, values: Any, target: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    if isinstance(values, torch.Tensor):
        return upload(values, target, dtype)
    return torch.tensor(values, device=target, dtype=dtype)


DEFECTS: dict[str, tuple[Any, Mutation]] = {
    "a read of the verdict": (
        round_results.fetch_results,
        before(lambda sequences, draft, given, found, *rest: found.verdict.accepted.tolist()),
    ),
    "two reads": (device.download, lambda download: lambda tensors: [download([x])[0] for x in tensors]),
    "a read of an accepted length": (vocab_ops.leading, after(lambda found: found.sum().item())),
    "finite rows by a mask": (sampling.distribution_of, after(lambda made: made[0].probs[made[1]])),
    "an upload that waits": (device.upload, made_on_the_host),
    "a read of every draft step": (draft_model.DraftModel.step, after(lambda x: x.argmax(-1).cpu())),
    "counts uploaded with a wait": (
        sampling.PenaltyContext.of,
        before(lambda cls, sequences, target: torch.tensor([len(s.tokens) for s in sequences])),
    ),
    "a read of a prompt's keys": (
        Runner.prefill,
        before(lambda runner, cache, row, tokens, start: int(cache.data[0, 0, row, 0, start, 0])),
    ),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_caught(llm: LLM, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    rounds, chunks = watch(llm, monkeypatch)

    def check() -> None:
        params = SamplingParams(max_new_tokens=8, ignore_eos=True, frequency_penalty=0.1)
        outputs = llm.generate(PROMPTS, params, drafter="draft-model")
        assert all(output.error is None for output in outputs)
        assert {len(found) for found in rounds} == {1} and not any(chunks), (rounds, chunks)

    assert_caught(Mutant(name, (DEFECTS[name],), check), monkeypatch)
