"""OpenAI's own client: chats, completions, responses, tools, and its classes of errors."""

import openai
from common import MESSAGES, TOO_LONG, URL, WANT, refused

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
given = {"model": "demo", "messages": MESSAGES, "temperature": 0, "max_tokens": 24}

whole = client.chat.completions.create(**given, logprobs=True, top_logprobs=2)
assert whole.choices[0].message.content == WANT["text"]
assert "".join(each.token for each in whole.choices[0].logprobs.content) == WANT["text"]
assert whole.usage.prompt_tokens == WANT["prompt_tokens"]
stream = client.chat.completions.create(**given, stream=True)
assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == WANT["text"]

response = client.responses.create(model="demo", input=MESSAGES, temperature=0, max_output_tokens=24)
assert response.output_text == WANT["text"] and response.incomplete_details.reason == "max_output_tokens"
completion = client.completions.create(model="demo", prompt="def f(", temperature=0, max_tokens=24)
assert completion.choices[0].text == WANT["plain"]

tool = {
    "type": "function",
    "name": "save",
    "parameters": {
        "type": "object",
        "properties": {"a": {"enum": ["x"]}, "more": {"type": "object", "propertyNames": {"pattern": "^b"}}},
        "required": ["a"],
    },
}
others = [{"type": "web_search"}, {"type": "custom", "name": "patch"}]
made = client.responses.with_raw_response.create(
    model="demo", input=MESSAGES, tools=[tool, *others], tool_choice="required", max_output_tokens=200
)
assert made.headers["x-ignored-tools"] == "web_search, custom patch", made.headers
assert made.headers["x-unenforced-keywords"], made.headers
assert made.parse().output[0].name == "save"

error = refused(
    openai.BadRequestError, lambda: client.chat.completions.create(**given | {"messages": TOO_LONG})
)
assert error.code == "context_length_exceeded" and error.param == "messages"
assert "maximum context length is 512" in error.message
refused(openai.NotFoundError, lambda: client.chat.completions.create(**given | {"model": "nope"}))
