"""Draw docs/streaming.svg: the coloured text of a real run of `foredraft generate`, as a terminal shows it.

    python benchmarks/picture.py

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
from tempfile import TemporaryFile

from rich.console import Console
from rich.text import Text

from foredraft.files import write_whole

DOCS = Path(__file__).resolve().parents[1] / "docs"
COLUMNS = 100
PROMPT = "def fibonacci(n):"
COMMAND = ("foredraft", "generate", "--temperature", "0", "--max-new-tokens", "96", "--compare", PROMPT)
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


def run(command: Sequence[str]) -> tuple[str, str]:
    """Return the text that a command writes to a terminal, and the figures on its standard error."""
    master, slave = pty.openpty()
    environment = os.environ | {"COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
    with (
        TemporaryFile() as errors,
        subprocess.Popen(command, stdout=slave, stderr=errors, env=environment) as process,
    ):
        os.close(slave)
        written = b""
        with suppress(OSError):  # how Linux says that the other end is closed
            while piece := os.read(master, 4096):
                written += piece
        os.close(master)
        process.wait()
        errors.seek(0)
        figures = errors.read().decode()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with exit code {process.returncode}\n{figures}")
    return written.decode().replace("\r\n", "\n"), figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--file", type=Path, default=DOCS / "streaming.svg")
    options = parser.parse_args()
    console = Console(
        record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    text, figures = run(COMMAND)
    console.print(Text(f"$ {shlex.join(COMMAND)}", style="bold"))
    console.print(Text.from_ansi(text))
    console.print(Text(f"\n{figures.strip().splitlines()[-1]}"))
    picture = console.export_svg(title="", code_format=FORM, unique_id="streaming")
    write_whole(options.file, picture, "the picture")


if __name__ == "__main__":
    main()
