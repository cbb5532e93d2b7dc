"""`foredraft generate --chat`: one turn, and conversations on a terminal.

What the model is told is read off a template that repeats its messages, through the ids that reach `LLM`. Seen
to fail on: a reply left out of the history, the system's message lost by /reset, a cut reply dropped, special
tokens added to the template's, a template's refusal that ends the conversation.
"""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from foredraft import LLM
from foredraft.cli import main
from tests.support.checkpoints import save_checkpoint
from tests.support.command import COMMAND, environment, foredraft

GENERATE = import_module("foredraft.cli.generate")  # the package has the function by that name
TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'refuse' %}{{ raise_exception('No such words.') }}{% endif %}"
    "{{ bos_token }}{{ m.role[0] }}:{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
GREEDY = ["--temperature", "0", "--max-new-tokens", "5"]


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = save_checkpoint(
        tmp_path_factory.mktemp("models") / "chatty", tokenizer=True, seed=1, eos_token_id=None
    )
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return ["generate", "--model", str(folder), "--chat"]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the model is asked to go on from, with its special tokens."""
    prompts: list[str] = []

    def noting(name: str) -> None:
        plain = getattr(LLM, name)

        def noted(self: LLM, prompt: Any, *arguments: Any, **options: Any) -> Any:
            assert self.tokenizer is not None
            prompts.append(self.tokenizer.decode(prompt, skip_special=False))
            return plain(self, prompt, *arguments, **options)

        monkeypatch.setattr(LLM, name, noted)

    noting("generate"), noting("stream")
    return prompts


@pytest.mark.parametrize("options", [[], ["--json"], ["--n", "2"]], ids=" ".join)
def test_a_prompt_is_the_users_turn(chatty: list[str], told: list[str], options: list[str]) -> None:
    assert main([*chatty, "Hi", *GREEDY, *options]) == 0
    assert main([*chatty, "Hi", "--system", "Be brief", *GREEDY, *options]) == 0
    assert told == ["<s>u:Hi</s>a:", "<s>s:Be brief</s><s>u:Hi</s>a:"]


def test_stdin_may_be_the_users_turn(chatty: list[str]) -> None:
    given, read = (foredraft(*chatty, prompt, *GREEDY, "--json", input="Hi\n") for prompt in ("Hi", "-"))
    assert json.loads(read.stdout)["outputs"][0]["text"] == json.loads(given.stdout)["outputs"][0]["text"]


class Person:
    """At a terminal: types lines, and reads what is shown."""

    def __init__(self, *arguments: str) -> None:
        self.shown, terminal = pty.openpty()
        self.process = subprocess.Popen(
            [*COMMAND, *arguments],
            stdin=terminal,
            stdout=terminal,
            stderr=subprocess.PIPE,
            env=environment(TERM="xterm", INPUTRC="/dev/null"),
        )
        os.close(terminal)
        self.text_buffer, self.read = "", 0

    def __enter__(self) -> Person:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()
        os.close(self.shown)

    def wait_for(self, text: str) -> None:
        """Read on until `text` is shown, once more than before."""
        while text not in self.text_buffer[self.read :]:
            ready, _, _ = select.select([self.shown], [], [], 60)
            assert ready, f"no {text!r} in {self.text_buffer!r}"
            try:
                self.text_buffer += os.read(self.shown, 4096).decode(errors="replace")
            except OSError:  # Linux's way to say that the other end is closed
                raise AssertionError(f"it ended without {text!r}: {self.text_buffer!r}") from None
        self.read = self.text_buffer.index(text, self.read) + len(text)

    def types(self, line: str) -> None:
        self.wait_for("> ")
        os.write(self.shown, line.encode())

    def leaves(self) -> tuple[int, list[str]]:
        """The exit code and the lines on stderr."""
        _, err = self.process.communicate(timeout=60)
        return self.process.returncode, err.decode().splitlines()


def test_a_conversation_on_a_terminal(chatty: list[str]) -> None:
    with Person(*chatty, *GREEDY) as person:
        for line in ("Hello\n", "\n", "refuse\n", "So?\n", "\x04"):
            person.types(line)
        code, errors = person.leaves()
    assert code == 0
    assert person.text_buffer.count("5 tokens in ") == 2
    assert "/reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C ends a reply" in errors
    assert "foredraft: error: the chat template refuses the messages: No such words." in errors
    assert any("drafted, and accepted" in line for line in errors)  # in colours, as ever


def converse(monkeypatch: pytest.MonkeyPatch, lines: list[str | BaseException], arguments: list[str]) -> int:
    """The same in this process; whoever types gives lines, or what `input` raises instead."""
    waiting = iter(lines)

    def typed(prompt: str) -> str:
        line = next(waiting, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", typed)
    monkeypatch.setattr(GENERATE, "on_terminal", lambda: True)
    return main(arguments)


def test_turns_add_up(
    chatty: list[str], told: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["Hi", "  ", "So?", "/reset", "Anew", "/exit", "never"]
    assert converse(monkeypatch, lines, [*chatty, "--system", "Be brief", *GREEDY, "--seed", "1"]) == 0
    system = "<s>s:Be brief</s>"
    first, second, third = told
    assert first == f"{system}<s>u:Hi</s>a:"
    assert third == f"{system}<s>u:Anew</s>a:"
    shown = capsys.readouterr().out
    before, after = second.split("<s>a:")
    said = after.removesuffix("</s><s>u:So?</s>a:")
    assert before == f"{system}<s>u:Hi</s>"
    assert said and shown.startswith(said)
    assert shown.count("5 tokens in ") == 3


def test_a_shown_end_token_is_no_part_of_the_conversation(
    chatty: list[str], told: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ends = ["--show-special", "--logit-bias", "2=100", "--max-new-tokens", "2", "--temperature", "0"]
    assert converse(monkeypatch, ["Hi", "So?"], [*chatty, *ends]) == 0
    assert capsys.readouterr().out.count("</s>") == 4
    assert told[1] == "<s>u:Hi</s><s>a:</s><s>u:So?</s>a:", "the template ends the reply, once"


def test_ctrl_c_ends_the_reply_and_keeps_it(
    chatty: list[str], told: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from foredraft.cli.render import Painter

    explain, count = Painter.explain, iter(range(10**6))

    def painted(self: Painter, *arguments: Any) -> None:
        explain(self, *arguments)
        if next(count) == 3:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Painter, "explain", painted)
    arguments = [*chatty, "--temperature", "0", "--max-new-tokens", "500"]
    assert converse(monkeypatch, ["Hi", "So?"], [*arguments[:-1], "20"]) == 0
    assert len(told) == 2
    shown = capsys.readouterr().out
    kept = told[1].split("<s>a:")[1].removesuffix("</s><s>u:So?</s>a:")
    assert kept and shown.startswith(kept)
    assert int(shown.splitlines()[len(kept.splitlines()) or 1].split(" tokens in ")[0]) < 20


def test_ctrl_c_at_the_prompt_ends_the_conversation(
    chatty: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert converse(monkeypatch, [KeyboardInterrupt()], chatty) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "foredraft: interrupted"


def test_a_turn_that_fails_leaves_no_trace(
    chatty: list[str], told: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["refuse", "long " * 40, UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), "a\udcff", "Hi"]
    assert converse(monkeypatch, lines, [*chatty, *GREEDY, "--max-length", "40"]) == 0
    assert told[-1] == "<s>u:Hi</s>a:"
    errors = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    for line, text in zip(
        errors,
        [
            "No such words.",
            "exceed the 40 positions there is room for",
            "not UTF-8 text",
            "not valid Unicode",
        ],
        strict=True,
    ):
        assert line.startswith("foredraft: error: ") and text in line
    assert "--max-new-tokens 5" in errors[1]


def test_room_for_a_conversation(
    chatty: list[str], loaded: list[LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert converse(monkeypatch, [], chatty) == 0
    monkeypatch.setattr(GENERATE, "CONVERSATION", 512)
    assert converse(monkeypatch, [], chatty) == 0
    assert converse(monkeypatch, [], [*chatty, "--max-length", "64"]) == 0
    assert [llm.max_length for llm in loaded] == [2048, 512, 64]  # the model has 2048
    assert {llm.engine.cache.rows for llm in loaded} == {1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x", "--system", "y"], "--system has no use without --chat; add --chat, or leave it out"),
        (["--chat"], "no prompt, and no terminal to keep a conversation on; give a prompt, or - to read it"),
        (["--chat", "x", "--system", "a\udcff"], "the system's message is not UTF-8 text (character 1)"),
        (
            ["--chat", "x"],
            "--chat needs a chat template, but the model has none; leave it out, or give --model",
        ),
        (["--chat", "x", "--model", "MUTE"], "--chat needs a tokenizer, but the model's folder has no"),
        (["--chat", "refuse", "--model", "CHATTY"], "the chat template refuses the messages: No such words."),
        (["x", "--revision", "v1"], "--revision is 'v1', but no hub id is given that has it; leave it out"),
        (["x", "--draft-revision", "v1"], "--draft-revision is 'v1', but no hub id is given that has it"),
        (["x", "--model", "MUTE", "--revision", "v1"], "MUTE is a local folder, which has no revision 'v1'"),
        (["x", "--model", "o/n@v1", "--revision", "v2"], "o/n@v1 names another revision than 'v2'; give one"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_one_line(
    models: Path,
    chatty: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(GENERATE, "on_terminal", lambda: False)
    places = {"MUTE": str(models / "mute"), "CHATTY": chatty[2]}
    assert main(["generate", *(places.get(word, word) for word in arguments)]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("foredraft: error: ") and told.err.count("\n") == 1
    assert message.replace("MUTE", places["MUTE"]) in told.err


@pytest.mark.parametrize(("options", "name"), [(["--json"], "json"), (["--n", "2"], "n")], ids=str)
def test_what_has_no_use_in_a_conversation(
    chatty: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    name: str,
) -> None:
    assert converse(monkeypatch, [], [*chatty, *options]) == 2
    assert f"--{name} has no use in a conversation; give a prompt, or leave it out" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--json"], [], ["--n", "2"]], ids=" ".join)
def test_special_tokens_can_be_shown(
    chatty: list[str], capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    """The random model says all of its vocabulary, the tokens that are left out of text among it."""
    arguments = ["generate", "x", "--model", chatty[2], "--seed", "3", "--max-new-tokens", "400", *options]
    seen = []
    for show in ([], ["--show-special"]):
        assert main([*arguments, *show]) == 0
        seen.append(capsys.readouterr().out)
    plain, special = ([text.count(token) for token in ("<s>", "</s>", "<pad>")] for text in seen)
    assert plain == [0, 0, 0]
    assert min(special) > 0
