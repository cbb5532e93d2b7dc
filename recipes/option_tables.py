"""Write the tables of options in the guides from the declarations of the options.

A table lies between two comments, the first of which names its options. This writes everything between them.

    python -m recipes.option_tables
"""

from __future__ import annotations

import re
from pathlib import Path

from foredraft.arguments import Declared, declared
from foredraft.decode.params import SamplingParams
from foredraft.files import write_whole
from foredraft.kinds.load_options import LoadOptions

ROOT = Path(__file__).parents[1]
PAGES = ("docs/guides/sampling.md", "docs/guides/constraints.md", "docs/guides/models.md")
BLOCK = re.compile(r"(?<=<!-- options: )(?P<names>[^>]*?) -->\n.*?(?=<!-- /options -->)", re.S)
OPTIONS = {**declared(LoadOptions), **declared(SamplingParams)}


def brought_up_to_date(page: str) -> str:
    """Return the text of a page with its tables as the options are declared."""
    return BLOCK.sub(lambda found: f"{found['names']} -->\n{_table(found['names'].split())}", page)


def _table(names: list[str]) -> str:
    lines = ["| option | default | meaning |", "|---|---|---|", *(_row(OPTIONS[name]) for name in names)]
    return "".join(f"{line}\n" for line in lines)


def _row(option: Declared) -> str:
    return f"| `{option.name}` | {option.shown_default} | {option.meaning} |"


def main() -> None:
    """Write the tables of all pages."""
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        write_whole(ROOT / page, brought_up_to_date(text), "page")


if __name__ == "__main__":
    main()
