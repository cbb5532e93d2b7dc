"""`foredraft generate` on tiny random checkpoints: output, errors, Ctrl-C, pipes and terminals."""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from foredraft import LLM, Output, SamplingParams, demo
from foredraft.cli import interrupt, main
from foredraft.cli.job import Comparison, Generate, alternate
from foredraft.cli.render import ProgressBars, visible
from foredraft.cli.words import STDIN, as_flag, one_line
from foredraft.decode.engine import Engine
from foredraft.decode.sequence import Sequence
from foredraft.errors import ConfigError, Option
from foredraft.kernels import library
from foredraft.kinds.tables import DRAFTERS, POLICIES
from tests.cli.conftest import Cli, told
from tests.support.checkpoints import save_checkpoint
from tests.support.command import COMMAND, foredraft
from tests.support.loaded import engine_of
from tests.support.running import environment
from tests.support.terminal import TerminalSession

FIGURE = r"\d+\.\d+"
LENGTH = r"finish_reason length \(--max-new-tokens \d+\)"
RATES = rf"{LENGTH}, acceptance rate \d+%, mean accepted length {FIGURE}"
GREEDY = ["--temperature", "0", "--max-new-tokens", "12"]


@pytest.fixture(scope="module")
def pair(models: Path) -> list[str]:
    return ["generate", "--model", str(models / "big"), "--draft", str(models / "small")]


def last_line(text: str) -> str:
    return text.splitlines()[-1]


def test_stdout_is_the_text_and_a_line_of_figures_and_stderr_is_empty(pair: list[str], cli: Cli) -> None:
    out, err = cli(*pair, "def accept", *GREEDY, "--policy", "fixed")
    assert told(err) == []
    assert re.fullmatch(f"12 tokens in {FIGURE} s: {FIGURE} tokens/s, {RATES}", last_line(out))
    assert "\x1b" not in out


@pytest.mark.heavy
@pytest.mark.skipif(library() is None, reason="no C compiler")
@pytest.mark.parametrize(("options", "variables", "because"), [
    ([], {"CC": "none"}, "because this installation carries no kernels, and CC is 'none', which is not a program;"
     " install a C compiler, or the wheel for this CPU"),
    (["--dtype", "bfloat16"], {}, "because the kernels need an even width in bfloat16, and a product has 33;"
     " give --dtype float32"),
    (["--dtype", "bfloat16", "--no-kernels"], {}, None),
])  # fmt: skip
def test_operators_in_place_of_the_kernels_are_one_line_with_reason_cost_and_remedy(
    options: list[str], variables: dict[str, str], because: str | None, tmp_path: Path
) -> None:
    odd = str(save_checkpoint(tmp_path / "odd", tokenizer=True, intermediate_size=33))
    given = ["generate", "x", "--model", odd, "--draft", odd, "--device", "cpu", "--policy", "fixed", *GREEDY]
    done = foredraft(*given, *options, **({"env": environment(**variables)} if variables else {}))
    assert done.returncode == 0, done.stderr
    start = (
        f"foredraft: {odd}: PyTorch's operators run instead of the kernels and take several times as long, "
    )
    assert told(done.stderr) == ([] if because is None else [start + because])


def test_a_text_that_the_default_limit_cut_says_so_on_stderr(pair: list[str], cli: Cli) -> None:
    command = [*pair, "def accept", "--temperature", "0", "--policy", "fixed"]
    cut = "foredraft: the text was cut after 128 new tokens, the default; --max-new-tokens gives more"
    for options in ([], ["--json"], ["--n", "2"]):
        out, err = cli(*command, "--ignore-eos", *options)
        assert told(err) == [cut] and "cut" not in last_line(out)
    out, err = cli(*command, "--ignore-eos", "--max-new-tokens", "128")
    assert told(err) == [] and "finish_reason length (--max-new-tokens 128)" in last_line(out)
    stopped = last_line(cli(*command, "--max-new-tokens", "8", "--n", "2", "--regex", "[a-z]{2}").out)
    assert "finish_reason " in stopped and "finish_reason length" not in stopped


