"""Calls of the public API as people type them in a notebook: keywords, misspelt names, closing, repr."""

from __future__ import annotations

import gc
import inspect
import threading
import weakref
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import foredraft
from foredraft import ConfigError, RequestError, SamplingParams
from foredraft.decode.params import SamplingKeywords
from foredraft.errors import did_you_mean
from foredraft.llm import driver
from tests.support import checkpoints
from tests.support.loaded import engine_of

FEW: dict[str, Any] = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}


def load(folder: Path, **options: Any) -> foredraft.LLM:
    common: dict[str, Any] = {"device": "cpu", "max_batch": 2, "max_length": 256, "policy": "fixed"}
    return foredraft.load(folder / "big", draft=folder / "small", **common | options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = checkpoints.save_pair(tmp_path_factory.mktemp("models"))
    (folder / "big/chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{{ mood }}{% endfor %}"
    )
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

    def test_generate_takes_them_in_place_of_the_models_defaults(
        self, llm: foredraft.LLM, monkeypatch: pytest.MonkeyPatch
    ) -> None:
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
        (lambda llm: llm.generate("x", drafter="draftmodel"), "'draftmodel', which is not .* mean 'draft-model'"),
        (lambda llm: llm.stream("x", drafter="loookup"), "'loookup', which is not .* Did you mean 'lookup'"),
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
        (
            lambda: foredraft.load(policy="confidence", policy_options={"treshold": 1}),
            "names 'treshold', .* Did you mean 'threshold'",
        ),
        (lambda: foredraft.LLM("big"), "an LLM is made by foredraft.load; call"),
        (lambda: foredraft.LLM(model="big"), "an LLM is made by foredraft.load; call"),
        (lambda: foredraft.LLM(), "an LLM is made by foredraft.load; call"),
    ],
)  # fmt: skip
def test_a_wrong_way_to_load_gets_one_clear_line(call: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()


def test_only_near_names_are_suggested() -> None:
    assert did_you_mean("oracle", ["lookup", "auto"]) == did_you_mean(5, ["lookup"]) == ""


def test_load_takes_the_model_by_name(folder: Path) -> None:
    llm = foredraft.load(model=folder / "big", device="cpu", max_batch=1, max_length=64, drafter="none")
    assert llm.model == str(folder / "big")


def test_an_unknown_drafter_is_refused_before_the_prompts_are_read(
    llm: foredraft.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("work was done for a request that cannot be served")

    monkeypatch.setattr(driver, "use_profile", fail)
    monkeypatch.setattr("foredraft.llm.requests.Requests.encode", fail)
    params = [SamplingParams(), SamplingParams(drafter="draftmodel")]
    with pytest.raises(RequestError, match="draftmodel"):
        llm.generate(["x", "y"], params)
    with pytest.raises(RequestError, match="draftmodel"):
        llm.stream("x", params[1])


class TestNoPrompts:
    @pytest.mark.parametrize("none", [[], ()])
    def test_generate_returns_no_outputs(self, llm: foredraft.LLM, none: Any) -> None:
        assert llm.generate(none) == llm.generate(none, []) == llm.generate(none, n=3) == []
        assert llm.encode(none) == []

    def test_the_options_are_checked_all_the_same(self, llm: foredraft.LLM) -> None:
        with pytest.raises(RequestError, match="1 sampling parameters for 0 prompts"):
            llm.generate([], [SamplingParams()])
        for n in (0, 100_001, 10**400, True):
            with pytest.raises(RequestError, match="n is .*; give a whole number from 1 to 100,000"):
                llm.generate([], n=n)

    def test_an_empty_prompt_and_an_empty_stream_are_refused(self, llm: foredraft.LLM) -> None:
        with pytest.raises(RequestError, match="the prompt is empty"):
            llm.generate([[]])
        with pytest.raises(RequestError, match="takes one prompt, not 0"):
            llm.stream([])
        with pytest.raises(RequestError, match="the prompt is empty"):
            llm.chat([{"role": "user", "content": ""}])


def test_repr_names_the_model_and_how_it_runs(llm: foredraft.LLM) -> None:
    assert (
        repr(llm)
        == f"<LLM {llm.model!r}: drafters lookup, prediction, draft-model; policy fixed; float32 on cpu>"
    )


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
            lambda: next(late),
            lambda: llm.__enter__(),
        ]
        for call in calls:
            with pytest.raises(RequestError, match="this LLM is closed; load the model again"):
                call()
        assert llm.tokenizer is not None and llm.tokenizer.encode("def")

    def test_an_open_stream_ends_as_cancelled(self, folder: Path) -> None:
        with load(folder) as llm:
            stream = llm.stream("def", max_new_tokens=200, ignore_eos=True)
            first = next(stream)
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

    def test_an_error_in_a_with_block_closes_it_too(self, folder: Path) -> None:
        with pytest.raises(ZeroDivisionError), load(folder) as llm:
            1 / 0  # noqa: B018
        assert "closed" in repr(llm)
