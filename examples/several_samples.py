"""Several samples of one prompt, the same with speculation and without.

One sees each sample, and how many tokens a pass of the target yielded with the drafter and without. The
text does not depend on who drafts: that is `acceptance="coupled"`, which a seed switches on.

python examples/several_samples.py [PROMPT]
"""

import sys

import foredraft

llm = foredraft.load()
prompt = sys.argv[1] if len(sys.argv) > 1 else "def read_config(path):"
params = foredraft.SamplingParams(temperature=0.8, seed=11, max_new_tokens=32)

drafted = llm.generate(prompt, params, n=3)
plain = llm.generate(prompt, params.replace(drafter="none"), n=3)
for one, other in zip(drafted, plain, strict=True):
    assert one.token_ids == other.token_ids
    lengths = f"{one.stats.mean_accepted_length:.2f} and {other.stats.mean_accepted_length:.2f} tokens a pass"
    print(f"[{one.sample}] {lengths}: {one.text!r}")
