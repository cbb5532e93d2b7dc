"""Write a page that shows who wrote each token and what every round did.

One sees the first rounds here, and all of them in the page, which a browser opens without a network.

python examples/write_trace.py [FILE.html]
"""

import sys

import foredraft

llm = foredraft.load()
file = sys.argv[1] if len(sys.argv) > 1 else "trace.html"
prompt = "def read_config(path):"
params = foredraft.SamplingParams(temperature=0.8, seed=3, max_new_tokens=48)

outputs = llm.generate(prompt, params, n=2, trace=True)
foredraft.write_trace(file, outputs, prompt=prompt, tokenizer=llm.tokenizer, about="two samples, seed 3")
for one in outputs[0].trace[:5]:
    drafted = [llm.tokenizer.decode([token]) for token in one.draft]
    print(f"{one.drafter}: {one.accepted} of {drafted}, then {llm.tokenizer.decode([one.next_token])!r}")
print(f"all {len(outputs[0].trace)} rounds are in {file}")
