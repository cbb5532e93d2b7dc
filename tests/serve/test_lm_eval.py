"""lm-eval's `local-completions` scores a small task through the server as the library itself does, to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval")
pytest.importorskip("datasets")
pytest.importorskip("aiohttp")

import lm_eval

from foredraft import demo
from foredraft.llm import LLM
from tests.support.serving import Served

pytestmark = pytest.mark.filterwarnings("ignore")  # lm-eval's own
DOCS = [
    {"question": "def add(a, b):\n    return", "choices": [" a + b", " a - b", " None"], "gold": 0},
    {"question": "for i in", "choices": [" range(3):", " while", " import"], "gold": 0},
    {"question": "import numpy as", "choices": [" np", " pd"], "gold": 0},
]
TEXTS = [{"text": "def f(x):\n    return x\n"}, {"text": "import os\n"}]


def tasks(folder: Path) -> list[dict[str, Any]]:
    """Return a task with choices, and one of whole texts; their documents lie in the folder."""
    made = []
    for name, docs in (("choices", DOCS), ("texts", TEXTS)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
        data = {"data_files": {"test": str(folder / f"{name}.jsonl")}, "cache_dir": str(folder / "cache")}
        made.append(
            {
                "task": name,
                "dataset_path": "json",
                "dataset_kwargs": data,
                "test_split": "test",
                "num_fewshot": 0,
            }
        )
    made[0] |= {
        "output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}",
        "doc_to_target": "gold", "target_delimiter": "", "metric_list": [{"metric": "acc"}],
    }  # fmt: skip
    made[1] |= {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}],
    }  # fmt: skip
    return made


def scored(llm: LLM, ids: list[int], first: int) -> tuple[float, bool]:
    """Return the log-likelihood of the tokens from the `first` on, and whether each is the likeliest."""
    [output] = llm.generate([ids], max_new_tokens=0, prompt_logprobs=1)
    scores = [score for score in (output.prompt_logprobs or [])[first:] if score is not None]
    return sum(score.logprob for score in scores), all(score.logprob == score.top[0][1] for score in scores)


@pytest.mark.slow
@pytest.mark.parametrize("ids", [True, False], ids=["token ids", "strings"])
def test_scores_are_the_library_s(
    served: Served, llm: LLM, tmp_path: Path, ids: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    found = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={
            "model": "demo", "base_url": f"{served.url}/v1/completions", "tokenizer": str(demo.target_path()),
            "tokenizer_backend": "huggingface", "max_length": 64, "tokenized_requests": ids, "max_retries": 1,
        },
        tasks=tasks(tmp_path), batch_size=4, log_samples=True, bootstrap_iters=0, random_seed=None,
    )  # fmt: skip
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    for sample in found["samples"]["choices"]:
        doc, likeliest = sample["doc"], []
        start = tokenizer.encode(doc["question"], False)
        for choice, response in zip(doc["choices"], sample["filtered_resps"], strict=True):
            whole = tokenizer.encode(doc["question"] + choice, False)
            want = scored(llm, whole, len(start))
            assert tuple(response) == want
            likeliest.append(want[0])
        assert sample["acc"] == float(likeliest.index(max(likeliest)) == doc["gold"])
    assert found["results"]["choices"]["acc,none"] > 0
    for sample in found["samples"]["texts"]:
        text = tokenizer.encode(sample["doc"]["text"], False)
        assert sample["filtered_resps"] == [scored(llm, [llm.loaded.spec.bos_token_id or 0, *text], 1)[0]]


def test_texts_are_generated_as_the_library_does(served: Served, llm: LLM) -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.models.api_models import JsonChatStr
    from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

    kwargs = {"until": ["\n\n"], "max_gen_toks": 12}
    request = Instance("generate_until", {}, ("def add(a, b):", kwargs), 0)
    strings = LocalCompletionsAPI(
        base_url=f"{served.url}/v1/completions",
        model="demo",
        tokenizer_backend=None,
        tokenized_requests=False,
    )
    [want] = llm.generate("def add(a, b):", temperature=0, max_new_tokens=12, stop=["\n\n"], drafter="none")
    assert strings.generate_until([request]) == [want.text]
    chat = LocalChatCompletion(base_url=f"{served.url}/v1/chat/completions", model="demo")
    messages = json.dumps([{"role": "user", "content": "def add(a, b):"}])
    asked = Instance("generate_until", {}, (JsonChatStr(messages), kwargs), 0)
    [answer] = llm.chat(json.loads(messages), temperature=0, max_new_tokens=12, stop=["\n\n"], drafter="none")
    assert chat.generate_until([asked]) == [answer.text]
