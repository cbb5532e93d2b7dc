"""Rank continuations by their log-probability, with prefill only: no token is generated.

Prints the log-probability of each continuation in nats, the most likely first.

python examples/score.py [PROMPT CONTINUATION ...]
"""

import sys

import foredraft

llm = foredraft.load()
prompt, *continuations = sys.argv[1:] or ["import numpy as", " np", " numpy", " banana"]
prefill_only = foredraft.SamplingParams(max_new_tokens=0, prompt_logprobs=0)

outputs = llm.generate([prompt + end for end in continuations], prefill_only)
scores = [sum(score.logprob for score in output.prompt_logprobs[1:]) for output in outputs]
[start] = llm.generate(prompt, prefill_only)
shared = sum(score.logprob for score in start.prompt_logprobs[1:])
for score, end in sorted(zip(scores, continuations, strict=True), reverse=True):
    print(f"{score - shared:8.2f}  {prompt}{end}")
