"""lm-eval: `local-completions` scores small tasks, `local-chat-completions` generates; prints what it found."""

import json
import sys

import lm_eval
from common import URL, WANT
from lm_eval.api.instance import Instance
from lm_eval.models.api_models import JsonChatStr
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

common = {"model": "demo", "base_url": f"{URL}/v1/completions", "max_length": 64, "max_retries": 1}
scores = []
for how in (
    {"tokenizer": WANT["folder"], "tokenizer_backend": "huggingface", "tokenized_requests": True},
    {"tokenizer": WANT["folder"], "tokenizer_backend": "huggingface", "tokenized_requests": False},
    {"tokenizer_backend": "remote", "tokenized_requests": False},
):
    found = lm_eval.simple_evaluate(
        model="local-completions", model_args=common | how, tasks=WANT["tasks"], batch_size=4, log_samples=True,
        bootstrap_iters=0, random_seed=None,
    )  # fmt: skip
    scores.append({task: [each["filtered_resps"] for each in own] for task, own in found["samples"].items()})

asked = {"until": ["\n\n"], "max_gen_toks": 12}
strings = LocalCompletionsAPI(
    base_url=f"{URL}/v1/completions", model="demo", tokenizer_backend=None, tokenized_requests=False
)
assert strings.generate_until([Instance("generate_until", {}, ("def add(a, b):", asked), 0)]) == [
    WANT["short_plain"]
]
chat = LocalChatCompletion(base_url=f"{URL}/v1/chat/completions", model="demo")
messages = JsonChatStr(json.dumps([{"role": "user", "content": "def add(a, b):"}]))
assert chat.generate_until([Instance("generate_until", {}, (messages, asked), 0)]) == [WANT["short_text"]]
json.dump(scores, sys.stdout)
