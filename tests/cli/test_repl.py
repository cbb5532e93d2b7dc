"""The commands of a conversation on a terminal, and Ctrl-C in one.

Planted defects that these tests found: an unknown command that is sent as a message, a first Ctrl-C at the prompt that
leaves, a warning that lasts beyond the next line, /set that keeps the default limit, /load that keeps the old system
message.
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from foredraft import LLM, SamplingParams
from foredraft.cli import main
from tests.cli.test_chat import GREEDY, chatty, converse, sent
from tests.support.checkpoints import save_checkpoint
from tests.support.terminal import CTRL_C, CTRL_D, TerminalSession

__all__ = ["chatty", "sent"]  # fixtures

GENERATE = import_module("foredraft.cli.generate")
COMMANDS = ("/help", "/clear", "/save FILE", "/load FILE", "/set OPTION VALUE", "/bye")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[SamplingParams]:
    """The parameters of each reply."""
    found: list[SamplingParams] = []
    stream = LLM.stream

    def recorded(self: LLM, prompt: Any, params: SamplingParams, **options: Any) -> Any:
        found.append(params)
        return stream(self, prompt, params, **options)

    monkeypatch.setattr(LLM, "stream", recorded)
    return found


def test_ctrl_c_at_the_prompt_says_how_to_leave_and_leaves_when_it_comes_again(chatty: list[str]) -> None:
    with TerminalSession(*chatty, *GREEDY, all_shown=True) as session:
        session.interrupt()
        session.wait_for("Ctrl-D or /bye ends the conversation; so does Ctrl-C again")
        session.type("Hello\n")
        session.wait_for("5 tokens in ")
        session.interrupt()  # not twice in a row
        session.wait_for("so does Ctrl-C again")
        session.interrupt()
        code, _ = session.wait()
    assert code == 130
    assert session.text_buffer.rstrip().endswith("foredraft: interrupted")
    assert "Traceback" not in session.text_buffer


def test_ctrl_c_while_a_reply_is_written_keeps_the_conversation(chatty: list[str], tmp_path: Path) -> None:
    file = tmp_path / "kept.json"
    with TerminalSession(*chatty, "--temperature", "0", "--ignore-eos", all_shown=True) as session:
        session.type("Hello\n")
        session.wait_for("accepted")  # the legend of the colours, before the first token
        session.press(CTRL_C)
        session.wait_for("finish_reason cancelled")
        session.type(f"/save {file}\n")
        session.type(CTRL_D)
        code, _ = session.wait()
    assert code == 0
    user, reply = json.loads(file.read_text())["messages"]
    assert user == {"role": "user", "content": "Hello"} and reply["role"] == "assistant"
    assert "Traceback" not in session.text_buffer


def test_commands_on_a_terminal(chatty: list[str], tmp_path: Path) -> None:
    with TerminalSession(*chatty, *GREEDY) as session:
        for line in ("/nosuch thing\n", "/set max-new-tokens 3\n", "Hi\n", "/bye\n"):
            session.type(line)
        code, told = session.wait()
    assert code == 0
    assert sum(line.startswith("/nosuch is no command; /help shows this") for line in told) == 1
    assert session.text_buffer.count("3 tokens in ") == 1


@pytest.mark.parametrize("line", ["/help", "/nosuch", "/etc/hosts holds names", "/", "/Help"])
def test_a_line_that_begins_with_a_slash_is_no_message(
    chatty: list[str],
    sent: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    line: str,
) -> None:
    assert converse(monkeypatch, [line, "/bye"], [*chatty, *GREEDY]) == 0
    assert sent == []
    greeted, told = capsys.readouterr().err.splitlines()
    assert all(command in told and command in greeted for command in COMMANDS)
    assert line == "/help" or told.startswith(f"{line.split()[0]} is no command; ")


def test_a_space_before_the_slash_makes_it_a_message(
    chatty: list[str], sent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert converse(monkeypatch, [" /etc is what?"], [*chatty, *GREEDY]) == 0
    assert sent == ["<s>u:/etc is what?</s>a:"]


def test_options_that_are_set_are_those_of_the_next_reply(
    chatty: list[str],
    asked: list[SamplingParams],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = ["a", "/set temperature 0.5", "/set top_k 7", "/set --stop xyz", "/set ignore-eos true", "b"]
    lines += ["/set seed 1", "/set max-new-tokens 4", "/set ignore-eos false", "c", "/set"]
    lines.insert(1, "/clear")
    assert converse(monkeypatch, list(lines), [*chatty, "--temperature", "0", "--max-length", "200"]) == 0
    first, second, third = asked
    assert (first.temperature, first.max_new_tokens) == (0, 200 - 7)  # tokens of <s>u:a</s>a:
    assert (second.temperature, second.top_k, second.stop, second.ignore_eos) == (0.5, 7, ("xyz",), True)
    assert (third.top_k, third.seed, third.max_new_tokens, third.ignore_eos) == (7, 1, 4, False)
    assert "temperature 0.5, top-k 7, " in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (
            "/set temprature 1",
            "'temprature' is no option of a reply; give one of temperature, top-k",
        ),
        ("/set temprature 1", "Did you mean 'temperature'?"),
        ("/set n 2", "'n' is no option of a reply"),
        ("/set temperature", "temperature has no value; give one: /set temperature VALUE"),
        ("/set temperature hot", "hot"),
        ("/set temperature -1", "--temperature is -1.0; give"),
        ("/save", "/save has no file; give one: /save FILE"),
        (
            "/save /nosuch/file",
            "/nosuch/file cannot be written (No such file or directory); give another file",
        ),
        ("/load /nosuch/file", "/nosuch/file cannot be read (No such file or directory); give another file"),
        ("/load BROKEN", "holds no conversation; give one that was saved"),
        ("/load OTHER", "holds no conversation; give one that was saved"),
    ],
)
def test_a_wrong_command_is_one_line_and_changes_nothing(
    chatty: list[str],
    asked: list[SamplingParams],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    line: str,
    told: str,
) -> None:
    (tmp_path / "broken").write_text("{")
    (tmp_path / "other").write_text('{"messages": [{"role": "robot", "content": "x"}]}')
    line = line.replace("BROKEN", str(tmp_path / "broken")).replace("OTHER", str(tmp_path / "other"))
    assert converse(monkeypatch, ["Hi", line, "Hi"], [*chatty, *GREEDY, "--seed", "1"]) == 0
    assert asked[0] == asked[1]
    [error] = [each for each in capsys.readouterr().err.splitlines() if "foredraft: " in each]
    assert error.startswith("foredraft: error: ") and told in error


def test_a_saved_conversation_goes_on_where_it_was(
    chatty: list[str], sent: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "kept.json"
    arguments = [*chatty, *GREEDY]
    assert converse(monkeypatch, ["Hi", f"/save {file}", "So?"], [*arguments, "--system", "Be brief"]) == 0
    roles = [message["role"] for message in json.loads(file.read_text())["messages"]]
    assert roles == ["system", "user", "assistant"]
    other = [*arguments, "--system", "Be long"]
    assert converse(monkeypatch, ["No", f"/load {file}", "So?", "/clear", "Anew"], other) == 0
    assert sent[1] == sent[3] and sent[2] == "<s>s:Be long</s><s>u:No</s>a:"
    assert sent[4] == "<s>s:Be brief</s><s>u:Anew</s>a:"


def test_a_reply_goes_on_to_its_end_or_to_that_of_the_context(
    chatty: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    greedy = [*chatty, "--temperature", "0"]
    assert converse(monkeypatch, ["Hi"], [*greedy, "--max-length", "300"]) == 0
    printed = capsys.readouterr()
    assert "finish_reason length (--max-length 300)" in printed.out
    told = "the reply was cut where the 300 tokens of the context end (--max-length); /clear begins anew"
    assert told in printed.err
    monkeypatch.setattr(GENERATE, "CONVERSATION", 256)
    assert main([*greedy, "Hi"]) == 0
    printed = capsys.readouterr()
    assert "finish_reason length (--max-length 256)" in printed.out
    assert printed.err.splitlines()[-1] == (
        "foredraft: the reply was cut where the 256 tokens of the context end (--max-length)"
    )


def test_a_full_conversation_says_how_to_go_on(
    chatty: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*chatty, "--temperature", "0", "--max-length", "64"]
    assert converse(monkeypatch, ["Hi", "So?", "/clear", "Anew"], arguments) == 0
    printed = capsys.readouterr()
    assert printed.out.count("finish_reason length (--max-length 64)") == 2
    [error] = [line for line in printed.err.splitlines() if line.startswith("foredraft: error: ")]
    assert error.endswith(
        "and the context has 64; shorten them (/clear in a conversation), give --truncate left, or raise --max-length"
    )
    assert converse(monkeypatch, ["Hi", "So?", "So?"], [*arguments, "--truncate", "left"]) == 0
    assert capsys.readouterr().out.count("finish_reason length (--max-length 64)") == 3


def test_a_reply_that_the_model_ends_is_not_called_cut(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_checkpoint(tmp_path / "ending", tokenizer=True, seed=1, eos_token_id=2)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    ends = ["--logit-bias", "2=100", "--temperature", "0", "--chat", "Hi"]
    assert main(["generate", "--model", str(folder), *ends]) == 0
    printed = capsys.readouterr()
    assert "finish_reason eos" in printed.out and "cut" not in printed.err
