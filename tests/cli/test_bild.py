"""The lossy rule on the command line: what names it, what it changes, and what refuses it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foredraft.cli import main
from tests.support.command import foredraft

BILD = [
    "--policy",
    "fallback",
    "--policy-option",
    "threshold=0.02",
    "--acceptance",
    "bild",
]  # as unsure as they are
FREE = ["--policy", "fixed", "--acceptance", "bild", "--rollback", "inf"]  # all that is drafted stands
GREEDY = ["--temperature", "0", "--max-new-tokens", "24", "--ignore-eos"]


@pytest.fixture(scope="module")
def pair(models: Path) -> list[str]:
    return ["--model", str(models / "big"), "--draft", str(models / "small"), "--device", "cpu"]


def document(pair: list[str], capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["generate", *pair, "def accept", *GREEDY, "--json", *words]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_help_says_that_it_is_not_lossless() -> None:
    told = " ".join(foredraft("generate", "--help").stdout.replace("│", " ").split())
    assert "bild: keeps drafted tokens unless they surprise the target (not lossless)" in told
    assert "coupled: same seed, same text, whatever the drafter;" in told


def test_the_document_says_so_whatever_came_of_it(
    pair: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """With an endless bound everything that is drafted stands, and with none the text is plain decoding's."""
    plain = document(pair[:2], capsys)
    free = document(pair, capsys, *FREE)
    bound = document(pair, capsys, *BILD, "--rollback", "0")
    assert [told["lossless"] for told in (plain, free, bound)] == [True, False, False]
    assert [told.get("deterministic") for told in (plain, free, bound)] == [None, False, False]
    texts = [told["outputs"][0]["token_ids"] for told in (plain, free, bound)]
    assert texts[0] == texts[2] != texts[1] and bound["stats"]["drafted"] > 0
    assert free["stats"]["acceptance_rate"] == 1


def test_the_strict_mode_is_plain_decoding(pair: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    plain = document(pair[:2], capsys)
    strict = document(pair, capsys, *BILD[:4])
    assert strict["stats"]["drafted"] > 0
    assert strict["lossless"] is True
    assert strict["outputs"] == [
        output | {"seed": strict["outputs"][0]["seed"]} for output in plain["outputs"]
    ]


def test_samples_log_probabilities_and_stop_strings(
    pair: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A token that stands though the target, at temperature 0, would not have said it: its law gives it none."""
    told = document(pair, capsys, *FREE, "--n", "2", "--logprobs", "1")
    assert not told["lossless"] and len(told["outputs"]) == 2
    scores = told["outputs"][0]["logprobs"]
    assert [score["token_id"] for score in scores] == told["outputs"][0]["token_ids"]
    assert {score["processed"] for score in scores} == {None, 0.0}
    assert all(score["logprob"] is not None for score in scores)
    stop = told["outputs"][0]["text"][4:6]
    ended = document(pair, capsys, *FREE, "--stop", stop)["outputs"][0]
    assert ended["finish_reason"] == "stop" and told["outputs"][0]["text"].startswith(ended["text"] + stop)


def test_a_seed_gives_the_text_again(pair: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    words = [*pair, "x", *BILD, "--rollback", "7", "--seed", "4", "--max-new-tokens", "24"]
    texts = []
    for _ in range(2):
        assert main(["generate", *words, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["stats"]["accepted"] > 0
        texts.append(told["outputs"][0]["token_ids"])
    assert texts[0] == texts[1]


def test_the_last_line_and_the_trace_say_so(
    pair: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = [*pair, "def accept", *GREEDY, "--trace", str(tmp_path / "t.html")]
    assert main(["generate", *words, "--policy", "fixed", "--acceptance", "bild", "--compare"]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.endswith("NOT LOSSLESS: the text need not be the target's")
    page = (tmp_path / "t.html").read_text(encoding="utf-8")
    told = json.loads(page.split('id="data">')[1].split("</script>")[0])
    assert told["about"].endswith("acceptance bild, which is not lossless")
    [sample] = told["samples"]
    assert ["lossless", "no"] in sample["figures"]
    for one in sample["rounds"]:
        assert one["least"] == pytest.approx(0.0067, abs=1e-4)
        assert all(p > one["least"] for p in one["p"][: one["accepted"]]), "by the law that judged it"
        assert all(p < one["least"] for p in one["p"][one["accepted"] :][:1])
    assert main(["generate", *words]) == 0
    assert "LOSSLESS" not in capsys.readouterr().out
    page = (tmp_path / "t.html").read_text(encoding="utf-8")
    [sample] = json.loads(page.split('id="data">')[1].split("</script>")[0])["samples"]
    assert all(one["least"] is None for one in sample["rounds"])
    assert "lossless" not in dict(sample["figures"])


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (
            ["generate", "x", "--rollback", "3"],
            "--rollback is 3.0, which only the lossy rule has a use for; give",
        ),
        (
            ["generate", "x", *BILD, "--rollback", "nan"],
            "--rollback is nan; give 0 nats or more, or leave it out",
        ),
        (
            ["generate", "x", *BILD, "--rollback", "-1"],
            "--rollback is -1.0; give 0 nats or more, or leave it out",
        ),
        (
            ["generate", "x", "--acceptance", "coupled", "--rollback", "3"],
            "for; give --acceptance bild, too, or leave it out",
        ),
        (
            ["verify", "--acceptance", "bild"],
            "--acceptance bild is not lossless: there is nothing to compare",
        ),
        (["verify", "--rollback", "1"], "--rollback is for --acceptance bild alone, which is not lossless;"),
        (["bench", "--acceptance", "bild"], "--acceptance bild is not lossless: there is nothing to compare"),
        (["bench", "--rollback", "1"], "--rollback is for --acceptance bild alone"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_is_refused(
    pair: list[str], capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str
) -> None:
    assert main([*arguments, *pair]) == 2
    told = capsys.readouterr()
    [line] = told.err.splitlines()
    assert told.out == "" and complaint in line


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (
            ["--acceptance", "bild", "--drafter", "none"],
            "--acceptance bild has no use with drafter none; leave it out",
        ),
        (
            ["--policy", "fallback", "--drafter", "lookup"],
            "--policy fallback has no use with drafter lookup; give",
        ),
    ],
)
def test_what_has_no_use_without_a_draft_model(
    models: Path, capsys: pytest.CaptureFixture[str], words: list[str], complaint: str
) -> None:
    assert main(["generate", "x", "--model", str(models / "big"), *words]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert complaint in line


def test_what_lookup_guesses_is_judged_too(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", str(models / "big"), "--drafter", "lookup", *FREE]
    assert main(["generate", "a b a b a b", *words, *GREEDY, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["lossless"] is False
    assert told["stats"]["drafted"] == told["stats"]["accepted"] > 0
