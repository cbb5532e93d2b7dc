"""Which drafter suits this prompt? The same greedy text from each.

One sees how many tokens a pass of the target yielded. `foredraft generate --compare` tells what that is
worth in time.

python examples/compare_drafters.py [MODEL [DRAFT [PROMPT]]]
"""

import sys

import foredraft

model, draft, prompt = (*sys.argv[1:4], None, None, None)[:3]
llm = foredraft.load(model, draft=draft)
for drafter in dict.fromkeys(("none", "lookup", llm.default_drafter or "none")):
    params = foredraft.SamplingParams(temperature=0, max_new_tokens=64, drafter=drafter)
    [output] = llm.generate(prompt or "def read_config(path):", params)
    print(f"{drafter:12} {output.stats.mean_accepted_length or 1:.2f} tokens a pass: {output.text!r}")
