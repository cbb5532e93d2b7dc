"""The HTML report: every figure comes from the records, and the page is self-contained."""

from __future__ import annotations

import html
import itertools
import re
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from typing import Any

import pytest

from foredraft.bench.bench_records import (
    Bandwidth,
    BenchReport,
    Ceiling,
    Cost,
    DraftCost,
    DraftFigures,
    Exactness,
    FirstDifference,
    ForwardCosts,
    ModelRecord,
    RoundTime,
    Row,
    Spread,
    TurnCount,
)
from foredraft.cli.bench import likelihoods
from foredraft.pages.benchmark import benchmark_page as page
from foredraft.pages.benchmark import plots
from tests.support.drawings import check_alone, texts

SAME = Exactness(comparable=True, identical=3, prompts=3)


def spread(median: float) -> Spread:
    return Spread(median, 0.9 * median, 1.1 * median, 3)


def row(workload: str, contender: str, speed: float, *, peer: bool = False, **more: Any) -> Row:
    common: dict[str, Any] = {
        "batch": 1,
        "tokens_per_second": spread(123.4 * speed),
        "speedup": spread(speed),
        "speedup_all": spread(speed + 0.03),
        "prefill_seconds": spread(0.017),
        "others": spread(0.02),
        "repeated": spread(0.12),
        "counted": 2,
        "prompts": 3,
        "exactness": SAME,
        "peak_memory": 77 * 2**20,
    }
    return Row(workload, contender=contender, peer=peer, **common | more)


def drafted(workload: str, contender: str, speed: float, **more: Any) -> Row:
    common: dict[str, Any] = {
        "over_peers": {"transformers": spread(2 * speed)},
        "policy": "auto",
        "drafting": DraftFigures(0.61, 0.42, (0.71, 0.57), 2.34, 3.21),
        "ceiling": Ceiling(0.61, 2, 1.99),
        "perfect": Ceiling(1.0, 7, 4.98),
        "predicted": spread(speed * 1.07),
        "measured_over_predicted": spread(0.93),
        "overhead": spread(0.08),
        "round_time": RoundTime(0.00123, 0.00456, 0.00078, 9),
        "bandwidth_share": 0.37,
    }
    return row(workload, contender, speed, **common | more)


def report(**more: Any) -> BenchReport:
    verifying = tuple(Cost(rows, v, spread(0.005 * v)) for rows, v in ((1, 1.0), (2, 1.04), (8, 1.31)))
    common: dict[str, Any] = {
        "options": {"temperature": 0.0, "repeats": 3, "coupled": False, "max_repeated": 0.3, "methods": None},
        "machine": {"cpu": "Some Processor", "threads": 1},
        "models": (ModelRecord("target", "big", 21_145_920, 42_291_840, "bfloat16"),),
        "bandwidth": Bandwidth(23.4e9, "read, best of 20"),
        "costs": (ForwardCosts(1, 319, verifying, {"draft-model": DraftCost(0.27, 0.13)}, 0.44),),
        "rows": (
            row("tables", "plain", 1.0),
            drafted("tables", "draft-model", 1.83),
            drafted("tables", "lookup", 2.61),
            row("tables", "transformers", 0.52, peer=True, exactness=replace(SAME, identical=2, first=FirstDifference(1, 16))),
            row("prose", "plain", 1.0),
            drafted("prose", "draft-model", 1.71),
            drafted("prose", "lookup", 0.84),
            Row("prose", 1, "llama.cpp", peer=True, note="decodes at batch size 1 only"),
        ),
        "notes": ("left out: retokenize needs another draft",),
    }  # fmt: skip
    return BenchReport(**common | more)


@cache
def usual_page() -> str:
    return page(report())


