"""`foredraft generate --chat` on a terminal: a conversation whose replies are streamed.

A reply that Ctrl-C ended stays in the conversation as far as it came. A turn that failed is not added to it.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from foredraft.cli.errors import print_error
from foredraft.cli.interrupt import Interrupt
from foredraft.cli.job import Job, Run, stream
from foredraft.cli.layout import fitted, terminal_width
from foredraft.cli.progress import ProgressBars
from foredraft.cli.render import Painter, last_line
from foredraft.errors import RequestError
from foredraft.model.prompt_form import chat_ids

if TYPE_CHECKING:
    from foredraft.model.tokenizer import Tokenizer

__all__ = ["CONVERSATION", "Conversation", "converse"]

# Tokens of a conversation unless --max-length is given or the model has fewer: some dozens of turns, for a
# moderate KV cache.
CONVERSATION = 8192
RESET, EXIT, HELP = "/reset", "/exit", "/help"
COMMANDS = (
    f"{RESET} clears the conversation, {EXIT} or Ctrl-D ends it, Ctrl-C ends a reply, {HELP} shows this again"
)


class Conversation:
    """The messages of a conversation.

    Attributes:
        turns: Messages of the user and the assistant, in order. The system message is kept apart, so that
            `reset` leaves it.
    """

    def __init__(self, system: str | None) -> None:
        self._system = [] if system is None else [_message("system", system)]
        self.turns: list[dict[str, str]] = []

    def encode(self, tokenizer: Tokenizer | None, text: str) -> list[int]:
        """Return the token ids of the conversation and one more user message, up to the reply's first token.

        Raises:
            ConfigError: The model has no tokenizer or no chat template.
        """
        return chat_ids(tokenizer, [*self._system, *self.turns, _message("user", text)])

    def add(self, text: str, reply: str) -> None:
        """Add a user message and its reply."""
        self.turns += [_message("user", text), _message("assistant", reply)]

    def reset(self) -> None:
        """Remove all messages but the system message."""
        self.turns = []


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def converse(job: Job, conversation: Conversation, painter: Painter, bars: ProgressBars) -> int:
    """Read messages and print replies until the user ends the conversation.

    Args:
        job: Parameters of every reply; its prompt is ignored.
        conversation: The messages so far.
        painter: Prints the replies.
        bars: Progress bars.

    Returns:
        The exit code.
    """
    with suppress(ImportError):  # not every system has it
        import readline  # noqa: F401  gives `input` a history and line editing
    print_commands()
    while True:
        try:
            text = input("> ").strip()
            if text == EXIT:
                return 0
            if text == RESET:
                conversation.reset()
            elif text == HELP:
                print_commands()
            elif text:
                reply(job, conversation, text, painter, bars)
        except EOFError:
            painter.write("\n")
            return 0
        except UnicodeDecodeError as error:
            print_error(f"the message is not UTF-8 text (byte {error.start}); type it again")
        except RequestError as error:
            print_error(error)


def print_commands() -> None:
    """Print the commands of a conversation to stderr."""
    print("\n".join(fitted([COMMANDS], terminal_width(sys.stderr))), file=sys.stderr)


def reply(job: Job, conversation: Conversation, text: str, painter: Painter, bars: ProgressBars) -> None:
    """Print the model's reply to a message, and add both to the conversation."""
    prompt = conversation.encode(job.llm.tokenizer, text)
    job = replace(job, prompt=prompt)
    with Interrupt(job.llm) as interrupt:
        shown = Run.timed(partial(stream, job, painter, bars, interrupt))
        bars.clear()
        line = last_line(shown.stats, None, compared=False, lossless=shown.lossless)
        print("\n".join(fitted([line], terminal_width(sys.stdout))))
    for error in shown.errors:
        print_error(error)
    if not shown.errors:
        [output] = shown.outputs
        assert job.llm.tokenizer is not None
        # Without special tokens, even under --show-special: the chat template adds them itself.
        conversation.add(text, job.llm.tokenizer.decode(output.token_ids, after=prompt))
