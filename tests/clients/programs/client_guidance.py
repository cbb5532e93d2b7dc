"""guidance: builds its text of the tokens of log-probabilities, and constrains by regular expressions."""

from common import URL, WANT
from guidance import assistant, gen, user
from guidance.models import OpenAI

model = OpenAI("demo", base_url=f"{URL}/v1", api_key="none")
with user():
    asked = model + "def add(a, b):"
with assistant():
    answered = asked + gen("answer", max_tokens=24, temperature=1e-6)  # it takes 0 for none
assert answered["answer"] == WANT["text"], answered["answer"]
