"""Charts: figures become places by their axes, and nothing is lost on the way."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from foredraft.pages.report_page import WIDTH, Axis, Bars, Panel, Points, ReferenceLine, chart
from tests.support.drawings import markers, texts

PLAIN = Axis()


def drawn(*marks: Points | Bars | ReferenceLine, x: Axis = PLAIN, y: Axis = PLAIN) -> str:
    return chart("name", [Panel(100, marks, y)], x)


def labels(svg: str) -> dict[str, float]:
    """Return the places of the labels of the horizontal axis, along it."""
    lowest = max(text.y for text in texts(svg))
    return {text.text: text.x for text in texts(svg) if text.y == lowest}


@pytest.mark.parametrize(
    ("low", "high", "whole", "expected"),
    [
        (0.0, 3.1, False, ["0.0", "0.5", "1.0", "1.5", "2.0", "2.5", "3.0"]),
        (0.0, 3.1, True, ["0", "1", "2", "3"]),
        (0.97, 1.02, False, ["0.97", "0.98", "0.99", "1.00", "1.01", "1.02"]),
        (0.0, 4000.0, False, ["0", "500", "1000", "1500", "2000", "2500", "3000", "3500", "4000"]),
        (-2.0, 2.0, False, ["-2.0", "-1.5", "-1.0", "-0.5", "0.0", "0.5", "1.0", "1.5", "2.0"]),
    ],
)
def test_ticks_are_round_and_in_the_axis(low: float, high: float, whole: bool, expected: list[str]) -> None:
    svg = drawn(Points("", [low], [1.0]), x=Axis(low=low, high=high, whole=whole))
    found = labels(svg)
    assert sorted(found, key=found.__getitem__) == expected
    assert all(0 <= place <= WIDTH for place in found.values())


@pytest.mark.parametrize("log", [False, True])
def test_a_point_is_where_its_axes_put_it(log: bool) -> None:
    x = Axis(ticks={1: "one", 10: "ten", 100: "hundred"}, log=log)
    svg = drawn(Points("", [1, 10, 100], [0, 1, 4]), x=x, y=Axis(low=4, high=0))
    places = labels(svg)
    (x1, y1), (x2, y2), (x3, y3) = markers(svg)
    assert [x1, x2, x3] == [pytest.approx(places[name], abs=0.1) for name in ("one", "ten", "hundred")]
    assert (x2 - x1) / (x3 - x1) == pytest.approx(0.5 if log else 1 / 11, abs=1e-3)
    assert y1 < y2 < y3 and (y2 - y1) / (y3 - y1) == pytest.approx(0.25, abs=1e-3), "it runs downwards"


def test_an_axis_holds_all_points_with_their_bars_of_errors() -> None:
    svg = drawn(Points("", [1, 2], [1, 1], spreads=[(0.5, 1.5), (1.5, 9.0)], along="x"))
    ends = [float(x) for pair in re.findall(r'd="M([\d.]+),[\d.]+L([\d.]+),', svg) for x in pair]
    assert max(ends) < WIDTH
    (first, _), (second, _) = markers(svg)
    assert second - first == pytest.approx((max(ends[:-2] or ends) - first) / 8, rel=0.2)


def test_a_skipped_box_is_crossed_and_a_rule_is_dashed() -> None:
    svg = drawn(Bars("run", [(0, 1, 0, 1)], 2), Bars("", [(1, 2, 0, 1)], None), ReferenceLine(x=1))
    assert svg.count("<rect") == 3, "two boxes, and one in the legend"
    assert svg.count("M-2.4,-2.4") == 1 and svg.count("stroke-dasharray") == 1
    assert "fill:var(--s2)" in svg and ">run</text>" in svg


def test_the_legend_names_every_series_once_and_keeps_to_the_width() -> None:
    names = [f"a series of a long name {number}" for number in range(9)]
    marks = [Points(name, [0, 1], [0, 1], number, "line") for number, name in enumerate(names)]
    svg = chart("name", [Panel(100, marks), Panel(100, marks)], Axis())
    found = [text for text in texts(svg) if text.text in names]
    assert sorted(text.text for text in found) == names
    assert all(text.right <= WIDTH for text in found)


def test_a_long_label_is_shortened_in_its_middle() -> None:
    label = "folder/" * 20 + "file.jsonl"
    svg = drawn(Points("", [1], [0]), y=Axis(low=-1, high=1, ticks={0: label}))
    [shown] = [text.text for text in texts(svg) if "…" in text.text]
    assert shown.startswith("folder/") and shown.endswith("file.jsonl")
    assert markers(svg)[0][0] > WIDTH / 2


def test_a_chart_is_well_formed() -> None:
    points = Points("<a & b>", [0, 1], [0, 1], 0, "steps")
    panels = [Panel(100, [points], Axis("<y>"), "<t>")]
    assert chart("name", panels, Axis("<x>")) == chart("name", panels, Axis("<x>"))
    root = ElementTree.fromstring(chart("name", panels, Axis("<x>")))
    assert root.tag == "svg"
    shown = {element.text for element in root.iter() if element.tag.endswith("text")}
    assert {"<a & b>", "<y>", "<t>", "<x>"} <= shown
