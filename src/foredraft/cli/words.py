"""What goes in and out of a command: words made ready for the parser, prompts, errors, documents, tables.

Options as other programs spell them:
https://github.com/ggml-org/llama.cpp/blob/master/tools/completion/README.md,
https://docs.vllm.ai/en/latest/cli/serve.html; docs/guides/coming-from.md translates whole commands. The
parser knows no argument `-`, and no option whose value may be left out. Files are checked before long work.
"""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
import stat
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from cyclopts import App, UnknownOptionError, UnusedCliTokensError

from foredraft.errors import NO_VALUE, ConfigError, ForedraftError, Option, Text
from foredraft.files import check_place, write_whole

if TYPE_CHECKING:
    from foredraft.cli.options import DocumentOptions


@cache
def other_names() -> dict[str, str]:
    """Return what options of other programs are here; those of the library stand with their declarations."""
    from foredraft.arguments import spelled_elsewhere
    from foredraft.cli.sections import flag_of
    from foredraft.decode.params import SamplingParams
    from foredraft.kinds.load_options import LoadOptions

    return {
        (name if name.startswith("-") else flag_of(name)): flag_of(here)
        for record in (LoadOptions, SamplingParams)
        for name, here in spelled_elsewhere(record).items()
    } | {
        "--guided-choice": "--choice",
        "-sys": "--system",
        "--system-prompt": "--system",
        "-cnv": "--chat",
        "--conversation": "--chat",
        "-ngl": "--device cuda",
    }


def name_here(word: str, options: Collection[str], command: str) -> str | None:
    """Return what an unknown option is here; None where it is nothing that the command has.

    Examples:
        >>> name_here("--temp=0", ["--temperature"], "generate")
        '--temperature'
        >>> name_here("-p", [], "generate")
        'the argument itself, without an option'
    """
    name, _, _ = word.partition("=")
    if name in ("-p", "--prompt") and command == "generate":
        return "the argument itself, without an option"
    here = other_names().get(name, "")
    return here if here.partition(" ")[0] in options else None


STDIN = "\0"  # stands for the argument `-`: no argument of a process can contain a NUL byte
SELF_TEST = "--self-test"  # the option whose value may be left out


def made_ready(words: Sequence[str], app: App) -> list[str]:
    """Return the words as the parser of a program takes them.

    A positional `-` becomes `STDIN`, and a `-` that is the value of an option is joined to the option. An
    option without its optional value gets the default one; the word after such an option is its value unless
    it begins with a dash.

    Examples:
        >>> from foredraft.cli.commands import app
        >>> made_ready(["generate", "-", "--stop", "-"], app)
        ['generate', '\x00', '--stop=-']
        >>> made_ready(["verify", "--self-test", "--json"], app)
        ['verify', '--self-test=residual', '--json']
    """
    valued: set[str] = set()  # options of the command that are followed by a value
    if "-" in words:
        arguments = app.parse_commands([*words])[1][-1].assemble_argument_collection()
        valued = {name for each in arguments for name in each.names if each.token_count()[0]}
    made: list[str] = []
    for word, following in zip(words, [*words[1:], "-"], strict=True):
        if word == SELF_TEST and following.startswith("-"):
            from foredraft.bench.settings import DEFAULT_DEFECT

            made.append(f"{word}={DEFAULT_DEFECT}")
        elif word != "-":
            made.append(word)
        elif made and made[-1] in valued:
            made[-1] += "=-"
        else:
            made.append(STDIN)
    return made


# Parameters of the Python API that the command line calls otherwise.
FLAG_NAMES = {"policy_options": "policy-option", "choices": "choice"}


def as_flag(option: Option) -> str:
    """Return the option as a flag.

    Examples:
        >>> as_flag(Option("max_batch")), as_flag(Option("dtype", "bfloat16")), as_flag(Option("json", True))
        ('--max-batch', '--dtype bfloat16', '--json')
    """
    name = FLAG_NAMES.get(option.name, option.name).replace("_", "-")
    if isinstance(option.value, bool):
        return f"--{name}" if option.value else f"--no-{name}"
    return f"--{name}" if option.value is NO_VALUE else f"--{name} {shlex.quote(str(option.value))}"


def one_line(error: Exception | str) -> str:
    """Return the message on one line, with options as flags and the stdin marker as `-`."""
    message = str(error)
    command = next(iter(getattr(error, "command_chain", None) or ()), "foredraft")
    if isinstance(error, ForedraftError):
        message = error.describe(as_flag)
    elif isinstance(error, UnusedCliTokensError):  # most are a prompt without quotes
        remedies = {"generate": "put a prompt of several words in quotes", "info": "give one model"}
        unused = " ".join(error.unused_tokens or [])
        message = ConfigError(
            f"{command} has no place for {unused!r}",
            remedy=remedies.get(command, "give options as --name value"),
        ).describe(as_flag)
    elif isinstance(error, UnknownOptionError):  # where it is another program's
        word = error.token.keyword or error.token.value
        options = [name for argument in error.argument_collection for name in argument.names]
        if (here := name_here(word, options, command)) is not None:
            message = f"Unknown option: {word}; here it is {here}"
    return " ".join(message.split()).replace(repr(STDIN), "'-'").replace(STDIN, "-")


