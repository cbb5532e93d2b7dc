"""The lossy rule through the public API: outputs say so, and lossless requests are not affected."""

from __future__ import annotations

from pathlib import Path

import pytest

import foredraft
from foredraft import ConfigError, RequestError, SamplingParams
from tests.support import checkpoints
from tests.support.loaded import engine_of

STRICT = SamplingParams(temperature=0, max_new_tokens=24, logprobs=0)
LOSSY = STRICT.replace(acceptance="bild", rollback=6.0)
PROMPT = "def accept"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = checkpoints.save_pair(tmp_path_factory.mktemp("models"))
    checkpoints.save_checkpoint(folder / "foreign", tokenizer=True, seed=3, vocab_size=300)
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> foredraft.LLM:
    return foredraft.load(
        folder / "big", draft=folder / "small", device="cpu", max_batch=4, max_length=128, policy="fixed"
    )


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
    drafted = [
        score.logprob
        for score, origin in zip(output.logprobs, output.origins, strict=True)
        if origin == "drafter"
    ]
    assert drafted and min(drafted) >= -6.0
    own = [s.processed for s, o in zip(output.logprobs, output.origins, strict=True) if o != "drafter"]
    assert set(own) == {0.0}
    assert {one.rollback for one in output.trace} == {6.0}
    cut = [one for one in output.trace if one.accepted < len(one.draft)]
    assert cut and all(one.p[one.accepted] < 0.0025 for one in cut)


def test_siblings_of_a_lossy_request_are_independent(llm: foredraft.LLM) -> None:
    outputs = llm.generate(PROMPT, LOSSY.replace(temperature=1.0, seed=1), n=3)
    assert len({tuple(output.token_ids) for output in outputs}) == 3
    again = llm.generate(PROMPT, LOSSY.replace(temperature=1.0, seed=1), n=3)
    assert [output.token_ids for output in again] == [output.token_ids for output in outputs]


def test_policies_that_stop_by_content_need_a_drafter_with_probabilities(folder: Path) -> None:
    for policy in ("fallback", "confidence", "adaptive-exit"):
        with pytest.raises(
            ConfigError, match=f"policy is '{policy}', which needs draft probabilities, but no"
        ):
            foredraft.load(folder / "big", drafter="lookup", policy=policy, device="cpu")


def test_policies_that_stop_by_content_need_probabilities_of_the_default_drafter(folder: Path) -> None:
    """Another loaded drafter with probabilities is not enough."""
    for drafter, more in (
        ("lookup", {"draft": folder / "small"}),
        ("retokenize", {"draft": folder / "foreign"}),
    ):
        with pytest.raises(
            ConfigError,
            match=f"policy is 'confidence', which needs draft probabilities, but drafter='{drafter}' has none",
        ):
            foredraft.load(
                folder / "big", plan="exit:1", drafter=drafter, policy="confidence", device="cpu", **more
            )


def test_a_request_for_a_drafter_that_the_policy_cannot_stop_is_refused(folder: Path) -> None:
    """A batch and a stream refuse it before anything runs."""
    llm = foredraft.load(
        folder / "big", draft=folder / "small", policy="confidence", device="cpu", max_batch=2
    )
    fitting, other = (STRICT.replace(drafter=name) for name in ("draft-model", "lookup"))
    message = (
        "^drafter is 'lookup', which has no draft probabilities, but policy='confidence' needs them;"
        " give one of none, draft-model, or load with another policy$"
    )
    with pytest.raises(RequestError, match=message):
        llm.generate([PROMPT, PROMPT], [fitting, other])
    with pytest.raises(RequestError, match=message):
        llm.stream(PROMPT, other)
    assert engine_of(llm).scheduler.idle
    assert llm.generate(PROMPT, fitting)[0].stats.drafted > 0
    for policy in ("fixed", "auto"):
        free = foredraft.load(
            folder / "big", draft=folder / "small", policy=policy, device="cpu", max_batch=1
        )
        assert free.generate(PROMPT, other)[0].error is None


def test_drafter_auto_needs_a_policy_that_can_choose(folder: Path) -> None:
    llm = foredraft.load(folder / "big", draft=folder / "small", policy="fallback", device="cpu", max_batch=1)
    message = (
        "drafter is 'auto', but policy='fallback' cannot choose among drafters; load with policy='auto',"
        " or give one of"
    )
    with pytest.raises(RequestError, match=f"{message} none, draft-model$"):
        llm.generate(PROMPT, STRICT.replace(drafter="auto"))


def test_a_threshold_may_be_set(folder: Path) -> None:
    def drafted(threshold: float) -> int:
        own = foredraft.load(
            folder / "big", draft=folder / "small", device="cpu", max_batch=1, max_length=128,
            policy="fallback", policy_options={"threshold": threshold},
        )  # fmt: skip
        return own.generate(PROMPT, STRICT)[0].stats.drafted

    assert drafted(0.0) > 0 == drafted(1.0)
