"""An interrupt (Ctrl-C), wherever it comes, ends the call with KeyboardInterrupt and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import foredraft
from foredraft import SamplingParams
from foredraft.llm.output import Request
from foredraft.llm.service import EngineThread
from tests.support import checkpoints
from tests.support.interrupting import LLM_FOLDER, LOCKS, InterruptAt, handler_of_sigint
from tests.support.loaded import between_steps, engine_of

PARAMS = SamplingParams(temperature=0, max_new_tokens=6, ignore_eos=True)
LONG = PARAMS.replace(max_new_tokens=400)
PROMPTS = [5, 6, 7], [9, 8, 7, 6]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> foredraft.LLM:
    folder = checkpoints.save_checkpoint(tmp_path_factory.mktemp("models") / "model", tokenizer=True)
    return foredraft.load(folder, drafter="lookup", device="cpu", max_batch=3, max_length=512, policy="fixed")


@pytest.fixture(scope="module")
def texts(llm: foredraft.LLM) -> list[list[int]]:
    return [llm.generate(prompt, PARAMS)[0].token_ids for prompt in PROMPTS]


Call = Callable[[foredraft.LLM], Callable[[], object]]


def generate(llm: foredraft.LLM) -> Callable[[], object]:
    """Have a sample wait for the row of another."""
    return lambda: llm.generate([PROMPTS[0]], PARAMS, n=5)


def stream(llm: foredraft.LLM) -> Callable[[], object]:
    return lambda: [piece.token_ids for piece in llm.stream(PROMPTS[0], PARAMS)]


def close(llm: foredraft.LLM) -> Callable[[], object]:
    begun = [llm.stream(PROMPTS[0], LONG)]
    next(begun[0])
    return lambda: begun.pop().close()


def drop(llm: foredraft.LLM) -> Callable[[], object]:
    def leave_early() -> None:
        for number, _ in enumerate(llm.stream(PROMPTS[0], LONG)):
            if number == 1:
                break

    return leave_early


def cancel_all(llm: foredraft.LLM) -> Callable[[], object]:
    begun = [llm.stream(PROMPTS[0], LONG)]
    next(begun[0])

    def cancel() -> None:
        with contextlib.closing(begun.pop()):
            llm.cancel_all()

    return cancel


CALLS = [generate, stream, close, drop, cancel_all]


def leftovers(llm: foredraft.LLM, text: list[int]) -> list[str]:
    """Return what an interrupted call left behind; removes it."""
    engine = engine_of(llm)
    between_steps(llm)
    found = [] if engine.scheduler.idle else ["a request is left"]
    if llm.generate(PROMPTS[1], PARAMS)[0].token_ids != text:
        found.append("the next text is wrong")
    llm.cancel_all()
    between_steps(llm)
    return found


def consequences(llm: foredraft.LLM, call: Call, instruction: int, text: list[int], files: Any) -> list[str]:
    interrupted = InterruptAt(instruction, files).run(call(llm))
    found = leftovers(llm, text)
    if interrupted.sent and not interrupted.raised:
        found.append("the interrupt is lost")
    return found


def sample(count: int) -> list[int]:
    ends = {*range(1, min(21, count)), *range(max(1, count - 20), count + 1)}
    return sorted(ends | {*random.Random(count).sample(range(1, count + 1), min(60, count))})


def every(count: int) -> list[int]:
    return [*range(1, count + 1)]


@pytest.mark.heavy
@pytest.mark.parametrize("chosen", [sample, pytest.param(every, marks=pytest.mark.slow)])
@pytest.mark.parametrize("call", CALLS)
def test_an_interrupt_at_any_instruction_leaves_nothing_behind(
    llm: foredraft.LLM, texts: list[list[int]], call: Any, chosen: Callable[[int], list[int]]
) -> None:
    files = InterruptAt(0).files if chosen is sample else (LLM_FOLDER, *LOCKS)
    with handler_of_sigint():
        instructions = InterruptAt(sys.maxsize, files).run(call(llm)).seen
        assert not leftovers(llm, texts[1]) and instructions > 20
        bad = {at: consequences(llm, call, at, texts[1], files) for at in chosen(instructions)}
    assert not any(bad.values()), bad


def test_an_interrupted_stream_has_no_more_parts(llm: foredraft.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, step = llm.stream(PROMPTS[0], LONG), engine_of(llm).step
    next(stream)

    def interrupted() -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return step()

    with monkeypatch.context() as planted, handler_of_sigint():
        planted.setattr(engine_of(llm), "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(stream)
        between_steps(llm)
    assert engine_of(llm).scheduler.idle
    assert list(stream) == []


def not_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineThread, "cancel", lambda self, request: None)
    dropped_unnoticed(monkeypatch)


def dropped_unnoticed(monkeypatch: pytest.MonkeyPatch) -> None:
    submit = EngineThread.submit
    monkeypatch.setattr(EngineThread, "submit", lambda self, request, owner: submit(self, request))


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("call", "defect", "consequence"),
    [
        (generate, not_cancelled, "a request is left"),
        (stream, not_cancelled, "a request is left"),
        (close, not_cancelled, "a request is left"),
        (drop, dropped_unnoticed, "a request is left"),
    ],
)
def test_the_check_finds_planted_defects(
    llm: foredraft.LLM, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch, call: Any, defect: Any,
    consequence: str,
) -> None:  # fmt: skip
    files = (LLM_FOLDER, *LOCKS)
    with handler_of_sigint():
        instructions = InterruptAt(sys.maxsize, files).run(call(llm)).seen
        found: set[str] = set()
        dice = random.Random(0)
        others = [dice.randint(1, instructions) for _ in range(300)]
        with monkeypatch.context() as planted:
            defect(planted)
            for instruction in [*reversed(sample(instructions)), *others]:
                found.update(consequences(llm, call, instruction, texts[1], files))
                if consequence in found:
                    break
    assert consequence in found


@contextlib.contextmanager
def busy(llm: foredraft.LLM, text: list[int]) -> Iterator[list[list[int]]]:
    """Generate in another thread meanwhile; every text must be right, and the thread must come to its end."""
    over, made, errors = threading.Event(), list[list[int]](), list[BaseException]()

    def work() -> None:
        try:
            while not over.is_set():
                made.append(llm.generate(PROMPTS[1], PARAMS)[0].token_ids)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        over.set()
        thread.join(timeout=60)
    assert not thread.is_alive(), "the other thread hangs"
    assert not errors
    assert made and all(tokens == text for tokens in made)


def test_a_storm_of_interrupts_does_not_harm_another_thread(
    llm: foredraft.LLM, texts: list[list[int]]
) -> None:
    """Of the signals, two at most interrupt one call, the second often while the first is handled."""
    left, raised, main, over, dice = 0, 0, threading.get_ident(), threading.Event(), random.Random(0)

    def handle(number: int, frame: Any) -> None:
        nonlocal left, raised
        if left:
            left, raised = left - 1, raised + 1
            raise KeyboardInterrupt

    def press() -> None:
        while not over.wait(dice.uniform(0, 2e-3)):
            signal.pthread_kill(main, signal.SIGINT)

    pressing, number = threading.Thread(target=press, daemon=True), 0
    with busy(llm, texts[1]) as made, handler_of_sigint(handle):
        pressing.start()
        try:
            while raised < 300 or len(made) < 3:
                number += 1
                with contextlib.suppress(KeyboardInterrupt):
                    try:
                        left = 2
                        CALLS[number % 4](llm)()
                    finally:
                        left = 0
        finally:
            over.set()
            pressing.join()
    assert not leftovers(llm, texts[1])


def test_an_interrupt_waits_for_no_other_step(llm: foredraft.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step, begun, go_on, waited = engine_of(llm).step, threading.Event(), threading.Event(), []

    def slow() -> Any:
        if not begun.is_set():
            begun.set()
            waited.append(go_on.wait(60))
        return step()

    monkeypatch.setattr(engine_of(llm), "step", slow)
    worker = threading.Thread(target=llm.generate, args=([5, 6], PARAMS), daemon=True)
    worker.start()
    assert begun.wait(60)
    wait = EngineThread.wait

    def interrupted(thread: EngineThread, request: Request) -> Any:
        threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGINT)).start()
        return wait(thread, request)

    monkeypatch.setattr(EngineThread, "wait", interrupted)
    try:
        with handler_of_sigint(), pytest.raises(KeyboardInterrupt):
            llm.generate([7, 8], PARAMS)
        assert not waited, "the interrupted call waits for the step"
    finally:
        go_on.set()
        worker.join(timeout=60)
    between_steps(llm)
    assert engine_of(llm).scheduler.idle