class Page(HTMLParser):
    """A parsed page: its tags with their attributes, the cells of its tables by row, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.text, self._open = "", ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open = tag
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._open in ("td", "th"):
            self.rows[-1][-1] += data
        elif self._open == "small":
            self.rows[-1][-1] += f" ({data})"

    def cells(self, place: int) -> dict[str, str]:
        """Return the cells of the place-th method in all tables of methods, by column."""
        found: dict[str, str] = {}
        lines = [one for one in self.rows if len(one) > 2]
        for at, head in enumerate(lines):
            if head[0] == "method":
                found |= dict(zip(head, lines[at + 1 + place], strict=True))
        return found


def verdicts(text: str) -> list[tuple[str, str]]:
    return re.findall(r'<p class="verdict (\w+)">(.*?)</p>', text)


class TestDoubts:
    @pytest.mark.parametrize(
        "more",
        [
            {},
            {"machine": {"cpu": "x", "cores": 2, "highest_load": 2.4}},
            {"turns": (TurnCount("tables", 1, 6, 4, 0), TurnCount("prose", 1, 3, 1, 0))},
        ],
    )
    def test_a_quiet_run_of_three_repeats_has_a_green_headline(self, more: dict[str, Any]) -> None:
        text, repeated = page(report(**more)), "Beside the 9 turns that count, 5 had to be repeated"
        assert report(**more).doubts == () and [kind for kind, _ in verdicts(text)] == ["good", "good"]
        assert (repeated in Page(text).text) == ("turns" in more)

    @pytest.mark.parametrize(
        ("more", "said"),
        [
            (
                {"machine": {"cores": 2, "highest_load": 2.6}},
                "The load rose to 2.6 on 2 cores during the run",
            ),
            (
                {"turns": (TurnCount("tables", 1, 6, 4, 2), TurnCount("prose", 1, 3, 0, 0))},
                "Other programs used more than 0.25 CPUs in 2 of 9 turns, in every attempt",
            ),
            ({"options": {"repeats": 1}}, "Every method ran only once on each prompt"),
            ({"options": {"repeats": 2}}, "Every method ran only twice on each prompt"),
        ],
    )
    def test_a_doubtful_run_has_a_warning_and_no_green_line(self, more: dict[str, Any], said: str) -> None:
        (speed, _), (kind, warning), (exactness, _) = verdicts(page(report(**more)))
        assert (speed, kind, exactness) == ("doubtful", "doubtful", "good")
        assert warning.startswith(said)
        assert report(**more).doubts[0].startswith(said)

    def test_what_others_used_stands_beside_a_plain_step(self) -> None:
        busy = report(costs=(replace(report().costs[0], others=spread(0.4)),))
        assert "; other programs used 0.40 CPUs" in Page(page(busy)).text

    def test_a_share_of_bandwidth_above_one_is_explained(self) -> None:
        sentence = "above 100 % means that the caches held a part of the weights"
        assert sentence not in usual_page() and report().bandwidth_remark is None
        fast = report(rows=(row("tables", "plain", 1.0, bandwidth_share=1.04),))
        assert sentence in Page(page(fast)).text and sentence in str(fast.bandwidth_remark)
        stepping = report(costs=(replace(report().costs[0], bandwidth_share=1.2),))
        assert sentence in Page(page(stepping)).text


def test_no_text_of_a_plot_covers_another() -> None:
    widths = (1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17)
    passes = tuple(Cost(rows, 1.1, spread(0.0055)) for rows in widths)
    drawn = plots(report(costs=(replace(report().costs[0], verifying=passes),)))
    assert len(drawn) == 5
    for plot in drawn:
        found = texts(plot.svg)
        for one, other in itertools.combinations(found, 2):
            assert not one.overlaps(other), (plot.name, one, other)
    (cost,) = (plot for plot in drawn if plot.name == "cost")
    shown = {text.text for text in texts(cost.svg)}
    assert {"1", "2", "17"} <= shown and "16" not in shown, "the last label stays"


class TestFigures:
    def test_a_row_shows_the_records_figures(self) -> None:
        shown = Page(usual_page()).cells(1)
        assert shown == {
            "method": "draft-model",
            "tokens/s": "225.8 (203.2–248.4)",
            "over plain": "1.83 (1.65–2.01)",
            "others, CPUs": "0.02 (0.02–0.02)",
            "identical": "✓ 3 of 3",
            "counted prompts": "2 of 3",
            "repeated 4-grams": "12% (11%–13%)",
            "over transformers": "3.66 (3.29–4.03)",
            "over plain, all prompts": "1.86 (1.67–2.05)",
            "predicted": "1.96 (1.76–2.15)",
            "measured ÷ predicted": "0.93 (0.84–1.02)",
            "host overhead o": "0.08 (0.07–0.09)",
            "α": "0.61",
            "τ": "2.34",
            "draft length": "3.21",
            "ceiling": "1.99 (γ = 2)",
            "ceiling at α = 1": "4.98 (γ = 7)",
            "prefill, s": "0.017 (0.015–0.019)",
            "share of bandwidth": "37%",
            "peak memory, MiB": "77",
        }

    def test_no_table_is_wider_than_a_screen(self) -> None:
        """Of 1,300 pixels a page uses 1,184: for 14 columns, narrow ones, and the names of the methods."""
        peers = {name: spread(2.0) for name in ("transformers", "transformers-draft", "llama.cpp")}
        one = row("tables", "plain", 1.0, over_single=2.0)
        wide = page(report(rows=(one, drafted("tables", "lookup", 2.6, over_peers=peers))))
        heads = re.findall(r"<thead>.*?</thead>", wide, re.DOTALL)
        assert len(heads) == 2 and all(head.count("<th ") <= 14 for head in heads)

    def test_a_missing_figure_is_a_dash_and_an_empty_column_is_left_out(self) -> None:
        shown = Page(usual_page()).cells(3)
        assert shown["method"] == "transformers"
        assert {shown[name] for name in ("predicted", "α", "τ", "over transformers")} == {"–"}
        alone = Page(page(report(rows=(row("tables", "plain", 1.0),)))).cells(0)
        assert not {"over transformers", "predicted"} & alone.keys()
        assert ["llama.cpp", "decodes at batch size 1 only"] in Page(usual_page()).rows, "a note for figures"

    def test_machine_costs_and_options_are_shown(self) -> None:
        text = re.sub(r"\s+", " ", Page(usual_page()).text)
        assert "big, 21.1 M parameters, bfloat16, 42.3 MB per step" in text
        assert "23.4 GB/s (read, best of 20)" in text
        assert (
            "5.00 ms at 319 tokens of context, 44% of that bandwidth; a draft of draft-model costs 0.27 plain steps,"
            " plus 0.13 for each further token" in text
        )
        assert "temperature0 repeats3 coupledno max_repeated0.3 methods– " in text
        assert "cpuSome Processor threads1" in text
        assert "left out: retokenize needs another draft" in text

    def test_each_batch_size_has_its_tables(self) -> None:
        eight = tuple(replace(one, batch=8, over_single=4.2) for one in report().rows)
        both = page(report(rows=report().rows + eight))
        assert both.count("<table>") == 4
        assert "<td>4.20</td>" in both
        assert "over batch 1" not in usual_page()


def under(policy: str, speed: float, **more: Any) -> Row:
    return drafted("tables", "draft-model", speed, **{"policy": policy, "ceiling": None} | more)


def by_policy(**more: Any) -> BenchReport:
    usual = report()
    rows = (*usual.rows[:2], under("fixed", 1.97), under("heuristic", 0.66, **more), *usual.rows[2:])
    return report(rows=rows, options=usual.options | {"policies": ["fixed", "heuristic"]})


class TestPolicies:
    def test_a_table_by_policy_follows_the_table_by_method(self) -> None:
        found = Page(page(by_policy()))
        heads = [place for place, cells in enumerate(found.rows) if cells[0] in ("method", "policy")]
        assert [found.rows[place][0] for place in heads] == ["method", "method", "policy"]
        by_method, lines = found.rows[: heads[2]], found.rows[heads[2] + 1 :]
        assert by_method == Page(usual_page()).rows[: len(by_method)]
        assert lines[0] == ["draft-model on tables"]
        assert [cells[0] for cells in lines[1:4]] == ["auto", "fixed", "heuristic"]
        assert [cells[0] for cells in lines[4:6]] == ["lookup on tables", "auto"]
        head = found.rows[heads[2]]
        shown = dict(zip(head, lines[2], strict=True))
        assert (shown["over plain"], shown["ceiling"]) == ("1.97 (1.77–2.17)", "–")
        by_name = Page(page(report(rows=(row("tables", "plain", 1.0), under("fixed", 1.97))))).cells(1)
        assert len(head) == 11 and all(shown[name] == by_name.get(name, "–") for name in head[1:])
        assert dict(zip(head, lines[1], strict=True))["ceiling"] == "1.99 (γ = 2)"
        assert "under every policy" not in usual_page()
        assert verdicts(page(by_policy()))[0] == verdicts(usual_page())[0], "further policies do not count"

    def test_differing_tokens_are_reported_with_the_policy(self) -> None:
        wrong = replace(SAME, identical=1, first=FirstDifference(0, 4))
        assert verdicts(page(by_policy(exactness=wrong)))[1] == (
            "bad",
            "Tokens differ from plain decoding&#39;s: draft-model under heuristic on tables at batch 1.",
        )

    def test_the_plot_has_the_records_figures(self) -> None:
        found = {plot.name: plot for plot in plots(by_policy())}
        assert found["policies-1"].alt.startswith(
            "draft-model under auto on tables 1.83; draft-model under fixed on tables 1.97;"
            " draft-model under heuristic on tables 0.66; lookup under auto on tables 2.61;"
        )
        for policy in ("auto", "fixed", "heuristic"):
            assert f">{policy}</text>" in found["policies-1"].svg
        before = {plot.name: plot for plot in plots(report())}
        del found["policies-1"]
        assert found == before  # the other plots show methods only

    def test_the_plots_axis_reaches_the_largest_speedup(self) -> None:
        rows = (*by_policy().rows, drafted("tables", "lookup", 7.9, policy="fixed"))
        plot = next(plot for plot in plots(replace(by_policy(), rows=rows)) if plot.name == "policies-1")
        assert max(float(tick) for tick in re.findall(r">(\d)</text>", plot.svg)) >= 8


def bild(speed: float) -> Row:
    uncompared = Exactness(False, 0, 3)
    return drafted("tables", "bild", speed, lossless=False, exactness=uncompared, policy="fallback")


class TestVerdict:
    @pytest.mark.parametrize(
        ("rows", "kind", "said"),
        [
            ((), "good", "The fastest drafter is draft-model: 1.77 × plain decoding, 3.54 × transformers"),
            (
                (row("a", "plain", 1.0), drafted("a", "lookup", 0.84)),
                "bad",
                "No drafter pays here: the best, lookup, reaches 0.84 × plain decoding (median of 1 workload,",
            ),
            (
                (row("a", "plain", 1.0), row("a", "transformers", 9.0, peer=True)),
                "none",
                "No drafter has figures on counted prompts.",
            ),
        ],
        ids=["the best median", "none pays", "another program"],
    )
    def test_the_speed_verdict(self, rows: tuple[Row, ...], kind: str, said: str) -> None:
        found, text = verdicts(page(report(rows=rows) if rows else report()))[0]
        assert found == kind and text.startswith(said)

    def test_another_programs_differences_do_not_affect_the_verdict(self) -> None:
        assert verdicts(usual_page())[1][0] == "good"
        assert Page(usual_page()).cells(3)["identical"] == "2 of 3 (first at prompt 2, token 17)"

    def test_differing_tokens_are_reported_and_marked(self) -> None:
        differs = replace(SAME, identical=1, first=FirstDifference(0, 4))
        rows = report().rows
        text = page(report(rows=(*rows[:6], drafted("prose", "lookup", 1.2, exactness=differs), *rows[7:])))
        said = "Tokens differ from plain decoding&#39;s: lookup on prose at batch 1."
        assert verdicts(text)[1] == ("bad", said)
        assert '<td class="bad">✗ 1 of 3<small>first at prompt 1, token 5</small>' in text

    def test_tokens_that_are_not_comparable_give_no_verdict(self) -> None:
        drawn = Exactness(comparable=False, identical=0, prompts=3)
        text = page(report(rows=(row("a", "plain", 1.0), drafted("a", "lookup", 1.5, exactness=drawn))))
        assert verdicts(text)[1][0] == "none"
        assert Page(text).cells(1)["identical"] == "not comparable"

    def test_a_lossy_method_is_labelled_and_never_the_fastest(self) -> None:
        lossy = bild(9.0)
        text = page(report(rows=(*report().rows[:4], lossy)))
        (speed, fastest), (exactness, identical), (_, labelled) = verdicts(text)
        assert (speed, exactness) == ("good", "good")
        assert fastest.startswith("The fastest lossless drafter is lookup: 2.61 × plain decoding, 5.22 × ")
        assert identical.endswith("to plain decoding&#39;s, in every run of every lossless drafter.")
        assert labelled.startswith("bild is lossy: its output does not have the model&#39;s own")
        assert labelled.endswith("It reaches 9.00 × plain decoding (median of 1 workload, batch 1).")
        assert [Page(text).cells(place)["identical"] for place in (1, 4)] == ["✓ 3 of 3", "lossy"]
        (plot,) = (plot for plot in plots(report(rows=(*report().rows, lossy))) if plot.name == "speedup-1")
        assert plot.note.endswith(" bild is lossy.")

    def test_beam_search_is_lossy_and_stands_beside_how_likely_the_texts_are(self) -> None:
        own = row("tables", "plain", 1.0, log_probability=spread(-0.5))
        beam = row(
            "tables", "beam", 0.3, peer=True, lossless=False, log_probability=spread(-0.4),
            exactness=Exactness(False, 0, 3),
        )  # fmt: skip
        made = report(rows=(own, beam))
        cells = Page(page(made)).cells(1)
        assert cells["identical"] == "lossy" and cells["log p of a token, nats"].startswith("-0.400")
        assert "log p of a token, nats" not in usual_page()
        assert likelihoods(made, beam) == (
            "tables, batch 1: the target gives a token of beam -0.400 nats (-0.360 to -0.440 over the texts)"
        )
        assert likelihoods(made, row("tables", "plain", 1.0)) is None

    def test_a_report_with_only_lossy_drafters_has_no_lossless_verdict(self) -> None:
        speed, identical, _ = verdicts(page(report(rows=(row("tables", "plain", 1.0), bild(1.11)))))
        assert speed == ("none", "No lossless drafter has figures on counted prompts.")
        assert identical == ("none", "No tokens were compared: no lossless drafter took part.")

    def test_an_interrupted_report_says_so_first(self) -> None:
        assert verdicts(page(report(finished=False)))[0][1].startswith("Interrupted")
        assert "Interrupted" not in usual_page()


class TestPlots:
    def test_every_kind_of_record_has_a_plot_whose_alternative_has_its_figures(self) -> None:
        said = {plot.name: plot.alt for plot in plots(report())}
        assert [*said] == ["speedup-1", "acceptance", "cost", "rounds-1", "predicted"]
        assert said["speedup-1"] == (
            "draft-model on tables 1.83; lookup on tables 2.61; transformers on tables 0.52;"
            " draft-model on prose 1.71; lookup on prose 0.84."
        )
        assert said["acceptance"].startswith("draft-model on tables 0.71, 0.57; lookup on tables")
        assert said["cost"] == "1 token at batch 1 1.00; 2 tokens at batch 1 1.04; 8 tokens at batch 1 1.31."
        assert "lookup on prose drafting 1.23 ms, verifying 4.56 ms, rest 0.78 ms" in said["rounds-1"]
        assert "draft-model on prose at batch 1 predicted 1.83, measured 1.71" in said["predicted"]
        images = [tags for _, tags in Page(usual_page()).tags if tags.get("role") == "img"]
        assert len(images) == usual_page().count("<svg") == 5 and all(each["aria-label"] for each in images)

    def test_a_workload_without_counted_prompts_is_not_drawn(self) -> None:
        none = drafted("loops", "lookup", 3.0, speedup=None, predicted=None)
        (first, *_) = plots(report(rows=(*report().rows, none)))
        assert "loops" not in first.svg + first.alt

    def test_a_page_can_be_made_from_incomplete_records(self) -> None:
        plain, note = row("a", "plain", 1.0), Row("a", 1, "plain", peer=False, note="interrupted")
        empty: dict[str, Any] = {"costs": (), "bandwidth": None, "models": (), "options": {}, "machine": {}}
        for rows in ((), (plain,), (note,), (plain, drafted("a", "lookup", 1.2, over_peers=None))):
            assert "Foredraft benchmark" in page(report(rows=rows, notes=(), **empty)), rows


class TestSelfContained:
    def test_the_page_has_no_external_references_and_no_scripts(self) -> None:
        check_alone(usual_page())

    def test_plots_use_the_pages_colours(self) -> None:
        """No colour is fixed, so plots follow the page's light or dark scheme."""
        for plot in plots(report()):
            assert not re.search(r"#[0-9a-f]{3}", plot.svg), plot.name
            used = set(re.findall(r"var\(--(\w+)\)", plot.svg))
            assert used <= set(re.findall(r"--(\w+):", usual_page()))
            assert "var(--s0)" in plot.svg

    def test_names_are_escaped(self) -> None:
        evil = '<script>alert("1")</script>&amp;'
        rows = (row(evil, "plain", 1.0), drafted(evil, evil, 1.5, over_peers={evil: spread(2.0)}))
        models = (ModelRecord("target", evil, 1, 1, evil),)
        more: Any = {"notes": (evil,), "options": {evil: evil}, "machine": {"cpu": evil}}
        text = page(report(rows=rows, models=models, **more))
        assert "<script" not in text
        assert Page(text).text.count(evil) >= 8
        labels = [attributes["aria-label"] for _, attributes in Page(text).tags if "aria-label" in attributes]
        assert any(evil in (label or "") for label in labels)
        assert html.escape(evil, quote=False) in text