def test_the_last_line_has_every_figure_of_a_comparison(pair: list[str], cli: Cli) -> None:
    # The temperature defaults to 0 under --compare.
    out = cli(*pair, "x", "--compare", "--policy", "fixed", "--max-new-tokens", "4").out
    assert re.fullmatch(
        f"4 tokens in {FIGURE} s: {FIGURE} tokens/s, {RATES}, median speed-up over plain decoding {FIGURE} x"
        rf" \(spread {FIGURE}-{FIGURE} over 5 alternations; outputs identical: yes\)",
        last_line(out),
    )
    assert out.count("tokens/s") == 1
    sampled = cli(*pair, "x", "--compare", "--temperature", "1", "--max-new-tokens", "4").out
    assert "; outputs not comparable token by token)" in last_line(sampled)


def test_the_last_line_says_what_measuring_costs_took(
    pair: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path))
    last = last_line(cli(*pair, "def accept", *GREEDY).out)
    assert re.search(f", costs of this machine measured in {FIGURE} s while loading$", last), last


def test_the_last_line_and_the_json_document_say_why_nothing_was_drafted(pair: list[str], cli: Cli) -> None:
    one_token = [*pair, "def accept", "--max-new-tokens", "1", "--policy", "fixed"]
    reason = "the drafter had nothing to propose"
    figures = f"1 tokens in {FIGURE} s: {FIGURE} tokens/s, {LENGTH}"
    last = last_line(cli(*one_token).out)
    assert re.fullmatch(f"{figures}, nothing drafted, no drafts because {reason}", last)
    assert cli.document(*one_token)["outputs"][0]["why_plain"] == reason


def test_the_json_document_has_every_field(pair: list[str], cli: Cli) -> None:
    document = cli.document(*pair, "def accept", *GREEDY, "--n", "2", "--compare", "--policy", "fixed")
    assert set(document) == {"outputs", "usage", "stats", "lossless", "compare"}
    for output in document["outputs"]:
        assert set(output) == {"text", "token_ids", "finish_reason", "seed"}
        assert (len(output["token_ids"]), output["finish_reason"]) == (12, "length")
    assert document["outputs"][0]["text"] == document["outputs"][1]["text"]  # greedy
    assert document["usage"]["completion_tokens"] == 24 and document["usage"]["prompt_tokens"] > 1
    assert set(document["stats"]) == {
        *("seconds", "tokens_per_second", "rounds", "drafted", "accepted", "acceptance_rate", "alpha"),
        *("mean_accepted_length", "acceptance_by_position", "siblings"),
    }
    assert document["stats"]["drafted"] > 0 and document["lossless"] is True
    assert (document["compare"]["identical"], document["compare"]["alternations"]) == (True, 5)


def test_compare_alternates_two_kinds(pair: list[str], monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    ran: list[tuple[str | None, bool]] = []
    generate = LLM.generate

    def recorded(self: LLM, prompts: str, params: SamplingParams, **options: Any) -> list[Output]:
        outputs = generate(self, prompts, params, **options)
        ran.append((params.drafter, sum(o.stats.drafted for o in outputs) > 0))
        return outputs

    monkeypatch.setattr(LLM, "generate", recorded)
    cli(*pair, "x", "--compare", "--max-new-tokens", "8", "--policy", "fixed")
    plain, fast = ("none", False), (None, True)
    assert ran == [plain, fast, *[plain, fast, fast, plain] * 2, plain, fast]


def given_on_stdin(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(content), isatty=lambda: False))


