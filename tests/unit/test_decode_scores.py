"""Scores: the likeliest tokens of a row, which do not depend on the batch or on how many of them are asked for."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import foredraft
from foredraft import SamplingParams
from foredraft.decode import scores
from foredraft.decode.scores import likeliest
from tests.support import checkpoints
from tests.support.mutation import Mutation, assert_caught, defect

KINDS = 8  # different logits of the model with ties


def tied_rows(rows: int, columns: int, vocabulary: int) -> Tensor:
    """Return numbers of which many are equal, infinite, or zeros of either sign."""
    generator = torch.Generator().manual_seed(rows + vocabulary)
    values = torch.tensor([-math.inf, -2.5, -1e-30, -0.0, 0.0, 1e-30, 3.0, 3.0000002, 1e30])
    return values[torch.randint(len(values), (rows, columns, vocabulary), generator=generator)]


@pytest.mark.parametrize(("rows", "columns", "vocabulary"), [(1, 1, 1), (1, 1, 50), (3, 2, 257), (2, 40, 33)])
def test_the_likeliest_tokens_are_those_of_a_stable_sort(rows: int, columns: int, vocabulary: int) -> None:
    x = tied_rows(rows, columns, vocabulary)
    want = x.sort(dim=-1, descending=True, stable=True).indices
    kept = x.clone()
    for count in {0, 1, min(5, vocabulary), vocabulary}:
        assert torch.equal(likeliest(x, count), want[..., :count])
    assert torch.equal(x.view(torch.int32), kept.view(torch.int32)), "the numbers are left as they are"


def test_numbers_of_every_size_are_ranked_by_value() -> None:
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**31), 2**31, (4, 1, 4096), generator=generator).to(torch.int32)
    x = bits.view(torch.float32).nan_to_num(0.0)
    assert torch.equal(likeliest(x, 4096), x.sort(dim=-1, descending=True, stable=True).indices)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> foredraft.LLM:
    """Return a model that gives every token the logit of KINDS - 1 others or more."""
    folder = checkpoints.save_checkpoint(tmp_path_factory.mktemp("tied") / "model")
    file = folder / "model.safetensors"
    weights = load_file(file)
    head = weights["lm_head.weight"]
    weights["lm_head.weight"] = head[torch.arange(len(head)) % KINDS].contiguous()
    save_file(weights, file, metadata={"format": "pt"})
    return foredraft.load(folder, dtype="float32", device="cpu", max_batch=4, max_length=128, policy="fixed")


def test_alternatives_do_not_depend_on_the_batch(tied: foredraft.LLM) -> None:
    prompt = [5, 6, 7, 8] * 8
    seeded: dict[str, Any] = {"temperature": 0.8, "seed": 3}
    for options in ({"temperature": 0.0}, seeded, {**seeded, "top_k": 20}):
        own = SamplingParams(max_new_tokens=6, logprobs=3, prompt_logprobs=2, **options)  # type: ignore[arg-type]
        other: Any = ({"logprobs": 50}, {"logprobs": 97, "prompt_logprobs": 30}, {"logprobs": None})
        others = [own.replace(**more) for more in other]
        [alone] = tied.generate([prompt], own)
        together = tied.generate([prompt] * 4, [own, *others])
        assert (together[0].logprobs, together[0].prompt_logprobs) == (alone.logprobs, alone.prompt_logprobs)
        for score in alone.logprobs or []:
            assert score.top[0][0] == min(score.top)[0] < KINDS, "the smallest id of the likeliest kind"
        for own_score, larger in zip(alone.logprobs or [], together[1].logprobs or [], strict=True):
            assert own_score.top == larger.top[:3] and own_score.processed_top == larger.processed_top[:3]
        for mine, theirs in zip(alone.prompt_logprobs or [], together[2].prompt_logprobs or [], strict=True):
            assert (mine and mine.top) == (theirs and theirs.top[:2])


# (name, point, mutation)
DEFECTS: list[tuple[str, Any, Mutation]] = [
    ("ties in the order of topk", likeliest, lambda sound: lambda x, count: x.topk(count, dim=-1).indices),
    ("the largest id first", scores._likeliest, lambda sound: lambda x, count: x.shape[-1] - 1 - sound(x.flip(-1), count)),
]  # fmt: skip


@pytest.mark.parametrize("row", DEFECTS, ids=lambda row: str(row[0]))
def test_defects_are_caught(row: Any, tied: foredraft.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(defect(*row, lambda: test_alternatives_do_not_depend_on_the_batch(tied)), monkeypatch)
