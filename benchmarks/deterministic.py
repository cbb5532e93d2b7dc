"""The cost of the `deterministic` option: the same decoding with the option on and off.

With the option on, passes keep to batch-invariant shapes, so that greedy output depends neither on the other
sequences of the batch nor on the drafter. With the option off, passes may have any shape. Foredraft's C
kernels are batch-invariant at every shape, so the option costs nothing there; --no-kernels measures PyTorch's
operators. The demo pair decodes 1, 8 and 32 held-out prompts as one batch, plainly and with its draft model.
Both sides take turns after a warm-up. A repeat's ratio is the tokens/s with the option on over those with it
off; the result file has medians and quartiles. For each side it also has the number of outputs that equal
plain decoding of the prompt alone, and the share of repeated 4-grams.

    python -m benchmarks.deterministic --repeats 5 --new-tokens 96
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

import foredraft
from benchmarks.timing import Quiet, spread, timed
from benchmarks.workload import heldout, machine, write
from foredraft import LLM, Output, SamplingParams
from foredraft.ngrams import repeated

ROWS = "1,8,32"
POSITIONS = 512  # tokens of a sequence, prompt included; held-out prompts are much shorter
WARM = 2  # untimed turns: the engine may prepare a shape at its second use, for example by recording a graph
SIDES = {True: "on", False: "off"}


def decode(llm: LLM, prompts: list[list[int]], drafter: str, new_tokens: int) -> tuple[float, list[Output]]:
    """Decode the prompts as one batch; return the tokens/s, with prefill included, and the outputs."""
    params = SamplingParams(temperature=0, max_new_tokens=new_tokens, ignore_eos=True, drafter=drafter)
    seconds, outputs = timed(lambda: llm.generate(prompts, params), llm.loaded.engine.device)
    return sum(len(output.token_ids) for output in outputs) / seconds, outputs


def compare(
    llms: dict[bool, LLM], prompts: list[list[int]], drafter: str, new_tokens: int, repeats: int
) -> dict[str, Any]:
    """Time both sides in turns on one batch of prompts; the keys are those of the result file."""
    alone = [decode(llms[True], [prompt], "none", new_tokens)[1][0].token_ids for prompt in prompts]
    speeds: dict[bool, list[float]] = {side: [] for side in llms}
    ids: dict[bool, list[list[int]]] = {}

    def turn(at: int) -> dict[bool, float]:
        taken = {}
        for side in list(llms)[:: 1 if at % 2 else -1]:
            taken[side], outputs = decode(llms[side], prompts, drafter, new_tokens)
            ids[side] = [output.token_ids for output in outputs]
        return taken

    for at in range(-WARM, 0):
        turn(at)
    quiet = Quiet(repeats)
    for at in range(repeats):
        for side, speed in quiet.take(partial(turn, at)).items():
            speeds[side].append(speed)
    pairs = zip(speeds[True], speeds[False], strict=True)
    return {
        "tokens_per_second": {SIDES[side]: spread(several) for side, several in speeds.items()},
        "on_over_off": spread([on / off for on, off in pairs]),
        "equal_to_plain_alone": {
            SIDES[side]: sum(a == b for a, b in zip(several, alone, strict=True))
            for side, several in ids.items()
        },
        "prompts": len(prompts),
        "repeated_4grams": median(repeated(several) for several in ids[True]),
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", default=ROWS, help="batch sizes, joined by commas")
    parser.add_argument("--drafters", default="none,draft-model", help="joined by commas")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--max-draft", type=int)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--kernels", action=argparse.BooleanOptionalAction)
    parser.add_argument("--name", default="deterministic")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    rows = [int(count) for count in options.rows.split(",")]
    load = {
        "dtype": options.dtype,
        "device": options.device,
        "max_draft": options.max_draft,
        "policy": "fixed",
        "kernels": options.kernels,
    }
    llms = {
        side: foredraft.load(**load, deterministic=side, max_batch=max(rows), max_length=POSITIONS)
        for side in SIDES
    }
    prompts = llms[True].encode(heldout(max(rows)))
    result: dict[str, Any] = {"what": vars(options), "machine": machine(), "runs": []}
    for count in rows:
        for drafter in options.drafters.split(","):
            found = compare(llms, prompts[:count], drafter, options.new_tokens, options.repeats)
            result["runs"].append({"rows": count, "drafter": drafter} | found)
    write(options.name, result)


if __name__ == "__main__":
    main()
