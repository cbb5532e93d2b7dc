"""`foredraft generate` on tiny random checkpoints: output, errors, Ctrl-C, terminals and help."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from foredraft.cli import main
from foredraft.kinds import DRAFTERS, POLICIES
from tests.support.command import BUSY, COMMAND, foredraft
from tests.support.running import environment

FIGURE = r"\d+\.\d+"
LENGTH = r"finish_reason length \(--max-new-tokens \d+\)"
RATES = rf"{LENGTH}, acceptance rate \d+%, mean accepted length {FIGURE}"
GREEDY = ["--temperature", "0", "--max-new-tokens", "12"]


@pytest.fixture(scope="module")
def pair(models: Path) -> list[str]:
    return ["generate", "--model", str(models / "big"), "--draft", str(models / "small")]


def stderr_lines(stderr: str) -> list[str]:
    """Return the lines of stderr without the warnings of a busy machine, or one without bit-identical shapes."""
    expected = ("using one fixed shape", BUSY)
    return [line for line in stderr.splitlines() if not any(each in line for each in expected)]


def quoted(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def last_line(text: str) -> str:
    return text.splitlines()[-1]


def test_stdout_is_the_text_and_a_line_of_figures_and_stderr_is_empty(pair: list[str]) -> None:
    done = foredraft(*pair, "def accept", *GREEDY, "--policy", "fixed")
    assert (done.returncode, stderr_lines(done.stderr)) == (0, [])
    assert re.fullmatch(f"12 tokens in {FIGURE} s: {FIGURE} tokens/s, {RATES}", last_line(done.stdout))
    assert "\x1b" not in done.stdout


def test_a_text_that_the_default_limit_cut_says_so_on_stderr(pair: list[str]) -> None:
    command = [*pair, "def accept", "--temperature", "0", "--policy", "fixed", "--ignore-eos"]
    told = "foredraft: the text was cut after 128 new tokens, the default; --max-new-tokens gives more"
    for options in ([], ["--json"], ["--n", "2"]):
        done = foredraft(*command, *options)
        assert (done.returncode, stderr_lines(done.stderr)) == (0, [told])
        assert "cut" not in last_line(done.stdout)
    chosen = foredraft(*command, "--max-new-tokens", "128")
    assert (chosen.returncode, stderr_lines(chosen.stderr)) == (0, [])
    assert "finish_reason length (--max-new-tokens 128)" in last_line(chosen.stdout)
    stopped = foredraft(*command[:-1], "--max-new-tokens", "8", "--n", "2", "--regex", "[a-z]{2}")
    assert "finish_reason " in last_line(stopped.stdout) and "finish_reason length" not in last_line(
        stopped.stdout
    )


def test_the_last_line_has_every_figure_of_a_comparison(pair: list[str]) -> None:
    # The temperature defaults to 0 under --compare.
    done = foredraft(*pair, "x", "--compare", "--policy", "fixed", "--max-new-tokens", "4")
    assert re.fullmatch(
        f"4 tokens in {FIGURE} s: {FIGURE} tokens/s, {RATES}, median speed-up over plain decoding {FIGURE} x"
        rf" \(spread {FIGURE}-{FIGURE} over 5 alternations; outputs identical: yes\)",
        last_line(done.stdout),
    )
    assert done.stdout.count("tokens/s") == 1
    sampled = foredraft(*pair, "x", "--compare", "--temperature", "1", "--max-new-tokens", "4")
    assert "; outputs not comparable token by token)" in last_line(sampled.stdout)


def test_the_last_line_says_what_measuring_costs_took(
    pair: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path))
    assert main([*pair, "def accept", *GREEDY]) == 0
    told = last_line(capsys.readouterr().out)
    assert re.search(f", costs of this machine measured in {FIGURE} s while loading$", told), told


def test_the_last_line_and_the_json_document_say_why_nothing_was_drafted(
    pair: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    one_token = [*pair, "def accept", "--max-new-tokens", "1", "--policy", "fixed"]
    reason = "the drafter had nothing to propose"
    assert main(one_token) == 0
    told = last_line(capsys.readouterr().out)
    assert re.fullmatch(
        f"1 tokens in {FIGURE} s: {FIGURE} tokens/s, {LENGTH}, nothing drafted, no drafts because {reason}",
        told,
    )
    assert main([*one_token, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["outputs"][0]["why_plain"] == reason


def test_the_json_document_has_every_field(pair: list[str]) -> None:
    done = foredraft(*pair, "def accept", *GREEDY, "--json", "--n", "2", "--compare", "--policy", "fixed")
    assert (done.returncode, stderr_lines(done.stderr)) == (0, [])
    document = json.loads(last_line(done.stdout))
    assert set(document) == {"outputs", "usage", "stats", "lossless", "compare"}
    for output in document["outputs"]:
        assert set(output) == {"text", "token_ids", "finish_reason", "seed"}
        assert len(output["token_ids"]) == 12
        assert output["finish_reason"] == "length"
    assert document["outputs"][0]["text"] == document["outputs"][1]["text"]  # greedy
    assert document["usage"]["completion_tokens"] == 24
    assert document["usage"]["prompt_tokens"] > 1
    assert set(document["stats"]) == {
        "seconds",
        "tokens_per_second",
        "rounds",
        "drafted",
        "accepted",
        "acceptance_rate",
        "alpha",
        "mean_accepted_length",
        "acceptance_by_position",
        "siblings",
    }
    assert document["stats"]["drafted"] > 0
    assert document["lossless"] is True
    assert document["compare"]["identical"] is True
    assert document["compare"]["alternations"] == 5


def test_the_drafter_does_not_change_the_text(pair: list[str], models: Path) -> None:
    texts = {
        json.loads(foredraft(*arguments, "x = 1", *GREEDY, "--json").stdout)["outputs"][0]["text"]
        for arguments in (pair, [*pair[:3], "--drafter", "lookup"], pair[:3])
    }
    assert len(texts) == 1


def test_a_seed_reproduces_the_text_with_and_without_a_drafter(pair: list[str]) -> None:
    texts = [
        json.loads(foredraft(*arguments, "x", "--seed", "7", "--max-new-tokens", "8", "--json").stdout)
        for arguments in (pair, pair, pair[:3])
    ]
    first, again, plain = [text["outputs"][0]["token_ids"] for text in texts]
    assert first == again == plain
    assert texts[0]["outputs"][0]["seed"] == 7


def test_compare_alternates_plain_and_speculative_runs(
    pair: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from foredraft import LLM, Output, SamplingParams

    ran: list[tuple[str | None, bool]] = []
    generate = LLM.generate

    def recorded(self: LLM, prompts: str, params: SamplingParams, **options: Any) -> list[Output]:
        outputs = generate(self, prompts, params, **options)
        ran.append((params.drafter, sum(o.stats.drafted for o in outputs) > 0))
        return outputs

    monkeypatch.setattr(LLM, "generate", recorded)
    assert main([*pair, "x", "--compare", "--max-new-tokens", "8", "--policy", "fixed"]) == 0
    plain, fast = ("none", False), (None, True)
    assert ran == [plain, fast, *[plain, fast, fast, plain] * 2, plain, fast]


def test_a_prompt_from_stdin_loses_one_trailing_newline(pair: list[str]) -> None:
    given = foredraft(*pair, "def accept\n", *GREEDY, "--json")
    read = foredraft(*pair, "-", *GREEDY, "--json", input="def accept\n\n")
    assert json.loads(read.stdout)["outputs"] != []
    assert [o["token_ids"] for o in json.loads(read.stdout)["outputs"]] == [
        o["token_ids"] for o in json.loads(given.stdout)["outputs"]
    ]


def test_samples_are_numbered(pair: list[str]) -> None:
    done = foredraft(*pair, "x", "--n", "3", "--max-new-tokens", "4")
    assert done.returncode == 0
    assert [f"[{i}/3]" in done.stdout for i in (1, 2, 3)] == [True] * 3
    assert last_line(done.stdout).startswith("12 tokens in ")


def test_a_long_prompt_is_refused_with_both_lengths_or_truncated(pair: list[str]) -> None:
    long = ["one two three four five six seven", "--max-length", "16", "--max-new-tokens", "8"]
    refused = foredraft(*pair, *long)
    assert refused.returncode == 2
    assert " tokens and --max-new-tokens 8 exceed the 16 positions" in refused.stderr
    assert "--truncate left" in refused.stderr
    taken = foredraft(*pair, *long, "--truncate", "left", "--json")
    assert taken.returncode == 0
    assert json.loads(taken.stdout)["usage"] == {"prompt_tokens": 8, "completion_tokens": 8}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--bogus", "1"], "Unknown option: --bogus"),
        (["--top-k", "many"], "--top-k"),
        (["--drafter", "oracle"], f"for --drafter. Choose from: {quoted(DRAFTERS)}."),
        (["--policy", "oracle"], f"for --policy. Choose from: {quoted(POLICIES)}."),
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--top-p", "0"], "--top-p is 0.0"),
        (["--max-new-tokens", "-1"], "--max-new-tokens is -1"),
        (
            ["--compare", "--drafter", "lookup", "--max-new-tokens", "0"],
            "--compare has nothing to time with --max-new-tokens 0; generate more tokens",
        ),
        (["--seed", "-3"], "seed is -3"),
        (["--n", "0"], "n is 0"),
        (
            ["--drafter", "lookup", "--max-draft", "0"],
            "--max-draft is 0; give a whole number, 1 or more, or --drafter none",
        ),
        (["--drafter", "lookup", "--max-draft", "100000"], "--max-draft is 100000"),
        (["--max-batch", "0"], "--max-batch is 0"),
        (["--device", "abacus"], "--device is 'abacus'"),
        (["--device", "cpu:3"], "--device is 'cpu:3'"),
        (
            ["--draft", "nowhere", "--drafter", "lookup"],
            "--draft has no effect with drafter lookup; leave it out",
        ),
        (["--drafter", "draft-model"], "--drafter is 'draft-model', which needs a draft model; give --draft"),
        (["--drafter", "none", "--policy", "fixed"], "--policy has no effect with drafter none"),
        (["--policy-option", "threshold=1"], "--policy-option names 'threshold'"),
        (["--drafter", "lookup", "--policy-option", "threshold=1"], "--policy-option names 'threshold'"),
        (
            ["--policy", "target-confidence", "--drafter", "lookup", "--policy-option", "threshold=2"],
            "--policy-option has threshold '2'; give a number from 0 to 1",
        ),
        (
            ["--drafter", "lookup", "--policy", "target-confidence", "--policy-option", "by=mood"],
            "--policy-option has by 'mood'; give one of probability, entropy, margin",
        ),
        (
            ["--drafter", "lookup", "--policy-option", "threshold"],
            "--policy-option is 'threshold'; give NAME=VALUE",
        ),
        (["--drafter", "auto", "--policy", "fixed"], "cannot choose among drafters; give --policy auto"),
        (["--drafter", "none", "--max-draft", "5"], "--max-draft has no effect with drafter none"),
        (
            ["--drafter", "none", "--draft-sampling", "sampled"],
            "--draft-sampling has no effect with drafter none",
        ),
        (
            ["--drafter", "lookup", "--draft-sampling", "greedy"],
            "--draft-sampling has no effect with drafter lookup",
        ),
        (["--drafter", "none", "--compare"], "--compare needs a drafter"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_option_prints_one_line_and_exits_with_code_2(
    models: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    code = main(["generate", "x", "--model", str(models / "big"), *arguments])
    printed = capsys.readouterr()
    assert (code, printed.out) == (2, "")
    assert printed.err.startswith("foredraft: error: ")
    assert printed.err.count("\n") == 1
    assert message in printed.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "no-such-folder", "x"], "no-such-folder"),
        (["--model", "big"], "no prompt; give one, or - to read it from stdin"),
        (["--model", "big", ""], "the prompt is empty"),
        (["--model", "mute", "x"], "no tokenizer.json"),
        (["--model", "big", "x", "y"], "y"),
        (["--model", "big", "x", "-"], "no place for '-'"),
        (["--model", "-", "x"], "'-' is neither a folder"),
        (["--model", "big", "--draft", "-", "x"], "'-' is neither a folder"),
        (["--model", "big", "a\udcff"], "the prompt is not UTF-8 text (character 1)"),
        (["--model"], "--model"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_model_or_prompt_prints_one_line_and_exits_with_code_2(
    models: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(models)
    code = main(["generate", *arguments])
    printed = capsys.readouterr()
    assert (code, printed.out) == (2, "")
    assert printed.err.startswith("foredraft: error: ")
    assert printed.err.count("\n") == 1
    assert message in printed.err


def test_errors_of_a_process_go_to_stderr_only(models: Path) -> None:
    done = foredraft("generate", "x", "--model", str(models / "nowhere"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("foredraft: error: ")
    assert done.stderr.count("\n") == 1


def test_a_failed_generation_exits_with_code_1(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(models / "big", tmp_path / "broken")
    weights = load_file(models / "big/model.safetensors")
    weights["model.norm.weight"][:] = float("nan")
    save_file(weights, tmp_path / "broken/model.safetensors", metadata={"format": "pt"})
    assert main(["generate", "x", "--model", str(tmp_path / "broken"), "--json"]) == 1
    printed = capsys.readouterr()
    [line] = stderr_lines(printed.err)
    assert re.fullmatch(r"foredraft: error: .* not finite.*", line)
    [output] = json.loads(last_line(printed.out))["outputs"]
    assert output["finish_reason"] == "error"
    assert "not finite" in output["error"]


FAILING = """
import sys
from foredraft.cli import main
from foredraft.decode.engine import Engine
def failing(self):
    raise MemoryError("no room")
