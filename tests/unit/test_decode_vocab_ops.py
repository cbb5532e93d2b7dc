"""Each model uses its own vocabulary operations, kernels or PyTorch, beside any other model of the process."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import foredraft
from foredraft import SamplingParams, kernels
from foredraft.decode.sampling import SamplingTable
from foredraft.decode.vocab_ops import TORCH_VOCAB_OPS, TorchVocabOps
from foredraft.kernels.vocab import KernelVocabOps
from tests.support import checkpoints
from tests.support.planting import spoil
from tests.support.vocab_ops_choice import METHODS

REQUESTS = (
    SamplingParams(temperature=0, max_new_tokens=8, prompt_logprobs=1),
    SamplingParams(top_k=20, top_p=0.9, max_new_tokens=8),
    SamplingParams(seed=5, max_new_tokens=8),
    SamplingParams(acceptance="bild", rollback=2.0, max_new_tokens=8),
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.save_pair(tmp_path_factory.mktemp("models"))


def load(pair: Path, **options: Any) -> foredraft.LLM:
    return foredraft.load(
        pair / "big",
        **{"draft": pair / "small", "device": "cpu", "policy": "auto", "max_length": 128} | options,
    )


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[type]:
    """Return how often each kind ran."""
    counted: Counter[type] = Counter()

    def counting(kind: type, name: str) -> Any:
        run = getattr(kind, name)

        def count(*given: Any) -> Any:
            counted[kind] += 1
            return run(*given)

        return count

    for kind in (TorchVocabOps, KernelVocabOps):
        for name in METHODS:
            monkeypatch.setattr(kind, name, counting(kind, name))
    return counted


@pytest.mark.skipif(kernels.library() is None, reason="no C compiler")
def test_two_models_of_one_process_use_their_own_operations(pair: Path, calls: Counter[type]) -> None:
    serving, without = load(pair, kernels=True), load(pair, kernels=False)
    for params in REQUESTS:
        for llm, mine, others in (
            (serving, KernelVocabOps, TorchVocabOps),
            (without, TorchVocabOps, KernelVocabOps),
        ):
            calls.clear()
            llm.generate([[5, 9, 5, 9, 7], [3, 4]], params)
            assert calls[mine] > 0, params
            assert calls[others] == 0, params


@pytest.mark.skipif(kernels.library() is None, reason="no C compiler")
def test_a_choice_that_gets_lost_is_noticed(
    pair: Path, calls: Counter[type], monkeypatch: pytest.MonkeyPatch
) -> None:
    def choice_lost(of: Any) -> Any:
        return lambda *args, **more: replace(of(*args, **more), vocab_ops=TORCH_VOCAB_OPS)

    spoil(monkeypatch, SamplingTable.of, choice_lost)
    with pytest.raises(AssertionError):
        test_two_models_of_one_process_use_their_own_operations(pair, calls)
