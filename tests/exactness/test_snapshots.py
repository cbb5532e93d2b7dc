"""Snapshots of recurrent states: a text that resumes at one, in memory or on disk, has the bits of one read anew."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

import foredraft
from foredraft import LLM, Output
from foredraft.decode.scheduler import Rows
from tests.exactness.test_hybrids import GREEDY, TEXTS, drafts, folder
from tests.support.loaded import engine_of
from tests.support.mutation import replaced

LONG = replace(GREEDY, max_new_tokens=150, logprobs=2)


@cache
def loaded(native: bool = True, draft: str | None = None) -> LLM:
    asset: dict[str, Any] = {} if draft is None else {"draft": drafts(draft)}
    return foredraft.load(folder(), device="cpu", max_batch=3, max_length=1000, kernels=native, **asset)


def told(outputs: list[Output]) -> list[Any]:
    return [(each.token_ids, each.logprobs) for each in outputs]


@cache
def banned(native: bool, span: int) -> str:
    """A phrase that plain decoding of the first text writes, of so many tokens."""
    llm = loaded(native)
    [plain] = llm.generate(TEXTS[:1], replace(LONG, drafter="none"))
    assert llm.tokenizer is not None
    return llm.tokenizer.decode(plain.token_ids[20 : 20 + span])


def check_rollback(native: bool = True, draft: str | None = None) -> None:
    """Of few tokens, which the log reaches, and of more than it does, once and after a further snapshot."""
    llm = loaded(native, draft)
    for span in (2, 40, 100):
        params = replace(LONG, ban=(banned(native, span),), ban_mode="rollback", drafter="none")
        with replaced(Rows, "keep_snapshot", lambda *given: None):  # each text is read from its beginning
            anew = llm.generate(TEXTS[:2], params)
        assert anew[0].token_ids != llm.generate(TEXTS[:1], replace(LONG, drafter="none"))[0].token_ids
        for drafter in engine_of(llm).drafters if draft else ("none", "lookup"):
            found = llm.generate(TEXTS[:2], replace(params, drafter=drafter, policy="fixed"))
            assert told(found) == told(anew), (span, drafter)


@pytest.mark.parametrize("native", [True, False])
def test_a_ban_takes_back_text(native: bool) -> None:
    check_rollback(native)


@pytest.mark.parametrize("draft", ["hybrid", "attention"])
def test_so_it_does_of_draft_models(draft: str) -> None:
    check_rollback(draft=draft)
