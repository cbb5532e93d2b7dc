"""What the cost model makes of good, bad and fickle drafters: `auto` beside plain decoding and fixed lengths.

The demo target decodes held-out prompts. Drafters that misbehave are the demo's draft model with other
words put into its mouth: it takes its time, and is then right or wrong as the case says. All take turns,
warm, on one loaded model; `auto` both as it meets a drafter for the first time and as it knows it from
earlier requests. Ratios are of seconds in the same repeat, plain over the other, prompts included: medians
and quartiles, and of all seconds together. Beside each stand whether its tokens are plain decoding's, its
mean draft length, its mean accepted length, and the share of repeated 4-grams. Above temperature 0, requests
have a seed, so that all contenders write the same text. `auto` goes by costs that it measures when the models
were loaded, and measures again: so they are loaded several times.

    random      the draft model is never right
    dear        the target drafts for itself: always right, and as slow
    thirty      right for 30 tokens, then never
    alternate   right at every other token
    bad-row     eight rows, one of which has a draft model that is never right

and on prompts whose plain output repeats under 30 % of its 4-grams within 64 tokens:

    pays        the draft model as it is; the best fixed length is the best of all that are timed
    choice      lookup, layer skip (a plan that `foredraft tune` found) or the draft model, beside each alone;
                the last two also with drafts that end by their length alone
    batch       the draft model for eight sequences together

    python benchmarks/auto.py --new-tokens 256 --repeats 5 --loads 3
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch
from timing import spread, timed
from torch import Tensor
from workload import fluent, heldout, machine, write

import foredraft
from foredraft import LLM, Output, SamplingParams
from foredraft.decode.policy import Auto, CostTable, Fixed, Policy
from foredraft.decode.policy.stopping import stops_of
from foredraft.decode.stats import Round, Stats
from foredraft.drafters.draft_model import DraftModel
from foredraft.model.runner import Drafted, Drawing, Stops
from foredraft.ngrams import repeated

POSITIONS = 1024
WARM = 1  # turns that do not count

Right = Callable[[int, int], bool]  # of a row and a place in its output
CASES: dict[str, tuple[int, Right | None]] = {
    "random": (1, lambda row, place: False),
    "dear": (1, None),
    "thirty": (1, lambda row, place: place < 30),
    "alternate": (1, lambda row, place: place % 2 == 0),
    "bad-row": (8, lambda row, place: row > 0 and place % 5 > 0),
    "pays": (1, None),
    "choice": (1, None),
    "batch": (8, None),
}
FLUENT = "pays", "choice", "batch"  # whose prompts lead to texts that repeat little
PLAN = "skip:attn=1-3,5-7,9-11,13-15/mlp=1-7,9-11,13-15"
MODELS = "layer-skip", "draft-model"


class Ventriloquist(DraftModel):
    """The draft model, and then other words: the target's next token where it is to be right, else another.

    truth: of each prompt, its output; the rows' sequences come from the engine.
    """

    def __init__(self, inner: DraftModel, rows: int, positions: int, llm: LLM, right: Right) -> None:
        super().__init__(inner.draft_pass.runner, rows, positions)
        self.llm, self.right = llm, right
        self.truth: Mapping[tuple[int, ...], list[int]] = {}
        self._texts: dict[int, tuple[int, list[int]]] = {}  # by request: its prompt's place, and its output

    def step(
        self, tokens: Tensor, starts: list[int], counts: list[int], idle: list[bool], at: Tensor | None
    ) -> Tensor:
        logits = super().step(tokens, starts, counts, idle, at).zero_()
        for row in range(len(starts)):
            logits[row, self._words(row, starts[row] + counts[row], 1)[0]] = 1.0
        return logits

    def draft(
        self,
        tokens: list[list[int]],
        starts: list[int],
        most: list[int],
        drawing: Drawing | None,
        stops: Stops | None = None,
    ) -> Drafted | None:
        made = super().draft(tokens, starts, most, drawing, stops)
        if made is not None:
            for row, count in enumerate(made.counts):
                first = starts[row] + len(tokens[row])
                made.tokens[row, :count] = torch.tensor(self._words(row, first, count), dtype=torch.int64)
        return made

    def join(self, sequence: Any) -> None:
        super().join(sequence)
        prompt = tuple(sequence.prompt)
        if prompt in self.truth:
            # by its prompt's place among all, not by the row it happens to have
            self._texts[sequence.id] = list(self.truth).index(prompt), self.truth[prompt]

    def leave(self, sequence: Any) -> None:
        super().leave(sequence)
        self._texts.pop(sequence.id, None)

    def _words(self, row: int, position: int, count: int) -> list[int]:
        """From a position of the row's on."""
        sequences, words = self.llm.engine.rows.sequences, self.draft_pass.runner.decoder.spec.vocab_size
        if row >= len(sequences) or sequences[row].id not in self._texts:
            return [0] * count  # its rounds are being timed
        index, output = self._texts[sequences[row].id]
        first = position - len(sequences[row].prompt)
        said = [output[place] if place < len(output) else 0 for place in range(first, first + count)]
        places = enumerate(said, start=first)
        return [token if self.right(index, place) else (token + 1) % words for place, token in places]


