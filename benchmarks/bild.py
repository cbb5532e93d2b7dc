"""The trade-off of the lossy `bild` rule between speed and quality.

Big Little Decoder (Kim et al. 2023, arXiv:2302.07863) runs over a grid of its two thresholds, on the demo
pair and held-out code on which plain decoding does not loop. Each fallback threshold also runs in the strict
mode, the same policy under a lossless rule. Plain decoding is the reference. All modes are timed in turns.
Quality has two figures:

- loss: mean negative log-probability of the output under the target, in nats per token; lower is better. The
  reference is plain decoding's loss.
- exact: the share of prompts whose output equals plain decoding's, and the mean share of an output before the
  first token that differs.

The script writes a JSON document and a plot, which docs/guides/bild.md shows; it prints a table and the
document. The exit code is 1 if a lossless output differs from plain decoding's.

    python -m benchmarks.bild --prompts 18 --new-tokens 64 --repeats 5
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import foredraft
from benchmarks.timing import interleaved, spread
from benchmarks.workload import fluent, machine, write
from foredraft import LLM, Output, SamplingParams
from foredraft.bench.figures import divergence
from foredraft.cli.layout import table
from foredraft.decode.policy import Fallback
from foredraft.files import write_whole
from foredraft.ngrams import repeated
from foredraft.pages.drawing import Axis, Panel, Points, picture

POSITIONS = 512  # tokens of a sequence, prompt included; held-out prompts are much shorter
PLOTS = Path(__file__).parents[1] / "docs" / "guides"
PLOTTED = {"loss": "loss, nats per token", "up_to_the_first_other": "share before it differs"}
WARM = 1  # untimed turns, after the one whose outputs are compared


@dataclass(frozen=True, slots=True)
class Mode:
    """A point of the grid.

    Attributes:
        fallback: Threshold of the fallback policy, a probability; None for plain decoding.
        rollback: Bound of the lossy rule, in nats; None for a lossless rule.
    """

    fallback: float | None = None
    rollback: float | None = None

    @property
    def lossless(self) -> bool:
        return self.rollback is None

    @property
    def name(self) -> str:
        if self.fallback is None:
            return "plain"
        return "strict" if self.rollback is None else f"up to {self.rollback:g}"


def modes(fallbacks: Sequence[float], rollbacks: Sequence[float]) -> Iterator[Mode]:
    """Yield plain decoding, then for each fallback threshold the strict mode and every bound."""
    yield Mode()
    for fallback in fallbacks:
        yield from (Mode(fallback, rollback) for rollback in (None, *rollbacks))


def decode(llm: LLM, mode: Mode, prompts: list[list[int]], options: argparse.Namespace) -> list[Output]:
    """Decode the prompts in this mode, one at a time."""
    params = SamplingParams(
        temperature=options.temperature,
        max_new_tokens=options.new_tokens,
        ignore_eos=True,
        seed=0,
        acceptance="speculative" if mode.lossless else "bild",
        rollback=mode.rollback,
        drafter="none" if mode.fallback is None else "draft-model",
    )
    if mode.fallback is not None:
        llm.loaded.engine.policy = Fallback(options.max_draft, mode.fallback)
    return [llm.generate(prompt, params)[0] for prompt in prompts]


def loss(llm: LLM, prompt: list[int], new: list[int]) -> float:
    """Return the mean negative log-probability of the new tokens under the target, in nats."""
    params = SamplingParams(max_new_tokens=0, prompt_logprobs=0)
    scores = llm.generate([*prompt, *new], params)[0].prompt_logprobs
    assert scores is not None
    return mean(-score.logprob for score in scores[len(prompt) :] if score is not None)


def quality(llm: LLM, prompts: list[list[int]], outputs: list[Output], plain: list[Output]) -> dict[str, Any]:
    """Compare the outputs of one mode with plain decoding's; the keys are those of the result file."""
    positions = [divergence(o.token_ids, p.token_ids) for o, p in zip(outputs, plain, strict=True)]
    lengths = [len(output.token_ids) for output in outputs]
    stats = foredraft.Stats.merge(output.stats for output in outputs)
    return {
        "loss": mean(loss(llm, p, o.token_ids) for p, o in zip(prompts, outputs, strict=True)),
        "identical": positions.count(None),
        "exact": positions.count(None) / len(positions),
        "up_to_the_first_other": mean(
            1.0 if position is None else position / length
            for position, length in zip(positions, lengths, strict=True)
        ),
        "lossless": all(output.lossless for output in outputs),
        "mean_accepted_length": stats.mean_accepted_length,
        "acceptance_rate": stats.acceptance_rate,
        "drafted_per_round": stats.drafted / stats.rounds,
        "repeated_4grams": median(repeated(output.token_ids) for output in outputs),
    }


