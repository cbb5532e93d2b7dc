"""Write the list of rooms in docs/architecture.md, and of their files in docs/rooms.md, from the docstrings.

The rooms stand in the order of the import contract in pyproject.toml; each line is what a package or a module
says of itself first.

    python -m recipes.room_list
"""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

from foredraft.files import write_whole

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "foredraft"
ARCHITECTURE, FILES = "docs/architecture.md", "docs/rooms.md"
BLOCK = re.compile(r"(?<=<!-- rooms -->\n).*?(?=<!-- /rooms -->)", re.S)
HEAD = """# Rooms and their files

What each file says of itself. [Architecture](architecture.md) has the plan, and answers "Where is ...?".
"""


def brought_up_to_date(page: str) -> str:
    """Return the text of docs/architecture.md with its list of rooms as the packages describe themselves."""
    rows = "".join(f"| `{_shown(path)}` | {_subject(path)} |\n" for path in _rooms())
    return BLOCK.sub(lambda _: f"\n| room | subject |\n|---|---|\n{rows}\n", page)


def list_of_files() -> str:
    """Return the text of docs/rooms.md."""
    parts = [HEAD]
    for path in _rooms():
        if not path.is_dir():
            continue
        rows = "".join(f"| `{file.relative_to(path)}` | {_subject(file)} |\n" for file in _files(path))
        parts.append(f"\n## {_shown(path)}\n\n{_subject(path)}\n\n| file | subject |\n|---|---|\n{rows}")
    return "".join(parts)


def _rooms() -> list[Path]:
    """Return the folders and files directly in the package, from the top of the import contract downwards."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    layers = next(each["layers"] for each in contracts["contracts"] if each["type"] == "layers")
    names = [name for layer in layers for name in re.findall(r"foredraft\.(\w+)", layer)]
    return [folder if (folder := PACKAGE / name).is_dir() else folder.with_suffix(".py") for name in names]


def _shown(path: Path) -> str:
    return f"{path.name}/" if path.is_dir() else path.name


def _files(room: Path) -> list[Path]:
    """Return the modules of a room, and those of rooms within it after its own."""
    own = sorted(each for each in room.glob("*.py") if not each.stem.startswith("__"))
    inner = sorted(each.parent for each in room.glob("*/__init__.py"))
    return [*own, *(file for folder in inner for file in (folder, *_files(folder)))]


def _subject(path: Path) -> str:
    """Return the first paragraph of the docstring of a module or a package, on one line."""
    source = path / "__init__.py" if path.is_dir() else path
    docstring = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or ""
    return " ".join(docstring.split("\n\n")[0].split()).replace("|", "\\|")


def main() -> None:
    """Write both lists."""
    page = (ROOT / ARCHITECTURE).read_text(encoding="utf-8")
    write_whole(ROOT / ARCHITECTURE, brought_up_to_date(page), "page")
    write_whole(ROOT / FILES, list_of_files(), "page")


if __name__ == "__main__":
    main()
