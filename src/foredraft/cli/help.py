"""`--help` and `--help-all`: examples first, then the options that most people need, or all of them.

`options`, `measuring` and the commands say which options are common, and so in `--help`, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from foredraft.cli.options import COMMON

if TYPE_CHECKING:
    from cyclopts.help import HelpPanel
    from rich.console import Console, ConsoleOptions

__all__ = ["EXAMPLES", "HELP_ALL", "HelpPages", "usage"]

HELP_ALL = "--help-all"
ALWAYS = {"Arguments", "Commands"}  # panels that are no section of options
# Command -> its arguments in the line of usage, and examples with their meaning.
EXAMPLES: dict[str, tuple[str, tuple[tuple[str, str], ...]]] = {
    "generate": (
        "[PROMPT | -] [OPTIONS]",
        (
            ('foredraft generate "def fibonacci(n):"', "the demo models"),
            ('foredraft generate --model ./big --draft ./small "Once"', "your models"),
            ("foredraft generate --compare", "the speed-up"),
        ),
    ),
    "serve": (
        "[OPTIONS]",
        (
            ("foredraft serve", "the demo models"),
            ("foredraft serve --model ./big --draft ./small", "your models"),
            ("foredraft serve --port 0 --api-key-file keys.txt", "a free port, with keys"),
        ),
    ),
    "bench": (
        "[OPTIONS]",
        (
            ("foredraft bench --html report.html", "the demo models"),
            ("foredraft bench --model ./big --draft ./small", "your models"),
            ("foredraft bench --model ./big --workload my.jsonl", "your prompts"),
        ),
    ),
    "tune": (
        "[OPTIONS]",
        (
            ("foredraft tune", "the demo model"),
            ("foredraft tune --model ./big --prompts my.txt", "your model"),
            ("foredraft tune --model ./big --prompts my.txt --timeout 600", "ten minutes"),
        ),
    ),
    "train adapter": (
        "--data FILES... [OPTIONS]",
        (
            ("foredraft train adapter --data my.jsonl", "for the demo model"),
            ("foredraft train adapter --model ./big --data my.jsonl", "for your model"),
            ("foredraft train adapter --model ./big --data prompts.jsonl --self-generate 256", "it writes"),
        ),
    ),
    "train eagle3": (
        "--data FILES... --out DIR [OPTIONS]",
        (
            ("foredraft train eagle3 --data my.jsonl --out ./head", "for the demo model"),
            ("foredraft train eagle3 --model ./big --data my.jsonl --out ./head", "for your model"),
            ("foredraft train eagle3 --data my.jsonl --out ./head --draft-vocabulary 2048", "a cheaper head"),
        ),
    ),
    "train dflash": (
        "--data FILES... --out DIR [OPTIONS]",
        (
            ("foredraft train dflash --data my.jsonl --out ./head", "for the demo model"),
            ("foredraft train dflash --model ./big --data my.jsonl --out ./head --block 16", "longer drafts"),
        ),
    ),
    "train draft": (
        "--data FILES... --out DIR [OPTIONS]",
        (
            ("foredraft train draft --model ./big --data my.jsonl --out ./small", "from scratch"),
            ("foredraft train draft --data my.jsonl --out ./small --from-layers 0,15", "from two layers"),
        ),
    ),
    "quantise": (
        "--out DIR [OPTIONS]",
        (
            ("foredraft quantise --out ./few", "the demo target in 8 bits"),
            ("foredraft quantise --model ./big --weights int4 --out ./few", "your model in 4 bits"),
            ("foredraft quantise --model ./big --out ./few --data my.jsonl", "and what it lost"),
        ),
    ),
    "doctor": (
        "--draft DIR [TEXTS...] [OPTIONS]",
        (
            ("foredraft doctor --model ./big --draft ./head", "a head"),
            ("foredraft doctor --model ./big --draft ./small", "a draft model"),
            ("foredraft doctor --model ./big --draft ./head --dry-run", "write nothing"),
        ),
    ),
    "export": (
        "--draft DIR --format FORMAT --out PLACE [OPTIONS]",
        (
            ("foredraft export --model ./big --draft ./head --format speculators --out ./vllm", "for vLLM"),
            ("foredraft export --model ./big --draft ./head --format gguf --out head.gguf", "for llama.cpp"),
        ),
    ),
    "info": (
        "[MODEL] [OPTIONS]",
        (
            ("foredraft info", "the demo models"),
            ("foredraft info ./big --draft ./small", "whether the draft model fits"),
            ("foredraft info owner/name --json", "on the hub: no weights are downloaded"),
        ),
    ),
    "verify": (
        "[PROMPTS...] [OPTIONS]",
        (
            ("foredraft verify", "the demo models"),
            ('foredraft verify --model ./big --draft ./small "Once"', "your models"),
            ("foredraft verify --self-test", "with a planted defect"),
        ),
    ),
}


def usage(command: str) -> str:
    """Return the head of a command's help: its usage and its examples."""
    arguments, examples = EXAMPLES[command]
    width = max(len(line) for line, _ in examples)
    lines = [f"  {line:{width}}  # {meaning}" for line, meaning in examples]
    return "\n".join([f"Usage: foredraft {command} {arguments}", "", *lines])


class HelpPages:
    """Renders the panels of the help: under `--help` the common options, under `--help-all` every section.

    Args:
        everything: Show every section.
    """

    show_metavar = True

    def __init__(self, *, everything: bool) -> None:
        self.everything = everything

    def render_usage(self, console: Console, options: ConsoleOptions, usage: object) -> None:
        """Print the usage and the examples, to be copied: on a narrow terminal, meanings come first."""
        lines = str(usage or "").splitlines()
        if max(map(len, lines), default=0) > console.width:
            lines = [part for line in lines for part in _meaning_first(line)]
        if lines:
            console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        """Print a panel where it belongs on the page."""
        from cyclopts.help import DefaultFormatter

        if panel.title in ALWAYS or (panel.title != COMMON.name) == self.everything:
            DefaultFormatter()(console, options, panel)


def _meaning_first(line: str) -> list[str]:
    """Return an example with its meaning on a line of its own; other lines as they are."""
    example, mark, meaning = line.partition("  # ")
    return [f"# {meaning}", example.strip()] if mark else [line]