def test_stdin_loses_one_trailing_newline(pair: list[str], monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    given_on_stdin(monkeypatch, b"def accept\n\n")
    read, given = (cli.document(*pair, prompt, *GREEDY)["outputs"] for prompt in ("-", "def accept\n"))
    assert [output["token_ids"] for output in read] == [output["token_ids"] for output in given]


def test_a_stdin_without_text_is_refused(pair: list[str], monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    given_on_stdin(monkeypatch, b"ab\xff")
    assert cli.refused(*pair, "-") == "stdin is not UTF-8 text (byte 2); convert it first"
    monkeypatch.setattr(sys, "stdin", None)
    assert cli.refused(*pair, "-") == "stdin is closed; give the prompt as an argument, or open stdin"
    cli(*pair, "x", *GREEDY)


def test_a_long_prompt_is_refused_with_both_lengths_or_truncated(pair: list[str], cli: Cli) -> None:
    long = ["one two three four five six seven", "--max-length", "16", "--max-new-tokens", "8"]
    refused = cli.refused(*pair, *long)
    assert " tokens and --max-new-tokens 8 exceed the 16 positions" in refused
    assert "--truncate left" in refused
    taken = cli.document(*pair, *long, "--truncate", "left")
    assert taken["usage"] == {"prompt_tokens": 8, "completion_tokens": 8}


def quoted(names: dict[str, Any]) -> str:
    return ", ".join(f'"{name}"' for name in names)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("x --model big --bogus 1", "Unknown option: --bogus"),
        ("x --model big --top-k many", "--top-k"),
        ("x --model big --drafter oracle", f"for --drafter. Choose from: {quoted(DRAFTERS)}."),
        ("x --model big --policy oracle", f"for --policy. Choose from: {quoted(POLICIES)}."),
        ("x --model big --max-new-tokens -1", "--max-new-tokens is -1"),
        ("x --compare --max-new-tokens 0", "--compare has nothing to time with --max-new-tokens 0;"),
        (f"x --model big --seed {2**63}", f"seed is {2**63}"),
        ("x --model big --drafter lookup --max-draft 100000", "--max-draft is 100000"),
        ("x --model big --device abacus", "--device is 'abacus'"),
        ("x --model big --device cpu:3", "--device is 'cpu:3'"),
        ("x --model big --policy-option threshold=1", "--policy-option names 'threshold'"),
        ("x --policy-option threshold", "--policy-option is 'threshold'; give NAME=VALUE"),
        ("x --model big --drafter none --compare", "--compare needs a drafter"),
        ("--model no-such-folder x", "no-such-folder"),
        ("--model big", "no prompt; give one, or - to read it from stdin"),
        ("--model big x -", "no place for '-'"),
        ("--model big --draft - x", "'-' is neither a folder"),
        ("--model big a\udcff", "the prompt is not UTF-8 text (character 1)"),
    ],
)
def test_a_wrong_line_is_refused(
    models: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli, line: str, says: str
) -> None:
    monkeypatch.chdir(models)
    assert says in cli.refused(f"generate {line}")


@pytest.mark.parametrize("words", [["genrate"], ["generate", "x", "--model", "nowhere"]], ids=" ".join)
def test_errors_of_a_process_go_to_stderr_only(words: list[str]) -> None:
    done = foredraft(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("foredraft: error: ") and done.stderr.count("\n") == 1


def test_a_failed_generation_exits_with_code_1(models: Path, tmp_path: Path, cli: Cli) -> None:
    shutil.copytree(models / "big", tmp_path / "broken")
    weights = load_file(models / "big/model.safetensors")
    weights["model.norm.weight"][:] = float("nan")
    save_file(weights, tmp_path / "broken/model.safetensors", metadata={"format": "pt"})
    out, err = cli("generate x --json --model", tmp_path / "broken", code=1)
    [line] = told(err)
    assert re.fullmatch(r"foredraft: error: .* not finite.*", line)
    [output] = json.loads(out)["outputs"]
    assert output["finish_reason"] == "error" and "not finite" in output["error"]


@pytest.mark.heavy
@pytest.mark.parametrize("streams", [">&- 2>&-", "| true"], ids=["closed", "a reader that ends"])
def test_closed_output_streams_are_no_error(pair: list[str], streams: str) -> None:
    command = shlex.join([*COMMAND, *pair, "x", *GREEDY])
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{command} {streams}"],
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, told(done.stderr)) == (0, "", [])


@pytest.mark.parametrize("n", [1, 3])
def test_ctrl_c_keeps_the_json(pair: list[str], n: int, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    extend, sent = Sequence.extend, list[None]()

    def extend_and_interrupt(self: Sequence, *new: Any) -> Any:
        read = extend(self, *new)
        if len(self.new_ids) > 40 and not sent:
            sent.append(os.kill(os.getpid(), signal.SIGINT))
        return read

    monkeypatch.setattr(Sequence, "extend", extend_and_interrupt)
    options = ["--max-new-tokens", "1900", "--temperature", "0", "--n", str(n), "--max-batch", "2"]
    document = cli.document(*pair, "x", *options, "--compare", code=130)
    assert sent and [output["finish_reason"] for output in document["outputs"]] == ["cancelled"] * n
    assert 0 < document["usage"]["completion_tokens"] < 1900 * n
    assert "compare" not in document


@pytest.mark.heavy
def test_a_terminal_shows_origins_in_colours_after_the_dimmed_prompt(pair: list[str], models: Path) -> None:
    # The draft model is the target itself, so there are accepted tokens and bonus tokens.
    with TerminalSession(*pair[:3], "--draft", str(models / "big"), "def accept", *GREEDY) as session:
        code, errors = session.wait()
    assert code == 0
    assert session.text_buffer.startswith("\x1b[2mdef accept\x1b[0m\x1b[")
    assert "\x1b[94m" in session.text_buffer and "\x1b[32m" in session.text_buffer
    [legend] = told("\n".join(errors))
    assert "drafted, and accepted by the target" in legend
    assert "\x1b" not in legend  # stderr is not a terminal


def show_on_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)


