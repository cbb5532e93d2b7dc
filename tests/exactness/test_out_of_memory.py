"""A GPU's memory that ends within a pass ends one request; the texts of the others do not change.

`tests/rehearsal` runs the check on the pretended device, where passes are replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from foredraft import LLM, SamplingParams
from foredraft.decode import faults
from foredraft.decode.engine import Engine
from foredraft.decode.guarded import Guarded
from foredraft.drafters.kangaroo import Kangaroo
from foredraft.model.runner.torch_backend import TorchBackend
from tests.support.every_drafter import DRAFTERS, load, save_models
from tests.support.planting import Spoiler, assert_caught, defect, replaced

PROMPTS = ["def add(a, b):", "import os\n\n\ndef read(path):", "class Stack:"]
PARAMS = [
    SamplingParams(seed=3, acceptance="speculative", max_new_tokens=8, ignore_eos=True),
    SamplingParams(seed=9, acceptance="speculative", max_new_tokens=8, regex="[a-z ]{3,20}x"),
    SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_models(tmp_path_factory.mktemp("models"))


@contextmanager
def ending_at(call: int | None) -> Iterator[list[int]]:
    """Let the memory end in one pass, after its layers; gather the passes."""
    seen, sound = list[int](), TorchBackend.run

    def run(self: TorchBackend, pass_: Any) -> Any:
        seen.append(len(seen))
        found = sound(self, pass_)
        if seen[-1] == call:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore follows.")
        return found

    with replaced(TorchBackend, "run", run):
        yield seen


def check(llm: LLM, drafter: str) -> None:
    """Let the memory end within a prompt, and in passes of one round: of its drafts, and the verifying one."""
    # the request that ends has another drafter, which so forgets nothing of the broken draft
    params = [
        replace(each, drafter=name) for each, name in zip(PARAMS, (drafter, drafter, "lookup"), strict=True)
    ]
    llm.generate(PROMPTS, params)  # a GPU's graphs are captured by now
    with ending_at(None) as passes:
        want = [output.token_ids for output in llm.generate(PROMPTS, params)]
    middle = len(passes) // 2
    for call in (0, *range(middle, middle + 6, 2)):
        with ending_at(call) as seen:
            outputs = llm.generate(PROMPTS, params)
        assert len(seen) > call
        [failed] = [index for index, output in enumerate(outputs) if output.error]
        assert call == 0 or failed == 2, "another request than the youngest ended"
        assert "too little memory left (CUDA out of memory." in str(outputs[failed].error)
        assert outputs[failed].finish_reason == "error"
        others = [output.token_ids for index, output in enumerate(outputs) if index != failed]
        assert others == [ids for index, ids in enumerate(want) if index != failed], "another text changed"
    assert [output.token_ids for output in llm.generate(PROMPTS, params)] == want


@pytest.mark.parametrize("loaded", DRAFTERS)
def test_one_request_ends(folder: Path, loaded: str) -> None:
    check(load(folder, loaded, "cpu"), DRAFTERS[loaded][0])


def _without(name: str, owner: Any) -> Spoiler:
    """Abandon a round without one of its parts."""

    def spoiler(sound: Callable[..., None]) -> Callable[..., None]:
        def spoilt(*args: Any) -> None:
            with replaced(owner, name, lambda *given: None):
                sound(*args)

        return spoilt

    return spoiler


DEFECTS: dict[str, tuple[Any, Spoiler]] = {
    "the states of a broken draft stay": (faults.abandon_round, _without("resume", Kangaroo)),
    "a constraint stays along a broken draft": (faults.abandon_round, _without("rewind", Guarded)),
    "the whole batch ends": (
        Engine._give_up_one, lambda sound: lambda self, error: self.fail_batch(error)
    ),
    "a prompt ends the whole batch": (
        Engine.fail, lambda sound: lambda self, sequence, error: self.fail_batch(error)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_caught(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = load(folder, "adapter", "cpu")
    found = defect(name, *DEFECTS[name], lambda: check(llm, "kangaroo"), Exception)
    assert_caught(found, monkeypatch)