def measure(
    llm: LLM, prompts: list[list[int]], grid: list[Mode], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return a row of figures for every mode, plain decoding first."""
    outputs = {mode: decode(llm, mode, prompts, options) for mode in grid}
    works = {mode: lambda mode=mode: decode(llm, mode, prompts, options) for mode in grid}
    seconds = interleaved(works, llm.loaded.engine.device, options.repeats, warm=WARM)
    plain, tokens = grid[0], len(prompts) * options.new_tokens
    rows = []
    for mode in grid:
        pairs = zip(seconds[plain], seconds[mode], strict=True)
        figures = {
            "mode": mode.name,
            "fallback": mode.fallback,
            "rollback": "inf" if mode.rollback == math.inf else mode.rollback,
            "tokens_per_second": spread([tokens / s for s in seconds[mode]]),
            "over_plain": spread([slow / fast for slow, fast in pairs]),
        }
        rows.append(figures | quality(llm, prompts, outputs[mode], outputs[plain]))
    return rows


COLUMNS = (
    *("fallback", "mode", "lossless", "over plain", "loss", "exact"),
    *("before first difference", "tau", "repeated"),
)


def lines(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of the printed table."""
    cells = [
        (
            "-" if row["fallback"] is None else f"{row['fallback']:g}",
            row["mode"],
            "yes" if row["lossless"] else "NO",
            f"{row['over_plain']['median']:.2f}",
            f"{row['loss']:.3f}",
            f"{row['exact']:.0%}",
            f"{row['up_to_the_first_other']:.0%}",
            f"{row['mean_accepted_length']:.2f}",
            f"{row['repeated_4grams']:.0%}",
        )
        for row in rows
    ]
    return table([COLUMNS, *cells])


def plot(rows: list[dict[str, Any]]) -> str:
    """Return an SVG: the loss, and the share before the first difference, by speed-up."""
    plain, *others = rows
    panels = []
    for key, title in (
        ("loss", "loss, nats per token"),
        ("up_to_the_first_other", "share before it differs"),
    ):
        marks = [Points("plain decoding", [1.0], [plain[key]], hollow=True)]
        for number, fallback in enumerate(dict.fromkeys(row["fallback"] for row in others)):
            strict, *lossy = [row for row in others if row["fallback"] == fallback]
            xs, ys = ([row["over_plain"]["median"] for row in lossy], [row[key] for row in lossy])
            notes = [f"{row['rollback']}" for row in lossy]
            label = f"fallback {fallback:g}"
            marks += [
                Points(label, xs, ys, number, "line", notes=notes),
                Points(
                    f"{label}, strict", [strict["over_plain"]["median"]], [strict[key]], number, hollow=True
                ),
            ]
        panels.append(Panel(150, marks, Axis(title, grid=True)))
    return picture(
        "bild",
        panels,
        Axis("speed-up over plain decoding; numbers are rollback bounds in nats", grid=True),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    fallbacks, rollbacks = (
        [float(word) for word in words.split(",")] for words in (options.fallbacks, options.rollbacks)
    )
    grid = list(modes(fallbacks, rollbacks))
    llm = foredraft.load(
        dtype=options.dtype,
        device=options.device,
        policy="fallback",
        max_draft=options.max_draft,
        max_batch=1,
        max_length=POSITIONS,
    )
    prompts = fluent(llm, options.prompts)
    rows = measure(llm, prompts, grid, options)
    write_whole(PLOTS / f"{options.name}.svg", plot(rows), "the plot")
    print("\n".join([*lines(rows), ""]))
    write(options.name, {"what": vars(options), "machine": machine(), "rows": rows})
    changed = [row for row in rows if row["lossless"] and row["exact"] < 1 and options.temperature == 0]
    return 1 if changed else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--fallbacks", default="0.3,0.6,0.9", help="joined by commas")
    parser.add_argument("--rollbacks", default="1,2,3,5,inf", help="nats, joined by commas")
    parser.add_argument("--max-draft", type=int, default=10)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--name", default="bild")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
