"""The lossy acceptance rule `bild` on the command line: its output is marked, and other commands refuse it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Cli

# A threshold that the random draft model's low confidence reaches.
FALLBACK = ["--policy", "fallback", "--policy-option", "threshold=0.02"]
BILD = [*FALLBACK, "--acceptance", "bild"]
# Every drafted token is kept.
UNBOUNDED = ["--policy", "fixed", "--acceptance", "bild", "--rollback", "inf"]
GREEDY = ["--temperature", "0", "--max-new-tokens", "24", "--ignore-eos"]


def document(cli: Cli, pair: list[str], *words: str) -> dict[str, Any]:
    return cli.document("generate", *pair, "def accept", *GREEDY, *words)


def test_the_document_says_that_the_rule_is_lossy(pair: list[str], cli: Cli) -> None:
    """An infinite bound keeps every drafted token; a bound of 0, or the policy alone, gives plain decoding's text."""
    plain = document(cli, pair[:2])
    unbounded = document(cli, pair, *UNBOUNDED)
    bound = document(cli, pair, *BILD, "--rollback", "0")
    fallback = document(cli, pair, *FALLBACK)
    documents = (plain, unbounded, bound, fallback)
    assert [found["lossless"] for found in documents] == [True, False, False, True]
    assert [found.get("deterministic") for found in documents] == [None, False, False, None]
    texts = [found["outputs"][0]["token_ids"] for found in documents]
    assert texts[0] == texts[2] == texts[3] != texts[1]
    assert bound["stats"]["drafted"] > 0 and fallback["stats"]["drafted"] > 0
    assert unbounded["stats"]["acceptance_rate"] == 1


def traced(page: Path) -> tuple[str, dict[str, Any]]:
    data = json.loads(page.read_text(encoding="utf-8").split('id="data">')[1].split("</script>")[0])
    [sample] = data["samples"]
    return data["about"], sample


def test_the_last_line_and_the_trace_mark_lossy_text(pair: list[str], tmp_path: Path, cli: Cli) -> None:
    page = tmp_path / "t.html"
    words = ["generate", *pair, "def accept", *GREEDY, "--trace", page]
    line = cli(*words, "--policy", "fixed", "--acceptance", "bild", "--compare").out.splitlines()[-1]
    assert line.endswith("NOT LOSSLESS: the text need not be the target's")
    about, sample = traced(page)
    assert about.endswith("acceptance bild, which is not lossless")
    assert ["lossless", "no"] in sample["figures"]
    for one in sample["rounds"]:
        assert one["least"] == pytest.approx(0.0067, abs=1e-4)
        assert all(p > one["least"] for p in one["p"][: one["accepted"]])
        assert all(p < one["least"] for p in one["p"][one["accepted"] :][:1])
    assert "LOSSLESS" not in cli(*words).out
    _, sample = traced(page)
    assert all(one["least"] is None for one in sample["rounds"])
    assert "lossless" not in dict(sample["figures"])


NO_COMPARISON = "--acceptance is 'bild', which is not lossless, so its output cannot be compared with plain"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("verify --acceptance bild", NO_COMPARISON),
        ("verify --rollback 1", "--rollback applies only to --acceptance bild, which is not lossless;"),
        ("bench --acceptance bild", "--acceptance is 'bild', which is not lossless"),
        ("bench --rollback 1", "--rollback applies only to --acceptance bild"),
    ],
)
def test_wrong_uses_are_refused(pair: list[str], words: str, says: str, cli: Cli) -> None:
    assert says in cli.refused(words, *pair)


def test_the_lossy_rule_applies_to_lookup_drafts(pair: list[str], cli: Cli) -> None:
    found = cli.document("generate", "a b a b a b", *pair[:2], "--drafter", "lookup", *UNBOUNDED, *GREEDY)
    assert found["lossless"] is False
    assert found["stats"]["drafted"] == found["stats"]["accepted"] > 0