class ByLength(Auto):
    """It does not hear how sure a drafter is."""

    def stops(self, sequences: Sequence[Any], budgets: Sequence[int], device: torch.device) -> Stops:
        return stops_of([None for _ in sequences], max(budgets), device)

    def learn(self, sequence: Any, outcome: Round, sure: float | None) -> None:
        super().learn(sequence, replace(outcome, sure=()), sure)


def drafter_of(case: str, llm: LLM, rows: int) -> DraftModel:
    own = llm.engine.drafters["draft-model"]
    assert isinstance(own, DraftModel)
    right = CASES[case][1]
    if right is not None:
        return Ventriloquist(own, rows, POSITIONS, llm, right)
    target: Any = llm.engine.target
    return DraftModel(target, rows, POSITIONS) if case == "dear" else own


def request(
    llm: LLM, prompts: list[list[int]], speculation: str, new_tokens: int, temperature: float
) -> tuple[float, list[Output]]:
    """Seconds of the decoding, from the first round of any to the end of all; outputs."""
    params = SamplingParams(
        temperature=temperature,
        max_new_tokens=new_tokens,
        ignore_eos=True,
        speculation=speculation,
        seed=7 if temperature else None,
        acceptance="coupled" if temperature else None,
    )
    seconds, outputs = timed(lambda: llm.generate(prompts, params), llm.engine.device)
    return seconds, outputs


def with_table(policy: Auto, table: CostTable) -> Auto:
    policy.table = table
    return policy


