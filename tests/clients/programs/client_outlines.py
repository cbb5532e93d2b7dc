"""outlines: text, and the types that it turns into schemas, over OpenAI's client."""

import json
from typing import Literal

import openai
import outlines
from common import URL, WANT
from pydantic import BaseModel


class Choice(BaseModel):
    a: Literal["x", "y"]
    n: int


client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
model = outlines.from_openai(client, "demo")
assert model("def add(a, b):", max_tokens=24, temperature=0) == WANT["text"]
assert json.loads(model("Choose.", Choice, max_tokens=100))["a"] in ("x", "y")
assert "".join(model.stream("def add(a, b):", max_tokens=24, temperature=0)) == WANT["text"]

# Its client of vLLM's servers has the fields of those.
own = outlines.from_vllm(client, "demo")
assert own("Choose.", Literal["yes", "no"], max_tokens=20) in ("yes", "no")
assert own("Choose.", outlines.types.Regex("a{3}b"), max_tokens=20) == "aaab"
