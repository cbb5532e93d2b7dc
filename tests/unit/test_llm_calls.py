"""Calls of the public API as people type them in a notebook: keywords, misspelt names, closing, repr."""

from __future__ import annotations

import doctest
import gc
import inspect
import threading
import weakref
from collections import UserDict
from contextlib import suppress
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch
import transformers

import foredraft
from foredraft import LLM, ConfigError, RequestError, SamplingParams
from foredraft.decode.params import SamplingKeywords
from foredraft.errors import did_you_mean
from foredraft.llm import service
from foredraft.model import tokenizer as tokenizer_module
from tests.support import checkpoints
from tests.support.loaded import engine_of
from tests.support.mutation import assert_caught, defect

FEW: dict[str, Any] = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}


def load(folder: Path, **options: Any) -> foredraft.LLM:
    common: dict[str, Any] = {"device": "cpu", "max_batch": 2, "max_length": 256, "policy": "fixed"}
    return foredraft.load(folder / "big", draft=folder / "small", **common | options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = checkpoints.save_pair(tmp_path_factory.mktemp("models"))
    (folder / "big/chat_template.jinja").write_text("{{ messages[0].content }}{{ mood }}")
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> foredraft.LLM:
    return load(folder)


class TestSamplingKeywords:
    def test_they_are_the_fields_of_sampling_params(self) -> None:
        """The list for type checkers must not drift from the dataclass."""
        assert get_type_hints(SamplingKeywords) == get_type_hints(SamplingParams)
        assert list(SamplingKeywords.__annotations__) == list(SamplingParams.__annotations__)
        assert not SamplingKeywords.__required_keys__

    @pytest.mark.parametrize("method", ["generate", "stream"])
    def test_no_option_of_a_call_has_the_name_of_a_sampling_option(self, method: str) -> None:
        own = inspect.signature(getattr(foredraft.LLM, method)).parameters
        assert not own.keys() & SamplingParams.__annotations__.keys()

    def test_they_replace_a_models_own(self, llm: foredraft.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(llm, "default_params", SamplingParams(max_new_tokens=3, ignore_eos=True))
        [by_name] = llm.generate("def", temperature=0)
        assert by_name.token_ids == llm.generate("def", llm.params(temperature=0))[0].token_ids
        assert len(by_name.token_ids) == 3

    def test_they_replace_fields_of_params(self, llm: foredraft.LLM) -> None:
        params = SamplingParams(**FEW)
        assert len(llm.generate("def", params, max_new_tokens=2)[0].token_ids) == 2
        both = llm.generate(["def", "x"], [params, params.replace(max_new_tokens=9)], max_new_tokens=2)
        assert [len(output.token_ids) for output in both] == [2, 2]

    def test_stream_and_chat_take_them(self, llm: foredraft.LLM) -> None:
        [expected] = llm.generate("def", SamplingParams(**FEW))
        *_, last = llm.stream("def", **FEW)
        assert last.output is not None and last.output.token_ids == expected.token_ids
        assert llm.tokenizer is not None
        message = [{"role": "user", "content": "de"}]
        [expected] = llm.generate(llm.tokenizer.encode_chat(message, mood="f"), SamplingParams(**FEW))
        [reply] = llm.chat(message, mood="f", **FEW)
        assert reply.token_ids == expected.token_ids


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.generate("x", {"temperature": 0}), r"params is \{'temperature': 0\}; give its entries as k"),
        (lambda llm: llm.generate("x", [{"temperature": 0}]), r"params\[0\] is \{'temperature': 0\}; give its"),
        (lambda llm: llm.stream("x", {"temperature": 0}), r"params is \{'temperature': 0\}"),
        (lambda llm: llm.stream("x", [SamplingParams()]), "stream takes one SamplingParams, not a list"),
        (lambda llm: llm.generate("x", 64), "params is 64; give a SamplingParams, or options as keywords"),
        (lambda llm: llm.generate("x", "greedy"), "params is 'greedy'; give a SamplingParams"),
        (lambda llm: llm.generate("x", temperatur=0), "'temperatur' of generate; known options .* Did you mean 'temperature'"),
        (lambda llm: llm.stream("x", max_tokens=4), "'max_tokens' of stream; its name is max_new_tokens"),
        (lambda llm: llm.stream("x", n=2), "'n' of stream; give it to generate"),
        (lambda llm: llm.generate(prompt="x"), "option 'prompt' of generate; .* Did you mean 'prompts'"),
        (lambda llm: llm.stream(prompts="x"), "option 'prompts' of stream; .* Did you mean 'prompt'"),
        (lambda llm: llm.generate("x", prompts="y"), "prompts is given twice; give it once"),
        (lambda llm: llm.generate(temperature=0), "generate needs prompts; give it"),
        (lambda llm: llm.generate("x", None, 2), "generate takes only prompts and params by position; give the"),
        (lambda llm: llm.generate("x", truncat="left"), "'truncat'.* Did you mean 'truncate'"),
        (lambda llm: llm.params(temprature=1), "'temprature'; known .* Did you mean 'temperature'"),
        (lambda llm: SamplingParams().replace(seeds=1), "'seeds'; .* Did you mean 'seed'"),  # type: ignore[call-arg]
        (lambda llm: SamplingParams(acceptance="couple"), "acceptance is 'couple'; .* Did you mean 'coupled'"),  # type: ignore[arg-type]
        (lambda llm: llm.stream([]), "takes one prompt, not 0"),
        (lambda llm: llm.stream(["one", "two"]), "takes one prompt, not 2"),
        (lambda llm: llm.chat([{"role": "user", "content": ""}]), "the prompt is empty"),
        (lambda llm: llm.generate([], [SamplingParams()]), "1 sampling parameters for 0 prompts"),
        (lambda llm: llm.generate([], n=100_001), "^n is 100001; give a whole number from 1 to 100,000$"),
        (lambda llm: llm.generate("x", n=10**400), "^n is .*; give a whole number from 1 to 100,000$"),
        (lambda llm: llm.generate("x", n=0), "^n is 0; give a whole number from 1 to 100,000$"),
        (lambda llm: llm.generate("x", n="2"), "^n is '2'; give a whole number"),
        (lambda llm: llm.generate("x", n=1.5), "^n is 1.5; give a whole number"),
        (lambda llm: llm.generate([], n=True), "^n is True; give a whole number"),
    ],
)  # fmt: skip
def test_a_wrong_call_gets_one_clear_line(llm: foredraft.LLM, call: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        call(llm)
    assert "\n" not in str(caught.value)
    assert engine_of(llm).scheduler.idle


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: foredraft.load(drafer="lookup"), "'drafer' of load; .* Did you mean 'drafter'"),
        (lambda: foredraft.load(path="big"), "'path' of load; its name is model"),
        (lambda: foredraft.load(torch_dtype="auto"), "'torch_dtype' of load; its name is dtype"),
        (lambda: foredraft.load("big", "small"), "load takes only model by position; give the other options by name"),
        (lambda: foredraft.load(drafter="draftmodel"), "drafter is 'draftmodel'; .* Did you mean 'draft-model'"),
        (lambda: foredraft.load(policy="fixd"), "policy is 'fixd'; .* Did you mean 'fixed'"),
        (lambda: foredraft.load(dtype="bfloat"), "dtype is 'bfloat'; .* Did you mean 'bfloat16'"),
        (lambda: foredraft.load(policy="confidence", policy_options={"treshold": 1}), "'treshold', .* Did you mean 'threshold'"),
        (lambda: foredraft.load(draft_sampling="beam"), "draft_sampling is 'beam'"),
        (lambda: foredraft.load(max_draft=1000), "max_draft is 1000, but"),
        (lambda: foredraft.load(device="abacus"), "device is 'abacus'"),
        (lambda: foredraft.LLM(model="big"), "an LLM is made by foredraft.load; call"),
        (lambda: foredraft.LLM(), "an LLM is made by foredraft.load; call"),
    ],
)  # fmt: skip
def test_a_wrong_way_to_load_gets_one_clear_line(call: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()


def test_no_prompts_have_no_outputs(llm: foredraft.LLM) -> None:
    for none in ([], ()):
        assert llm.generate(none) == llm.generate(none, []) == llm.generate(none, n=3) == []
        assert llm.encode(none) == []


def test_only_near_names_are_suggested() -> None:
    assert did_you_mean("oracle", ["lookup", "auto"]) == did_you_mean(5, ["lookup"]) == ""


def test_an_unknown_drafter_is_refused_at_once(llm: foredraft.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("work was done for a request that cannot be served")

    monkeypatch.setattr(service, "use_profile", fail)
    monkeypatch.setattr("foredraft.llm.requests.Requests.encode", fail)
    params = [SamplingParams(), SamplingParams(drafter="draftmodel")]
    with pytest.raises(RequestError, match="draftmodel"):
        llm.generate(["x", "y"], params)
    with pytest.raises(RequestError, match="'draftmodel', which is not .* mean 'draft-model'"):
        llm.stream("x", params[1])


class TestClose:
    def test_it_frees_the_weights_and_the_caches(self, folder: Path) -> None:
        llm = load(folder)
        llm.generate("def", **FEW)
        target = llm.loaded.runner
        parts = [weakref.ref(part) for part in (engine_of(llm), engine_of(llm).cache, target)]
        del target
        llm.close()
        gc.collect()
        assert [part() for part in parts] == [None] * 3

    def test_later_calls_raise_and_closing_again_does_nothing(self, folder: Path) -> None:
        llm = load(folder)
        parts = "drafters lookup, prediction, draft-model; policy fixed; float32 on cpu"
        assert repr(llm) == f"<LLM {llm.model!r}: {parts}>"
        late = llm.stream("def", **FEW)
        llm.close()
        llm.close()
        llm.cancel_all()
        assert repr(llm) == f"<LLM {llm.model!r}: closed>"
        calls: list[Any] = [
            lambda: llm.generate("def"),
            lambda: llm.generate([]),
            lambda: llm.stream("def"),
            lambda: llm.chat([{"role": "user", "content": "def"}]),
            lambda: llm.encode("def"),
            lambda: llm.loaded,
            lambda: llm.requests,
            lambda: next(late),
            lambda: llm.__enter__(),
        ]
        for call in calls:
            with pytest.raises(RequestError, match="this LLM is closed; load the model again"):
                call()
        assert llm.tokenizer is not None and llm.tokenizer.encode("def")

    def test_an_open_stream_ends_as_cancelled(self, folder: Path) -> None:
        with suppress(ZeroDivisionError), load(folder) as llm:  # an error closes it too
            stream = llm.stream("def", max_new_tokens=200, ignore_eos=True)
            first = next(stream)
            raise ZeroDivisionError
        *_, last = stream
        assert last.output is not None and last.output.finish_reason == "cancelled"
        assert last.output.token_ids[: len(first.token_ids)] == first.token_ids

    def test_a_request_in_another_thread_returns_what_it_has(self, folder: Path) -> None:
        llm = load(folder, max_length=2048)
        found: list[foredraft.Output] = []
        running = threading.Event()
        step = engine_of(llm).step

        def watched() -> Any:
            running.set()
            return step()

        engine_of(llm).step = watched  # type: ignore[method-assign]
        work = lambda: found.extend(llm.generate("def", max_new_tokens=2000, ignore_eos=True))  # noqa: E731
        thread = threading.Thread(target=work)
        thread.start()
        assert running.wait(60)
        llm.close()
        thread.join(60)
        assert [output.finish_reason for output in found] == ["cancelled"]


# --- examples of docstrings -----------------------------------------------------------------------


PUBLIC: dict[str, Any] = {
    "load": foredraft.load,
    "Output": foredraft.Output,
    "Piece": foredraft.Piece,
    "SamplingParams": SamplingParams,
    "Score": foredraft.Score,
    "Stats": foredraft.Stats,
    "Stream": foredraft.Stream,
    "RoundTrace": foredraft.RoundTrace,
    "write_trace": foredraft.write_trace,
    "ForedraftError": foredraft.ForedraftError,
    **{
        name: getattr(LLM, name)
        for name in ("params", "generate", "chat", "stream", "save_texts", "cancel_all", "close", "encode")
    },
}


@pytest.mark.parametrize("name", PUBLIC)
def test_examples_give_results(llm: LLM, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = {name: getattr(foredraft, name) for name in foredraft.__all__}
    names |= {"foredraft": foredraft, "llm": llm, "Path": Path}
    [example] = [
        found
        for found in doctest.DocTestFinder(recurse=False).find(PUBLIC[name], name, globs=names)
        if found.examples
    ]
    told: list[str] = []
    results = doctest.DocTestRunner().run(example, out=told.append)
    assert results.attempted > 0
    assert results.failed == 0, "".join(told)


# --- values that are no prompt, no text or no number ----------------------------------------------


PLAIN = SamplingParams(temperature=0, max_new_tokens=2, drafter="none")
HUGE = 10**400  # no float holds it


KINDS: list[tuple[Any, str]] = [
    (b"hello", "bytes; decode it"),
    (bytearray(b"x"), "bytes; decode it"),
    ({"input_ids": [3, 4], "attention_mask": [1, 1]}, r'encoding\["input_ids"\]'),
    (UserDict(input_ids=[3]), r'encoding\["input_ids"\]'),
    ({3: 1}, "a mapping, of which only the keys would be read"),
    ({3, 4}, "a set, which has no order"),
    (frozenset({3}), "a set"),
    (None, "is None; give text"),
    (torch.tensor(5), "; give text"),
    (np.array(5), "; give text"),
]
PROMPTS: list[tuple[Any, str]] = [
    *KINDS, *(([prompt, "x"], says) for prompt, says in KINDS), (5, "the prompt is 5"), (["a", 5], "is 5; give text"),
    ([[3.0, 4.0]], "3.0 is not a whole number"), ([3.0, 4.0], "3.0; give text or a list"), ([[True, 4]], "True is not"),
    ([[3, "4"]], "'4' is not"), ([[3, None]], "None is not"), (torch.tensor([True, False]), "True"), (np.array([True]), "True"),
    ([True], "True"), (torch.tensor([1.0]), "; give text"), ([1.5], "1.5"), ([[[1]]], "1"), ([["a"]], "'a'"),
    ("\udc80", "not valid Unicode at character 0"), (["fine", "not \ud800"], "not valid Unicode at character 4"),
    ("", "the prompt is empty"), ([[]], "the prompt is empty"), ([[3], []], "empty"), ([3, 99999], "token id 99999"),
]  # fmt: skip


@pytest.mark.parametrize(("prompt", "says"), PROMPTS, ids=str)
def test_what_is_no_prompt_is_refused_before_it_runs(llm: foredraft.LLM, prompt: Any, says: str) -> None:
    with pytest.raises(RequestError, match=says) as caught:
        llm.generate(prompt, PLAIN)
    assert "\n" not in str(caught.value)
    assert engine_of(llm).scheduler.idle


@pytest.mark.parametrize("rows", [torch.tensor([[5], [6]]), np.array([[5], [6]]), [torch.tensor([5]), [6]]])
def test_rows_of_one_token_are_prompts_of_their_own(llm: foredraft.LLM, rows: Any) -> None:
    assert llm.encode(rows) == [[5], [6]]
    encoding = transformers.BatchEncoding({"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1]})
    assert llm.encode(encoding["input_ids"]) == [[5, 6, 7]]


@pytest.mark.parametrize("text", ["\ud800", "a\udfff", "\udc80b"])
def test_text_beyond_utf8_is_refused(llm: foredraft.LLM, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert llm.tokenizer is not None
    encode, message = llm.tokenizer.encode, [{"role": "user", "content": "x"}]
    calls = {
        "the prompt": lambda: llm.generate(text, PLAIN),
        "the text": lambda: encode(text),
        "stop": lambda: PLAIN.replace(stop=text),
        "a message": lambda: llm.chat([{"role": "user", "content": text}], PLAIN),
        "chat template": lambda: llm.chat(message, PLAIN, **{text: 1}),
        "unknown sampling option": lambda: llm.params(**{text: 1}),
        "logit_bias": lambda: SamplingParams(logit_bias={text: 1.0}),  # type: ignore[dict-item]
        "drafter": lambda: llm.generate("a", PLAIN.replace(drafter=text)),
    }

    def check() -> None:
        for name, call in calls.items():
            with pytest.raises(RequestError, match=name) as caught:
                call()
            str(caught.value).encode()

    check()
    assert not llm.tokenizer.special_ids([text])
    reach = defect(
        "surrogates reach the library", tokenizer_module.check_unicode, lambda sound: lambda text, name: None,
        check, BaseException,  # type: ignore[arg-type]
    )  # fmt: skip
    assert_caught(reach, monkeypatch)


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
