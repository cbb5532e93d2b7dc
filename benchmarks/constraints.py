"""Time constraints: JSON under speculation, a long list of banned text, its masks, and a long schema.

    json      a schema: plain decoding, which jumps forward, too, and drafters in turns
    ban       10,000 phrases that never come up against no constraint, in turns, by the same drafter
    masks     the mask of an unseen state at 131,072 words and 10,000 phrases; compiling both
    schema    the first token of a request with a schema of 200 lines, compiled anew, against one without

The first two run on the demo target, and on the same with layers added that change nothing, so that a step
takes 5 ms. Ratios are of the seconds of the same requests, medians and quartiles. Texts of a ratio are
compared.

    python -m benchmarks.constraints --repeats 8
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import foredraft
from benchmarks.timing import Quiet, spread
from benchmarks.workload import DEMO_LAYERS, demo_plan, heldout, machine, padded_demo, write
from foredraft import LLM, Output, SamplingParams
from foredraft.constraints.phrases import PhraseAutomaton, PhraseState, Symbols
from foredraft.constraints.token_masks import TokenMasks
from foredraft.constraints.token_table import TokenTable

PHRASES, WORDS = 10_000, 131_072
LETTERS = "etaoinshrdlucmfwypvbgkjqxz"
RECORD: dict[str, Any] = {
    "type": "object",
    "properties": {
        "identifier": {"type": "string", "pattern": "^[a-z]{4,12}$"},
        "description": {"type": "string", "minLength": 8, "maxLength": 60},
        "priority": {"enum": ["low", "medium", "high"]},
        "arguments": {
            "type": "array", "items": {"type": "string", "maxLength": 10}, "minItems": 1, "maxItems": 3,
        },
        "returns": {"type": "string", "maxLength": 10},
    },
    "required": ["identifier", "description", "priority", "arguments", "returns"],
    "additionalProperties": False,
}  # fmt: skip

SCHEMAS = {
    "record": RECORD,
    "three records": {"type": "array", "items": RECORD, "minItems": 3, "maxItems": 3},
}


def words(dice: random.Random, count: int, least: int) -> str:
    weights = [1 / (rank + 1) for rank in range(len(LETTERS))]
    return " ".join("".join(dice.choices(LETTERS, weights, k=dice.randint(least, 9))) for _ in range(count))


def banned(dice: random.Random) -> list[str]:
    """Return phrases in letters as frequent as in English, with a rare one each: they do not come up."""
    return [f"{words(dice, dice.choice((1, 1, 2)), 3)}\u00b6" for _ in range(PHRASES)]


def in_turns(
    calls: Mapping[str, Callable[[], Output]], repeats: int, base: str
) -> tuple[dict[str, Any], dict[str, Output]]:
    """Return the ratios of the seconds of `base` to each call's, timed in random order after a warm-up."""
    outputs = {name: call() for name, call in calls.items()}
    ratios: dict[str, list[float]] = defaultdict(list)

    def turn() -> dict[str, float]:
        seconds: dict[str, float] = {}
        for name in random.sample(sorted(calls), len(calls)):
            start = time.perf_counter()
            outputs[name] = calls[name]()
            seconds[name] = time.perf_counter() - start
        return seconds

    quiet = Quiet(repeats)
    for _ in range(repeats):
        seconds = quiet.take(turn)
        for name in calls:
            ratios[name].append(seconds[base] / seconds[name])
    return dict(ratios), outputs


def compared(
    llm: LLM, requests: Mapping[str, SamplingParams], prompts: list[str], repeats: int, base: str
) -> list[dict[str, Any]]:
    """Return each request's speed over that of `base`, over all prompts and repeats."""
    ratios: dict[str, list[float]] = defaultdict(list)
    same: dict[str, bool] = dict.fromkeys(requests, True)
    figures: dict[str, list[float]] = defaultdict(list)
    tokens: dict[str, list[int]] = defaultdict(list)
    for prompt in prompts:
        calls = {name: partial(first_output, llm, prompt, params) for name, params in requests.items()}
        found, outputs = in_turns(calls, repeats, base)
        for name in requests:
            ratios[name] += found[name]
            same[name] &= outputs[name].token_ids == outputs[base].token_ids
            figures[name].append(outputs[name].stats.mean_accepted_length)
            tokens[name].append(len(outputs[name].token_ids))
    return [
        {
            "request": name, "over_base": spread(ratios[name]), "identical": same[name],
            "mean_accepted_length": sum(figures[name]) / len(figures[name]), "tokens": tokens[name],
        }
        for name in requests
    ]  # fmt: skip


def first_output(llm: LLM, prompt: str, params: SamplingParams) -> Output:
    return llm.generate([prompt], params)[0]


@contextmanager
def loaded(layers: int, **options: Any) -> Iterator[LLM]:
    """Load the demo pair, the target with as many layers."""
    with TemporaryDirectory() as folder:
        big = None if layers == DEMO_LAYERS else str(padded_demo(Path(folder) / "big", layers))
        draft = None if big is None else str(foredraft.demo.draft_path())
        yield foredraft.load(big, draft=draft, **options)


