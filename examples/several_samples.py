"""Draw several samples of one prompt, with and without the drafter: the texts are the same.

A request with a seed uses `acceptance="coupled"`, under which the text does not depend on the drafter. Prints
each sample, and the mean accepted lengths with the drafter and without.

python examples/several_samples.py [PROMPT]
"""

import sys

import foredraft

llm = foredraft.load()
prompt = sys.argv[1] if len(sys.argv) > 1 else "def read_config(path):"
params = foredraft.SamplingParams(temperature=0.8, seed=11, max_new_tokens=32)

drafted = llm.generate(prompt, params, n=3)
plain = llm.generate(prompt, params.replace(drafter="none"), n=3)
for sample, same in zip(drafted, plain, strict=True):
    assert sample.token_ids == same.token_ids
    lengths = (
        f"{sample.stats.mean_accepted_length:.2f} and {same.stats.mean_accepted_length:.2f} tokens per pass"
    )
    print(f"[{sample.sample}] {lengths}: {sample.text!r}")
