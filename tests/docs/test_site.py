"""The documentation site builds, loads nothing from other hosts, has no broken link, and documents the whole API."""

from __future__ import annotations

import inspect
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag, urlsplit

import pytest

import foredraft
from tests.support.pages import DOCS, Page
from tests.support.running import ROOT

MARKDOWN = [*DOCS, Page(ROOT / "README.md"), Page(ROOT / "CONTRIBUTING.md")]


class Elements(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str]]] = []
        self.feed(text)
        self.links = [
            attributes["href"] for tag, attributes in self.found if tag == "a" and "href" in attributes
        ]
        self.ids = {attributes["id"] for _, attributes in self.found if "id" in attributes}

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, {name: value or "" for name, value in attributes}))

    @property
    def fetched(self) -> Iterator[str]:
        """Yield the addresses that a browser fetches without a click."""
        for tag, attributes in self.found:
            for name in ("src", "srcset", "data", "poster", *(["href"] if tag == "link" else [])):
                if attributes.get("rel") != "canonical" and name in attributes:
                    yield attributes[name]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    for name in ("docs", "src"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.safetensors"))
    shutil.copy(ROOT / "zensical.toml", folder)
    options: dict[str, Any] = {
        "cwd": folder,
        "env": os.environ | {"NO_COLOR": "1"},
        "encoding": "utf-8",
        "timeout": 120,
    }
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(command, capture_output=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"


def elements(site: Path) -> dict[Path, Elements]:
    pages = {page: Elements(page.read_text(encoding="utf-8")) for page in site.rglob("*.html")}
    assert len(pages) > len(DOCS)  # DOCS and 404.html
    return pages


@pytest.mark.heavy
def test_site_loads_nothing_from_other_hosts(site: Path) -> None:
    for page, found in elements(site).items():
        for address in found.fetched:
            assert not urlsplit(address).netloc, (page.name, address)
        # The theme would load mermaid from a CDN.
        assert not any("mermaid" in attributes.get("class", "") for _, attributes in found.found)
    for sheet in site.rglob("*.css"):
        assert not re.search(r"""(url\(|@import)\s*["']?(https?:)?//""", sheet.read_text(encoding="utf-8"))


@pytest.mark.heavy
def test_site_has_no_broken_link(site: Path) -> None:
    pages = elements(site)
    followed = 0
    for page, found in pages.items():
        for link in found.links:
            if urlsplit(link).scheme or page.name == "404.html":
                continue
            address, fragment = urldefrag(unquote(link))
            target = Path(os.path.normpath(page.parent / address)) if address else page
            target = target / "index.html" if target.is_dir() else target
            assert target.is_relative_to(site) and target.is_file(), (page, link)
            assert not fragment or fragment in pages[target].ids, (page, link)
            followed += 1
    assert followed > 10 * len(DOCS)


def test_every_page_is_in_the_navigation_once() -> None:
    def files(entry: object) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        parts = entry.values() if isinstance(entry, dict) else entry
        return [file for part in parts for file in files(part)]  # type: ignore[union-attr]

    navigation = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]["nav"]
    assert sorted(files(navigation)) == sorted(page.name.removeprefix("docs/") for page in DOCS)


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda page: page.name)
def test_links_of_a_markdown_file_point_to_existing_files(page: Page) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.text):
        assert (page.path.parent / target).exists(), target


@pytest.mark.heavy
def test_api_page_documents_every_public_name(site: Path) -> None:
    ids = Elements((site / "api/index.html").read_text(encoding="utf-8")).ids
    text = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    assert "foredraft.__version__" in text
    for name in {*foredraft.__all__} - {"__version__"}:
        assert any(re.fullmatch(rf"foredraft\.[\w.]*\b{name}", id) for id in ids), name


@pytest.mark.parametrize(
    "of", [foredraft.load, foredraft.LLM.generate, foredraft.LLM.chat, foredraft.LLM.stream, foredraft.write_trace, *(
        getattr(foredraft, name) for name in ("SamplingParams", "Output", "Piece", "Score", "Stats", "RoundTrace")
    )], ids=lambda of: of.__name__,
)  # fmt: skip
def test_docstring_explains_every_option_and_attribute_in_order(of: object) -> None:
    section = re.search(
        r"^ *(?:Args|Attributes):\n(.*?)(?:\n\n|\Z)", inspect.cleandoc(of.__doc__ or ""), re.M | re.S
    )
    assert section is not None
    fields = getattr(of, "__dataclass_fields__", None) or inspect.signature(of).parameters  # type: ignore[arg-type]
    assert re.findall(r"^    \*{0,2}(\w+): ", section[1], re.M) == [name for name in fields if name != "self"]