def json_case(layers: int, repeats: int, new_tokens: int) -> dict[str, Any]:
    prompts = [f"{head}\n# The function above as a JSON record:\n" for head in heldout(4)]
    rows = []
    with loaded(layers, policy="auto", plan=demo_plan(layers)) as llm:
        for name, schema in SCHEMAS.items():
            free = SamplingParams(temperature=0, max_new_tokens=2 * new_tokens, json_schema=schema)
            drafters = ("none", "auto", "draft-model", "layer-skip", "lookup")
            requests = {drafter: free.replace(drafter=drafter) for drafter in drafters}
            found = compared(llm, requests, prompts, repeats, "none")
            rows += [row | {"schema": name} for row in found]
    return {"base": "none", "layers": layers, "rows": rows}


def ban_case(layers: int, repeats: int, new_tokens: int, phrases: list[str]) -> dict[str, Any]:
    with loaded(layers, policy="fixed") as llm:
        rows = []
        for drafter in ("none", "draft-model"):
            free = SamplingParams(temperature=0, max_new_tokens=new_tokens, ignore_eos=True, drafter=drafter)
            requests = {
                "free": free,
                **{f"ban, {m}": free.replace(ban=phrases, ban_mode=m) for m in ("mask", "rollback")},
            }
            rows += [
                row | {"drafter": drafter} for row in compared(llm, requests, heldout(4), repeats, "free")
            ]
    return {"base": "free", "layers": layers, "rows": rows}


def masks_case(dice: random.Random, states: int) -> dict[str, Any]:
    """Return the times of masks of unseen states, which a text of phrases and words leads to."""
    texts = {bytes([byte]): None for byte in range(256)}
    while len(texts) < WORDS - 1:
        texts[(" " if dice.random() < 0.5 else "").encode() + words(dice, 1, 2).encode()] = None
    table = TokenTable((*texts, b""), frozenset({WORDS - 1}))
    phrases = [words(dice, dice.choice((1, 1, 2)), 3) for _ in range(PHRASES)]
    rows = []
    for whole_words in (False, True):
        start = time.perf_counter()
        automaton = PhraseAutomaton(phrases, Symbols(ignore_case=False, whole_words=whole_words))
        masks = TokenMasks(automaton, table)
        compiled = time.perf_counter() - start
        seen: set[PhraseState] = set()
        seconds: list[float] = []
        while len(seen) < states:
            node, pending = automaton.start
            for symbol in automaton.symbols.of(dice.choice(phrases)[: dice.randint(1, 8)]):
                node = automaton.step(node, symbol)
            if automaton.shortest[node] or (state := PhraseState(node, pending)) in seen:
                states -= 1
                continue
            seen.add(state)
            start = time.perf_counter()
            masks.allowed(state)
            seconds.append(time.perf_counter() - start)
        seconds.sort()
        rows.append(
            {
                "whole_words": whole_words, "compile_seconds": compiled, "states": len(seconds),
                "mask_seconds": spread(seconds), "mask_seconds_99": seconds[int(0.99 * len(seconds))],
            }
        )  # fmt: skip
    return {"words": WORDS, "phrases": PHRASES, "rows": rows}


def schema_case(repeats: int) -> dict[str, Any]:
    """Return the first token's extra seconds under a schema of 200 lines, a new one each time."""
    llm = foredraft.load(policy="fixed")
    free = SamplingParams(temperature=0, max_new_tokens=1, drafter="none")
    llm.generate(["{"], free.replace(json_schema={"type": "object"}))
    extra = []
    for turn in range(repeats):
        schema = {
            "type": "object",
            "properties": {f"field_{turn}_{each}": {"type": "string", "maxLength": 9} for each in range(50)},
            "required": [f"field_{turn}_{each}" for each in range(50)],
        }
        lines = len(json.dumps(schema, indent=1).splitlines())
        start = time.perf_counter()
        llm.generate(["{"], free)
        between = time.perf_counter()
        llm.generate(["{"], free.replace(json_schema=schema))
        extra.append(time.perf_counter() - between - (between - start))
    return {"lines": lines, "extra_seconds": spread(extra)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default="json,ban,masks,schema")
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=160)
    parser.add_argument("--layers", type=int, default=48, help="of the target whose step takes 5 ms")
    parser.add_argument("--name", default="constraints")
    given = parser.parse_args()
    dice = random.Random(0)
    phrases = banned(dice)
    shapes = (DEMO_LAYERS, given.layers)
    made: dict[str, Callable[[], Any]] = {
        "json": lambda: [json_case(each, given.repeats, given.new_tokens) for each in shapes],
        "ban": lambda: [ban_case(each, given.repeats, given.new_tokens, phrases) for each in shapes],
        "masks": lambda: masks_case(dice, 400),
        "schema": lambda: schema_case(4 * given.repeats),
    }
    cases = {name: made[name]() for name in given.cases.split(",")}
    write(given.name, {"what": vars(given), "machine": machine(), "cases": cases})


if __name__ == "__main__":
    main()
