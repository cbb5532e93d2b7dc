"""The runs of `foredraft generate`: figures, failures, Ctrl-C, no screen output while a run is timed, errors."""

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
from foredraft.cli.errors import as_flag, one_line
from foredraft.cli.progress import ProgressBars
from foredraft.cli.words import STDIN
from foredraft.errors import ConfigError, Option
from foredraft.model.spec import ModelSpec
from foredraft.model.weights import weight_bytes
from tests.support.loaded import engine_of

GREEDY = ["--temperature", "0", "--max-new-tokens", "6"]
Request = Callable[[], list[Output]]


@pytest.fixture(scope="module")
def pair(models: Path) -> list[str]:
    return ["generate", "--model", str(models / "big"), "--draft", str(models / "small"), "x"]


@pytest.fixture
def at_run(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int, str | None, Request], Any]], None]:
    """Wrap every `LLM.generate` call: the wrapper gets the call's number, its drafter and the call itself."""

    def wrap(around: Callable[[int, str | None, Request], Any]) -> None:
        generate, count = LLM.generate, iter(range(1000))

        def wrapped(self: LLM, prompts: str, params: SamplingParams, **options: Any) -> Any:
            request = lambda: generate(self, prompts, params, **options)  # noqa: E731
            return around(next(count), params.drafter, request)

        monkeypatch.setattr(LLM, "generate", wrapped)

    return wrap


