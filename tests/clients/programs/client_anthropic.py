"""Anthropic's own client: messages, streams, tools, counting, and its classes of errors."""

import anthropic
from common import MESSAGES, TOO_LONG, URL, WANT, refused

client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
given = {"model": "demo", "messages": MESSAGES, "max_tokens": 24, "extra_body": {"temperature": 0}}
text = [{"type": "text", "text": WANT["text"]}]

whole = client.messages.create(**given)
assert whole.content[0].text == WANT["text"] and whole.stop_reason == "max_tokens"
with client.messages.stream(**given) as stream:
    assert "".join(stream.text_stream) == WANT["text"]
    assert stream.get_final_message().usage.output_tokens == 24
counted = client.messages.count_tokens(model="demo", messages=MESSAGES)
assert counted.input_tokens == WANT["prompt_tokens"]

# As its agents ask: more tokens than the context has, thinking, and a history with thinking.
history = [
    *MESSAGES,
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            {"type": "redacted_thinking", "data": "d"},
            *text,
        ],
    },
    {"role": "user", "content": "go on"},
]
agent = given | {"messages": history, "max_tokens": 32_000, "thinking": {"type": "adaptive"}}
with client.messages.stream(**agent, stop_sequences=["\n\n"]) as stream:
    assert stream.get_final_message().stop_reason in ("stop_sequence", "max_tokens", "end_turn")

tool = {
    "name": "save",
    "input_schema": {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"]},
}
server_tool = {"type": "web_search_20250305", "name": "web_search"}
called = client.messages.create(
    **given | {"max_tokens": 200},
    tools=[tool, server_tool],
    tool_choice={"type": "any", "disable_parallel_tool_use": True},
)
assert called.stop_reason == "tool_use" and called.content[0].input == {"a": "x"}

error = refused(anthropic.BadRequestError, lambda: client.messages.create(**given | {"messages": TOO_LONG}))
assert error.body["type"] == "error" and error.body["error"]["message"].startswith("prompt is too long: ")
refused(anthropic.NotFoundError, lambda: client.messages.create(**given | {"model": "nope"}))
