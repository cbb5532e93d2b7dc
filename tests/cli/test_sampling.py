"""The options of a request on the command line, the log-probabilities of `--json`, and `--trace`."""

from __future__ import annotations

from pathlib import Path

import pytest

from foredraft.cli.commands import app
from foredraft.cli.words import STDIN, made_ready
from foredraft.model.tokenizer import Tokenizer
from tests.cli.conftest import Cli

GREEDY = ["--temperature", "0", "--max-new-tokens", "24"]


@pytest.fixture
def generate(models: Path) -> list[str]:
    return ["generate", "def accept(draft, p, q):", "--model", str(models / "big"), *GREEDY]


def test_stop_strings_end_the_text(generate: list[str], cli: Cli) -> None:
    text = cli.document(*generate)["outputs"][0]["text"]
    stop = next(text[i : i + 2] for i in range(5, len(text)) if "\ufffd" not in text[i : i + 2])
    before = text[: text.index(stop)]
    [found] = cli.document(*generate, "--stop", "no such text", "--stop", stop)["outputs"]
    assert (found["text"], found["finish_reason"], found["stopped_by"]) == (before, "stop", stop)
    [found] = cli.document(*generate, "--stop", stop, "--include-stop")["outputs"]
    assert found["text"] == before + stop
    shown = cli(*generate, "--stop", stop).out
    assert shown.startswith(before)
    assert len(shown.split(" tokens in ")[0]) < len(text) + 5, "text after the stop string is not shown"


SAMPLED = ["--seed", "1", "--temperature", "1.3", "--max-new-tokens", "24"]


@pytest.mark.parametrize(
    ("sampling", "options"),
    [
        (GREEDY, "--logit-bias={first}=-9 --repetition-penalty=3 --presence-penalty=2 --frequency-penalty=2"),
        (SAMPLED, "--top-k=2 --top-p=0.3 --min-p=0.5 --typical-p=0.2"),
    ],
    ids=["greedy", "sampled"],
)
def test_every_option_changes_ids(generate: list[str], sampling: list[str], options: str, cli: Cli) -> None:
    words = [*generate[:4], *sampling]
    base = cli.ids(*words)
    for option in options.format(first=base[0]).split():
        assert cli.ids(*words, option) != base, option


def test_log_probabilities_are_reported(generate: list[str], cli: Cli) -> None:
    found = cli.document(*generate, "--logprobs", "2", "--prompt-logprobs", "0", "--top-k", "5")
    [output] = found["outputs"]
    assert [score["token_id"] for score in output["logprobs"]] == output["token_ids"]
    assert all(len(score["top"]) == 2 for score in output["logprobs"])
    assert len(output["prompt_logprobs"]) == found["usage"]["prompt_tokens"]
    first, *others = output["prompt_logprobs"]
    assert first is None
    assert any(score["processed"] is None for score in others), "the greedy distribution has one token"


def test_a_trace_page_can_be_replaced(generate: list[str], models: Path, tmp_path: Path, cli: Cli) -> None:
    file = tmp_path / "trace.html"
    cli(*generate, "--draft", models / "small", "--trace", file)
    first = file.read_text(encoding="utf-8")
    cli(*generate, "--n", "2", "--trace", file)
    second = file.read_text(encoding="utf-8")
    assert first != second and all("drafter auto" in page for page in (first, second))
    assert [path.name for path in tmp_path.iterdir()] == ["trace.html"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--logit-bias 5", "--logit-bias is '5'; give ID=BIAS"),
        ("--logit-bias a=b", "give ID=BIAS"),
        ("--logit-bias 5=200", "numbers from -100 to 100"),
        ("--typical-p 0", "--typical-p is 0.0; give above 0"),
        ("--repetition-penalty -1", "--repetition-penalty is -1.0"),
        ("--presence-penalty 3", "--presence-penalty is 3.0; give from -2 to 2"),
        ("--stop ''", "none of them empty"),
        ("--logit-bias 5=1 --logit-bias 5=2", "--logit-bias is '5=1 5=2'; give each token once"),
        ("--logprobs 2", "--logprobs has no effect without --json; add --json, or leave it out"),
        ("--prompt-logprobs 2", "--prompt-logprobs has no effect without --json"),
        ("--json --logprobs -1", "--logprobs is -1"),
        ("--trace .", "--trace is '.'"),
    ],
)
def test_a_wrong_sampling_option_is_refused(generate: list[str], line: str, says: str, cli: Cli) -> None:
    assert says in cli.refused(f"generate {line}", *generate[1:])


def test_a_dash_as_the_value_of_an_option_is_not_stdin(generate: list[str], cli: Cli) -> None:
    words = ["generate", "-", "--json", "-", "--stop", "-", "--stop=-"]
    assert made_ready(words, app) == ["generate", STDIN, "--json", STDIN, "--stop=-", "--stop=-"]
    tokenizer = Tokenizer.from_folder(Path(generate[3]))
    assert tokenizer is not None
    dash = tokenizer.encode("-", add_special_tokens=False)[-1]
    for spelled in (["--stop", "-"], ["--stop=-"]):
        [found] = cli.document(*generate, *spelled, "--logit-bias", f"{dash}=100")["outputs"]
        assert (found["stopped_by"], found["text"]) == ("-", "")
