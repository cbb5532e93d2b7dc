"""The options of a request on the command line, the log-probabilities of `--json`, and `--trace`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foredraft.cli import main
from foredraft.cli.commands import app
from foredraft.cli.words import STDIN, made_ready
from foredraft.model.tokenizer import Tokenizer

GREEDY = ["--temperature", "0", "--max-new-tokens", "24"]


@pytest.fixture
def generate(models: Path) -> list[str]:
    return ["generate", "def accept(draft, p, q):", "--model", str(models / "big"), *GREEDY]


def document(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_stop_strings_end_the_text(generate: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    [whole] = document(capsys, generate)["outputs"]
    text = whole["text"]
    stop = next(text[i : i + 2] for i in range(5, len(text)) if "\ufffd" not in text[i : i + 2])
    [found] = document(capsys, [*generate, "--stop", "no such text", "--stop", stop])["outputs"]
    assert found["text"] == text[: text.index(stop)]
    assert (found["finish_reason"], found["stopped_by"]) == ("stop", stop)
    [found] = document(capsys, [*generate, "--stop", stop, "--include-stop"])["outputs"]
    assert found["text"] == text[: text.index(stop)] + stop
    main([*generate, "--stop", stop])
    shown = capsys.readouterr().out
    assert shown.startswith(text[: text.index(stop)])
    assert len(shown.split(" tokens in ")[0]) < len(text) + 5, "text after the stop string is not shown"


def test_every_sampling_option_changes_the_output(
    generate: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    base = document(capsys, generate)["outputs"][0]["token_ids"]
    first = base[0]
    for options in (
        ["--logit-bias", f"{first}=-100"],
        ["--repetition-penalty", "3"],
        ["--presence-penalty", "2"],
        ["--frequency-penalty", "-2"],
    ):
        ids = document(capsys, [*generate, *options])["outputs"][0]["token_ids"]
        assert ids != base, options
    sampled = [*generate[:4], "--seed", "1", "--temperature", "1.3", "--max-new-tokens", "24"]
    base = document(capsys, sampled)["outputs"][0]["token_ids"]
    for options in (["--top-k", "2"], ["--top-p", "0.3"], ["--min-p", "0.5"], ["--typical-p", "0.2"]):
        ids = document(capsys, [*sampled, *options])["outputs"][0]["token_ids"]
        assert ids != base, options


def test_log_probabilities_are_reported(generate: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*generate, "--logprobs", "2", "--prompt-logprobs", "0", "--top-k", "5"]
    found = document(capsys, arguments)
    [output] = found["outputs"]
    assert [score["token_id"] for score in output["logprobs"]] == output["token_ids"]
    assert all(len(score["top"]) == 2 for score in output["logprobs"])
    assert len(output["prompt_logprobs"]) == found["usage"]["prompt_tokens"]
    assert output["prompt_logprobs"][0] is None
    assert any(score["processed"] is None for score in output["prompt_logprobs"][1:]), (
        "the greedy distribution has one token"
    )


def test_the_models_defaults_apply_unless_an_option_is_given(
    generate: list[str], models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in (models / "big").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = {"do_sample": True, "temperature": 0.9, "top_k": 1, "max_new_tokens": 7}
    (folder / "generation_config.json").write_text(json.dumps(config))
    without_options = [*generate[:3], str(folder)]
    [found] = document(capsys, without_options)["outputs"]
    [greedy] = document(capsys, generate)["outputs"]
    assert found["token_ids"] == greedy["token_ids"][:7], "the file has top_k = 1 and 7 tokens"
    assert len(document(capsys, [*without_options, "--max-new-tokens", "9"])["outputs"][0]["token_ids"]) == 9


def test_a_trace_page_is_written_and_replaced(
    generate: list[str], models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "trace.html"
    draft = ["--draft", str(models / "small")]
    assert main([*generate, *draft, "--trace", str(file)]) == 0
    page = file.read_text(encoding="utf-8")
    assert "drafter auto" in page
    capsys.readouterr()
    document(capsys, [*generate, "--n", "2", "--trace", str(file)])
    assert "drafter auto" in file.read_text(encoding="utf-8"), "an older page is replaced"
    assert [path.name for path in tmp_path.iterdir()] == ["trace.html"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--logit-bias", "5"], "--logit-bias is '5'; give ID=BIAS"),
        (["--logit-bias", "a=b"], "give ID=BIAS"),
        (["--logit-bias", "5=200"], "numbers from -100 to 100"),
        (["--logit-bias", "99999=2"], "--logit-bias names token 99999"),
        (["--typical-p", "0"], "--typical-p is 0.0; give above 0"),
        (["--repetition-penalty", "-1"], "--repetition-penalty is -1.0"),
        (["--presence-penalty", "3"], "--presence-penalty is 3.0; give from -2 to 2"),
        (["--min-new-tokens", "30"], "--min-new-tokens is 30, but --max-new-tokens is 24"),
        (["--stop", ""], "none of them empty"),
        (["--logit-bias", "5=1", "--logit-bias", "5=2"], "--logit-bias is '5=1 5=2'; give each token once"),
        (["--logprobs", "2"], "--logprobs has no effect without --json; add --json, or leave it out"),
        (["--prompt-logprobs", "2"], "--prompt-logprobs has no effect without --json"),
        (["--json", "--logprobs", "-1"], "--logprobs is -1"),
        (["--trace", "no/such/folder.html"], "--trace is 'no/such/folder.html'; give a file in a folder"),
        (["--trace", "."], "--trace is '.'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_sampling_option_prints_one_line(
    generate: list[str], capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert main([*generate, *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    [line] = captured.err.splitlines()
    assert line.startswith("foredraft: error: ")
    assert message in line


def test_a_dash_as_the_value_of_an_option_is_not_stdin(
    generate: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", "-", "--json", "-", "--stop", "-", "--stop=-"]
    assert made_ready(words, app) == ["generate", STDIN, "--json", STDIN, "--stop=-", "--stop=-"]
    dash = tokenizer_of(generate).encode("-", add_special_tokens=False)[-1]
    for spelled in (["--stop", "-"], ["--stop=-"]):
        [found] = document(capsys, [*generate, *spelled, "--logit-bias", f"{dash}=100"])["outputs"]
        assert (found["stopped_by"], found["text"]) == ("-", "")


def tokenizer_of(generate: list[str]) -> Tokenizer:
    tokenizer = Tokenizer.from_folder(Path(generate[3]))
    assert tokenizer is not None
    return tokenizer
