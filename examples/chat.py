"""A conversation: every reply is part of what the next one goes on from.

One sees questions and streamed replies. A model that was trained to chat has a template, which turns
messages into its prompt; the demo models have none, so they go on from a transcript, and a stop string ends
their turn.

python examples/chat.py [MODEL [DRAFT]]
"""

import sys

import foredraft

llm = foredraft.load(*sys.argv[1:2], draft=sys.argv[2] if len(sys.argv) > 2 else None)
messages = []
for question in ("What does a list hold?", "And a dictionary?"):
    messages.append({"role": "user", "content": question})
    if llm.tokenizer.chat is not None:
        prompt = llm.tokenizer.encode_chat(messages)
    else:
        prompt = "".join(f"# {each['role']}: {each['content']}\n" for each in messages) + "# assistant:"
    print(f"> {question}")
    for piece in llm.stream(prompt, llm.params(max_new_tokens=48, stop="\n# user:", seed=1)):
        print(piece.text, end="", flush=True)
    print(f"\n[{piece.output.finish_reason}]")
    messages.append({"role": "assistant", "content": piece.output.text})
