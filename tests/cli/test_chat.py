"""`foredraft generate --chat`: one turn, conversations on a terminal, and their commands.

The chat template repeats its messages, so that the token ids that reach `LLM` show the conversation.
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from foredraft import LLM, SamplingParams
from foredraft.cli.render import Painter
from tests.cli.conftest import Cli
from tests.support.checkpoints import save_checkpoint
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
    folder = save_checkpoint(tmp_path_factory.mktemp("models") / "chatty", tokenizer=True, eos_token_id=None)
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
def test_the_prompt_is_the_user_message(
    chatty: list[str], sent: list[str], options: list[str], monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    cli(*chatty, "Hi", *GREEDY, *options)
    cli(*chatty, "Hi", "--system", "Be brief", *GREEDY, *options)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"Ho\n"), isatty=lambda: False))
    cli(*chatty, "-", *GREEDY, *options)
    assert sent == ["<s>u:Hi</s>a:", "<s>s:Be brief</s><s>u:Hi</s>a:", "<s>u:Ho</s>a:"]


Converse = Callable[..., Any]


@pytest.fixture
def converse(chatty: list[str], monkeypatch: pytest.MonkeyPatch, cli: Cli) -> Converse:
    """Run a conversation in this process; `input` returns each line, or raises it if it is an exception."""

    def run(lines: list[str | BaseException], *options: object) -> Any:
        remaining = iter(lines)

        def read_line(prompt: str) -> str:
            line = next(remaining, EOFError())
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr("builtins.input", read_line)
        monkeypatch.setattr(GENERATE, "on_terminal", lambda: True)
        return cli(*chatty, *options)

    return run


def test_every_turn_has_the_earlier_ones_until_they_are_cleared(converse: Converse, sent: list[str]) -> None:
    lines = ["Hi", "  ", "So?", "/clear", "Anew", "/bye", "never"]
    shown = converse(lines, "--system", "Be brief", *GREEDY, "--seed", "1").out
    system = "<s>s:Be brief</s>"
    first, second, third = sent
    assert first == f"{system}<s>u:Hi</s>a:"
    assert third == f"{system}<s>u:Anew</s>a:"
    before, after = second.split("<s>a:")
    reply = after.removesuffix("</s><s>u:So?</s>a:")
    assert before == f"{system}<s>u:Hi</s>"
    assert reply and shown.startswith(reply)
    assert shown.count("5 tokens in ") == 3


def test_shown_special_tokens_are_not_added_to_the_conversation(converse: Converse, sent: list[str]) -> None:
    ends = "--show-special --logit-bias 2=100 --ignore-eos --max-new-tokens 2 --temperature 0"
    assert converse(["Hi", "So?"], *ends.split()).out.count("</s>") == 4
    assert sent[1] == "<s>u:Hi</s><s>a:</s><s>u:So?</s>a:", "the template alone ends the reply"


def test_ctrl_c_keeps_the_text(converse: Converse, sent: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    print_legend, count = Painter.print_legend, iter(range(10**6))

    def interrupted(self: Painter, *arguments: Any) -> None:
        print_legend(self, *arguments)
        if next(count) == 3:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Painter, "print_legend", interrupted)
    shown = converse(["Hi", "So?"], "--temperature", "0", "--max-new-tokens", "20").out
    assert len(sent) == 2
    kept = sent[1].split("<s>a:")[1].removesuffix("</s><s>u:So?</s>a:")
    assert kept and shown.startswith(kept)
    assert int(shown.splitlines()[len(kept.splitlines()) or 1].split(" tokens in ")[0]) < 20


def test_a_failed_turn_is_not_added_to_the_conversation(converse: Converse, sent: list[str]) -> None:
    lines = ["refuse", "long " * 40, UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), "a\udcff", "Hi"]
    err = converse(lines, *GREEDY, "--max-length", "40").err
    assert sent[-1] == "<s>u:Hi</s>a:"
    errors = [line for line in err.splitlines() if "error" in line]
    wanted = [
        "No such words.",
        "exceed the 40 positions there is room for",
        "not UTF-8 text",
        "not valid Unicode",
    ]
    for line, text in zip(errors, wanted, strict=True):
        assert line.startswith("foredraft: error: ") and text in line
    assert "--max-new-tokens 5" in errors[1]


def test_size_of_conversation(converse: Converse, loaded: list[LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    converse([])
    monkeypatch.setattr(GENERATE, "CONVERSATION", 512)
    converse([])
    converse([], "--max-length", "64")
    assert [llm.max_length for llm in loaded] == [2048, 512, 64]  # 2048 is the model's maximum
    assert {engine_of(llm).cache.rows for llm in loaded} == {1}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("x --system y", "--system has no effect without --chat; add --chat, or leave it out"),
        ("--chat", "no prompt, and no terminal for a conversation; give a prompt, or - to read it from"),
        ("--chat x --system a\udcff", "the system message is not UTF-8 text (character 1); convert it first"),
        ("--chat x", "--chat needs a chat template, but the model has none; leave it out, or give --model"),
        ("--chat refuse --model {chatty}", "the chat template refuses the messages: No such words."),
        ("x --revision v1", "--revision is 'v1', but no hub id is given that has it; leave it out"),
    ],
)
def test_a_wrong_command_is_refused(
    models: Path, chatty: list[str], monkeypatch: pytest.MonkeyPatch, line: str, says: str, cli: Cli
) -> None:
    monkeypatch.setattr(GENERATE, "on_terminal", lambda: False)
    places = {"mute": models / "mute", "chatty": chatty[2]}
    assert says.format(**places) in cli.refused(f"generate {line.format(**places)}")


@pytest.mark.parametrize(
    ("options", "name"), [(["--json"], "json"), (["--out", "x"], "out"), (["--n", "2"], "n")]
)
def test_options_of_a_single_text_are_refused_in_a_conversation(
    chatty: list[str], monkeypatch: pytest.MonkeyPatch, options: list[str], name: str, cli: Cli
) -> None:
    monkeypatch.setattr(GENERATE, "on_terminal", lambda: True)
    told = f"--{name} has no effect in a conversation; give a prompt, or leave it out"
    assert told in cli.refused(*chatty, *options)


@pytest.mark.parametrize("options", [["--json"], [], ["--n", "2"]], ids=" ".join)
def test_special_tokens_can_be_shown(chatty: list[str], options: list[str], cli: Cli) -> None:
    likely = [word for token in range(3) for word in ("--logit-bias", f"{token}=6")]
    command = ["generate", "x", *chatty[1:3], "--seed", "3", "--ignore-eos", "--max-new-tokens", "80"]
    command += [*likely, *options]
    seen = [cli(*command, *show).out for show in ([], ["--show-special"])]
    plain, special = ([text.count(token) for token in ("<s>", "</s>", "<pad>")] for text in seen)
    assert plain == [0, 0, 0]
    assert min(special) > 0


# --- commands of a conversation, and Ctrl-C in one ------------------------------------------------


COMMANDS = ("/help", "/clear", "/save FILE", "/load FILE", "/set OPTION VALUE", "/bye")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[SamplingParams]:
    found: list[SamplingParams] = []
    stream = LLM.stream

    def recorded(self: LLM, prompt: Any, params: SamplingParams, **options: Any) -> Any:
        found.append(params)
        return stream(self, prompt, params, **options)

    monkeypatch.setattr(LLM, "stream", recorded)
    return found


@pytest.mark.heavy
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


@pytest.mark.parametrize("line", ["/help", "/nosuch", "/etc/hosts holds names", "/", "/Help"])
def test_a_line_that_begins_by_a_slash_is_no_message(converse: Converse, sent: list[str], line: str) -> None:
    err = converse([line, " /etc is what?", "/bye", "no message"], *GREEDY).err
    assert sent == ["<s>u:/etc is what?</s>a:"]
    greeted, told = err.splitlines()
    assert all(command in told and command in greeted for command in COMMANDS)
    assert line == "/help" or told.startswith(f"{line.split()[0]} is no command; ")


def test_options_that_are_set_change_the_next_reply(converse: Converse, asked: list[SamplingParams]) -> None:
    lines = [
        "a",
        "/clear",
        "/set temperature 0.5",
        "/set top_k 7",
        "/set --stop xyz",
        "/set ignore-eos true",
        "b",
    ]
    lines += ["/set seed 1", "/set max-new-tokens 4", "/set ignore-eos false", "c", "/set"]
    err = converse(lines, "--temperature", "0", "--max-length", "200").err
    first, second, third = asked
    assert (first.temperature, first.max_new_tokens) == (0, 200 - 7)  # tokens of <s>u:a</s>a:
    assert (second.temperature, second.top_k, second.stop, second.ignore_eos) == (0.5, 7, ("xyz",), True)
    assert (third.top_k, third.seed, third.max_new_tokens, third.ignore_eos) == (7, 1, 4, False)
    assert "temperature 0.5, top-k 7, " in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("/set temprature 1", "'temprature' is no option of a reply; give one of temperature, top-k"),
        ("/set temprature 1", "Did you mean 'temperature'?"),
        ("/set n 2", "'n' is no option of a reply"),
        ("/set temperature", "temperature has no value; give one: /set temperature VALUE"),
        ("/set temperature hot", "hot"),
        ("/set temperature -1", "--temperature is -1.0; give"),
        ("/save", "/save has no file; give one: /save FILE"),
        ("/save /no/file", "/no/file cannot be written (No such file or directory); give another file"),
        ("/load /no/file", "/no/file cannot be read (No such file or directory); give another file"),
        ("/load {folder}/broken", "holds no conversation; give one that was saved"),
        ("/load {folder}/other", "holds no conversation; give one that was saved"),
    ],
)
def test_a_wrong_command_is_one_line_and_changes_nothing(
    converse: Converse, asked: list[SamplingParams], tmp_path: Path, line: str, told: str
) -> None:
    (tmp_path / "broken").write_text("{")
    (tmp_path / "other").write_text('{"messages": [{"role": "robot", "content": "x"}]}')
    err = converse(["Hi", line.format(folder=tmp_path), "Hi"], *GREEDY, "--seed", "1").err
    assert asked[0] == asked[1]
    [error] = [each for each in err.splitlines() if "foredraft: " in each]
    assert error.startswith("foredraft: error: ") and told in error


def test_a_saved_conversation_goes_on_as_it_was(converse: Converse, sent: list[str], tmp_path: Path) -> None:
    file = tmp_path / "kept.json"
    converse(["Hi", f"/save {file}", "So?"], *GREEDY, "--system", "Be brief")
    roles = [message["role"] for message in json.loads(file.read_text())["messages"]]
    assert roles == ["system", "user", "assistant"]
    converse(["No", f"/load {file}", "So?", "/clear", "Anew"], *GREEDY, "--system", "Be long")
    assert sent[1] == sent[3] and sent[2] == "<s>s:Be long</s><s>u:No</s>a:"
    assert sent[4] == "<s>s:Be brief</s><s>u:Anew</s>a:"


def test_a_reply_goes_on_to_its_end_or_to_that_of_the_context(
    converse: Converse, chatty: list[str], monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    out, err = converse(["Hi"], "--temperature", "0", "--max-length", "300")
    assert "finish_reason length (--max-length 300)" in out
    told = "the reply was cut where the 300 tokens of the context end (--max-length); /clear begins anew"
    assert told in err
    monkeypatch.setattr(GENERATE, "CONVERSATION", 256)
    out, err = cli(*chatty, "Hi", "--temperature", "0")
    assert "finish_reason length (--max-length 256)" in out
    told = "foredraft: the reply was cut where the 256 tokens of the context end (--max-length)"
    assert err.splitlines()[-1] == told


def test_a_full_conversation_says_how_to_go_on(converse: Converse) -> None:
    short = ["--temperature", "0", "--max-length", "64"]
    out, err = converse(["Hi", "So?", "/clear", "Anew"], *short)
    assert out.count("finish_reason length (--max-length 64)") == 2
    [error] = [line for line in err.splitlines() if line.startswith("foredraft: error: ")]
    assert error.endswith(
        "and the context has 64; shorten them (/clear in a conversation), give --truncate left, or raise --max-length"
    )
    out, _ = converse(["Hi", "So?", "So?"], *short, "--truncate", "left")
    assert out.count("finish_reason length (--max-length 64)") == 3


def test_a_reply_that_the_model_ends_is_not_called_cut(tmp_path: Path, cli: Cli) -> None:
    folder = save_checkpoint(tmp_path / "ending", tokenizer=True, seed=1, eos_token_id=2)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    out, err = cli("generate Hi --chat --logit-bias 2=100 --temperature 0 --model", folder)
    assert "finish_reason eos" in out and "cut" not in err