@dataclass
class Runs:
    """Of all contenders of a case: seconds of each turn, what they wrote, and whether it was what plain
    decoding writes. tables: the costs that `auto` went by, of each load, at its end."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    outputs: dict[str, list[Output]] = field(default_factory=lambda: defaultdict(list))
    same: dict[str, bool] = field(default_factory=lambda: defaultdict(lambda: True))
    tables: list[CostTable] = field(default_factory=list)


def contenders_of(
    case: str, known: Auto, lengths: Sequence[int]
) -> dict[str, tuple[Callable[[], Policy], str]]:
    """name -> (a policy for one request, who drafts); a fresh one knows the table, and no drafter."""
    contenders: dict[str, tuple[Callable[[], Policy], str]] = {
        "plain": (lambda: known, "none"),
        "auto, first request": (lambda: Auto(known.max_draft, known.table), "draft-model"),
        "auto": (lambda: known, "draft-model"),
    }
    if case == "choice":
        by_length = ByLength(known.max_draft)
        contenders |= {
            "auto": (lambda: known, "auto"),
            "auto, first request": (lambda: Auto(known.max_draft, known.table), "auto"),
            "auto, lookup": (lambda: known, "lookup"),
        }
        for name in MODELS:
            contenders[f"auto, {name}"] = lambda: known, name
            contenders[f"by length, {name}"] = lambda: with_table(by_length, known.table), name
    for gamma in lengths:
        contenders[f"fixed {gamma}"] = (lambda gamma=gamma: Fixed(gamma), "draft-model")  # type: ignore[misc]
    return contenders


def run(case: str, options: argparse.Namespace, runs: Runs) -> None:
    """A case on models that are loaded for it: all contenders on every prompt in turns."""
    batch = CASES[case][0]
    llm = foredraft.load(
        dtype=options.dtype,
        device=options.device,
        max_batch=batch,
        max_length=POSITIONS,
        max_draft=options.max_draft,
        plan=PLAN if case == "choice" else None,
    )
    engine = llm.engine
    count = options.prompts * batch
    prompts = fluent(llm, count) if case in FLUENT else llm.encode(heldout(count))
    groups = [prompts[start : start + batch] for start in range(0, len(prompts), batch)]
    drafter = engine.drafters["draft-model"] = drafter_of(case, llm, batch)
    engine.rows.caches = list({id(c): c for c in (engine.cache, *drafter.caches)}.values())
    known = engine.policy
    assert isinstance(known, Auto)
    contenders = contenders_of(case, known, [int(length) for length in options.lengths.split(",")])
    for group in groups:
        outputs = request(llm, group, "none", options.new_tokens, options.temperature)[1]
        plain = [output.token_ids for output in outputs]
        if isinstance(drafter, Ventriloquist):
            drafter.truth = {tuple(ids): text for ids, text in zip(group, plain, strict=True)}
        for turn in range(-WARM, options.repeats):
            for name in list(contenders)[:: 1 if turn % 2 else -1]:
                make, speculation = contenders[name]
                engine.policy = make()
                seconds, outputs = request(llm, group, speculation, options.new_tokens, options.temperature)
                engine.policy = known
                runs.same[name] &= [output.token_ids for output in outputs] == plain
                if turn >= 0:
                    runs.seconds[name].append(seconds)
                    runs.outputs[name] += outputs
    runs.tables.append(known.table)


def compare(case: str, options: argparse.Namespace) -> dict[str, Any]:
    """A case, as often as models are loaded."""
    runs = Runs()
    for _ in range(options.loads):
        run(case, options, runs)
    plain = runs.seconds["plain"]
    return {
        "case": case,
        "batch": CASES[case][0],
        "tables": [{"passes": table.passes, "drafts": table.drafts} for table in runs.tables],
        "contenders": [
            {
                "name": name,
                "speedup": spread([one / other for one, other in zip(plain, own, strict=True)]),
                "overall": sum(plain) / sum(own),
                "seconds": spread(own),
                "identical_to_plain": runs.same[name],
                "mean_draft_length": sum(o.stats.drafted for o in runs.outputs[name])
                / sum(o.stats.rounds for o in runs.outputs[name]),
                "mean_accepted_length": Stats.merge(o.stats for o in runs.outputs[name]).mean_accepted_length,
                "repeated_4grams": median(repeated(o.token_ids) for o in runs.outputs[name]),
            }
            for name, own in runs.seconds.items()
        ],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES), help="joined by commas")
    parser.add_argument("--lengths", default="1,2,3,4,5,6,8", help="fixed ones, joined by commas")
    parser.add_argument("--prompts", type=int, default=4, help="of each case, or batches of them")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=5, help="turns on each prompt, after a first one")
    parser.add_argument("--loads", type=int, default=3, help="times that the models are loaded")
    parser.add_argument("--max-draft", type=int)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--name", default="auto")
    options = parser.parse_args(arguments)
    result: dict[str, Any] = {"what": vars(options), "machine": machine(), "cases": []}
    with torch.inference_mode():
        for case in options.cases.split(","):
            result["cases"].append(compare(case, options))
    write(options.name, result)


if __name__ == "__main__":
    main()
