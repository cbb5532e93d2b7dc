"""Stream the rounds of speculative decoding.

Prints one line per round: the origin of each token (the drafter, the target, or the bonus token after a fully
accepted draft), and the text that the round completed.

python examples/stream.py [PROMPT]
"""

import sys

import foredraft

llm = foredraft.load()
prompt = sys.argv[1] if len(sys.argv) > 1 else "def read_config(path):"
for piece in llm.stream(prompt, foredraft.SamplingParams(temperature=0, max_new_tokens=48)):
    print(f"{', '.join(piece.origins):50} {piece.text!r}")
print(piece.output.finish_reason, piece.output.stats.as_dict())
