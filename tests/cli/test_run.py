"""What `foredraft generate` does around its runs: figures, failures, Ctrl-C, and a screen that keeps still."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from foredraft import LLM, Output, SamplingParams, loading
from foredraft.cli import interrupt, main
from foredraft.cli.error_text import spelled_as_options
from foredraft.cli.progress import ProgressBars
from foredraft.model.spec import ModelSpec
from foredraft.model.weights import weight_bytes

GREEDY = ["--temperature", "0", "--max-new-tokens", "6"]
Request = Callable[[], list[Output]]


@pytest.fixture(scope="module")
def pair(models: Path) -> list[str]:
    return ["generate", "--model", str(models / "big"), "--draft", str(models / "small"), "x"]


@pytest.fixture
def at_run(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int, str | None, Request], Any]], None]:
    """Puts something around every `LLM.generate`: it gets the number of the call, and who drafts in it."""

    def wrap(around: Callable[[int, str | None, Request], Any]) -> None:
        generate, count = LLM.generate, iter(range(1000))

        def wrapped(self: LLM, prompts: str, params: SamplingParams, **options: Any) -> Any:
            request = lambda: generate(self, prompts, params, **options)  # noqa: E731
            return around(next(count), params.drafter, request)

        monkeypatch.setattr(LLM, "generate", wrapped)

    return wrap


def signalled() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def document(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_outputs_that_differ_are_not_lossless(
    pair: list[str], at_run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def around(number: int, drafter: str | None, request: Request) -> list[Output]:
        [output] = request()
        return [replace(output, token_ids=[9, *output.token_ids[1:]])] if drafter == "none" else [output]

    at_run(around)
    assert main([*pair, *GREEDY, "--json", "--compare"]) == 0
    found = document(capsys)
    assert (found["compare"]["identical"], found["lossless"]) == (False, False)


def test_the_text_shown_is_compared_too(
    pair: list[str], at_run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def around(number: int, drafter: str | None, request: Request) -> list[Output]:
        [output] = request()
        return [replace(output, token_ids=[9])] if number == 0 else [output]

    at_run(around)
    assert main([*pair, *GREEDY, "--json", "--compare"]) == 0
    assert document(capsys)["compare"]["identical"] is False


@pytest.mark.parametrize("options", [[], ["--no-deterministic"]], ids=" ".join)
def test_the_document_says_when_bits_may_differ(
    pair: list[str], capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    assert main([*pair, *GREEDY, "--json", *options]) == 0
    found = document(capsys)
    assert found["lossless"] is (not options)
    assert found.get("deterministic") is (False if options else None)


@pytest.mark.parametrize("streams", [True, False])
def test_a_pass_that_breaks_off_keeps_what_there_is(
    pair: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], streams: bool
) -> None:
    from foredraft.decode.engine import Engine

    rounds, count = Engine.round, iter(range(1000))

    def breaking(self: Engine) -> Any:
        if next(count) == 2:
            raise MemoryError("no room")
        return rounds(self)

    monkeypatch.setattr(Engine, "round", breaking)
    assert main([*pair, *GREEDY, *([] if streams else ["--json"])]) == 1
    told = capsys.readouterr()
    assert told.err.splitlines()[-1] == "foredraft: error: MemoryError: no room"
    assert "Traceback" not in told.err
    if streams:
        assert int(told.out.splitlines()[-1].split(" tokens in ")[0]) > 0
    else:
        [output] = json.loads(told.out)["outputs"]
        assert (output["finish_reason"], output["error"]) == ("error", "MemoryError: no room")
        assert output["token_ids"]


def test_a_comparison_that_breaks_off_keeps_the_first_run(
    pair: list[str], at_run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def around(number: int, drafter: str | None, request: Request) -> list[Output]:
        [output] = request()
        return [replace(output, error="no room")] if number == 2 else [output]

    at_run(around)
    assert main([*pair, *GREEDY, "--json", "--compare"]) == 1
    told = capsys.readouterr()
    found = json.loads(told.out)
    assert "compare" not in found and len(found["outputs"][0]["token_ids"]) == 6
    assert told.err.splitlines()[-1] == "foredraft: error: no room"


@pytest.mark.parametrize("options", [[], ["--json"]], ids=" ".join)
def test_ctrl_c_before_the_request_begins(
    pair: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    enter = interrupt.Interrupt.__enter__

    def entered(self: interrupt.Interrupt) -> interrupt.Interrupt:
        enter(self)
        signalled()
        return self

    monkeypatch.setattr(interrupt.Interrupt, "__enter__", entered)
    assert main([*pair, *GREEDY, *options]) == 130
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.splitlines()[-1] == "foredraft: interrupted"


def test_ctrl_c_between_the_prompts_encoding_and_its_request(
    pair: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = LLM.stream

    def streamed(self: LLM, *arguments: Any, **options: Any) -> Any:
        signalled()
        return stream(self, *arguments, **options)

    monkeypatch.setattr(LLM, "stream", streamed)
    assert main([*pair, "--temperature", "0", "--max-new-tokens", "500"]) == 130
    assert int(capsys.readouterr().out.splitlines()[-1].split(" tokens in ")[0]) < 500


def test_ctrl_c_between_two_runs_of_a_comparison(
    pair: list[str], at_run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[int] = []

    def around(number: int, drafter: str | None, request: Request) -> list[Output]:
        ran.append(number)
        return request()

    def show(self: ProgressBars, stage: str, done: int, total: int) -> None:
        if stage == "compare" and done == 2:
            signalled()  # when no request is there to be ended

    at_run(around)
    monkeypatch.setattr(ProgressBars, "show", show)
    assert main([*pair, *GREEDY, "--json", "--compare"]) == 130
    assert ran == [0, 1, 2]
    assert "compare" not in document(capsys)


def test_ctrl_c_in_the_last_run_of_a_comparison(
    pair: list[str], at_run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its rate and its text are not a whole run's."""

    def around(number: int, drafter: str | None, request: Request) -> list[Output]:
        if number == 12:
            signalled()
        return request()

    at_run(around)
    assert main([*pair, *GREEDY, "--json", "--compare"]) == 130
    assert "compare" not in document(capsys)


