"""A GPU's memory that ends within a pass ends one request; the texts of the others do not change."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from foredraft import LLM, SamplingParams
from foredraft.decode import engine_target
from foredraft.decode.constraint import Guarded
from foredraft.decode.drafter import Drafter
from foredraft.decode.engine import Engine
from foredraft.decode.policy import Candidates, Decision, Policy
from foredraft.decode.sequence import Sequence
from foredraft.drafters.draft_model import DraftModel
from foredraft.drafters.states import KnownStates
from foredraft.model.runner.torch_backend import TorchBackend
from tests.support.every_drafter import DRAFTERS, load, save_models
from tests.support.harness import DRAFTERS as TABULAR
from tests.support.harness import make_engine, request, run
from tests.support.mutation import Mutation, assert_caught, defect, replaced
from tests.support.mutations import Function, around, during
from tests.support.parts import foreseeing
from tests.support.tabular import Table

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
    names = drafter, drafter, "lookup"
    params = [replace(each, drafter=name) for each, name in zip(PARAMS, names, strict=True)]
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


@contextmanager
def ending_when_told(drafter: Drafter, call: int) -> Iterator[list[int]]:
    """Let the memory end when the drafter is handed committed states for the n-th time; gather whose they are."""
    seen, sound = list[int](), drafter.observe

    def observe(sequence: Sequence, start: int, states: Any) -> None:
        if start >= len(sequence.prompt) - 1:
            seen.append(sequence.id)
            if len(seen) == call:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        sound(sequence, start, states)

    with replaced(drafter, "observe", observe):
        yield seen


def check_commit(llm: LLM, name: str) -> None:
    """Let the memory end in commits: of each row, and where the text ends in the same round."""
    params, drafter = [replace(each, drafter=name) for each in PARAMS], llm.loaded.engine.drafters[name]
    with ending_when_told(drafter, 0) as calls:
        want = [output.token_ids for output in llm.generate(PROMPTS, params)]
    last = {len(calls) - calls[::-1].index(id) for id in calls}  # the calls in whose round a text ends
    assert len(last) == 3 and len(calls) > 6
    for call in range(1, len(calls) + 1):
        with ending_when_told(drafter, call):
            outputs = llm.generate(PROMPTS, params)
        failed = [index for index, output in enumerate(outputs) if output.error]
        assert len(failed) == (call not in last), "a text that has ended is whole"
        for index, output in enumerate(outputs):
            if index in failed:
                assert "too little memory left (CUDA out of memory." in str(output.error)
            else:
                assert output.token_ids == want[index], "another text changed"
    assert [output.token_ids for output in llm.generate(PROMPTS, params)] == want


class InTurn(Policy):
    name = "in turn"

    def __init__(self, drafter: str) -> None:
        self.drafter, self.begun = drafter, 0

    def decide(self, rows: Seq[Candidates]) -> list[Decision]:
        name = ("script", self.drafter)[self.begun % 2]
        self.begun += 1
        return [Decision(name, 3) for _ in rows]


def check_forgotten(name: str) -> None:
    """Check that a drafter keeps nothing of a round that broke off after its draft; `CheckedEngine` looks into its cache.

    The next round accepts other tokens, of a model-free drafter that knows the text."""
    table, draft = Table(5, 21), Table(5, 22)
    new = {"temperature": 0, "max_new_tokens": 20}
    [text] = run(make_engine(table), [request([3, 1, 4], **new)])
    for broken in (1, 3):
        policy = InTurn(name)
        # the request that ends has another drafter, which so forgets nothing of the broken draft
        kept = request([3, 1, 4], drafters=(name, "script"), **new)
        youngest = request([2, 0], drafters=("script",), **new)
        script = foreseeing({kept.id: text, youngest.id: [0] * 20}, 3, 5)
        engine = make_engine(table, draft, policy, script=script)
        sound, drafted = engine._verify, list[int]()

        def verify(*args: Any) -> Any:
            if policy.begun == broken + 1 and not drafted:  # noqa: B023
                drafted.append(args[1].tokens.shape[1])  # noqa: B023
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return sound(*args)  # noqa: B023

        with replaced(engine, "_verify", verify):
            assert run(engine, [kept, youngest])[0] == text
        assert drafted and youngest.error and not kept.error


@pytest.mark.parametrize("name", [name for name in TABULAR if name not in (None, "script")])
def test_a_drafter_forgets_a_broken_round(name: str) -> None:
    check_forgotten(name)


@pytest.mark.heavy
@pytest.mark.parametrize("loaded", ["adapter", "eagle3"])
def test_one_request_ends_in_a_commit(folder: Path, loaded: str) -> None:
    check_commit(load(folder, loaded, "cpu"), DRAFTERS[loaded][0])


def _without(owner: Any, name: str) -> Mutation:
    return during(owner, name, lambda *_: None)


@around
def _passed_over(tell: Function, *args: Any) -> None:
    with suppress(torch.OutOfMemoryError):
        tell(*args)


@around
def _ends_the_batch(tell: Function, *args: Any) -> None:
    try:
        tell(*args)
    except torch.OutOfMemoryError as error:
        raise RuntimeError(str(error)) from None


DEFECTS: dict[str, tuple[Function, Any, Mutation]] = {
    "the states of a broken draft stay": (check, engine_target.abandon_round, _without(KnownStates, "forget")),
    "a constraint stays along a broken draft": (
        check, engine_target.abandon_round, _without(Guarded, "rewind")
    ),
    "the whole batch ends": (
        check, Engine._give_up_one, lambda sound: lambda self, error: self.fail_batch(error)
    ),
    "a prompt ends the whole batch": (
        check, Engine.fail, lambda sound: lambda self, sequence, error: self.fail_batch(error)
    ),
    "memory that ends in a commit is passed over": (check_commit, Engine._tell_drafters, _passed_over),
    "memory that ends in a commit ends the batch": (check_commit, Engine._tell_drafters, _ends_the_batch),
}  # fmt: skip


def test_a_drafter_that_is_not_rewound_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cache claims the tokens of its broken draft: the engine tells no drafter of a broken round."""
    untold = _without(DraftModel, "rewind")
    found = defect("untold", engine_target.abandon_round, untold, lambda: check_forgotten("draft-model"))
    assert_caught(found, monkeypatch)


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_caught(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = load(folder, "adapter", "cpu")
    checked, *edit = DEFECTS[name]
    raises = Exception if checked is check else AssertionError
    assert_caught(defect(name, *edit, lambda: checked(llm, "kangaroo"), raises), monkeypatch)
