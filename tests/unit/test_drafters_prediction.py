"""The alignment of an output with its prediction, and requests that bring one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

import foredraft
from foredraft import demo
from foredraft.cli import main
from foredraft.drafters.lookup import LONGEST, Alignment
from foredraft.errors import RequestError
from foredraft.llm.requests import Submission

tokens = st.lists(st.integers(0, 3), max_size=20)


def followed(predicted: list[int], output: list[int]) -> Alignment:
    alignment = Alignment(predicted)
    alignment.follow(output)
    return alignment


@pytest.mark.parametrize(
    ("output", "rest"),
    [
        ([], [1, 2, 3, 4, 5, 6, 7, 8, 9]),
        ([1, 2, 3], [4, 5, 6, 7, 8, 9]),
        ([1, 2, 0], [4, 5, 6, 7, 8, 9]),  # 3 was replaced
        ([1, 2, 0, 0, 3], [4, 5, 6, 7, 8, 9]),  # two were inserted
        ([1, 2, 6], [7, 8, 9]),  # three were left out
        ([0, 0, 1, 2], [3, 4, 5, 6, 7, 8, 9]),  # the prediction comes after a beginning of its own
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], []),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 0], []),
    ],
    ids=str,
)
def test_a_place_is_found_again_after_an_edit(output: list[int], rest: list[int]) -> None:
    predicted = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert followed(predicted, output).continuation(99) == rest
    assert followed(predicted, output).continuation(2) == rest[:2]


def test_a_longer_run_wins_over_a_nearer_one_and_of_equals_the_nearest() -> None:
    predicted = [5, 1, 2, 3, 6, 2, 3, 7, 4, 4, 2, 3, 8]
    assert followed(predicted, [9, 1, 2, 3]).continuation(1) == [6]
    assert followed(predicted, [5, 1, 2, 3, 6, 2, 3, 0, 2, 3]).continuation(1) == [8]


@given(tokens, tokens, st.data())
def test_alignment_follows_the_output(predicted: list[int], output: list[int], data: st.DataObject) -> None:
    alignment = Alignment(predicted)
    for _ in range(3):  # forward and, as after a ban's rollback, back
        end = data.draw(st.integers(0, len(output)))
        alignment.follow(output[:end])
    alignment.follow(output)
    fresh = followed(predicted, output)
    assert (alignment.place, alignment.matched) == (fresh.place, fresh.matched)


@given(tokens, tokens)
def test_a_run_that_was_looked_up_stands_before_the_place(predicted: list[int], output: list[int]) -> None:
    alignment = followed(predicted, output)
    run = min(alignment.matched, LONGEST, len(output))
    if run and alignment.place:
        assert predicted[alignment.place - run : alignment.place] == output[-run:]


PROMPT = "def area(width, height):\n"


@pytest.fixture(scope="module")
def llm() -> foredraft.LLM:
    return foredraft.load(draft=demo.draft_path(), max_length=256, policy="fixed")


def request(llm: foredraft.LLM, **options: Any) -> foredraft.Output:
    [output] = llm.generate([PROMPT], temperature=0, max_new_tokens=40, ignore_eos=True, **options)
    return output


def test_a_right_prediction_is_accepted_and_no_prediction_changes_the_text(llm: foredraft.LLM) -> None:
    plain = request(llm, drafter="none")
    assert plain.text is not None
    for prediction, drafter in ((plain.text, "prediction"), (plain.token_ids, None)):
        found = request(llm, prediction=prediction, drafter=drafter)
        assert found.token_ids == plain.token_ids
        assert found.stats.drafts["prediction"] > 0
    only = request(llm, prediction=plain.token_ids, drafter="prediction")
    assert only.stats.accepted_by["prediction"] == only.stats.accepted == only.stats.drafted > 25
    wrong = request(llm, prediction=plain.token_ids[::-1], drafter="prediction")
    assert wrong.token_ids == plain.token_ids and wrong.stats.accepted < wrong.stats.drafted


def test_a_prediction_is_no_longer_than_a_text_can_be(llm: foredraft.LLM) -> None:
    [sequence] = llm.requests.sequences(Submission(llm.encode("x")[0], llm.params(prediction=[5] * 9999)))
    assert len(sequence.prediction) == llm.max_length


def test_without_a_prediction_its_drafter_drafts_nothing(llm: foredraft.LLM) -> None:
    assert request(llm, drafter="prediction").stats.drafted == 0
    assert request(llm, prediction="", drafter="prediction").stats.drafted == 0
    assert "prediction" not in request(llm).stats.drafts
    assert request(llm, prediction="x", drafter="none").stats.drafted == 0


def test_another_default_drafter_yields_to_a_prediction() -> None:
    fixed = foredraft.load(drafter="lookup", policy="fixed", max_length=128)
    assert set(request(fixed, prediction="return").stats.drafts) == {"prediction"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"prediction": 5}, "prediction is 5; give text"),
        ({"prediction": [1.5]}, "text or a list of token ids"),
        ({"prediction": [5, 10**6]}, "prediction names token 1000000; give ids from 0 to "),
        ({"prediction": "\ud800"}, "text or a list of token ids"),
        ({"prediction": "x", "drafter": "lookup"}, "prediction has no effect with drafter='lookup'"),
    ],
    ids=str,
)
def test_what_cannot_be_predicted_is_refused(llm: foredraft.LLM, options: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        request(llm, **options)


def test_the_command_reads_a_prediction_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "before.py"
    file.write_text("    return width * height\n")
    found = []
    for more in (["--prediction", str(file)], ["--drafter", "none"]):
        assert main(["generate", PROMPT, *"--temperature 0 --max-new-tokens 20 --json".split(), *more]) == 0
        found.append(json.loads(capsys.readouterr().out)["outputs"][0]["token_ids"])
    assert found[0] == found[1]
    assert main(["generate", PROMPT, "--prediction", str(tmp_path / "absent")]) == 2
    assert capsys.readouterr().err.startswith("foredraft: error: --prediction is ")
