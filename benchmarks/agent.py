"""Count what an agent's session reads: tokens that each turn computes, per token that is new in it.

A session begins with a system prompt; each turn adds a message and the model's reply, and asks with all of
it. A template may leave out of the history what ends a prompt (`--opening`, such as an opened thought), and a
client may change the reply (`--changed`, its last tokens): then what follows is new. Nothing is timed, and
the last line is JSON.

    python -m benchmarks.agent --turns 20 --tokens 16000
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import foredraft
from foredraft import LLM, SamplingParams
from foredraft.decode.prefix_cache import PrefixCache
from tests.support.hybrids import save_hybrid


class Reads:
    """Counts the tokens of prompts that a model computes."""

    def __init__(self, llm: LLM) -> None:
        self.tokens, runner = 0, llm.loaded.runner
        prefill = runner.prefill

        def counted(cache: Any, row: int, tokens: list[int], *given: Any, **more: Any) -> Any:
            self.tokens += len(tokens)
            return prefill(cache, row, tokens, *given, **more)

        runner.prefill = counted  # type: ignore[method-assign]


def session(llm: LLM, given: argparse.Namespace, opening: int, changed: int) -> dict[str, Any]:
    """Return what the turns of one session read, and how many tokens were new in each."""
    draw, reads = random.Random(f"{opening} {changed}"), Reads(llm)
    params = SamplingParams(temperature=0, max_new_tokens=given.reply, ignore_eos=True)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(3, llm.loaded.spec.vocab_size) for _ in range(count)]

    message = given.tokens // given.turns - given.reply
    history, read, new = tokens(2 * message), list[int](), list[int]()
    for _ in range(given.turns):
        fresh = tokens(message) + list(range(3, 3 + opening))
        before = reads.tokens
        [output] = llm.generate([history + fresh], params)
        read.append(reads.tokens - before)
        behind = given.reply if opening else changed  # of the reply before, where its text departs
        new.append(len(fresh) + (len(history) if len(read) == 1 else behind))
        reply = output.token_ids[: given.reply - changed] + tokens(changed)
        history += fresh[: len(fresh) - opening] + reply
    ratios = [round(one / other, 3) for one, other in zip(read, new, strict=True)]
    later = round(sum(read[1:]) / sum(new[1:]), 3)
    return {"tokens": len(history), "read": read, "new": new, "ratios": ratios, "later_turns": later}


def main() -> None:
    """Run a session as generated, one with openings that are left out, and one with changed replies."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("turns", 20), ("tokens", 16_000), ("reply", 100), ("opening", 4), ("changed", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--mib", type=int, default=512, help="of the prefix cache")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        length = 2 * given.tokens
        model = save_hybrid(
            Path(folder), dtype="bfloat16", num_hidden_layers=4, max_position_embeddings=length
        )
        cases = {
            "as generated": (0, 0),
            "opening left out": (given.opening, 0),
            "reply changed": (0, given.changed),
        }
        found = {}
        for name, case in cases.items():
            with foredraft.load(model, device="cpu", drafter="none", max_batch=1, max_length=length) as llm:
                kept = llm.loaded.engine.prefix_cache = PrefixCache(given.mib << 20)
                found[name] = session(llm, given, *case) | {"kept_bytes": kept.bytes}
                print(name, found[name]["ratios"])
    print(json.dumps(vars(given) | {"cases": found}))


if __name__ == "__main__":
    main()
