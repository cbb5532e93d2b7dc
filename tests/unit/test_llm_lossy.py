"""The lossy rule through the public API: outputs say so, and lossless requests are not affected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import foredraft
from foredraft import ConfigError, SamplingParams
from tests.support import checkpoints

STRICT = SamplingParams(temperature=0, max_new_tokens=24, logprobs=0)
LOSSY = STRICT.replace(acceptance="bild", rollback=6.0)
PROMPT = "def accept"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = checkpoints.save_pair(tmp_path_factory.mktemp("models"))
    checkpoints.save_checkpoint(folder / "foreign", tokenizer=True, seed=3, vocab_size=300)
    return folder


def load(folder: Path, **options: Any) -> foredraft.LLM:
    common = {"draft": folder / "small", "device": "cpu", "max_batch": 4, "max_length": 128}
    return foredraft.load(folder / "big", **common | options)


@pytest.fixture(scope="module")
def llm(folder: Path) -> foredraft.LLM:
    return load(folder, policy="fixed")


def test_lossless_requests_in_a_lossy_batch_keep_every_bit(llm: foredraft.LLM) -> None:
    seeded = SamplingParams(seed=3, max_new_tokens=24, logprobs=0)
    several = [STRICT, LOSSY, seeded, LOSSY.replace(temperature=1.0, seed=5)]
    together = llm.generate([PROMPT] * 4, several)
    for output, own in zip(together, several, strict=True):
        [alone] = llm.generate(PROMPT, own.replace(drafter="none"))
        assert alone.lossless and alone.deterministic, "without drafts the rule changes nothing"
        assert output.lossless is output.deterministic is (own.bound is None)
        if output.lossless:
            assert (output.token_ids, output.logprobs) == (alone.token_ids, alone.logprobs)
    assert together[1].token_ids != together[0].token_ids, "the lossy rule must change the text"


def test_kept_drafted_tokens_are_within_the_bound(llm: foredraft.LLM) -> None:
    """The target's log-probability of every drafted token shows it; all other tokens are the target's."""
    [output] = llm.generate(PROMPT, LOSSY, trace=True)
    assert output.logprobs is not None and output.trace is not None
    tokens = list(zip(output.logprobs, output.origins, strict=True))
    drafted = [score.logprob for score, origin in tokens if origin == "drafter"]
    assert drafted and min(drafted) >= -6.0
    assert {score.processed for score, origin in tokens if origin != "drafter"} == {0.0}
    assert {one.rollback for one in output.trace} == {6.0}
    cut = [one for one in output.trace if one.accepted < len(one.draft)]
    assert cut and all(one.p[one.accepted] < 0.0025 for one in cut)


def test_choices_of_a_lossy_request_are_independent(llm: foredraft.LLM) -> None:
    sampled = LOSSY.replace(temperature=1.0, seed=1)
    first, again = ([each.token_ids for each in llm.generate(PROMPT, sampled, n=3)] for _ in range(2))
    assert len(set(map(tuple, first))) == 3 and again == first


@pytest.mark.parametrize(
    ("policy", "drafter", "draft", "says"),
    [
        ("fallback", "lookup", None, "no"),
        # another loaded drafter with probabilities is not enough
        ("confidence", "lookup", "small", "drafter='lookup' has none"),
        ("confidence", "retokenize", "foreign", "drafter='retokenize' has none"),
    ],
)
def test_policies_that_stop_by_content_need_probabilities_of_the_default_drafter(
    folder: Path, policy: str, drafter: str, draft: str | None, says: str
) -> None:
    more = {} if draft is None else {"plan": "exit:1"}
    told = f"^policy is '{policy}', which needs draft probabilities, but {says}"
    with pytest.raises(ConfigError, match=told):
        load(folder, drafter=drafter, policy=policy, draft=draft and folder / draft, **more)