def print_error(error: Exception | str) -> None:
    print(f"foredraft: error: {one_line(error)}", file=sys.stderr)


@contextmanager
def writing_stdout() -> Iterator[None]:
    """Turn an OSError of stdout into a ConfigError."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise _refused(error.strerror) from error


def _refused(why: str | None) -> ConfigError:
    return ConfigError(f"stdout cannot be written ({why})", remedy="redirect it to another file")


GAP = "  "  # between two columns
NARROWEST = 8  # characters of a column whose cells are wrapped


def terminal_width(stream: TextIO) -> int | None:
    """Return the columns of the terminal that a stream writes to; None where it writes to none."""
    return shutil.get_terminal_size().columns if stream.isatty() else None


def fitted(lines: Iterable[str], width: int | None) -> list[str]:
    """Return the lines with those that exceed `width` broken between words, at their own indentation."""
    if width is None:
        return list(lines)
    return [part for line in lines for part in _broken(line, width)]


def table(rows: Sequence[tuple[str, ...]], width: int | None = None, keys: int = 1) -> list[str]:
    """Return the lines of a table, with the cells aligned in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines: list[str] = []
    for columns in _groups(widths, width, keys):
        lines += [""] if lines else []
        lines += _aligned([[row[column] for column in columns] for row in rows], width)
    return lines


def _groups(widths: Sequence[int], width: int | None, keys: int) -> list[list[int]]:
    """Return the columns of each table, by index."""
    kept = list(range(keys))
    groups = [[*kept]]
    for column in range(keys, len(widths)):
        taken = _total([widths[other] for other in (*groups[-1], column)])
        if width is not None and taken > width and len(groups[-1]) > keys:
            groups.append([*kept])
        groups[-1].append(column)
    return groups


def _aligned(rows: Sequence[Sequence[str]], width: int | None) -> list[str]:
    """Return the rows in aligned columns; too wide ones break the cells of the widest column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if width is not None and (excess := _total(widths) - width) > 0:
        widest = widths.index(max(widths))
        widths[widest] = max(NARROWEST, widths[widest] - excess)
    lines = []
    for row in rows:
        cells = [_broken(cell, room) for cell, room in zip(row, widths, strict=True)]
        for place in range(max(map(len, cells))):
            parts = [parts[place] if place < len(parts) else "" for parts in cells]
            line = GAP.join(part.ljust(room) for part, room in zip(parts, widths, strict=True))
            lines.append(line.rstrip())
    return lines


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + len(GAP) * (len(widths) - 1)


def _broken(text: str, width: int) -> list[str]:
    """Return the text in lines of at most `width` characters; a longer word has a line of its own."""
    if len(text) <= width:
        return [text]
    indent = text[: len(text) - len(text.lstrip())]
    return textwrap.wrap(
        text.strip(), width, initial_indent=indent, subsequent_indent=indent,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def with_weights(dtype: str, weights: str | None) -> str:
    """Return the name of a model's dtype, with how its weights are quantised: "bfloat16, weights int4"."""
    return dtype if weights is None else f"{dtype}, weights {weights}"


def check_places(**files: Path | None) -> None:
    """Refuse files that cannot be written, stdout included, and one file for two options."""
    descriptor = None
    with suppress(AttributeError, OSError, ValueError):  # stdout is no file, or closed
        descriptor = sys.stdout.fileno()
    if descriptor is not None and hasattr(os, "fstatvfs") and stat.S_ISREG(os.fstat(descriptor).st_mode):
        system = os.fstatvfs(descriptor)
        if system.f_blocks and not system.f_bavail:  # a full disk; some systems do not count blocks
            raise _refused(os.strerror(errno.ENOSPC))
    for option, file in files.items():
        if str(file) in ("-", STDIN):
            remedy: Text = ("give ", Option("json"), " instead") if option == "out" else "give a file"
            raise ConfigError("which is stdout, not a file", option=option, value="-", remedy=remedy)
        if file is not None:
            check_place(file, option)
    for (one, first), (other, second) in combinations(files.items(), 2):
        if first and second and first.resolve() == second.resolve():
            raise ConfigError(
                ("and so is ", Option(one)),
                option=other,
                value=str(second),
                remedy="give each a file of its own",
            )


def write_document(document: Mapping[str, Any], given: DocumentOptions) -> None:
    """Write the JSON document to the file of `--out`, if it is given."""
    if given.out is not None:
        write_whole(given.out, as_json(document) + "\n", "out")


def write_report(
    document: Mapping[str, Any],
    text: Callable[[int | None], list[str]],
    given: DocumentOptions,
    *,
    html: Path | None = None,
    page: Callable[[], str] | None = None,
) -> None:
    """Write a document to stdout and the files; a stdout that fails does not cost the files."""
    try:
        # before the files: a full disk must not cost the document
        width = terminal_width(sys.stdout)
        print_text(as_json(document) if given.json else "\n".join(fitted(text(width), width)))
    finally:
        write_document(document, given)
        if html is not None and page is not None:
            write_whole(html, page(), "html")


def print_text(text: str) -> None:
    with writing_stdout():
        print(text, flush=True)


def as_json(document: Mapping[str, Any]) -> str:
    return json.dumps(document, allow_nan=False)
