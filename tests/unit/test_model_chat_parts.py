"""Chat templates that take a message's text as a list of parts."""

from __future__ import annotations

import pytest

from foredraft.model import chat
from foredraft.model.chat import ChatTemplate
from tests.support.planting import Mutant, assert_caught, defect

ALONE = (
    "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}{% if part.type == 'text' %}"
    "{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
)
FIRST = "{% for m in messages %}<{{ m.role }}>{{ m['content'][0]['text'] }}{% endfor %}"
BOTH = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %}{% endfor %}"
)
AS_IT_IS = "{% for m in messages %}<{{ m.role }}>{{ m.content }} (text){% endfor %}"
MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]


def rendered(template: str, **more: object) -> str:
    return ChatTemplate({"default": template}).render(MESSAGES, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("template", [ALONE, FIRST])
def test_a_template_of_parts_alone_shows_texts(template: str) -> None:
    assert rendered(template) == "<user>Hi<assistant>Ho"
    assert rendered(template, continue_final_message=True) == "<user>Hi<assistant>Ho"


def test_a_template_that_takes_texts_gets_texts() -> None:
    assert rendered(BOTH) == "<user>Hi<assistant>Ho"
    assert rendered(AS_IT_IS) == "<user>Hi (text)<assistant>Ho (text)"


def test_parts_stay_as_they_are_given() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]}]
    assert ChatTemplate({"default": ALONE}).render(parts) == "<user>AB"
    assert ChatTemplate({"default": BOTH}).render(parts) == "<user>[A][B]"


MUTANTS = [
    defect(
        "texts are never given as parts",
        chat.takes_parts_alone,
        lambda sound: lambda render: False,
        lambda: test_a_template_of_parts_alone_shows_texts(ALONE),
    ),
    defect(
        "texts are always given as parts",
        chat.takes_parts_alone,
        lambda sound: lambda render: True,
        test_a_template_that_takes_texts_gets_texts,
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_defect_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(mutant, monkeypatch)