def send_sigint() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def document(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_different_outputs_are_reported_as_not_lossless(
    pair: list[str], at_run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def around(number: int, drafter: str | None, request: Request) -> list[Output]:
        [output] = request()
        return [replace(output, token_ids=[9, *output.token_ids[1:]])] if drafter == "none" else [output]

    at_run(around)
    assert main([*pair, *GREEDY, "--json", "--compare"]) == 0
    found = document(capsys)
    assert (found["compare"]["identical"], found["lossless"]) == (False, False)


def test_the_comparison_includes_the_printed_run(
    pair: list[str], at_run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def around(number: int, drafter: str | None, request: Request) -> list[Output]:
        [output] = request()
        return [replace(output, token_ids=[9])] if number == 0 else [output]

    at_run(around)
    assert main([*pair, *GREEDY, "--json", "--compare"]) == 0
    assert document(capsys)["compare"]["identical"] is False


@pytest.mark.parametrize("options", [[], ["--no-deterministic"]], ids=" ".join)
def test_the_document_says_that_a_run_is_not_deterministic(
    pair: list[str], capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    assert main([*pair, *GREEDY, "--json", *options]) == 0
    found = document(capsys)
    assert found["lossless"] is (not options)
    assert found.get("deterministic") is (False if options else None)


@pytest.mark.parametrize("streams", [True, False])
def test_a_failed_forward_keeps_the_text_so_far(
    pair: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], streams: bool
) -> None:
    from foredraft.decode.engine import Engine

    rounds, count = Engine.round, iter(range(1000))

    def failing(self: Engine) -> Any:
        if next(count) == 2:
            raise MemoryError("no room")
        return rounds(self)

    monkeypatch.setattr(Engine, "round", failing)
    assert main([*pair, *GREEDY, *([] if streams else ["--json"])]) == 1
    printed = capsys.readouterr()
    assert printed.err.splitlines()[-1] == "foredraft: error: MemoryError: no room"
    assert "Traceback" not in printed.err
    if streams:
        assert int(printed.out.splitlines()[-1].split(" tokens in ")[0]) > 0
    else:
        [output] = json.loads(printed.out)["outputs"]
        assert (output["finish_reason"], output["error"]) == ("error", "MemoryError: no room")
        assert output["token_ids"]


def test_a_failed_comparison_keeps_the_first_run(
    pair: list[str], at_run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def around(number: int, drafter: str | None, request: Request) -> list[Output]:
        [output] = request()
        return [replace(output, error="no room")] if number == 2 else [output]

    at_run(around)
    assert main([*pair, *GREEDY, "--json", "--compare"]) == 1
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert "compare" not in found and len(found["outputs"][0]["token_ids"]) == 6
    assert printed.err.splitlines()[-1] == "foredraft: error: no room"


@pytest.mark.parametrize("options", [[], ["--json"]], ids=" ".join)
def test_ctrl_c_before_the_request_starts_prints_no_output(
    pair: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    enter = interrupt.Interrupt.__enter__

    def entered(self: interrupt.Interrupt) -> interrupt.Interrupt:
        enter(self)
        send_sigint()
        return self

    monkeypatch.setattr(interrupt.Interrupt, "__enter__", entered)
    assert main([*pair, *GREEDY, *options]) == 130
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines()[-1] == "foredraft: interrupted"


def test_ctrl_c_between_encoding_and_submitting_a_prompt_cancels_the_request(
    pair: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = LLM.stream

    def streamed(self: LLM, *arguments: Any, **options: Any) -> Any:
        send_sigint()
        return stream(self, *arguments, **options)

    monkeypatch.setattr(LLM, "stream", streamed)
    assert main([*pair, "--temperature", "0", "--max-new-tokens", "500"]) == 130
    assert int(capsys.readouterr().out.splitlines()[-1].split(" tokens in ")[0]) < 500


def test_ctrl_c_before_a_request_is_submitted_cancels_it(
    pair: list[str], at_run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def around(number: int, drafter: str | None, request: Request) -> list[Output]:
        send_sigint()
        return request()

    at_run(around)
    assert main([*pair, "--temperature", "0", "--max-new-tokens", "1900", "--json"]) == 130
    [output] = document(capsys)["outputs"]
    assert output["finish_reason"] == "cancelled" and len(output["token_ids"]) < 1900


def test_ctrl_c_between_two_runs_ends_the_comparison(
    pair: list[str], at_run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[int] = []

    def around(number: int, drafter: str | None, request: Request) -> list[Output]:
        ran.append(number)
        return request()

    def show(self: ProgressBars, stage: str, done: int, total: int) -> None:
        if stage == "compare" and done == 2:
            send_sigint()  # between two requests

    at_run(around)
    monkeypatch.setattr(ProgressBars, "show", show)
    assert main([*pair, *GREEDY, "--json", "--compare"]) == 130
    assert ran == [0, 1, 2]
    assert "compare" not in document(capsys)


def test_ctrl_c_in_the_last_run_discards_the_comparison(
    pair: list[str], at_run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The interrupted run's speed and text are incomplete."""

    def around(number: int, drafter: str | None, request: Request) -> list[Output]:
        if number == 12:
            send_sigint()
        return request()

    at_run(around)
    assert main([*pair, *GREEDY, "--json", "--compare"]) == 130
    assert "compare" not in document(capsys)


@pytest.mark.parametrize("options", [[], ["--json"]], ids=" ".join)
def test_a_second_ctrl_c_keeps_the_first_run(
    pair: list[str], at_run: Any, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    runs = len(options)  # streamed text does not call `generate`

    def around(number: int, drafter: str | None, request: Request) -> list[Output]:
        if number == runs:
            send_sigint()
            send_sigint()
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


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_nothing_is_drawn_during_a_timed_run(
    pair: list[str], at_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = FakeTerminal()
    monkeypatch.setattr(sys, "stderr", screen)
    threads = threading.active_count()
    disturbed: list[int] = []

    def around(number: int, drafter: str | None, request: Request) -> list[Output]:
        before = screen.tell()
        outputs = request()
        time.sleep(0.15)  # longer than the period of a refresh thread
        if screen.tell() != before or threading.active_count() != threads:
            disturbed.append(number)
        return outputs

    at_run(around)
    # A prompt of two chunks reports the progress of its prefill.
    assert main([*pair[:-1], "a b c " * 100, *GREEDY, "--compare"]) == 0
    assert disturbed == []
    assert "Comparing" in screen.getvalue()
    assert "Reading the prompt" in screen.getvalue()  # from the first run, which is not timed


def test_the_figures_of_a_comparison_are_those_of_warm_runs(
    pair: list[str], at_run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def around(number: int, drafter: str | None, request: Request) -> list[Output]:
        outputs = request()
        time.sleep(2 if number in (0, 2) else 0)  # the printed run and the warm-up
        return outputs

    at_run(around)
    assert main([*pair, *GREEDY, "--compare", "--json"]) == 0
    found = document(capsys)
    assert found["stats"]["seconds"] < 2
    rate = found["compare"]["speculative_tokens_per_second"]
    assert found["stats"]["tokens_per_second"] == pytest.approx(rate, rel=0.05)


@pytest.mark.parametrize("n", [1, 2])
def test_seconds_cover_the_whole_request(
    pair: list[str], at_run: Any, capsys: pytest.CaptureFixture[str], n: int
) -> None:
    def around(number: int, drafter: str | None, request: Request) -> list[Output]:
        time.sleep(1)
        return request()

    at_run(around)
    assert main([*pair, *GREEDY, "--json", "--n", str(n)]) == 0
    assert document(capsys)["stats"]["seconds"] > 1


def test_the_demo_prints_its_prompt(capsys: pytest.CaptureFixture[str]) -> None:
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
def test_the_cache_has_the_rows_and_positions_of_the_request(
    pair: list[str], loaded: list[LLM], options: list[str], rows: int
) -> None:
    assert main([*pair, *GREEDY, "--json", *options]) == 0
    [llm] = loaded
    assert llm.tokenizer is not None
    assert engine_of(llm).cache.rows == rows
    assert llm.max_length == len(llm.tokenizer.encode("x")) + 6


@pytest.mark.parametrize(
    ("option", "flag"),
    [
        (Option("max_batch"), "--max-batch"),
        (Option("dtype", "bfloat16"), "--dtype bfloat16"),
        (Option("max_draft", 3), "--max-draft 3"),
        (Option("stop", "two words"), "--stop 'two words'"),
        (Option("json", True), "--json"),
        (Option("deterministic", False), "--no-deterministic"),
        (Option("model"), "--model"),
        (Option("model", "big"), "--model big"),
        (Option("policy_options"), "--policy-option"),
    ],
)
def test_options_are_spelled_as_flags(option: Option, flag: str) -> None:
    assert as_flag(option) == flag


def test_an_error_is_printed_on_one_line_with_flags() -> None:
    error = ConfigError(
        ("and the prompt is", "\ntoo long for ", Option("max_length")),
        option="model",
        value=STDIN,
        remedy=("shorten it, or give ", Option("truncate", "left")),
    )
    assert one_line(error) == (
        "--model is '-', and the prompt is too long for --max-length; shorten it, or give --truncate left"
    )
    assert one_line(f"text with max_length\n and {STDIN}") == "text with max_length and -"


def test_a_model_larger_than_memory_is_refused_in_one_line(
    pair: list[str], models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    need = weight_bytes(ModelSpec.from_folder(models / "big"), torch.device("cpu"), torch.float32)
    monkeypatch.setattr(loading.capacity, "free_memory", lambda device: need)
    code = main([*pair, "--device", "cpu"])
    printed = capsys.readouterr()
    assert (code, printed.out, printed.err.count("\n")) == (2, "", 1)
    assert "; give --dtype bfloat16, or leave the draft model out" in printed.err