@pytest.mark.parametrize("options", [[], ["--json"]], ids=" ".join)
def test_a_second_ctrl_c_does_not_lose_the_first_run(
    pair: list[str], at_run: Any, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    runs = len(options)  # text is streamed, by no call of `generate`

    def around(number: int, drafter: str | None, request: Request) -> list[Output]:
        if number == runs:
            signalled()
            signalled()
        return request()

    at_run(around)
    assert main([*pair, *GREEDY, "--compare", *options]) == 130
    out = capsys.readouterr().out
    if options:
        found = json.loads(out)
        assert len(found["outputs"][0]["token_ids"]) == 6 and found["stats"]["rounds"] > 0
    else:
        assert out.splitlines()[-1].startswith("6 tokens in ")
        assert out.splitlines()[-1].endswith(", comparison not finished")


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_screen_keeps_still_during_timed_runs(
    pair: list[str], at_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    threads = threading.active_count()
    disturbed: list[int] = []

    def around(number: int, drafter: str | None, request: Request) -> list[Output]:
        before = screen.tell()
        outputs = request()
        time.sleep(0.15)  # more than one period of a display that refreshes itself
        if screen.tell() != before or threading.active_count() != threads:
            disturbed.append(number)
        return outputs

    at_run(around)
    # a prompt of two chunks reports its prefill
    assert main([*pair[:-1], "a b c " * 100, *GREEDY, "--compare"]) == 0
    assert disturbed == []
    assert "Comparing" in screen.getvalue()
    assert "Reading the prompt" in screen.getvalue()  # of the first run, which is not timed


def test_the_last_line_tells_the_warm_runs(
    pair: list[str], at_run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def around(number: int, drafter: str | None, request: Request) -> list[Output]:
        outputs = request()
        time.sleep(2 if number in (0, 2) else 0)  # the run that is shown, and the warm-up
        return outputs

    at_run(around)
    assert main([*pair, *GREEDY, "--compare", "--json"]) == 0
    found = document(capsys)
    assert found["stats"]["seconds"] < 2
    rate = found["compare"]["speculative_tokens_per_second"]
    assert found["stats"]["tokens_per_second"] == pytest.approx(rate, rel=0.05)


@pytest.mark.parametrize("n", [1, 2])
def test_seconds_are_the_whole_requests(
    pair: list[str], at_run: Any, capsys: pytest.CaptureFixture[str], n: int
) -> None:
    def around(number: int, drafter: str | None, request: Request) -> list[Output]:
        time.sleep(1)
        return request()

    at_run(around)
    assert main([*pair, *GREEDY, "--json", "--n", str(n)]) == 0
    assert document(capsys)["stats"]["seconds"] > 1


def test_the_demo_shows_what_it_goes_on_from(capsys: pytest.CaptureFixture[str]) -> None:
    from foredraft import demo

    short = ["--temperature", "0", "--max-new-tokens", "2"]
    assert main(["generate", *short]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(demo.prompt())
    assert main(["generate", demo.prompt(), *short]) == 0
    assert demo.prompt() not in capsys.readouterr().out
    assert main(["generate", "--json", *short]) == 0
    assert set(document(capsys)) == {"outputs", "usage", "stats", "lossless"}


@pytest.mark.parametrize(
    ("options", "rows"), [([], 1), (["--n", "3"], 3), (["--max-batch", "2"], 2)], ids=str
)
def test_room_is_made_for_what_is_asked(
    pair: list[str], loaded: list[LLM], options: list[str], rows: int
) -> None:
    assert main([*pair, *GREEDY, "--json", *options]) == 0
    [llm] = loaded
    assert llm.tokenizer is not None
    assert llm.engine.cache.rows == rows
    assert llm.max_length == len(llm.tokenizer.encode("x")) + 6


@pytest.mark.parametrize(
    ("message", "spelled"),
    [
        (
            "max_batch is 0; lower max_batch or max_length",
            "--max-batch is 0; lower --max-batch or --max-length",
        ),
        ("give dtype='bfloat16' or 'float32'", "give --dtype bfloat16 or float32"),
        ("needs draft=, the draft's folder", "needs --draft, the draft's folder"),
        ("seed is -1; a seed is whole", "--seed is -1; a seed is whole"),
        ("shorten it, or truncate='left'", "shorten it, or --truncate left"),
        ("top_p-1 in /models/top_k has no file", "top_p-1 in /models/top_k has no file"),
        ("two\nlines", "two lines"),
    ],
)
def test_messages_are_spelled_as_options(message: str, spelled: str) -> None:
    assert spelled_as_options(message) == spelled


def test_a_model_larger_than_memory_is_one_line(
    pair: list[str], models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    need = weight_bytes(ModelSpec.from_folder(models / "big"), torch.device("cpu"), torch.float32)
    monkeypatch.setattr(loading.capacity, "free_memory", lambda device: need)
    code = main([*pair, "--device", "cpu"])
    told = capsys.readouterr()
    assert (code, told.out, told.err.count("\n")) == (2, "", 1)
    assert "; give --dtype bfloat16, or leave the draft model out" in told.err
