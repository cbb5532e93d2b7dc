"""Values of a request that are no prompt, no text or no number: each is refused in one line, and none is misread."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers

import foredraft
from foredraft import ConfigError, RequestError, SamplingParams
from foredraft.model import tokenizer as tokenizer_module
from tests.support import checkpoints
from tests.support.planting import assert_caught, defect

PLAIN = SamplingParams(temperature=0, max_new_tokens=2, drafter="none")
HUGE = 10**400  # no float holds it


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> foredraft.LLM:
    folder = checkpoints.save_checkpoint(tmp_path_factory.mktemp("model") / "target", tokenizer=True)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}{{ more }}")
    return foredraft.load(folder, device="cpu", dtype="float32", max_batch=2, max_length=64, drafter="none")


ENCODING = transformers.BatchEncoding({"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1]})


@pytest.mark.parametrize("prompt", [None, torch.tensor(5), np.array(5)], ids=str)
def test_what_has_no_items_is_no_prompt(llm: foredraft.LLM, prompt: Any) -> None:
    with pytest.raises(RequestError, match="^the prompt is .*; give text"):
        llm.generate(prompt, PLAIN)
    with pytest.raises(RequestError, match="^a prompt in the list is .*; give text"):
        llm.encode([[5], prompt])


@pytest.mark.parametrize(
    "ids", [torch.tensor([True, False]), np.array([True]), [True], torch.tensor([1.0]), [1.5], [[[1]]], [["a"]]], ids=str
)  # fmt: skip
def test_what_is_no_token_id_is_refused(llm: foredraft.LLM, ids: Any) -> None:
    with pytest.raises(RequestError):
        llm.generate(ids, PLAIN)


@pytest.mark.parametrize(
    "rows", [torch.tensor([[5], [6]]), np.array([[5], [6]]), [torch.tensor([5]), [6]]], ids=str
)
def test_rows_of_one_token_are_prompts_of_their_own(llm: foredraft.LLM, rows: Any) -> None:
    assert llm.encode(rows) == [[5], [6]]


def test_the_ids_of_an_encoding_are_a_prompt(llm: foredraft.LLM) -> None:
    assert llm.encode(ENCODING["input_ids"]) == [[5, 6, 7]]


@pytest.mark.parametrize("text", ["\ud800", "a\udfff", "\udc80b"])
def test_text_that_utf8_cannot_spell_is_refused(llm: foredraft.LLM, text: str) -> None:
    assert llm.tokenizer is not None
    calls = {
        "the prompt": lambda: llm.generate(text, PLAIN),
        "the text": lambda: llm.tokenizer.encode(text),  # type: ignore[union-attr]
        "stop": lambda: PLAIN.replace(stop=text),
        "a message": lambda: llm.chat([{"role": "user", "content": text}], PLAIN),
        "chat template": lambda: llm.chat([{"role": "user", "content": "x"}], PLAIN, **{text: 1}),
        "unknown sampling option": lambda: llm.params(**{text: 1}),
        "logit_bias": lambda: SamplingParams(logit_bias={text: 1.0}),  # type: ignore[dict-item]
        "drafter": lambda: llm.generate("a", PLAIN.replace(drafter=text)),
    }
    for name, call in calls.items():
        with pytest.raises(RequestError, match=name) as caught:
            call()
        str(caught.value).encode()
    assert llm.tokenizer.special_id(text) is None


@pytest.mark.parametrize(
    "options", [{"temperature": HUGE}, {"acceptance": "bild", "rollback": HUGE}, {"top_p": HUGE}, {"top_k": HUGE},
                {"logit_bias": {1: HUGE}}, {"seed": HUGE}], ids=lambda options: "-".join(options)
)  # fmt: skip
def test_numbers_that_no_float_holds_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**options)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "options",
    [
        {"max_batch": HUGE}, {"max_length": HUGE}, {"max_draft": HUGE}, {"device": HUGE}, {"plan": HUGE}, {"plan": b"x"},
        {"device": "\ud800"}, {"plan": "\ud800"}, {"plan": "\0"}, {"dtype": HUGE},
        {"policy": "confidence", "policy_options": {"threshold": HUGE}},
    ],
    ids=str,
)  # fmt: skip
def test_hostile_options_of_load_are_refused_in_one_line(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        foredraft.load(**options)
    assert len(str(caught.value)) < 600
    str(caught.value).encode()


def test_surrogates_that_reach_the_library_are_caught(
    llm: foredraft.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_through = defect(
        "surrogates reach the library", tokenizer_module.check_unicode, lambda sound: lambda text, name: None,
        lambda: test_text_that_utf8_cannot_spell_is_refused(llm, "\ud800"), BaseException,  # type: ignore[arg-type]
    )  # fmt: skip
    assert_caught(let_through, monkeypatch)
