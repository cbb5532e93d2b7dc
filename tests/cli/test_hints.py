"""What a user of another program or a new user gets wrong, and the one line that says what to give instead.

Seen to fail on: each hint left out; a name of another program for an option that the command lacks; a prompt that
only resembles the path of a model taken for one.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from foredraft.cli import main
from foredraft.cli.commands import app
from foredraft.cli.foreign_options import NAMES

ARGUMENT = "the argument itself, without an option"


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the only line of a command that is refused."""
    assert main(words) == 2
    out, err = capsys.readouterr()
    [line] = err.splitlines()
    assert out == "" and line.startswith("foredraft: error: ")
    return line.removeprefix("foredraft: error: ")


@pytest.mark.parametrize(
    ("words", "here"),
    [
        ("generate --temp 0 x", "--temperature"),
        ("generate --temp=0 x", "--temperature"),
        ("generate --prompt x", ARGUMENT),
        ("generate -p x", ARGUMENT),
        ("generate -m x", "--model"),
        ("info -m x", "--model"),
        ("serve -c 512", "--max-length"),
        ("generate -n 4 x", "--max-new-tokens"),
        ("generate -c 512 x", "--max-length"),
        ("generate -ngl 99 x", "--device cuda"),
        ("train adapter -t 4", "--threads"),
    ],
)
def test_an_option_of_another_program_names_the_option_here(
    capsys: pytest.CaptureFixture[str], words: str, here: str
) -> None:
    option = next(word for word in words.split() if word.startswith("-"))
    assert refused(capsys, *words.split()) == f"Unknown option: {option}; here it is {here}"


def test_an_option_that_the_command_lacks_is_not_named(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ("info --temp 0", "info -c 512", "tune -p x", "generate --tempo 1 x"):
        assert "here it is" not in refused(capsys, *words.split())


def test_names_of_other_programs_are_no_options_here_and_their_counterparts_are() -> None:
    options = {
        name
        for command in ("generate", "serve")
        for argument in app[command].assemble_argument_collection()
        for name in argument.names
    }
    assert not options & NAMES.keys()
    assert {here.split()[0] for here in NAMES.values()} <= options


def test_a_model_in_the_place_of_the_prompt_is_refused(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a model.gguf"
    file.write_bytes(b"GGUF")
    for words, kind, option in (
        ([str(models / "big")], "the folder of a model", models / "big"),
        ([f"{models / 'big'}/"], "the folder of a model", f"{models / 'big'}/"),
        ([str(tmp_path), "--chat"], "the folder of a model", tmp_path),
        ([str(file)], "a GGUF file", f"'{file}'"),
    ):
        line = refused(capsys, "generate", *words)
        assert line.startswith(f"the prompt {words[0]!r} is {kind}; did you mean --model {option}? ")
        assert line.endswith("To continue it as text, give it on stdin, by -")


def test_beside_a_model_such_a_prompt_is_a_text_and_told_of(
    models: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(models)
    command = ["generate", "--model", "big", "--drafter", "none", "--max-new-tokens", "2"]
    assert main([*command, "small"]) == 0
    told = capsys.readouterr().err
    assert "foredraft: the prompt 'small' is the folder of a model; it is continued as text\n" in told


def test_a_prompt_that_is_the_path_of_no_model_is_a_text(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words").mkdir()
    (tmp_path / "big").write_text("big")
    command = ["generate", "--drafter", "none", "--max-new-tokens", "1"]
    for prompt in ("words", "big", "x.gguf", "a " * 300, "a\nb"):
        assert main([*command, prompt]) == 0
        assert "prompt" not in capsys.readouterr().err


@pytest.mark.parametrize("more", [[], ["--chat"]])
def test_a_folder_without_a_tokenizer_is_refused_before_its_weights_are_read(
    models: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    monkeypatch.setattr("foredraft.loading.make_runners", lambda *given: pytest.fail("weights are read"))
    line = refused(capsys, "generate", "--model", str(models / "mute"), "x", *more)
    assert line == (
        "this model's folder has no tokenizer.json; give the folder of the model's tokenizer as --tokenizer"
    )


@pytest.mark.parametrize("name", ["bf16", "bfloat16", "fp32", "torch.float32"])
def test_a_dtype_may_be_given_by_its_short_name(
    models: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert main(["info", str(models / "big"), "--dtype", name]) == 0
    assert {"b": "bfloat16;", "f": "float32;", "t": "float32;"}[name[0]] in capsys.readouterr().out
    line = refused(capsys, "generate", "--model", str(models / "big"), "--dtype", "fp8", "x")
    assert line == "--dtype is 'fp8'; give one of bfloat16, float16, float32"
