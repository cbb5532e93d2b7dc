"""`foredraft generate --chat` on a terminal: a conversation, each reply streamed as text is.

Contract: a reply that was ended (Ctrl-C) stays in the conversation as far as it came; a turn that failed
leaves no trace in it.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from foredraft.cli.error_text import spelled_as_options
from foredraft.cli.interrupt import Interrupt
from foredraft.cli.job import Job, Run, stream
from foredraft.cli.progress import ProgressBars
from foredraft.cli.render import Painter, last_line
from foredraft.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from foredraft.model.tokenizer import Tokenizer

__all__ = ["CONVERSATION", "Conversation", "converse"]

CONVERSATION = 8192  # positions that there is room for, unless the model has fewer or --max-length says so
RESET, EXIT = "/reset", "/exit"


class Conversation:
    """The messages so far; the system's stays."""

    def __init__(self, system: str | None) -> None:
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self.turns: list[dict[str, str]] = []

    def ids(self, tokenizer: Tokenizer | None, text: str) -> list[int]:
        """The conversation with one more message of the user's, up to where the reply begins."""
        if tokenizer is None:
            raise ConfigError("--chat needs a tokenizer, but the model's folder has no tokenizer.json")
        if tokenizer.chat is None:
            raise ConfigError(
                "--chat needs a chat template, but the model has none; leave it out, or give --model one that"
                " was trained to chat"
            )
        return tokenizer.encode_chat([*self._system, *self.turns, _said("user", text)])

    def add(self, text: str, reply: str) -> None:
        self.turns += [_said("user", text), _said("assistant", reply)]

    def reset(self) -> None:
        self.turns = []


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def converse(job: Job, conversation: Conversation, painter: Painter, bars: ProgressBars) -> int:
    """Read, reply, until the user ends it; job: what each reply is made with, its prompt aside."""
    with suppress(ImportError):  # of systems without it
        import readline  # noqa: F401  `input` then has a history and an editor
    print(f"{RESET} forgets the conversation, {EXIT} or Ctrl-D ends it, Ctrl-C ends a reply", file=sys.stderr)
    while True:
        try:
            text = input("> ").strip()
            if text == EXIT:
                return 0
            if text == RESET:
                conversation.reset()
            elif text:
                reply(job, conversation, text, painter, bars)
        except EOFError:
            painter.write("\n")
            return 0
        except UnicodeDecodeError as error:
            complain(f"that is not UTF-8 text (byte {error.start}); type it again")
        except RequestError as error:
            complain(str(error))


def reply(job: Job, conversation: Conversation, text: str, painter: Painter, bars: ProgressBars) -> None:
    prompt = conversation.ids(job.llm.tokenizer, text)
    job = replace(job, prompt=prompt)
    with Interrupt(job.llm) as interrupt:
        shown = Run.of(partial(stream, job, painter, bars, interrupt))
        bars.clear()
        print(last_line(shown.stats, None, compared=False, lossless=shown.lossless))
    for error in shown.errors:
        complain(error)
    if not shown.errors:
        [output] = shown.outputs
        assert job.llm.tokenizer is not None
        # as the template wants it, whatever was shown: the special tokens are the template's own
        conversation.add(text, job.llm.tokenizer.decode(output.token_ids, after=prompt))


def complain(message: str) -> None:
    print(f"foredraft: error: {spelled_as_options(message)}", file=sys.stderr)
