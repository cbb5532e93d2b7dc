"""The ways in which models write calls, as data: the texts around the name and the arguments of each.

A model writes calls as its chat template tells those of earlier turns.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias

ID_LENGTH = 9  # letters and digits, as Mistral's template asks
QUOTE = '<|"|>'  # around texts in Gemma's calls
Payload: TypeAlias = Literal["object", "json", "elements", "gemma"]


@dataclass(frozen=True)
class CallFormat:
    """A way in which models write calls: the texts around the name and the arguments of each."""

    opens: str  # before the name
    middle: str  # from the name to the arguments
    closes: str  # after the arguments
    first: str = ""  # before the first call
    between: str = ""  # from one call to the next
    last: str = ""  # after the last call
    # what begins a call wherever it stands; "": calls begin the text
    marker: str = ""
    # how arguments are written: as JSON within an object that has the name, too; as JSON; as an element each;
    # in Gemma's own way
    payload: Payload = "json"
    element: tuple[str, str, str] = ("", "", "")  # before the key, from the key to its value, after the value
    id: str = ""  # before an id between name and arguments

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return a call; its arguments are texts, where they are not JSON."""
        before, key, after = self.element
        match self.payload:
            case "elements":
                given = "".join(f"{before}{each}{key}{text}{after}" for each, text in arguments.items())
            case "gemma":
                given = ",".join(f"{each}:{QUOTE}{text}{QUOTE}" for each, text in arguments.items())
            case _:
                given = json.dumps(arguments, ensure_ascii=False)
        return f"{self.opens}{name}{self.middle}{given}{self.closes}"

    @cached_property
    def head(self) -> re.Pattern[str]:
        """What stands between a marker and the arguments."""
        opens = _around(self.opens.removeprefix(self.marker))
        id = rf"(?:{_around(self.id)}\w*)?" if self.id else ""
        follows = {"json": r"\{", "elements": f"{loose(self.element[0])}|{loose(self.closes)}"}
        behind = f"(?={follows.get(self.payload, '')})"
        return re.compile(rf"{opens}(?P<name>[\w.\-]+)(?=[^\w.\-]){id}{_around(self.middle)}{behind}")

    @property
    def closing(self) -> str:
        """What follows a call that has a marker."""
        return (self.closes.removeprefix("}") if self.payload == "object" else self.closes).strip()

    @property
    def is_list(self) -> bool:
        """Whether only the first call has a marker."""
        return bool(self.marker) and not self.opens.startswith(self.marker)

    @property
    def noise(self) -> tuple[str, ...]:
        """What stands around all calls, and is neither a call nor content."""
        return () if self.is_list else tuple(filter(None, (self.first.strip(), self.last.strip())))


def _object(opens: str = "", closes: str = "", *, key: str = "arguments", **more: Any) -> CallFormat:
    return CallFormat(f'{opens}{{"name": "', f'", "{key}": ', f"}}{closes}", payload="object", **more)


# Nous Research's Hermes; Qwen 2.5 and 3.
HERMES = _object("<tool_call>\n", "\n</tool_call>", between="\n", marker="<tool_call>")
LLAMA = _object(between="; ", key="parameters")  # Llama 3.1 and later
# https://huggingface.co/mistralai/Mistral-7B-Instruct-v0.3
MISTRAL = _object(first="[TOOL_CALLS] [", between=", ", last="]", marker="[TOOL_CALLS]")
# https://huggingface.co/ibm-granite/granite-3.3-8b-instruct
GRANITE = _object(first="<|tool_call|>[", between=", ", last="]", marker="<|tool_call|>")
# https://huggingface.co/mistralai/Ministral-3-8B-Instruct-2512
MINISTRAL = CallFormat("[TOOL_CALLS]", "[ARGS]", "", marker="[TOOL_CALLS]")
# https://huggingface.co/google/gemma-4-E4B-it
GEMMA = CallFormat("<|tool_call>call:", "{", "}<tool_call|>", marker="<|tool_call>", payload="gemma")
# https://huggingface.co/mistralai/Mistral-Small-3.2-24B-Instruct-2506
SMALL = CallFormat("[TOOL_CALLS]", "[ARGS]", "", marker="[TOOL_CALLS]", id="[CALL_ID]")
# https://huggingface.co/deepseek-ai/DeepSeek-V3.1, and R1 of May 2025
DEEPSEEK = CallFormat(
    "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", first="<｜tool▁calls▁begin｜>",
    last="<｜tool▁calls▁end｜>", marker="<｜tool▁call▁begin｜>",
)  # fmt: skip
DEEPSEEK_R1 = CallFormat(
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>",
    first="<｜tool▁calls▁begin｜>", between="\n", last="<｜tool▁calls▁end｜>", marker="<｜tool▁call▁begin｜>",
)  # fmt: skip


def _elements(opens: str, middle: str, closes: str, *element: str, **more: Any) -> CallFormat:
    assert len(element) == 3
    return CallFormat(opens, middle, closes, payload="elements", element=element, **more)


# https://huggingface.co/Qwen/Qwen3-Coder-30B-A3B-Instruct, and Qwen 3.5 and later
QWEN = _elements(
    "<tool_call>\n<function=", ">\n", "</function>\n</tool_call>", "<parameter=", ">\n", "\n</parameter>\n",
    between="\n", marker="<tool_call>",
)  # fmt: skip
# https://huggingface.co/ByteDance-Seed/Seed-OSS-36B-Instruct
SEED = _elements(
    "<seed:tool_call>\n<function=", ">\n", "</function>\n</seed:tool_call>", "<parameter=", ">",
    "</parameter>\n", between="\n", marker="<seed:tool_call>",
)  # fmt: skip
# https://huggingface.co/zai-org/GLM-4.5-Air, and GLM-4.7-Flash
GLM = _elements(
    "<tool_call>", "\n", "</tool_call>", "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n",
    between="\n", marker="<tool_call>",
)  # fmt: skip
GLM_DENSE = _elements(
    "<tool_call>", "", "</tool_call>", "<arg_key>", "</arg_key><arg_value>", "</arg_value>",
    marker="<tool_call>",
)  # fmt: skip
# https://huggingface.co/MiniMaxAI/MiniMax-M2
MINIMAX = _elements(
    '<invoke name="', '">\n', "</invoke>", '<parameter name="', '">', "</parameter>\n",
    first="<minimax:tool_call>\n", between="\n", last="\n</minimax:tool_call>", marker="<invoke",
)  # fmt: skip
# https://huggingface.co/openbmb/MiniCPM5-1B
MINICPM = _elements(
    '<function name="', '">', "</function>", '<param name="', '">', "</param>", between="\n",
    marker="<function",
)  # fmt: skip
FORMATS = (
    HERMES, QWEN, SEED, GLM, GLM_DENSE, MINIMAX, MINICPM, GEMMA, GRANITE, SMALL, MINISTRAL, MISTRAL,
    DEEPSEEK_R1, DEEPSEEK, LLAMA,
)  # fmt: skip


def _around(text: str) -> str:
    """Return a pattern of a text with any white space where it has some, and before and behind it."""
    return rf"\s*{loose(text)}\s*" if text.strip() else r"\s*"


def loose(text: str) -> str:
    return r"\s*".join(map(re.escape, text.split()))