def test_long_prompts_show_their_end(pair: list[str], monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    show_on_terminal(monkeypatch)
    shown = cli(*pair, "x" * 2001, *GREEDY[:3], "2").out
    assert shown.startswith(f"\x1b[2m…{'x' * 2000}\x1b[0m\x1b[")


@pytest.mark.parametrize("options", [["--json"], ["--chat", "--json"], ["--chat"]], ids=" ".join)
def test_a_document_and_a_reply_do_not_show_the_prompt(
    pair: list[str],
    models: Path,
    tmp_path: Path,
    options: list[str],
    monkeypatch: pytest.MonkeyPatch,
    cli: Cli,
) -> None:
    show_on_terminal(monkeypatch)
    chatty = shutil.copytree(models / "big", tmp_path / "chatty")
    (chatty / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert "zwölf" not in cli(*pair[:2], chatty, *pair[3:], "zwölf", *GREEDY, *options).out


@pytest.mark.parametrize("how", ["--no-color", "NO_COLOR"])
def test_colours_can_be_off(pair: list[str], how: str, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    show_on_terminal(monkeypatch)
    monkeypatch.setenv("NO_COLOR", "1" if how == "NO_COLOR" else "")
    out, err = cli(*pair, "def accept", "--n", "2", *GREEDY, *(["--no-color"] if how == "--no-color" else []))
    assert told(err) == [] and "\x1b" not in out
    assert out.startswith("def accept\n[1/2]\n")


def test_control_characters_are_made_visible() -> None:
    assert "".join(map(visible, "a\x1b[2J\x07\x9b\n\tß🙂")) == "a␛[2J␇\N{REPLACEMENT CHARACTER}\n\tß🙂"


# --- runs: figures, failures, Ctrl-C and errors ---------------------------------------------------


SHORT = ["--temperature", "0", "--max-new-tokens", "6"]
Request = Callable[[], list[Output]]
Around = Callable[[int, str | None, Request], list[Output]]  # of a run's number, drafter and itself


@pytest.fixture(scope="module")
def words(pair: list[str]) -> list[str]:
    return [*pair, "x"]


@pytest.fixture
def at_run(monkeypatch: pytest.MonkeyPatch) -> Callable[[Around], None]:
    def wrap(around: Around) -> None:
        generate, count = LLM.generate, iter(range(1000))

        def wrapped(self: LLM, prompts: str, params: SamplingParams, **options: Any) -> Any:
            request = lambda: generate(self, prompts, params, **options)  # noqa: E731
            return around(next(count), params.drafter, request)

        monkeypatch.setattr(LLM, "generate", wrapped)

    return wrap


def send_sigint() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("altered", ["plain", "printed"])
def test_other_outputs_are_not_lossless(words: list[str], at_run: Any, altered: str, cli: Cli) -> None:
    def around(number: int, drafter: str | None, request: Request) -> list[Output]:
        [output] = request()
        differs = drafter == "none" if altered == "plain" else number == 0
        return [replace(output, token_ids=[9, *output.token_ids[1:]])] if differs else [output]

    at_run(around)
    found = cli.document(*words, *SHORT, "--compare")
    assert (found["compare"]["identical"], found["lossless"]) == (False, False)


@pytest.mark.parametrize("options", [[], ["--no-deterministic"]], ids=" ".join)
def test_the_document_says_if_it_is_deterministic(words: list[str], options: list[str], cli: Cli) -> None:
    found = cli.document(*words, *SHORT, *options)
    assert found["lossless"] is (not options)
    assert found.get("deterministic") is (False if options else None)


@pytest.mark.parametrize("streams", [True, False])
def test_a_failed_forward_keeps_the_text_so_far(
    words: list[str], monkeypatch: pytest.MonkeyPatch, streams: bool, cli: Cli
) -> None:
    rounds, count = Engine.round, iter(range(1000))

    def failing(self: Engine) -> Any:
        if next(count) == 2:
            raise MemoryError("no room")
        return rounds(self)

    monkeypatch.setattr(Engine, "round", failing)
    out, err = cli(*words, *SHORT, *([] if streams else ["--json"]), code=1)
    assert err.splitlines()[-1] == "foredraft: error: MemoryError: no room" and "Traceback" not in err
    if streams:
        assert int(out.splitlines()[-1].split(" tokens in ")[0]) > 0
    else:
        [output] = json.loads(out)["outputs"]
        assert (output["finish_reason"], output["error"]) == ("error", "MemoryError: no room")
        assert output["token_ids"]


def test_a_failed_comparison_keeps_the_first_run(words: list[str], at_run: Any, cli: Cli) -> None:
    def around(number: int, drafter: str | None, request: Request) -> list[Output]:
        [output] = request()
        return [replace(output, error="no room")] if number == 2 else [output]

    at_run(around)
    out, err = cli(*words, *SHORT, "--json", "--compare", code=1)
    found = json.loads(out)
    assert "compare" not in found and len(found["outputs"][0]["token_ids"]) == 6
    assert err.splitlines()[-1] == "foredraft: error: no room"


@pytest.mark.parametrize("options", [[], ["--json"]], ids=" ".join)
def test_ctrl_c_before_the_request_starts_prints_no_output(
    words: list[str], monkeypatch: pytest.MonkeyPatch, options: list[str], cli: Cli
) -> None:
    enter = interrupt.Interrupt.__enter__

    def entered(self: interrupt.Interrupt) -> interrupt.Interrupt:
        enter(self)
        send_sigint()
        return self

    monkeypatch.setattr(interrupt.Interrupt, "__enter__", entered)
    out, err = cli(*words, *SHORT, *options, code=130)
    assert (out, err.splitlines()[-1]) == ("", "foredraft: interrupted")


@pytest.mark.parametrize(("method", "options"), [("stream", []), ("generate", ["--json"])])
def test_ctrl_c_before_a_request_is_submitted_cancels_it(
    words: list[str], method: str, options: list[str], monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    sound = getattr(LLM, method)

    def interrupted(self: LLM, *arguments: Any, **options: Any) -> Any:
        send_sigint()
        return sound(self, *arguments, **options)

    monkeypatch.setattr(LLM, method, interrupted)
    assert "cancelled" in cli(*words, "--temperature", "0", "--max-new-tokens", "500", *options, code=130).out


def interrupted_at(place: int, times: int = 1) -> Around:
    def around(number: int, drafter: str | None, request: Request) -> list[Output]:
        for _ in range(times if number == place else 0):
            send_sigint()
        return request()

    return around


def test_ctrl_c_between_two_runs_ends_the_comparison(
    words: list[str], at_run: Any, monkeypatch: pytest.MonkeyPatch, cli: Cli
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
    assert "compare" not in cli.document(*words, *SHORT, "--compare", code=130)
    assert ran == [0, 1, 2]


def test_ctrl_c_in_the_last_run_discards_the_comparison(words: list[str], at_run: Any, cli: Cli) -> None:
    """The interrupted run's speed and text are incomplete."""
    at_run(interrupted_at(12))
    assert "compare" not in cli.document(*words, *SHORT, "--compare", code=130)


@pytest.mark.parametrize("options", [[], ["--json"]], ids=" ".join)
def test_two_ctrl_c_keep_the_first_run(words: list[str], at_run: Any, options: list[str], cli: Cli) -> None:
    at_run(interrupted_at(len(options), times=2))  # streamed text does not call `generate`
    out = cli(*words, *SHORT, "--compare", *options, code=130).out
    if options:
        found = json.loads(out)
        assert len(found["outputs"][0]["token_ids"]) == 6 and found["stats"]["rounds"] > 0
    else:
        last = out.splitlines()[-1]
        assert last.startswith("6 tokens in ") and last.endswith(", comparison not finished")


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def others() -> set[str]:
    """The threads besides the engine's."""
    return {each.name for each in threading.enumerate()} - {"foredraft-engine"}


def test_nothing_is_drawn_while_timed(words: list[str], at_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = FakeTerminal()
    monkeypatch.setattr(sys, "stderr", screen)
    threads = others()
    disturbed: list[int] = []

    def around(number: int, drafter: str | None, request: Request) -> list[Output]:
        before = screen.tell()
        outputs = request()
        time.sleep(0.15)  # longer than the period of a refresh thread
        if screen.tell() != before or others() != threads:
            disturbed.append(number)
        return outputs

    at_run(around)
    # A prompt of two chunks reports the progress of its prefill.
    assert main([*words[:-1], "a b c " * 100, *SHORT, "--compare"]) == 0
    assert disturbed == []
    assert "Comparing" in screen.getvalue()
    assert "Reading the prompt" in screen.getvalue()  # from the first run, which is not timed


def slowed(*places: int, seconds: float) -> Around:
    def around(number: int, drafter: str | None, request: Request) -> list[Output]:
        time.sleep(seconds if number in places else 0)
        return request()

    return around


@pytest.mark.heavy
def test_the_figures_of_a_comparison_are_those_of_warm_runs(words: list[str], at_run: Any, cli: Cli) -> None:
    at_run(slowed(0, 2, seconds=2))  # the printed run and the warm-up
    found = cli.document(*words, *SHORT, "--compare")
    assert found["stats"]["seconds"] < 2
    rate = found["compare"]["speculative_tokens_per_second"]
    assert found["stats"]["tokens_per_second"] == pytest.approx(rate, rel=0.05)


@pytest.mark.parametrize("n", [1, 2])
def test_seconds_cover_the_whole_request(words: list[str], at_run: Any, n: int, cli: Cli) -> None:
    at_run(slowed(0, 1, seconds=1))
    assert cli.document(*words, *SHORT, "--n", n)["stats"]["seconds"] > 1


def test_the_demo_prints_its_prompt(cli: Cli) -> None:
    short = "--temperature 0 --max-new-tokens 2"
    assert cli(f"generate {short}").out.startswith(demo.prompt())
    assert demo.prompt() not in cli(f"generate {short}", demo.prompt()).out
    assert set(cli.document(f"generate {short}")) == {"outputs", "usage", "stats", "lossless"}


@pytest.mark.parametrize(("options", "rows"), [([], 1), (["--n", "3"], 3), (["--max-batch", "2"], 2)])
def test_the_cache_has_the_rows_and_positions_of_the_request(
    words: list[str], loaded: list[LLM], options: list[str], rows: int, cli: Cli
) -> None:
    cli(*words, *SHORT, *options)
    [llm] = loaded
    assert llm.tokenizer is not None
    assert engine_of(llm).cache.rows == rows
    assert llm.max_length == len(llm.tokenizer.encode("x")) + 6


def test_options_are_spelled_as_flags() -> None:
    options = Option("dtype", "bfloat16"), Option("stop", "two words"), Option("policy_options")
    assert [*map(as_flag, options)] == ["--dtype bfloat16", "--stop 'two words'", "--policy-option"]
    assert as_flag(Option("json", True)) == "--json"
    assert as_flag(Option("max_batch", False)) == "--no-max-batch"


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


# --- alternating timed runs: medians of the pairs, and the exactness flag ------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def decoder(self, seconds: Callable[[int], float], tokens: list[list[int]]) -> Generate:
        runs = itertools.count()

        def generate() -> list[list[int]]:
            self.now += seconds(next(runs))
            return tokens

        return generate

    def compare(self, plain: Generate, speculative: Generate, **options: object) -> Comparison:
        return alternate(plain, speculative, clock=lambda: self.now, **{"comparable": True} | options)


def test_speedup_is_the_median_of_the_ratios_within_pairs() -> None:
    clock, tokens = Clock(), [[1, 2, 3, 4]]
    # The machine runs at half speed in pairs 2 and 4. That leaves the ratios within the pairs unchanged, but the
    # medians of the plain and of the speculative runs, taken separately, would show no gain.
    plain = clock.decoder(lambda i: [9, 4, 8, 4, 8, 4][i], tokens)
    speculative = clock.decoder(lambda i: [9, 2, 4, 4, 4, 1][i], tokens)
    comparison = clock.compare(plain, speculative)
    assert asdict(comparison) == {
        "speedup": pytest.approx(2),
        "speedup_low": pytest.approx(1),
        "speedup_high": pytest.approx(4),
        "alternations": 5,
        "plain_tokens_per_second": pytest.approx(1),
        "speculative_tokens_per_second": pytest.approx(1),
        "identical": True,
    }


def test_one_differing_token_makes_the_outputs_not_identical() -> None:
    clock = Clock()
    plain, other = (clock.decoder(lambda i: 1, [[1, 2], [last]]) for last in (3, 4))
    assert clock.compare(plain, other).identical is False
    assert clock.compare(plain, other, comparable=False).identical is None
    shorter = clock.decoder(lambda i: 1, [[1]])
    assert clock.compare(plain, shorter).speedup == pytest.approx(1 / 3), "the ratio of tokens/s"
