"""Generate from many prompts at once, each with its own parameters.

Requests of every kind share a batch: greedy and sampled, plain and drafted, short and long. Requests that do
not fit into the batch wait for a free row. Prints each request's finish reason, its mean accepted length and
its text.

python examples/many_prompts.py
"""

import foredraft
from foredraft import SamplingParams

llm = foredraft.load(max_batch=3)
requests = {
    "def area(width, height):": SamplingParams(temperature=0, max_new_tokens=16),
    "class Stack:": SamplingParams(temperature=0.7, top_p=0.9, seed=1, max_new_tokens=24),
    "import os\n": SamplingParams(drafter="none", min_p=0.1, max_new_tokens=12),
    "x = [1, 2, 3, 1, 2,": SamplingParams(drafter="lookup", temperature=0, max_new_tokens=24),
    "def test_": SamplingParams(repetition_penalty=1.2, stop="\n\n", max_new_tokens=32),
}
outputs = llm.generate(list(requests), list(requests.values()))
for prompt, output in zip(requests, outputs, strict=True):
    length = output.stats.mean_accepted_length
    print(f"{output.finish_reason:6} {length:.2f} tokens per pass  {prompt!r} -> {output.text!r}")
