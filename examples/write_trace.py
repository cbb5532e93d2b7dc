"""Write an HTML page that shows each token's origin and every round.

Prints the first rounds; the page has all of them, and needs no network.

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
for step in outputs[0].trace[:5]:
    drafted = [llm.tokenizer.decode([token]) for token in step.draft]
    print(f"{step.drafter}: {step.accepted} of {drafted}, then {llm.tokenizer.decode([step.next_token])!r}")
print(f"all {len(outputs[0].trace)} rounds are in {file}")
