"""Policy `auto` with good, bad and fickle drafters, beside plain decoding and fixed draft lengths.

The demo target, or the same with padding layers that change nothing (--layers), decodes held-out prompts. A
drafter that misbehaves is the demo's draft model with other tokens put in place of its own: it takes its
time, and is then right or wrong as the case says. Every contender has models of its own, loaded for it, and
all run at once, warm, a slice of some rounds at a time in turns, so that a longer disturbance burdens all of
them. `auto` runs both as it meets a drafter for the first time and as it knows it from earlier requests.
Ratios are of the seconds of the same requests, plain over the other, prompts included: medians and quartiles,
and of all seconds together. Plain decoding takes part twice: its own ratio is 1 but for disturbances. Beside
each stand whether its tokens are plain decoding's, its mean draft length, its mean accepted length, and the
share of repeated 4-grams. Above temperature 0, requests have a seed, so that all contenders write the same
text.

    random      the draft model is never right
    random-32   the same, 32 rows
    dear        the target drafts for itself: always right, and as slow
    thirty      right for 30 tokens, then never
    alternate   right at every other token
    bad-row     eight rows, one of which has a draft model that is never right
    long-random the same as random, after a prompt of 700 tokens

and on prompts whose plain output repeats under 30 % of its 4-grams within 64 tokens:

    pays        the draft model as it is; the best fixed length is the best of all that are timed
    long        the same after a prompt of 700 tokens, whatever its output repeats
    choice      lookup, layer skip (a plan that `foredraft tune` found) or the draft model, beside each alone
    batch       the draft model for eight sequences together
    copies      lookup, on prompts whose answer copies much of them (the workload `edit-file`)

    python -m benchmarks.auto --layers 128 --new-tokens 256 --repeats 3 --loads 2
"""

from __future__ import annotations

import argparse
import random
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

import foredraft
from benchmarks.timing import spread
from benchmarks.workload import DEMO_LAYERS, demo_plan, fluent, heldout, machine, padded_demo, write
from foredraft import LLM, Output, SamplingParams, demo
from foredraft.decode.policy import Fixed, Policy
from foredraft.decode.policy.auto import Auto
from foredraft.decode.policy.cost_table import CostTable
from foredraft.decode.sequence import State
from foredraft.decode.stats import Stats
from foredraft.drafters.draft_model import DraftModel
from foredraft.drafters.lookup import repeated
from foredraft.llm.requests import Submission
from foredraft.model.memory import synchronise
from foredraft.model.runner import DraftInputs, FusedDraft
from foredraft.profiling.profile import measure_profile

POSITIONS = 1024
WARM = 1  # turns that do not count
SLICE = 0.03  # seconds that a contender gets at a time

Right = Callable[[int, int], bool]  # of a row and a place in its output
CASES: dict[str, tuple[int, Right | None]] = {
    "random": (1, lambda row, place: False),
    "random-32": (32, lambda row, place: False),
    "dear": (1, None),
    "thirty": (1, lambda row, place: place < 30),
    "alternate": (1, lambda row, place: place % 2 == 0),
    "bad-row": (8, lambda row, place: row > 0 and place % 5 > 0),
    "long-random": (1, lambda row, place: False),
    "long": (1, None),
    "pays": (1, None),
    "choice": (1, None),
    "batch": (8, None),
    "copies": (1, None),
}
# cases on prompts whose output repeats little, and the workload that the prompts come from
FLUENT = {"pays": "free", "choice": "free", "batch": "free", "copies": "edit-file"}
LONG = 700  # tokens of a prompt, in the cases that begin with that word
DRAFTER_OF = {"choice": "auto", "copies": "lookup"}  # drafters of cases, if not the draft model


