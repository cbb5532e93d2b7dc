"""A steady round launches few kernels: sampling, acceptance and drafts are replayed as graphs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import foredraft
from foredraft import LLM, SamplingParams
from foredraft.decode import drafting
from foredraft.decode.accept import ONCE
from tests.rehearsal.rounds import costs_of_rounds
from tests.rehearsal.test_texts import OPTIONS
from tests.support.checkpoints import save_pair

DRAFT = 5  # tokens of a draft
MOST = {"none": 40, "draft-model": 60}  # launches of a round
PROMPTS = [[3 + (7 * i + j * j) % 90 for j in range(length)] for i, length in enumerate((5, 25))]
NAMES = ("greedy", "speculative", "coupled", "block", "cuts", "typical", "penalties")


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = save_pair(tmp_path_factory.mktemp("models"))
    llm = foredraft.load(
        folder / "big", draft=folder / "small", device="cuda", max_batch=4, max_length=256,
        policy="fixed", max_draft=DRAFT,
    )  # fmt: skip
    yield llm
    llm.close()


def launches(llm: LLM, drafter: str, name: str) -> list[int]:
    params = SamplingParams(drafter=drafter, max_new_tokens=24, ignore_eos=True, **OPTIONS[name])
    for _ in range(3):
        llm.generate(PROMPTS, params)
    with costs_of_rounds(llm) as costs:
        llm.generate(PROMPTS, params)
    return sorted(cost.launches for cost in costs if not cost.captures)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("drafter", MOST)
def test_launches_of_a_round(llm: LLM, drafter: str, name: str) -> None:
    steady = launches(llm, drafter, name)
    assert len(steady) > 10
    assert steady[len(steady) // 2] <= MOST[drafter], steady


def test_without_replays_the_check_fails(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.loaded.engine, "replays", ONCE)
    assert launches(llm, "none", "speculative")[0] > MOST["none"]
    monkeypatch.setattr(drafting, "_captured_draft", lambda *arguments: None)
    assert launches(llm, "draft-model", "speculative")[0] > MOST["draft-model"]


def test_rows_of_two_rules_upload_their_masks_outside_graphs(llm: LLM) -> None:
    rules = [
        SamplingParams(seed=seed, acceptance=rule, drafter="draft-model", max_new_tokens=10, ignore_eos=True)
        for seed, rule in enumerate(("coupled", "speculative"))
    ]
    [alone] = llm.generate(PROMPTS[:1], rules[0])
    for _ in range(4):
        outputs = llm.generate(PROMPTS, rules)
        assert [output.error for output in outputs] == [None, None]
        assert outputs[0].token_ids == alone.token_ids
