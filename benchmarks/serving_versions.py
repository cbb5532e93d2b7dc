"""The servers of two versions beside each other: the same requests, in turns, on the demo pair, padded.

    streams   seconds until 1, 4, 16 and 32 streams at a time have ended, with policy auto, drafting always
              and drafting never
    first     seconds to the first token of a prompt of some 64 tokens, idle and while 15 streams decode
    prefix    seconds to the first token of a prompt of which the prefix cache has 1,000 tokens

The ratios are the old version's seconds over the new one's: 1.02 means that the new version is 2 % faster.
The server that waits sleeps, and the texts must be equal.

    git worktree add ../before <commit>
    python -m benchmarks.serving_versions --old ../before
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.serving import POSITIONS, ROWS, WAYS, Client, start_server
from benchmarks.timing import Quiet, spread
from benchmarks.versions import commit
from benchmarks.workload import heldout, machine, padded_demo, write
from foredraft import demo

AT_A_TIME = (1, 4, 16, 32)
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
        client, others = Client(), Client()

        def bodies(prompts: list[str], new_tokens: int, way: str) -> list[dict[str, Any]]:
            fields = {"max_tokens": new_tokens, "temperature": 0, "stream": True, "ignore_eos": True}
            return [{"model": Path(model).name, "prompt": each, **fields, **WAYS[way]} for each in prompts]

        def ask(which: str, asked: list[dict[str, Any]], turn: int, load: list[dict[str, Any]]) -> Seconds:
            """Return the seconds of each version; they begin in turn."""
            seconds = {}
            for name in sorted(servers, reverse=turn % 2 == 0):
                if load:
                    others.send(servers[name][1], load, leave=4.0)
                    time.sleep(2)
                found = client.read(servers[name][1], asked)
                if load:
                    others.result()
                    time.sleep(0.5)
                texts[name].append([each["text"] for each in found])
                seconds[name] = float(max(each[which] for each in found))
            return seconds

        def compared(
            which: str, asked: Callable[[int], list[dict[str, Any]]], load: Sequence[dict[str, Any]] = ()
        ) -> dict[str, Any]:
            ratios, quiet = [], Quiet(given.repeats)
            for turn in range(-1, given.repeats):
                seconds = quiet.take(partial(ask, which, asked(turn), turn, [*load]))
                if turn >= 0:  # the first one warms
                    ratios.append(seconds["old"] / seconds["new"])
            return spread(ratios)

        words = " ".join(heldout(60))

        def short(turn: int) -> list[dict[str, Any]]:
            return bodies([words[100 * turn + 200 :][:250]], 2, "always")

        crowd = bodies((heldout(8) * 2)[:15], 900, "always")

        def streams(way: str) -> dict[str, Any]:
            asked = {count: bodies((heldout(8) * 4)[:count], given.new_tokens, way) for count in AT_A_TIME}
            return {str(count): compared("seconds", lambda _, c=count: asked[c]) for count in AT_A_TIME}

        try:
            cases = {
                "streams": {way: streams(way) for way in WAYS},
                "first": {"idle": compared("first", short), "busy": compared("first", short, crowd)},
                "prefix": compared(
                    "first", lambda turn: bodies([words[:3000] + f"\n# {turn}\n"], 2, "always")
                ),
            }
        finally:
            client.close()
            others.close()
            for process, _ in servers.values():
                process.terminate()
                process.wait()
    what, same = vars(given) | {"old": commit(given.old)}, texts["old"] == texts["new"]
    write(given.name, {"what": what, "machine": machine(), "identical": same, **cases})


if __name__ == "__main__":
    main()
