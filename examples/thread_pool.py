"""Generate from several threads with one loaded model: their requests share a batch.

Prints each thread's text, which equals the text of the same prompt alone.

python examples/thread_pool.py
"""

from concurrent.futures import ThreadPoolExecutor

import foredraft

llm = foredraft.load()
prompts = ["def mean(values):", "class Stack:", "import numpy as", "def read_config(path):", "for i in"]


def text(prompt):
    return llm.generate(prompt, foredraft.SamplingParams(temperature=0, max_new_tokens=24))[0].text


with ThreadPoolExecutor(max_workers=4) as pool:
    together = list(pool.map(text, prompts))
for prompt, shared in zip(prompts, together, strict=True):
    assert shared == text(prompt)
    print(f"{prompt!r} -> {shared!r}")
