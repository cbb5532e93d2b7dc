"""litellm, as a program's way to any server: chats, streams, schemas, text completions, and its classes of errors."""

import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it asks the internet

import litellm
from common import MESSAGES, TOO_LONG, URL, WANT, refused

given = {
    "model": "openai/demo", "messages": MESSAGES, "api_base": f"{URL}/v1", "api_key": "none", "max_tokens": 24,
    "temperature": 0, "max_retries": 0,
}  # fmt: skip

whole = litellm.completion(**given, logprobs=True, top_logprobs=2)
[choice] = whole.choices
assert choice.message.content == WANT["text"] and choice.finish_reason == "length"
assert [each.logprob for each in choice.logprobs.content] == WANT["logprobs"]
assert [len(each.top_logprobs) for each in choice.logprobs.content] == [2] * 24
assert whole.usage.completion_tokens == 24 and whole.usage.prompt_tokens == WANT["prompt_tokens"]

chunks = list(litellm.completion(**given, stream=True, stream_options={"include_usage": True}))
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == WANT["text"]
assert [each.usage.completion_tokens for each in chunks if getattr(each, "usage", None)] == [24]

stop = WANT["text"].split()[1]
[stopped] = litellm.completion(**given, stop=[stop]).choices
assert stopped.message.content == WANT["text"][: WANT["text"].index(stop)] and stopped.finish_reason == "stop"

schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
form = {"type": "json_schema", "json_schema": {"name": "choice", "schema": schema, "strict": True}}
made = litellm.completion(**given | {"max_tokens": 100}, response_format=form)
assert json.loads(made.choices[0].message.content)["a"] in ("x", "y")

text = litellm.text_completion(
    **{name: value for name, value in given.items() if name != "messages"}
    | {"model": "text-completion-openai/demo"},
    prompt="def f(",
)
assert text.choices[0].text == WANT["plain"]

anthropic = given | {"model": "anthropic/demo", "api_base": URL}
assert litellm.completion(**anthropic).choices[0].message.content == WANT["text"]

for asked in (given, anthropic):
    refused(
        litellm.ContextWindowExceededError,
        lambda asked=asked: litellm.completion(**asked | {"messages": TOO_LONG}),
    )
assert "temperature" in str(
    refused(litellm.BadRequestError, lambda: litellm.completion(**given | {"temperature": -1}))
)
refused(litellm.NotFoundError, lambda: litellm.completion(**given | {"model": "openai/nope"}))