Engine.round = failing
sys.exit(main())
"""


def test_a_failed_forward_is_reported_without_a_traceback(pair: list[str]) -> None:
    done = foredraft(*pair, "x", *GREEDY, command=[sys.executable, "-c", FAILING])
    assert done.returncode == 1
    assert all(line.startswith("foredraft: ") for line in stderr_lines(done.stderr))
    assert last_line(done.stderr) == "foredraft: error: MemoryError: no room"


def test_stdin_that_is_not_utf8_is_refused(pair: list[str]) -> None:
    done = subprocess.run([*COMMAND, *pair, "-"], input=b"ab\xff", capture_output=True, env=environment())
    assert done.returncode == 2
    assert done.stderr == b"foredraft: error: stdin is not UTF-8 text (byte 2); convert it first\n"


def test_an_unknown_command_is_refused() -> None:
    done = foredraft("genrate")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("foredraft: error: ")


def test_a_closed_stdin_is_refused(pair: list[str]) -> None:
    arguments = shlex.join([*COMMAND, *pair, "-"])
    done = subprocess.run(f"{arguments} <&-", shell=True, capture_output=True, env=environment())
    assert done.returncode == 2
    assert done.stderr == (
        b"foredraft: error: stdin is closed; give the prompt as an argument, or open stdin\n"
    )


def test_closed_output_streams_are_no_error(pair: list[str]) -> None:
    arguments = shlex.join([*COMMAND, *pair, "x", *GREEDY])
    done = subprocess.run(f"{arguments} >&- 2>&-", shell=True, capture_output=True, env=environment())
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_stdin_is_not_read_without_a_dash(pair: list[str]) -> None:
    read, write = os.pipe()  # stays open and empty
    try:
        done = foredraft(*pair, "x", *GREEDY, stdin=read, timeout=60)
    finally:
        os.close(read), os.close(write)
    assert done.returncode == 0


WAITING = """
import os, sys
from foredraft.cli import main
from foredraft.decode.sequence import Sequence
extend = Sequence.extend
def extend_and_wait(self, *new):
    if self.params.max_new_tokens == 1900 and len(self.new_ids) > 40:
        os.read(0, 1)  # blocks until the parent closes stdin
    return extend(self, *new)
