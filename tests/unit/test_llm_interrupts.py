"""An interrupt (Ctrl-C), wherever it comes, ends the call with KeyboardInterrupt and leaves nothing behind."""

from __future__ import annotations

import contextlib
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import foredraft
from foredraft import SamplingParams
from foredraft.llm.inbox import Inbox
from foredraft.llm.interrupts import Interrupts
from tests.support import checkpoints
from tests.support.interrupting import LLM_FOLDER, LOCKS, InterruptAt, handler_of_sigint
from tests.support.loaded import engine_of

PARAMS = SamplingParams(temperature=0, max_new_tokens=6, ignore_eos=True)
LONG = PARAMS.replace(max_new_tokens=400)
PROMPTS = [5, 6, 7], [9, 8, 7, 6]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> foredraft.LLM:
    folder = checkpoints.save_checkpoint(tmp_path_factory.mktemp("models") / "model", tokenizer=True)
    return foredraft.load(
        folder, drafter="lookup", dtype="float32", device="cpu", max_batch=3, max_length=512, policy="fixed"
    )


@pytest.fixture(scope="module")
def texts(llm: foredraft.LLM) -> list[list[int]]:
    return [llm.generate(prompt, PARAMS)[0].token_ids for prompt in PROMPTS]


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
    """Return what an interrupted call left behind, found while another request runs; removes it."""
    engine, driver = engine_of(llm), llm._driver
    found = ["the turn is taken"] if driver.turn.locked() else []
    if driver._waiters:
        found.append("a thread waits")
    with contextlib.suppress(RuntimeError):
        driver.turn.release()
    driver._waiters.clear()
    running = [(sequence, sequence.round_count) for sequence in engine.rows.sequences]
    [output] = llm.generate(PROMPTS[1], PARAMS)
    if output.token_ids != text:
        found.append("the next text is wrong")
    if any(sequence.round_count > rounds for sequence, rounds in running):
        found.append("a row is decoded on")
    if engine.rows.sequences or engine.scheduler.waiting:
        found.append("a request is left")
    if driver.inbox:
        found.append("a command is left")
    llm.cancel_all()
    return found


def consequences(
    llm: foredraft.LLM, call: Callable[[foredraft.LLM], Callable[[], object]], instruction: int,
    text: list[int], files: tuple[str, ...],
) -> list[str]:  # fmt: skip
    """Interrupt a call at an instruction; return what is not as it should be."""
    interrupted = InterruptAt(instruction, files).run(call(llm))
    found = leftovers(llm, text)
    if interrupted.sent and not interrupted.raised:
        found.append("the interrupt is lost")
    return found


def check_calls(
    llm: foredraft.LLM, call: Callable[[foredraft.LLM], Callable[[], object]], text: list[int],
    chosen: Callable[[int], list[int]], files: tuple[str, ...],
) -> None:  # fmt: skip
    with handler_of_sigint():
        instructions = InterruptAt(sys.maxsize, files).run(call(llm)).seen
        assert not leftovers(llm, text) and instructions > 100
        bad = {
            instruction: found
            for instruction in chosen(instructions)
            if (found := consequences(llm, call, instruction, text, files))
        }
    assert not bad


def sample(count: int) -> list[int]:
    """Return all instructions of a short call; of a long one the first and the last ones, and some others."""
    if count <= 500:
        return [*range(1, count + 1)]
    ends = {*range(1, 31), *range(count - 30, count + 1)}
    return sorted(ends | {*random.Random(count).sample(range(1, count + 1), 120)})


@pytest.mark.parametrize("call", CALLS)
def test_an_interrupt_at_any_instruction_leaves_nothing_behind(
    llm: foredraft.LLM, texts: list[list[int]], call: Any
) -> None:
    check_calls(llm, call, texts[1], sample, InterruptAt(0).files)


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
def test_an_interrupt_at_every_instruction_leaves_nothing_behind(
    llm: foredraft.LLM, texts: list[list[int]], call: Any
) -> None:
    check_calls(llm, call, texts[1], lambda count: [*range(1, count + 1)], (LLM_FOLDER, *LOCKS))


def test_a_stream_that_an_interrupt_ended_has_no_more_pieces(
    llm: foredraft.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, step = llm.stream(PROMPTS[0], LONG), engine_of(llm).step
    next(stream)

    def interrupted() -> Any:
        signal.raise_signal(signal.SIGINT)
        return step()

    with monkeypatch.context() as planted, handler_of_sigint():
        planted.setattr(engine_of(llm), "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(stream)
    assert engine_of(llm).scheduler.idle and not llm._driver.inbox
    assert list(stream) == []


def not_deferred(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Interrupts, "__enter__", lambda self: self)


def dropped_unnoticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Inbox, "cancel_with", lambda self, owner, sequence: None)


@pytest.mark.parametrize(
    ("call", "defect", "consequence"),
    [
        (generate, not_deferred, "the turn is taken"),
        (stream, not_deferred, "the turn is taken"),
        (close, not_deferred, "the turn is taken"),
        (drop, dropped_unnoticed, "a row is decoded on"),
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


class Storm:
    """Interrupts the main thread at random while it runs calls, twice a call at most.

    Attributes:
        raised: KeyboardInterrupts so far.
    """

    def __init__(self) -> None:
        self.raised = self._left = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._send, args=(threading.get_ident(),), daemon=True)

    def __enter__(self) -> Storm:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def handle(self, number: int, frame: Any) -> None:
        if self._left > 0:
            self._left -= 1
            self.raised += 1
            raise KeyboardInterrupt

    def run(self, function: Callable[[], object]) -> None:
        try:
            try:
                self._left = 2
                function()
                self._left = 0
            except KeyboardInterrupt:
                self._left = 0
        except KeyboardInterrupt:
            pass

    def _send(self, main: int) -> None:
        dice = random.Random(0)
        while not self._over.is_set():
            time.sleep(dice.uniform(0, 2e-3))
            signal.pthread_kill(main, signal.SIGINT)


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


def check_storm(llm: foredraft.LLM, text: list[int], interrupts: int) -> None:
    storm = Storm()
    with busy(llm, text) as made, handler_of_sigint(storm.handle), storm:
        for number in range(sys.maxsize):
            call = [generate, stream, drop, close][number % 4]
            storm.run(lambda call=call: call(llm)())  # type: ignore[misc]
            if storm.raised >= interrupts and len(made) > 3:
                break
    assert not leftovers(llm, text)


def test_a_storm_of_interrupts_does_not_harm_another_thread(
    llm: foredraft.LLM, texts: list[list[int]]
) -> None:
    check_storm(llm, texts[1], 300)


@pytest.mark.slow
def test_a_long_storm_of_interrupts_does_not_harm_another_thread(
    llm: foredraft.LLM, texts: list[list[int]]
) -> None:
    check_storm(llm, texts[1], 20_000)


def test_an_interrupt_at_any_instruction_beside_another_thread_leaves_nothing_behind(
    llm: foredraft.LLM, texts: list[list[int]]
) -> None:
    """Which instruction the interrupt meets depends on the other thread, so some runs end before it."""
    dice = random.Random(1)
    with busy(llm, texts[1]), handler_of_sigint():
        for number in range(200):
            interrupted = InterruptAt(dice.randint(1, 3000)).run(
                [generate, stream, close, drop][number % 4](llm)
            )
            assert interrupted.raised == interrupted.sent
            assert not llm._driver._waiters[1:], "a thread waits"
    assert not leftovers(llm, texts[1])
