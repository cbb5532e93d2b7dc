"""langchain-anthropic: messages, streams, tools, and its class for a prompt that is too long."""

from common import TOO_LONG, URL, WANT, refused
from langchain_anthropic import ChatAnthropic
from langchain_core.exceptions import ContextOverflowError


def model(**more):
    given = {"model": "demo", "temperature": 0, "max_tokens": 24} | more
    return ChatAnthropic(base_url=URL, api_key="none", max_retries=0, **given)


prompt = [("user", "def add(a, b):")]
whole = model().invoke(prompt)
assert whole.content == WANT["text"] and whole.response_metadata["stop_reason"] == "max_tokens"
assert whole.usage_metadata["output_tokens"] == 24
assert "".join(chunk.text for chunk in model().stream(prompt)) == WANT["text"]
schema = {"title": "Choice", "type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
[call] = model(max_tokens=200).bind_tools([schema], tool_choice="any").invoke(prompt).tool_calls[:1]
assert call["name"] == "Choice" and call["args"]["a"] in ("x", "y")
refused(ContextOverflowError, lambda: model().invoke(TOO_LONG))