Sequence.extend = extend_and_wait
sys.exit(main())
"""


def test_ctrl_c_keeps_the_text_and_exits_with_code_130(pair: list[str]) -> None:
    arguments = [sys.executable, "-c", WAITING, *pair, "x"]
    arguments += ["--max-new-tokens", "1900", "--temperature", "0"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(arguments, **pipes, env=environment()) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)  # generation has started
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, stderr_lines(err.decode())) == (130, [])
    tokens, rest = last_line((first + out).decode(errors="replace")).split(" ", 1)
    assert 0 < int(tokens) < 1900
    assert rest.startswith("tokens in ")


SELF_INTERRUPTING = """
import os, signal, sys
from foredraft.cli import main
from foredraft.decode.sequence import Sequence
extend, sent = Sequence.extend, []
def extend_and_interrupt(self, *new):
    read = extend(self, *new)
    if self.params.max_new_tokens == 1900 and len(self.new_ids) > 40 and not sent:
        sent.append(os.kill(os.getpid(), signal.SIGINT))
    return read
Sequence.extend = extend_and_interrupt
sys.exit(main())
"""


@pytest.mark.parametrize("n", [1, 3])
def test_ctrl_c_keeps_the_document_whole(pair: list[str], n: int) -> None:
    options = ["--max-new-tokens", "1900", "--temperature", "0", "--json", "--n", str(n), "--max-batch", "2"]
    done = foredraft(*pair, "x", *options, "--compare", command=[sys.executable, "-c", SELF_INTERRUPTING])
    assert (done.returncode, stderr_lines(done.stderr)) == (130, [])
    document = json.loads(last_line(done.stdout))
    assert [output["finish_reason"] for output in document["outputs"]] == ["cancelled"] * n
    assert 0 < document["usage"]["completion_tokens"] < 1900 * n
    assert "compare" not in document


class TerminalOutput:
    """The output of a process whose stdout is a pseudo-terminal and whose stderr is a pipe."""

    def __init__(self, *arguments: str, **changes: str) -> None:
        shown, terminal = pty.openpty()
        env = environment(TERM="xterm", **changes)
        process = subprocess.Popen([*COMMAND, *arguments], stdout=terminal, stderr=subprocess.PIPE, env=env)
        os.close(terminal)
        chunks: list[bytes] = []
        while True:
            try:
                chunk = os.read(shown, 4096)
            except OSError:  # Linux raises EIO when the other end is closed
                break
            if not chunk:
                break
            chunks.append(chunk)
        _, err = process.communicate(timeout=60)
        os.close(shown)
        self.stdout, self.stderr, self.returncode = (
            b"".join(chunks).decode(),
            err.decode(),
            process.returncode,
        )


def test_a_terminal_shows_origins_in_colours(pair: list[str], models: Path) -> None:
    # The draft model is the target itself, so there are accepted tokens and bonus tokens.
    same_model = [*pair[:3], "--draft", str(models / "big")]
    seen = TerminalOutput(*same_model, "x", *GREEDY)
    assert seen.returncode == 0
    assert "\x1b[94m" in seen.stdout
    assert "\x1b[32m" in seen.stdout
    [legend] = stderr_lines(seen.stderr)
    assert "drafted, and accepted by the target" in legend
    assert "\x1b" not in legend  # stderr is not a terminal


def test_a_terminal_shows_the_prompt_dimmed_before_the_text(pair: list[str]) -> None:
    for prompt, shown in (("def accept", "def accept"), ("x" * 2001, "…" + "x" * 2000)):
        seen = TerminalOutput(*pair, prompt, *GREEDY[:3], "2")
        assert seen.stdout.startswith(f"\x1b[2m{shown}\x1b[0m\x1b["), seen.stdout
    several = TerminalOutput(*pair, "def accept", *GREEDY, "--n", "2", NO_COLOR="1")
    assert several.stdout.startswith("def accept\r\n[1/2]\r\n")


@pytest.mark.parametrize("options", [["--json"], ["--chat", "--json"], ["--chat"]], ids=" ".join)
def test_a_document_and_a_reply_do_not_show_the_prompt(
    pair: list[str], models: Path, options: list[str]
) -> None:
    (models / "big" / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    try:
        seen = TerminalOutput(*pair, "zwölf", *GREEDY, *options)
    finally:
        (models / "big" / "chat_template.jinja").unlink()
    assert seen.returncode == 0 and "zwölf" not in seen.stdout


@pytest.mark.parametrize("how", ["--no-color", "NO_COLOR"])
def test_colours_can_be_turned_off(pair: list[str], how: str) -> None:
    off = (
        TerminalOutput(*pair, "x", *GREEDY, "--no-color")
        if how == "--no-color"
        else TerminalOutput(*pair, "x", *GREEDY, NO_COLOR="1")
    )
    assert (off.returncode, stderr_lines(off.stderr)) == (0, [])
    assert "\x1b" not in off.stdout


def test_control_characters_are_made_visible(pair: list[str]) -> None:
    from foredraft.cli.render import visible

    assert "".join(map(visible, "a\x1b[2J\x07\x9b\n\tß🙂")) == "a␛[2J␇\N{REPLACEMENT CHARACTER}\n\tß🙂"


def test_a_new_drafter_and_policy_need_one_table_line_each(models: Path) -> None:
    """Help, choices and checks of the command line come from the tables of `kinds`."""
    script = """
