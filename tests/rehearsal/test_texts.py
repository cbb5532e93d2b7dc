"""The texts of the pretended device are those of PyTorch's operators on a CPU, and a round waits as promised.

With `--gpus 2` the models lie on the second GPU, which is not the current one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

from foredraft import LLM, SamplingParams
from foredraft.decode.prefix_cache import PrefixCache
from foredraft.kinds.tables import DRAFTERS as KINDS
from foredraft.kinds.tables import POLICIES
from tests.exactness import test_out_of_memory as memory
from tests.rehearsal.graphs import Graph
from tests.rehearsal.ledger import LEDGER
from tests.rehearsal.rounds import costs_of_rounds
from tests.rehearsal.tensors import FREE_ATTENTION
from tests.support.every_drafter import DRAFT, DRAFTERS, load, save_models

PROMPTS = [
    "def add(a, b):",
    "import os\n\n\ndef read(path):\n    ",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n        self.items",
]
SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "cuts": {"seed": 2, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "typical": {"seed": 2, "typical_p": 0.9},
    "speculative": {"seed": 3, "acceptance": "speculative"},
    "coupled": {"seed": 3, "acceptance": "coupled"},
    "block": {"seed": 3, "acceptance": "block"},
    "penalties": {
        "seed": 4,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "acceptance": "speculative",
    },
    "scores": {"seed": 5, "logprobs": 2, "prompt_logprobs": 1, "top_p": 0.9},
    "bias": {"seed": 6, "logit_bias": {5: 1.0, 9: -3.0}, "min_new_tokens": 8},
    "ban": {"seed": 7, "ban": ["return", "self"], "ban_mode": "rollback"},
    "masked ban": {"seed": 7, "ban": ["return", "self"], "ban_mode": "mask"},
    "json": {"seed": 9, "json_schema": SCHEMA},
    "regex": {"seed": 9, "regex": "[a-z ]{3,20}(return|pass) [0-9]+"},
    "bild": {"seed": 10, "acceptance": "bild", "rollback": 2.0},
    "prediction": {"temperature": 0, "prediction": "def add(a, b):\n    return a + b\n"},
}
GUESSERS = ("none", "lookup", "suffix", "prediction")  # which draft without a forward, or not at all
CONSTRAINED = ("ban", "masked ban", "json", "regex")
# every drafter and every option at least once
SHORT = [
    ("draft model", "draft-model", "cuts"), ("draft model", "draft-model", "json"), ("draft model", "none", "regex"),
    ("draft model", "lookup", "penalties"), ("draft model", "suffix", "masked ban"),
    ("draft model", "prediction", "prediction"),
    ("other tokenizer", "retokenize", "bias"), ("eagle3", "eagle3", "speculative"), ("eagle3", "eagle3", "ban"),
    ("early exit", "layer-skip", "typical"), ("skipped layers", "layer-skip", "bild"),
    ("eagle", "eagle", "penalties"), ("medusa", "medusa", "regex"), ("medusa", "medusa", "block"), ("eagle", "eagle", "coupled"), ("dflash", "dflash", "speculative"),
    ("p-eagle", "p-eagle", "speculative"), ("dflash 2", "dflash", "json"), ("dspark", "dspark", "cuts"), ("adapter", "kangaroo", "greedy"), ("adapter", "kangaroo", "scores"),
    ("gemma4", "gemma4-assistant", "cuts"), ("gemma4", "gemma4-assistant", "json"), ("gemma4", "none", "greedy"),
    ("gemma4 unified", "gemma4-assistant", "speculative"), ("further", "mtp", "coupled"), ("further", "mtp", "json"),
    ("hybrid", "mtp", "speculative"), ("hybrid", "mtp", "ban"), ("hybrid", "lookup", "greedy"),
]  # fmt: skip
Models: TypeAlias = Callable[[str], tuple[LLM, LLM]]


@pytest.fixture(scope="module")
def device(request: pytest.FixtureRequest) -> str:
    return f"cuda:{request.config.getoption('--gpus') - 1}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def models(device: str, folder: Path) -> Iterator[Models]:
    """Return a function of what is loaded, to the model on the CPU and the one on the pretended device."""
    open_: list[LLM] = []

    @cache
    def loaded(name: str) -> tuple[LLM, LLM]:
        pair = load(folder, name, "cpu"), load(folder, name, device)
        open_.extend(pair)
        return pair

    yield loaded
    for llm in open_:
        llm.close()


def texts(llm: LLM, params: SamplingParams | list[SamplingParams], prompts: list[str]) -> list[Any]:
    outputs = llm.generate(prompts, params)
    assert not [o.error for o in outputs if o.error], outputs
    return [(o.token_ids, o.finish_reason, *map(_rounded, (o.logprobs, o.prompt_logprobs))) for o in outputs]


def _rounded(scores: Any) -> Any:
    return scores and [score and (score.token_id, round(score.logprob, 3)) for score in scores]


def check(models: tuple[LLM, LLM], params: SamplingParams | list[SamplingParams], waits: int) -> None:
    """Compare texts, and count the waits of rounds in which no graph was captured."""
    host, device = models
    want, replays = texts(host, params, PROMPTS), Graph.replays
    scored = isinstance(params, SamplingParams) and params.prompt_logprobs is not None
    with costs_of_rounds(device, scored=scored) as costs:
        assert texts(device, params, PROMPTS) == want, params
    steady = [cost.waits for cost in costs if not cost.captures]
    assert steady and all(1 <= count <= waits for count in steady), (params, steady)
    assert not any(cost.pageable for cost in costs), params
    # passes through recurrent layers are not captured
    recurs = device.loaded.runner.decoder.spec.recurrent is not None
    assert recurs or Graph.replays > replays, params
    free = LEDGER.seen(FREE_ATTENTION)
    assert all("loading/runners.py" in line for line in free), "a kernel that no self-check has tried"


def check_option(models: Models, loaded: str, drafter: str, name: str) -> None:
    """Check that a round waits once, and under a constraint at most once more for each token of a draft.

    No fewer will do: the host has to see a drafted token before it knows the mask of the next position.
    """
    ends = name in ("json", "regex")
    params = SamplingParams(drafter=drafter, max_new_tokens=9, ignore_eos=not ends, **OPTIONS[name])
    if drafter == "retokenize":
        waits = 2  # it reads what its model drafted
    else:
        waits = 1 + DRAFT * (name in CONSTRAINED and drafter not in GUESSERS)
    check(models(loaded), params, waits)


def test_every_drafter_and_every_option_once(models: Models) -> None:
    assert {loaded for loaded, *_ in SHORT} == {*DRAFTERS} and {name for *_, name in SHORT} == {*OPTIONS}
    rehearsed = {name for names in DRAFTERS.values() for name in names}
    # a request's own prediction drafts, `auto` is a choice among the others, and kernels of a CPU run the last
    assert {*KINDS} == rehearsed | {"prediction", "auto", "low-bit"}, "a drafter is not rehearsed"
    for case in SHORT:
        check_option(models, *case)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("loaded", DRAFTERS)
def test_texts_and_waits(models: Models, loaded: str, name: str) -> None:
    for drafter in DRAFTERS[loaded]:
        if (name == "bild" and drafter in (*GUESSERS, "retokenize")) or name == "prediction":
            continue
        if (loaded, drafter, name) not in SHORT:
            check_option(models, loaded, drafter, name)


@pytest.mark.parametrize("name", ["greedy", "cuts", "coupled", "block"])
def test_rows_of_several_drafters_wait_once(models: Models, name: str) -> None:
    params = SamplingParams(max_new_tokens=9, ignore_eos=True, **OPTIONS[name])
    drafters = ("draft-model", "lookup", "none")
    check(models("draft model"), [replace(params, drafter=each) for each in drafters], 1)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_that_stops_drafts_waits_once_a_step(models: Models, policy: str) -> None:
    waits = POLICIES[policy].max_draft if POLICIES[policy].stops_by_content else 1
    loaded, drafter = ("adapter", "kangaroo") if policy == "adaptive-exit" else ("draft model", "draft-model")
    params = SamplingParams(drafter=drafter, policy=policy, max_new_tokens=16, ignore_eos=True, seed=1)
    check(models(loaded), params, waits)


@pytest.mark.skipif("config.getoption('--gpus') < 2", reason="one pretended GPU")
def test_a_model_on_the_second_gpu(folder: Path) -> None:
    """Its texts do not depend on the current device of the thread that loads it, nor of those that decode."""
    params = SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True)
    first = load(folder, "draft model", "cuda")
    assert first.loaded.engine.device == torch.device("cuda", 0)
    want = texts(first, params, PROMPTS)
    with torch.cuda.device(1):
        inside = load(folder, "draft model", "cuda")
        assert texts(inside, params, PROMPTS) == want
    assert inside.loaded.engine.device == torch.device("cuda", 1)
    assert texts(inside, params, PROMPTS) == want
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(texts(inside, params, PROMPTS)))
    thread.start()
    thread.join()
    assert found == [want]
    for llm in (first, inside):
        llm.close()


def test_memory_that_ends_ends_one_request(models: Models) -> None:
    memory.check(models("adapter")[1], "kangaroo")
    memory.check_commit(models("adapter")[1], "kangaroo")


def test_a_prefix_cache_and_many_threads(folder: Path, device: str) -> None:
    llm = load(folder, "draft model", device)
    params = SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True)
    want = [texts(llm, params, [prompt])[0] for prompt in PROMPTS]
    llm.loaded.engine.prefix_cache = PrefixCache(2**26)
    for _ in range(2):
        assert texts(llm, params, PROMPTS) == want
    found: dict[int, Any] = {}

    def work(index: int) -> None:
        found[index] = texts(llm, params, [PROMPTS[index % 3]])[0]

    threads = [threading.Thread(target=work, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {index: want[index % 3] for index in range(6)}
    llm.close()
