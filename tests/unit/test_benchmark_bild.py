"""The benchmark of the lossy rule, on two prompts."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as xml
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bild, workload

QUICK = (
    "--prompts 2 --new-tokens 12 --repeats 1 --fallbacks 0,0.6 --rollbacks 0,inf --max-draft 3 --name small"
)


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(workload, "HERE", tmp_path)
    monkeypatch.setattr(bild, "PLOTS", tmp_path)
    prompts = ["def add(a, b):\n", "import os\n"]
    monkeypatch.setattr(bild, "fluent", lambda llm, count: llm.encode(prompts[:count]))
    (tmp_path / "results").mkdir()
    return tmp_path / "results"


def test_every_mode_is_compared_with_plain_decoding(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bild.main(QUICK.split()) == 0
    found = json.loads((results / "small.json").read_text(), parse_constant=pytest.fail)
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == found
    plain, *others = found["rows"]
    assert plain["over_plain"]["median"] == plain["exact"] == plain["mean_accepted_length"] == 1
    assert [(row["fallback"], row["rollback"], row["lossless"]) for row in others] == [
        (fallback, bound, bound is None) for fallback in (0, 0.6) for bound in (None, 0, "inf")
    ]
    for row in others:
        if row["rollback"] != "inf":  # only the target's own tokens are accepted
            assert (row["exact"], row["loss"]) == (1, plain["loss"])
    accept_all = others[2]
    assert accept_all["exact"] < 1 and accept_all["loss"] != plain["loss"]
    assert accept_all["acceptance_rate"] == 1
    assert others[0]["drafted_per_round"] > others[3]["drafted_per_round"], "the fallback policy stops drafts"
    assert xml.fromstring((results.parent / "small.svg").read_text()).tag.endswith("svg")


def test_a_changed_text_in_a_lossless_mode_fails(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = bild.decode

    def lossy(llm: Any, mode: bild.Mode, *rest: Any) -> Any:
        outputs = decode(llm, mode, *rest)
        for output in outputs if mode == bild.Mode(0.6) else []:
            output.token_ids[-1] += 1
        return outputs

    monkeypatch.setattr(bild, "decode", lossy)
    assert bild.main(QUICK.split()) == 1


def test_the_loss_matches_the_targets_logprobs(results: Path) -> None:
    import foredraft

    llm = foredraft.load(device="cpu", max_length=64)
    [output] = llm.generate(
        "def add(a, b):\n", foredraft.SamplingParams(temperature=0, max_new_tokens=6, logprobs=0)
    )
    assert output.logprobs is not None
    prompt = llm.encode("def add(a, b):\n")[0]
    want = -sum(score.logprob for score in output.logprobs) / 6
    assert bild.loss(llm, prompt, output.token_ids) == pytest.approx(
        want, rel=0.02
    )  # one pass or six, in bfloat16


def test_the_grid_has_a_strict_mode_for_every_threshold() -> None:
    grid = list(bild.modes([0.3], [1.0, math.inf]))
    assert [mode.name for mode in grid] == ["plain", "strict", "up to 1", "up to inf"]
    assert [mode.lossless for mode in grid] == [True, True, False, False]
