"""Options that constrain the text: banned words, regular expressions, JSON schemas and grammars."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cyclopts import Group, Parameter

from foredraft.cli.options import Flag, Repeatable
from foredraft.cli.text_files import read_text
from foredraft.errors import ConfigError, Option

__all__ = ["ConstraintOptions", "constraint_options"]

CONSTRAINTS = Group("Constraints", sort_key=4)


@Parameter(name="*", group=CONSTRAINTS)
@dataclass(frozen=True, slots=True)
class ConstraintOptions:
    """Options of a request that say which texts are allowed."""

    ban: Repeatable = ()
    """Text that must not come up, however it is cut into tokens; repeatable."""
    ban_file: Path | None = None
    """A UTF-8 file with one banned text in each line."""
    ban_mode: Literal["mask", "rollback"] | None = None
    """mask (default): tokens that would complete banned text have probability 0. rollback: banned text is
    taken back, and drawn anew without the token that began it."""
    ban_ignore_case: Flag = False
    """Ban upper and lower case alike."""
    ban_whole_words: Flag = False
    """Ban only where no letter, digit or underscore stands directly before or behind."""
    ban_prompt: bool | None = None
    """Whether banned text that begins in the prompt counts (yes)."""
    ban_rollbacks: int | None = None
    """With --ban-mode rollback: the times that text is taken back before the text ends (100)."""
    regex: str | None = None
    """A regular expression of the whole text, in Rust's syntax."""
    choice: Repeatable = ()
    """A string that the whole text may be; repeatable: the text is one of them."""
    json_schema: str | None = None
    """The JSON schema of the text: a file, or the schema itself, which begins with {."""
    json_object: Flag = False
    """The text is a JSON object."""
    grammar: Path | None = None
    """A file with a context-free grammar of the text, in llguidance's Lark dialect."""


def constraint_options(given: ConstraintOptions) -> dict[str, Any]:
    """Return the given options by the field names of `SamplingParams`.

    Raises:
        ConfigError: A file cannot be read, has no banned text, or an option of bans has nothing to ban.
    """
    options: dict[str, Any] = {
        name: value
        for name in ("ban_mode", "ban_prompt", "ban_rollbacks", "regex")
        if (value := getattr(given, name)) is not None
    }
    options |= {
        name: True for name in ("ban_ignore_case", "ban_whole_words", "json_object") if getattr(given, name)
    }
    if given.choice:
        options["choices"] = [*given.choice]
    if given.json_schema is not None:
        is_schema = given.json_schema.lstrip().startswith("{")
        options["json_schema"] = (
            given.json_schema if is_schema else read_text("json_schema", Path(given.json_schema))
        )
    if given.grammar is not None:
        options["grammar"] = read_text("grammar", given.grammar)
    banned = [*given.ban]
    if given.ban_file is not None:
        lines = [line for line in read_text("ban_file", given.ban_file).splitlines() if line]
        if not lines:
            raise ConfigError(
                "which is empty", option="ban_file", value=str(given.ban_file), remedy="give one text a line"
            )
        banned += lines
    if banned:
        options["ban"] = banned
    else:
        for name in options:
            if name.startswith("ban_"):
                raise ConfigError("has nothing to ban", option=name, remedy=("give ", Option("ban")))
    return options
