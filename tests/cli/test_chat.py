"""`foredraft generate --chat`: one turn, and conversations on a terminal; `test_repl.py` has their commands.

The chat template of these tests repeats its messages, so the token ids that reach `LLM` show the conversation.
Planted defects that these tests found: a reply missing from the history, a system message lost by /clear, an
interrupted reply dropped, special tokens added to the template's, a refusal of the template that ends the
conversation.
"""

from __future__ import annotations

import json
import os
import signal
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from foredraft import LLM
from foredraft.cli import main
from tests.support.checkpoints import save_checkpoint
from tests.support.command import foredraft
from tests.support.loaded import engine_of
from tests.support.terminal import TerminalSession

GENERATE = import_module("foredraft.cli.generate")  # `foredraft.cli.generate` is the function
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
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The prompts that the model receives, with special tokens."""
    prompts: list[str] = []

    def record(name: str) -> None:
        method = getattr(LLM, name)

        def recorded(self: LLM, prompt: Any, *arguments: Any, **options: Any) -> Any:
            assert self.tokenizer is not None
            prompts.append(self.tokenizer.decode(prompt, skip_special=False))
            return method(self, prompt, *arguments, **options)

        monkeypatch.setattr(LLM, name, recorded)

    record("generate"), record("stream")
    return prompts


@pytest.mark.parametrize("options", [[], ["--json"], ["--n", "2"]], ids=" ".join)
def test_the_prompt_is_the_user_message(chatty: list[str], sent: list[str], options: list[str]) -> None:
    assert main([*chatty, "Hi", *GREEDY, *options]) == 0
    assert main([*chatty, "Hi", "--system", "Be brief", *GREEDY, *options]) == 0
    assert sent == ["<s>u:Hi</s>a:", "<s>s:Be brief</s><s>u:Hi</s>a:"]


def test_stdin_can_be_the_user_message(chatty: list[str]) -> None:
    given, read = (foredraft(*chatty, prompt, *GREEDY, "--json", input="Hi\n") for prompt in ("Hi", "-"))
    assert json.loads(read.stdout)["outputs"][0]["text"] == json.loads(given.stdout)["outputs"][0]["text"]


def test_a_conversation_on_a_terminal_survives_a_refused_message(chatty: list[str]) -> None:
    with TerminalSession(*chatty, *GREEDY) as session:
        for line in ("Hello\n", "\n", "refuse\n", "So?\n", "\x04"):
            session.type(line)
        code, errors = session.wait()
    assert code == 0
    assert session.text_buffer.count("5 tokens in ") == 2
    assert any(line.startswith("/help shows this, /clear forgets the messages") for line in errors)
    assert "foredraft: error: the chat template refuses the messages: No such words." in errors
    assert any("drafted, and accepted" in line for line in errors)  # the legend of the colours


def converse(monkeypatch: pytest.MonkeyPatch, lines: list[str | BaseException], arguments: list[str]) -> int:
    """Run a conversation in this process; `input` returns each line, or raises it if it is an exception."""
    remaining = iter(lines)

    def read_line(prompt: str) -> str:
        line = next(remaining, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", read_line)
    monkeypatch.setattr(GENERATE, "on_terminal", lambda: True)
    return main(arguments)


def test_every_turn_contains_the_earlier_ones_until_they_are_cleared(
    chatty: list[str], sent: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["Hi", "  ", "So?", "/clear", "Anew", "/bye", "never"]
    assert converse(monkeypatch, lines, [*chatty, "--system", "Be brief", *GREEDY, "--seed", "1"]) == 0
    system = "<s>s:Be brief</s>"
    first, second, third = sent
    assert first == f"{system}<s>u:Hi</s>a:"
    assert third == f"{system}<s>u:Anew</s>a:"
    shown = capsys.readouterr().out
    before, after = second.split("<s>a:")
    reply = after.removesuffix("</s><s>u:So?</s>a:")
    assert before == f"{system}<s>u:Hi</s>"
    assert reply and shown.startswith(reply)
    assert shown.count("5 tokens in ") == 3


def test_special_tokens_that_are_shown_are_not_added_to_the_conversation(
    chatty: list[str], sent: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ends = ["--show-special", "--logit-bias", "2=100", "--max-new-tokens", "2", "--temperature", "0"]
    assert converse(monkeypatch, ["Hi", "So?"], [*chatty, *ends]) == 0
    assert capsys.readouterr().out.count("</s>") == 4
    assert sent[1] == "<s>u:Hi</s><s>a:</s><s>u:So?</s>a:", "the template alone ends the reply"


def test_ctrl_c_ends_the_reply_and_keeps_its_text(
    chatty: list[str], sent: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from foredraft.cli.render import Painter

    print_legend, count = Painter.print_legend, iter(range(10**6))

    def interrupted(self: Painter, *arguments: Any) -> None:
        print_legend(self, *arguments)
        if next(count) == 3:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Painter, "print_legend", interrupted)
    arguments = [*chatty, "--temperature", "0", "--max-new-tokens", "500"]
    assert converse(monkeypatch, ["Hi", "So?"], [*arguments[:-1], "20"]) == 0
    assert len(sent) == 2
    shown = capsys.readouterr().out
    kept = sent[1].split("<s>a:")[1].removesuffix("</s><s>u:So?</s>a:")
    assert kept and shown.startswith(kept)
    assert int(shown.splitlines()[len(kept.splitlines()) or 1].split(" tokens in ")[0]) < 20


def test_a_failed_turn_is_not_added_to_the_conversation(
    chatty: list[str], sent: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["refuse", "long " * 40, UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), "a\udcff", "Hi"]
    assert converse(monkeypatch, lines, [*chatty, *GREEDY, "--max-length", "40"]) == 0
    assert sent[-1] == "<s>u:Hi</s>a:"
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


def test_the_cache_has_room_for_a_conversation(
    chatty: list[str], loaded: list[LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert converse(monkeypatch, [], chatty) == 0
    monkeypatch.setattr(GENERATE, "CONVERSATION", 512)
    assert converse(monkeypatch, [], chatty) == 0
    assert converse(monkeypatch, [], [*chatty, "--max-length", "64"]) == 0
    assert [llm.max_length for llm in loaded] == [2048, 512, 64]  # 2048 is the model's maximum
    assert {engine_of(llm).cache.rows for llm in loaded} == {1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x", "--system", "y"], "--system has no effect without --chat; add --chat, or leave it out"),
        (
            ["--chat"],
            "no prompt, and no terminal for a conversation; give a prompt, or - to read it from stdin",
        ),
        (
            ["--chat", "x", "--system", "a\udcff"],
            "the system message is not UTF-8 text (character 1); convert it first",
        ),
        (
            ["--chat", "x"],
            "--chat needs a chat template, but the model has none; leave it out, or give --model a model trained for",
        ),
        (
            ["--chat", "x", "--model", "MUTE"],
            "this model's folder has no tokenizer.json; give the folder of the model's tokenizer as --tokenizer",
        ),
        (["--chat", "refuse", "--model", "CHATTY"], "the chat template refuses the messages: No such words."),
        (["x", "--revision", "v1"], "--revision is 'v1', but no hub id is given that has it; leave it out"),
        (["x", "--draft-revision", "v1"], "--draft-revision is 'v1', but no hub id is given that has it"),
        (["x", "--model", "MUTE", "--revision", "v1"], "MUTE is a local folder, which has no revision 'v1'"),
        (["x", "--model", "o/n@v1", "--revision", "v2"], "o/n@v1 names another revision than 'v2'; give one"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_command_prints_one_line_and_exits_with_code_2(
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
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("foredraft: error: ") and printed.err.count("\n") == 1
    assert message.replace("MUTE", places["MUTE"]) in printed.err


@pytest.mark.parametrize(
    ("options", "name"), [(["--json"], "json"), (["--out", "o.json"], "out"), (["--n", "2"], "n")], ids=str
)
def test_options_of_a_single_text_are_refused_in_a_conversation(
    chatty: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    name: str,
) -> None:
    assert converse(monkeypatch, [], [*chatty, *options]) == 2
    assert (
        f"--{name} has no effect in a conversation; give a prompt, or leave it out" in capsys.readouterr().err
    )


@pytest.mark.parametrize("options", [["--json"], [], ["--n", "2"]], ids=" ".join)
def test_special_tokens_can_be_shown(
    chatty: list[str], capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    """The random model generates all of its vocabulary, special tokens included."""
    arguments = ["generate", "x", "--model", chatty[2], "--seed", "3", "--max-new-tokens", "400", *options]
    seen = []
    for show in ([], ["--show-special"]):
        assert main([*arguments, *show]) == 0
        seen.append(capsys.readouterr().out)
    plain, special = ([text.count(token) for token in ("<s>", "</s>", "<pad>")] for text in seen)
    assert plain == [0, 0, 0]
    assert min(special) > 0