class ScriptedDraftModel(DraftModel):
    """The draft model at its own cost, with scripted tokens: right or wrong as the case says."""

    def __init__(self, inner: DraftModel, rows: int, positions: int, llm: LLM, right: Right) -> None:
        super().__init__(inner.draft_pass.runner, rows, positions)
        self.llm, self.right = llm, right
        self.truth: Mapping[tuple[int, ...], list[int]] = {}  # prompt -> the target's output
        self._texts: dict[int, tuple[int, list[int]]] = {}  # by request: its prompt's place, and its output

    def step(
        self, tokens: Tensor, starts: list[int], counts: list[int], idle: list[bool], at: Tensor | None
    ) -> Tensor:
        logits = super().step(tokens, starts, counts, idle, at).zero_()
        for row in range(len(starts)):
            logits[row, self._scripted(row, starts[row] + counts[row], 1)[0]] = 1.0
        return logits

    def fused_draft(self, inputs: DraftInputs) -> FusedDraft | None:
        made = super().fused_draft(inputs)
        if made is not None:
            for row, count in enumerate(inputs.lengths):
                first = inputs.starts[row] + len(inputs.tokens[row])
                made.tokens[row, :count] = torch.tensor(self._scripted(row, first, count), dtype=torch.int64)
        return made

    def join(self, sequence: Any) -> None:
        super().join(sequence)
        prompt = tuple(sequence.prompt)
        if prompt in self.truth:
            # the prompt's place among all prompts; the row may be any
            self._texts[sequence.id] = list(self.truth).index(prompt), self.truth[prompt]

    def leave(self, sequence: Any) -> None:
        super().leave(sequence)
        self._texts.pop(sequence.id, None)

    def _scripted(self, row: int, position: int, count: int) -> list[int]:
        """Return `count` tokens of a row from a position on, counted from `context_start`."""
        sequences = self.llm.loaded.engine.rows.sequences
        words = self.draft_pass.runner.decoder.spec.vocab_size
        if row >= len(sequences) or sequences[row].id not in self._texts:
            return [0] * count  # its rounds are being timed
        index, output = self._texts[sequences[row].id]
        first = self.context_start(sequences[row]) + position - len(sequences[row].prompt)
        said = [output[place] if place < len(output) else 0 for place in range(first, first + count)]
        places = enumerate(said, start=first)
        return [token if self.right(index, place) else (token + 1) % words for place, token in places]


def drafter_of(case: str, llm: LLM, rows: int) -> DraftModel:
    own = llm.loaded.engine.drafters["draft-model"]
    assert isinstance(own, DraftModel)
    right = CASES[case][1]
    if right is not None:
        return ScriptedDraftModel(own, rows, POSITIONS, llm, right)
    target = llm.loaded.runner
    return DraftModel(target, rows, POSITIONS) if case == "dear" else own


@dataclass
class Contender:
    """One side of a comparison: its own models, the policy of its next requests, and its drafter."""

    llm: LLM
    policy: Callable[[], Policy]
    drafter: str


class Running:
    """Requests of a contender that decode a slice at a time; `seconds` adds up their time."""

    def __init__(self, contender: Contender, prompts: list[list[int]], params: SamplingParams) -> None:
        self.llm = contender.llm
        self.engine = contender.llm.loaded.engine
        self.engine.policy = contender.policy()
        own = replace(params, drafter=contender.drafter)
        requests = self.llm.requests
        self.sequences = [s for ids in prompts for s in requests.sequences(Submission(ids, own))]
        self.seconds = 0.0
        for sequence in self.sequences:
            self.engine.submit(sequence)

    def go_on(self, seconds: float) -> None:
        """Decode for so long, and to the end of the round that runs then."""
        start, taken = time.perf_counter(), 0.0
        while taken < seconds and not self.done:
            self.engine.step()
            taken = time.perf_counter() - start
        synchronise(self.engine.device)
        self.seconds += time.perf_counter() - start

    @property
    def done(self) -> bool:
        return all(sequence.state is State.FINISHED for sequence in self.sequences)

    def outputs(self) -> list[Output]:
        return [self.llm.requests.output(sequence) for sequence in self.sequences]


