"""The servers of two versions beside each other: the same requests, in turns, on the demo pair, padded.

    streams   seconds until 1, 4 and 16 streams at a time have ended, drafting always
    first     seconds to the first token of a prompt of some 64 tokens
    prefix    seconds to the first token of a prompt of which the prefix cache has 1,000 tokens

The ratios are the old version's seconds over the new one's: 1.02 means that the new version is 2 % faster.
The server that waits sleeps, and the texts must be equal.

    git worktree add ../before <commit>
    python -m benchmarks.serving_versions --old ../before
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.serving import POSITIONS, ROWS, Client, start_server
from benchmarks.timing import Quiet, spread
from benchmarks.versions import commit
from benchmarks.workload import heldout, machine, padded_demo, write
from foredraft import demo

AT_A_TIME = (1, 4, 16)
DRAFTING = {"policy": "fixed", "drafter": "draft-model"}
Seconds = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--old", type=Path, required=True, help="a working tree of the old version")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--name", default="serving_versions")
    given = parser.parse_args()
    trees = {"old": given.old, "new": Path(__file__).resolve().parents[1]}
    texts: dict[str, list[list[str]]] = defaultdict(list)
    with TemporaryDirectory() as folder:
        model = str(padded_demo(Path(folder) / "target", given.layers, POSITIONS))
        options = "--model", model, "--draft", str(demo.draft_path()), "--max-batch", str(ROWS)
        servers = {
            name: start_server(*options, "--max-length", str(POSITIONS), tree=tree)
            for name, tree in trees.items()
        }
        client = Client()

        def ask(which: str, prompts: list[Any], new_tokens: int, turn: int) -> Seconds:
            """Return the seconds of each version; they begin in turn."""
            fields = {"max_tokens": new_tokens, "temperature": 0, "stream": True, "ignore_eos": True}
            bodies = [{"model": Path(model).name, "prompt": each, **fields, **DRAFTING} for each in prompts]
            seconds = {}
            for name in sorted(servers, reverse=turn % 2 == 0):
                found = client.read(servers[name][1], bodies)
                texts[name].append([each["text"] for each in found])
                seconds[name] = float(max(each[which] for each in found))
            return seconds

        def compared(which: str, prompts: Any, new_tokens: int) -> dict[str, Any]:
            ratios, quiet = [], Quiet(given.repeats)
            for turn in range(-1, given.repeats):
                seconds = quiet.take(partial(ask, which, prompts(turn), new_tokens, turn))
                if turn >= 0:  # the first one warms
                    ratios.append(seconds["old"] / seconds["new"])
            return spread(ratios)

        words = " ".join(heldout(60))
        try:
            cases = {
                "streams": {
                    str(count): compared("seconds", lambda _, n=count: (heldout(8) * 2)[:n], given.new_tokens)
                    for count in AT_A_TIME
                },
                "first": compared("first", lambda turn: [words[100 * turn + 200 :][:250]], 2),
                "prefix": compared("first", lambda turn: [words[:3000] + f"\n# {turn}\n"], 2),
            }
        finally:
            client.close()
            for process, _ in servers.values():
                process.terminate()
                process.wait()
    what, same = vars(given) | {"old": commit(given.old)}, texts["old"] == texts["new"]
    write(
        given.name,
        {"what": what, "machine": machine(), "identical": same, **cases},
    )


if __name__ == "__main__":
    main()