import sys
from foredraft import kinds
from foredraft.decode.policy import Fixed
from foredraft.drafters.asset import Nothing
from foredraft.drafters.lookup import Lookup
class Oracle(Lookup):
    name = "oracle"
kinds.DRAFTERS["oracle"] = kinds.DrafterKind("the future drafts", lambda: Nothing(Oracle), lossless=False)
kinds.POLICIES["bold"] = kinds.PolicyKind("as long as can be", Fixed, max_draft=3)
from foredraft.cli import main
sys.exit(main())
"""
    command = [sys.executable, "-c", script]
    text = " ".join(foredraft("generate", "--help-all", command=command).stdout.replace("│", " ").split())
    assert "oracle: the future drafts (not lossless)" in text
    assert "bold: as long as can be" in text
    assert ", 3 with bold;" in text
    options = ["--drafter", "oracle", "--policy", "bold", "--json", *GREEDY]
    done = foredraft("generate", "--model", str(models / "big"), "a b a b a b", *options, command=command)
    document = json.loads(done.stdout)
    assert 0 < len(document["stats"]["acceptance_by_position"]) <= 3
    assert document["lossless"] is False


def test_a_reader_that_closes_the_pipe_is_no_error(pair: list[str]) -> None:
    with subprocess.Popen(
        [*COMMAND, *pair, "x", "--temperature", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert stderr_lines(process.stderr.read().decode()) == []
        assert process.wait(timeout=60) == 0