@dataclass
class Runs:
    """Seconds, outputs and identity of all contenders of a case; tables: costs of `auto` at each load."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    outputs: dict[str, list[Output]] = field(default_factory=lambda: defaultdict(list))
    same: dict[str, bool] = field(default_factory=lambda: defaultdict(lambda: True))
    tables: list[CostTable] = field(default_factory=list)


def contenders_of(case: str, options: argparse.Namespace) -> dict[str, Contender]:
    """Return the contenders by name; a policy that meets its drafter first shares the costs of `auto`."""

    def known() -> Auto:
        policy = contenders["auto"].llm.loaded.engine.policy
        assert isinstance(policy, Auto)
        return policy

    def loaded(make: Callable[[], Policy] | None, drafter: str) -> Contender:
        llm = foredraft.load(
            options.model,
            draft=None if options.model is None else str(demo.draft_path()),
            drafter="draft-model",
            dtype=options.dtype,
            device=options.device,
            max_batch=CASES[case][0],
            max_length=POSITIONS,
            max_draft=options.max_draft,
            plan=demo_plan(options.layers) if case == "choice" else None,
        )
        engine = llm.loaded.engine
        own = engine.policy
        stand_in = engine.drafters["draft-model"] = drafter_of(case, llm, CASES[case][0])
        engine.rows.caches = list({id(c): c for c in (engine.cache, *stand_in.caches)}.values())
        if isinstance(own, Auto) and case == "dear":  # the stand-in costs what the target costs
            profile = measure_profile(engine, own.max_draft)
            own.use(profile.greedy, profile.sampled)
        return Contender(llm, make or (lambda: own), drafter)

    who = DRAFTER_OF.get(case, "draft-model")
    contenders = {
        "auto": loaded(None, who),
        "auto, first request": loaded(lambda: Auto(known().max_draft, known().greedy, known().sampled), who),
        "plain": loaded(lambda: Fixed(1), "none"),
        "plain, again": loaded(lambda: Fixed(1), "none"),
    }
    if case == "choice":
        for name in ("lookup", "layer-skip", "draft-model"):
            contenders[f"auto, {name}"] = loaded(None, name)
    fixed = "draft-model" if who == "auto" else who
    for gamma in (int(length) for length in options.lengths.split(",")):
        contenders[f"fixed {gamma}"] = loaded(partial(Fixed, gamma), fixed)
    return contenders


def run(case: str, options: argparse.Namespace, runs: Runs) -> None:
    """Load models for a case, and run all contenders on every prompt."""
    batch = CASES[case][0]
    contenders = contenders_of(case, options)
    llm = contenders["auto"].llm
    count = options.prompts * batch
    if case in FLUENT:
        prompts = fluent(llm, count, FLUENT[case])
    elif case.startswith("long"):
        texts = llm.encode(heldout(5 * count))
        several = (texts[at : at + 5] for at in range(0, len(texts), 5))
        prompts = [[id for text in five for id in text][-LONG:] for five in several]
    else:
        prompts = llm.encode(heldout(count))
    params = SamplingParams(
        temperature=options.temperature,
        max_new_tokens=options.new_tokens,
        ignore_eos=True,
        seed=7 if options.temperature else None,
        acceptance="coupled" if options.temperature else None,
    )
    chance = random.Random(case)
    for group in (prompts[start : start + batch] for start in range(0, len(prompts), batch)):
        plain = [output.token_ids for output in llm.generate(group, replace(params, drafter="none"))]
        for contender in contenders.values():
            drafter = contender.llm.loaded.engine.drafters["draft-model"]
            if isinstance(drafter, ScriptedDraftModel):
                drafter.truth = {tuple(ids): text for ids, text in zip(group, plain, strict=True)}
        for turn in range(-WARM, options.repeats):
            running = {name: Running(contender, group, params) for name, contender in contenders.items()}
            order = list(running.values())
            while order:
                chance.shuffle(order)  # so that no contender always follows the same one, whose work slows it
                for requests in order:
                    requests.go_on(SLICE)
                order = [requests for requests in order if not requests.done]
            for name, requests in running.items():
                outputs = requests.outputs()
                runs.same[name] &= [output.token_ids for output in outputs] == plain
                if turn >= 0:
                    runs.seconds[name].append(requests.seconds)
                    runs.outputs[name] += outputs
    policy = llm.loaded.engine.policy
    assert isinstance(policy, Auto)
    runs.tables.append(policy.greedy)


def compare(case: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run a case once for each load of the models, and return its figures."""
    runs = Runs()
    for _ in range(options.loads):
        run(case, options, runs)
    plain = runs.seconds["plain"]
    return {
        "case": case,
        "batch": CASES[case][0],
        "tables": [table.as_dict() for table in runs.tables],
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
    parser.add_argument("--layers", type=int, default=DEMO_LAYERS, help="of the target, padding included")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--name", default="auto")
    options = parser.parse_args(arguments)
    result: dict[str, Any] = {"what": dict(vars(options)), "machine": machine(), "cases": []}
    with torch.inference_mode(), TemporaryDirectory() as folder:
        options.model = None
        if options.layers > DEMO_LAYERS:
            options.model = str(padded_demo(Path(folder) / "target", options.layers))
        for case in options.cases.split(","):
            result["cases"].append(compare(case, options))
    write(options.name, result)


if __name__ == "__main__":
    main()
