"""pydantic-ai: agents over chat completions, responses and messages; typed output by tools and by schema."""

from typing import Literal

from anthropic import AsyncAnthropic
from common import TOO_LONG, URL, WANT, refused
from openai import AsyncOpenAI
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


class Letter(BaseModel):
    a: Literal["x", "y"]


class Choice(Letter):
    words: set[Literal["p", "q"]] = Field(default=set(), max_length=2)  # a set is uniqueItems


openai = OpenAIProvider(openai_client=AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0))
anthropic = AnthropicProvider(anthropic_client=AsyncAnthropic(base_url=URL, api_key="none", max_retries=0))
models = [
    OpenAIChatModel("demo", provider=openai),
    OpenAIResponsesModel("demo", provider=openai),
    AnthropicModel("demo", provider=anthropic),
]
short = {"temperature": 0.0, "max_tokens": 24}
long = short | {
    "max_tokens": 200,
    "parallel_tool_calls": False,
}  # or calls go on to the limit, which cuts one
for model in models:
    assert Agent(model, model_settings=short).run_sync("def add(a, b):").output == WANT["text"]
    assert Agent(model, output_type=Choice, model_settings=long, retries=3).run_sync("Choose.").output.a in (
        "x",
        "y",
    )
    error = refused(
        ModelHTTPError,
        lambda model=model: Agent(model, model_settings=short).run_sync(TOO_LONG[0]["content"]),
    )
    assert error.status_code == 400 and (
        "maximum context length" in str(error) or "prompt is too long" in str(error)
    )
native = Agent(models[0], output_type=NativeOutput(Letter, strict=True), model_settings=long, retries=3)
assert native.run_sync("Choose.").output.a in ("x", "y")
