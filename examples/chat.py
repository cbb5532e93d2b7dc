"""Hold a conversation in which every prompt contains the earlier turns.

Prints questions and streamed replies. A model that was trained to chat has a chat template, which turns
messages into a prompt. The demo models have none, so they continue a transcript, and a stop string ends their
turn.

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
        prompt = (
            "".join(f"# {message['role']}: {message['content']}\n" for message in messages) + "# assistant:"
        )
    print(f"> {question}")
    for piece in llm.stream(prompt, llm.params(max_new_tokens=48, stop="\n# user:", seed=1)):
        print(piece.text, end="", flush=True)
    print(f"\n[{piece.output.finish_reason}]")
    messages.append({"role": "assistant", "content": piece.output.text})
