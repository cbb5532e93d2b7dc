"""The lossy acceptance rule `bild` on the command line: its output is marked, and other commands refuse it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foredraft.cli import main
from foredraft.kinds import RULES
from tests.support.command import foredraft

# A threshold that the random draft model's low confidence reaches.
FALLBACK = ["--policy", "fallback", "--policy-option", "threshold=0.02"]
BILD = [*FALLBACK, "--acceptance", "bild"]
# Every drafted token is kept.
UNBOUNDED = ["--policy", "fixed", "--acceptance", "bild", "--rollback", "inf"]
GREEDY = ["--temperature", "0", "--max-new-tokens", "24", "--ignore-eos"]


@pytest.fixture(scope="module")
def pair(models: Path) -> list[str]:
    return ["--model", str(models / "big"), "--draft", str(models / "small"), "--device", "cpu"]


def document(pair: list[str], capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["generate", *pair, "def accept", *GREEDY, "--json", *words]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_help_marks_the_lossy_rule() -> None:
    text = " ".join(foredraft("generate", "--help-all").stdout.replace("│", " ").split())
    assert f"bild: {RULES['bild'].summary} (not lossless)" in text
    assert f"coupled: {RULES['coupled'].summary} •" in text


def test_the_document_says_that_the_rule_is_lossy(
    pair: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """An infinite bound keeps every drafted token; a bound of 0 gives plain decoding's text, and is still marked."""
    plain = document(pair[:2], capsys)
    unbounded = document(pair, capsys, *UNBOUNDED)
    bound = document(pair, capsys, *BILD, "--rollback", "0")
    documents = (plain, unbounded, bound)
    assert [found["lossless"] for found in documents] == [True, False, False]
    assert [found.get("deterministic") for found in documents] == [None, False, False]
    texts = [found["outputs"][0]["token_ids"] for found in documents]
    assert texts[0] == texts[2] != texts[1] and bound["stats"]["drafted"] > 0
    assert unbounded["stats"]["acceptance_rate"] == 1


def test_the_fallback_policy_alone_is_lossless(pair: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    plain = document(pair[:2], capsys)
    lossless = document(pair, capsys, *FALLBACK)
    assert lossless["stats"]["drafted"] > 0
    assert lossless["lossless"] is True
    assert lossless["outputs"] == [
        output | {"seed": lossless["outputs"][0]["seed"]} for output in plain["outputs"]
    ]


def test_lossy_outputs_have_samples_log_probabilities_and_stop_strings(
    pair: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """At temperature 0, a kept token that is not the target's argmax has probability 0 after the transforms."""
    found = document(pair, capsys, *UNBOUNDED, "--n", "2", "--logprobs", "1")
    assert not found["lossless"] and len(found["outputs"]) == 2
    scores = found["outputs"][0]["logprobs"]
    assert [score["token_id"] for score in scores] == found["outputs"][0]["token_ids"]
    assert {score["processed"] for score in scores} == {None, 0.0}
    assert all(score["logprob"] is not None for score in scores)
    stop = found["outputs"][0]["text"][4:6]
    ended = document(pair, capsys, *UNBOUNDED, "--stop", stop)["outputs"][0]
    assert ended["finish_reason"] == "stop" and found["outputs"][0]["text"].startswith(ended["text"] + stop)


def test_a_seed_reproduces_the_text(pair: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    words = [*pair, "x", *BILD, "--rollback", "7", "--seed", "4", "--max-new-tokens", "24"]
    texts = []
    for _ in range(2):
        assert main(["generate", *words, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["stats"]["accepted"] > 0
        texts.append(found["outputs"][0]["token_ids"])
    assert texts[0] == texts[1]


def test_the_last_line_and_the_trace_mark_lossy_text(
    pair: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = [*pair, "def accept", *GREEDY, "--trace", str(tmp_path / "t.html")]
    assert main(["generate", *words, "--policy", "fixed", "--acceptance", "bild", "--compare"]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.endswith("NOT LOSSLESS: the text need not be the target's")
    page = (tmp_path / "t.html").read_text(encoding="utf-8")
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    assert data["about"].endswith("acceptance bild, which is not lossless")
    [sample] = data["samples"]
    assert ["lossless", "no"] in sample["figures"]
    for one in sample["rounds"]:
        assert one["least"] == pytest.approx(0.0067, abs=1e-4)
        assert all(p > one["least"] for p in one["p"][: one["accepted"]])
        assert all(p < one["least"] for p in one["p"][one["accepted"] :][:1])
    assert main(["generate", *words]) == 0
    assert "LOSSLESS" not in capsys.readouterr().out
    page = (tmp_path / "t.html").read_text(encoding="utf-8")
    [sample] = json.loads(page.split('id="data">')[1].split("</script>")[0])["samples"]
    assert all(one["least"] is None for one in sample["rounds"])
    assert "lossless" not in dict(sample["figures"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["generate", "x", "--rollback", "3"],
            "--rollback is 3.0",
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
            "give --acceptance bild",
        ),
        (
            ["verify", "--acceptance", "bild"],
            "--acceptance is 'bild', which is not lossless, so its output cannot be compared with plain decoding's;",
        ),
        (
            ["verify", "--rollback", "1"],
            "--rollback applies only to --acceptance bild, which is not lossless;",
        ),
        (["bench", "--acceptance", "bild"], "--acceptance is 'bild', which is not lossless"),
        (["bench", "--rollback", "1"], "--rollback applies only to --acceptance bild"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_uses_are_refused_in_one_line(
    pair: list[str], capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main([*arguments, *pair]) == 2
    printed = capsys.readouterr()
    [line] = printed.err.splitlines()
    assert printed.out == "" and message in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--acceptance", "bild", "--drafter", "none"],
            "--acceptance is 'bild', which has no effect with drafter none; leave it out",
        ),
        (
            ["--policy", "fallback", "--drafter", "lookup"],
            "--policy is 'fallback', which needs draft probabilities, but drafter lookup has none",
        ),
    ],
)
def test_options_that_need_a_draft_model_are_refused_without_one(
    models: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["generate", "x", "--model", str(models / "big"), *words]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line


def test_the_lossy_rule_applies_to_lookup_drafts(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", str(models / "big"), "--drafter", "lookup", *UNBOUNDED]
    assert main(["generate", "a b a b a b", *words, *GREEDY, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["lossless"] is False
    assert found["stats"]["drafted"] == found["stats"]["accepted"] > 0
