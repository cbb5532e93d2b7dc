"""Options that constrain the text: banned words, regular expressions, JSON schemas and grammars."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from cyclopts import Group, Parameter

from foredraft.cli.options import CONSTRAINED
from foredraft.cli.sections import Given, Repeatable, derived, option, section
from foredraft.cli.text_files import read_text
from foredraft.decode.params import GRAMMARS
from foredraft.errors import ConfigError, Option

__all__ = ["CONSTRAINTS", "ConstraintOptions", "constraint_options"]

OTHER_FORM = (
    "ban_file",
    "choice",
)  # options that the command line has in place of the library's, or beside it
CONSTRAINTS = {
    **derived("ban"),
    "ban_file": option(Path, "A UTF-8 file with one banned text in each line."),
    **derived(*(name for name in CONSTRAINED if name not in GRAMMARS), "regex"),
    "choice": Annotated[
        Repeatable,
        Parameter(help="A string that the whole text may be; repeatable: the text is one of them."),
    ],
    **derived(*(name for name in GRAMMARS if name not in ("regex", "choices"))),
    "json_schema": option(
        str, "The JSON schema of the text: a file, or the schema itself, which begins with {."
    ),
    "grammar": option(
        Path, "A file with a context-free grammar of the text, in llguidance's Lark dialect or in GBNF."
    ),
}

if TYPE_CHECKING:
    ConstraintOptions: TypeAlias = Given
else:
    ConstraintOptions = section("ConstraintOptions", Group("Constraints", sort_key=4), CONSTRAINTS)


def constraint_options(given: Given) -> dict[str, Any]:
    """Return the given options by the field names of `SamplingParams`.

    Raises:
        ConfigError: A file cannot be read, has no banned text, or an option of bans has nothing to ban.
    """
    options = {name: value for name, value in given.items() if name not in OTHER_FORM}
    if "choice" in given:
        options["choices"] = [*given["choice"]]
    if "json_schema" in given and not given["json_schema"].lstrip().startswith("{"):
        options["json_schema"] = read_text("json_schema", Path(given["json_schema"]))
    if "grammar" in given:
        options["grammar"] = read_text("grammar", given["grammar"])
    banned = [*given.get("ban", ())]
    if "ban_file" in given:
        lines = [line for line in read_text("ban_file", given["ban_file"]).splitlines() if line]
        if not lines:
            raise ConfigError(
                "which is empty",
                option="ban_file",
                value=str(given["ban_file"]),
                remedy="give one text a line",
            )
        banned += lines
    if banned:
        options["ban"] = banned
    else:
        for name in options:
            if name.startswith("ban_"):
                raise ConfigError("has nothing to ban", option=name, remedy=("give ", Option("ban")))
    return options
