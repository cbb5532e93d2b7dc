"""Rank continuations by their log-probability: nothing is generated, the prompt is only read.

One sees the likeliest continuation first, with what the model gives it in nats.

python examples/score.py [PROMPT CONTINUATION ...]
"""

import sys

import foredraft

llm = foredraft.load()
prompt, *continuations = sys.argv[1:] or ["import numpy as", " np", " numpy", " banana"]
only_read = foredraft.SamplingParams(max_new_tokens=0, prompt_logprobs=0)

outputs = llm.generate([prompt + end for end in continuations], only_read)
scores = [sum(score.logprob for score in output.prompt_logprobs[1:]) for output in outputs]
[start] = llm.generate(prompt, only_read)
shared = sum(score.logprob for score in start.prompt_logprobs[1:])
for score, end in sorted(zip(scores, continuations, strict=True), reverse=True):
    print(f"{score - shared:8.2f}  {prompt}{end}")
