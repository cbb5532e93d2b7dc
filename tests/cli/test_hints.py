"""What a user of another program or a new user gets wrong, and the one line that says what to give instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from foredraft.cli.commands import app
from foredraft.cli.words import other_names
from tests.cli.conftest import Cli

ARGUMENT = "the argument itself, without an option"


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
def test_an_option_of_another_program_names_the_option_here(words: str, here: str, cli: Cli) -> None:
    option = next(word for word in words.split() if word.startswith("-"))
    assert cli.refused(words) == f"Unknown option: {option}; here it is {here}"


@pytest.mark.parametrize("words", ["info --temp 0", "info -c 512", "tune -p x", "generate --tempo 1 x"])
def test_an_option_that_the_command_lacks_is_not_named(words: str, cli: Cli) -> None:
    assert "here it is" not in cli.refused(words)


def test_names_of_other_programs_are_no_options_here_and_their_counterparts_are() -> None:
    options = {
        name
        for command in ("generate", "serve")
        for argument in app[command].assemble_argument_collection()
        for name in argument.names
    }
    assert not options & other_names().keys()
    assert {here.split()[0] for here in other_names().values()} <= options


def test_a_model_in_the_place_of_the_prompt_is_refused(models: Path, tmp_path: Path, cli: Cli) -> None:
    file = tmp_path / "a model.gguf"
    file.write_bytes(b"GGUF")
    for words, kind, option in (
        ([str(models / "big")], "the folder of a model", models / "big"),
        ([f"{models / 'big'}/"], "the folder of a model", f"{models / 'big'}/"),
        ([str(tmp_path), "--chat"], "the folder of a model", tmp_path),
        ([str(file)], "a GGUF file", f"'{file}'"),
    ):
        line = cli.refused("generate", *words)
        assert line.startswith(f"the prompt {words[0]!r} is {kind}; did you mean --model {option}? ")
        assert line.endswith("To continue it as text, give it on stdin, by -")


def test_beside_a_model_it_is_a_text(models: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    monkeypatch.chdir(models)
    told = cli("generate small --model big --drafter none --max-new-tokens 2").err
    assert "foredraft: the prompt 'small' is the folder of a model; it is continued as text\n" in told


@pytest.mark.parametrize("prompt", ["words", "big", "x.gguf", "a " * 300, "a\nb"])
def test_a_prompt_that_is_the_path_of_no_model_is_a_text(
    tmp_path: Path, prompt: str, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words").mkdir()
    (tmp_path / "big").write_text("big")
    assert "prompt" not in cli("generate --drafter none --max-new-tokens 1", prompt).err


@pytest.mark.parametrize("more", [[], ["--chat"]])
def test_a_folder_without_a_tokenizer_is_refused_before_its_weights_are_read(
    models: Path, monkeypatch: pytest.MonkeyPatch, more: list[str], cli: Cli
) -> None:
    monkeypatch.setattr("foredraft.loading.make_runners", lambda *given: pytest.fail("weights are read"))
    assert cli.refused("generate x --model", models / "mute", *more) == (
        "this model's folder has no tokenizer.json; give the folder of the model's tokenizer as --tokenizer"
    )
