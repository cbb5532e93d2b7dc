"""One loaded model, several threads: their requests share a batch.

One sees each thread's text. It is what the prompt gives alone: who shares the batch changes nothing.

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
