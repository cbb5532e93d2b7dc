"""Which drafter suits this prompt? The same greedy text from each, and what it took.

python examples/compare_drafters.py [MODEL [PROMPT]]
"""

import sys

import foredraft

model, prompt = (*sys.argv[1:3], None, None)[:2]
for drafter in ("none", "lookup") if model else ("none", "lookup", "draft-model"):
    llm = foredraft.load(model, drafter=drafter)
    params = foredraft.SamplingParams(temperature=0, max_new_tokens=64)
    [output] = llm.generate([prompt or "def main():\n"], params)
    length = output.stats.mean_accepted_length or 1
    print(f"{drafter:12} {length:.2f} tokens per pass of the target: {output.text!r}")
