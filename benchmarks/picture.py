"""Draw docs/streaming.svg: the coloured text of a real run of `foredraft generate`, as a terminal shows it.

    python -m benchmarks.picture --model SmolLM2-135M-Instruct-BF16.gguf

The picture needs no font from elsewhere, and no script.
"""

from __future__ import annotations

import argparse
import io
import os
import pty
import shlex
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.text import Text

from foredraft.files import write_whole

DOCS = Path(__file__).resolve().parents[1] / "docs"
COLUMNS = 100
PROMPT = "def fibonacci(n):"
OPTIONS = ("--temperature", "0", "--max-new-tokens", "160", "--compare", PROMPT)
# rich's own form without its window and without the font that it would fetch
FORM = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px; }}
{styles}
</style>
<defs>{lines}</defs>
<rect width="{width}" height="{height}" rx="8" fill="#10141a"/>
<g transform="translate({terminal_x}, {terminal_y})">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def run(command: Sequence[str]) -> str:
    """Return what a command writes to a terminal; its standard error is none."""
    master, slave = pty.openpty()
    environment = os.environ | {"COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
    with subprocess.Popen(command, stdout=slave, stderr=subprocess.DEVNULL, env=environment) as process:
        os.close(slave)
        written = b""
        with suppress(OSError):  # how Linux says that the other end is closed
            while piece := os.read(master, 4096):
                written += piece
        os.close(master)
    if process.returncode:
        raise SystemExit(f"{shlex.join(command)} ended with exit code {process.returncode}")
    return written.decode().replace("\r\n", "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--file", type=Path, default=DOCS / "streaming.svg")
    options = parser.parse_args()
    console = Console(
        record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    shown = shlex.join(["foredraft", "generate", "--model", options.model.name, *OPTIONS])
    console.print(Text(f"$ {shown}", style="bold"))
    console.print(Text.from_ansi(run(["foredraft", "generate", "--model", str(options.model), *OPTIONS])))
    picture = console.export_svg(title="", code_format=FORM, unique_id="streaming")
    write_whole(options.file, picture, "the picture")


if __name__ == "__main__":
    main()
