"""What the pages of reports show: the texts and markers of a chart, and that a page stands alone."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from html import unescape

from foredraft.pages.report_page import FONT, MARKERS

EM = 0.5  # width of a character of a plain font ÷ the size of its text


@dataclass(frozen=True)
class Text:
    text: str
    x: float
    y: float
    left: float
    right: float
    size: float

    def overlaps(self, other: Text) -> bool:
        apart = self.right <= other.left or other.right <= self.left
        return not apart and abs(self.y - other.y) < 0.7 * min(self.size, other.size)


def check_alone(page: str) -> None:
    assert page.startswith("<!doctype html>") and page.count("<style") == 1
    assert not re.search(
        r"https?:|//\w|@import|url\(|<script|<link|<iframe|<img|\bhref=|\bsrc=|\son\w+=", page
    )
    ids = Counter(re.findall(r'\bid="([^"]*)"', page))
    assert set(ids.values()) <= {1}, ids
    names = page.count('role="img" aria-label="')
    assert names == page.count("<svg") == page.count("<figure>")


def texts(svg: str) -> list[Text]:
    found = []
    for x, y, more, text in re.findall(r'<text x="([-\d.]+)" y="([-\d.]+)"([^>]*)>([^<]*)</text>', svg):
        size = float((re.search(r'font-size="([\d.]+)"', more) or [0, FONT])[1])
        wide = EM * size * len(unescape(text))
        share = 0.5 if "middle" in more else 1.0 if "end" in more else 0.0
        left = float(x) - share * wide
        found.append(Text(unescape(text), float(x), float(y), left, left + wide, size))
    return found


def markers(svg: str) -> list[tuple[float, float]]:
    shapes = "|".join(map(re.escape, MARKERS))
    found = re.findall(rf'<path d="(?:{shapes})" transform="translate\(([-\d.]+),([-\d.]+)\)"', svg)
    return [(float(x), float(y)) for x, y in found]
