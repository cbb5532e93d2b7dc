"""Compare drafters on one prompt: all of them give the same greedy text.

Prints the mean accepted length, the tokens per forward pass of the target. `foredraft generate --compare`
measures the speed-up.

python examples/compare_drafters.py [MODEL [DRAFT [PROMPT]]]
"""

import sys

import foredraft

model, draft, prompt = (*sys.argv[1:4], None, None, None)[:3]
llm = foredraft.load(model, draft=draft)
for drafter in dict.fromkeys(("none", "lookup", llm.default_drafter or "none")):
    params = foredraft.SamplingParams(temperature=0, max_new_tokens=64, drafter=drafter)
    [output] = llm.generate(prompt or "def read_config(path):", params)
    print(f"{drafter:12} {output.stats.mean_accepted_length or 1:.2f} tokens per pass: {output.text!r}")
