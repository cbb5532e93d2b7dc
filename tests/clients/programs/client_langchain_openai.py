"""langchain-openai: chats, batches, streams, structured output, tools, and OpenAI's classes of errors."""

import openai
from common import TOO_LONG, URL, WANT, refused
from langchain_core.exceptions import ContextOverflowError
from langchain_openai import ChatOpenAI, OpenAI


def model(**more):
    given = {"model": "demo", "temperature": 0, "max_completion_tokens": 24} | more
    return ChatOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, **given)


prompt = [("user", "def add(a, b):")]
whole = model(logprobs=True, top_logprobs=2).invoke(prompt)
assert whole.content == WANT["text"] and whole.response_metadata["finish_reason"] == "length"
assert [each["logprob"] for each in whole.response_metadata["logprobs"]["content"]] == WANT["logprobs"]
assert whole.usage_metadata["output_tokens"] == 24
assert whole.usage_metadata["input_tokens"] == WANT["prompt_tokens"]

chunks = list(model(stream_usage=True).stream(prompt))
assert "".join(chunk.content for chunk in chunks) == WANT["text"] and len(chunks) > 2
assert sum(each.usage_metadata["output_tokens"] for each in chunks if each.usage_metadata) == 24
assert [each.content for each in model().batch([prompt, prompt])] == [WANT["text"]] * 2
stop = WANT["text"].split()[1]
assert model().invoke(prompt, stop=[stop]).content == WANT["text"][: WANT["text"].index(stop)]
assert model(use_responses_api=True).invoke(prompt).text == WANT["text"]

schema = {
    "title": "Choice", "description": "A choice.", "type": "object", "properties": {"a": {"enum": ["x", "y"]}},
    "required": ["a"], "additionalProperties": False,
}  # fmt: skip
structured = model(max_completion_tokens=100).with_structured_output(schema, method="json_schema")
assert structured.invoke(prompt)["a"] in ("x", "y")
[call] = (
    model(max_completion_tokens=200)
    .bind_tools([schema], tool_choice="required")
    .invoke(prompt)
    .tool_calls[:1]
)
assert call["name"] == "Choice" and call["args"]["a"] in ("x", "y")

completion = OpenAI(
    model="demo", base_url=f"{URL}/v1", api_key="none", max_retries=0, temperature=0, max_tokens=24
)
assert completion.invoke("def f(") == "".join(completion.stream("def f(")) == WANT["plain"]

refused(ContextOverflowError, lambda: model().invoke(TOO_LONG))
assert "temperature" in str(refused(openai.BadRequestError, lambda: model(temperature=-1).invoke(prompt)))
refused(openai.NotFoundError, lambda: model(model="nope").invoke(prompt))
