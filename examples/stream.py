"""Watch the rounds of speculative decoding: one line a round, with who wrote what.

python examples/stream.py [PROMPT]
"""

import sys

import foredraft

llm = foredraft.load()
prompt = sys.argv[1] if len(sys.argv) > 1 else "def main():\n"
for piece in llm.stream(prompt, foredraft.SamplingParams(temperature=0, max_new_tokens=48)):
    print(f"{', '.join(piece.origins):50} {piece.text!r}")
    if piece.output is not None:
        print(piece.output.finish_reason, piece.output.stats.as_dict())
