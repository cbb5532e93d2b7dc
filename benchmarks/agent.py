"""Time a scripted agent's session over HTTP, with and without the prefix cache, lookup and suffix drafts.

The agent reads a file and proposes edits of it, turn by turn. Each turn's prompt is the whole conversation so
far: the system's line, the file, and all instructions and answers. So prompts begin alike, and answers copy
from them. Six servers take the same session, each turn in turns:

    plain       neither
    cache       the prefix cache
    lookup      drafting by lookup
    both        both
    suffix      the prefix cache, and drafting by suffix with memory for texts
    own         the same without that memory

Figures are seconds by turn, to the first token, from there to the last one, and in all; prompt tokens that
were not read again; new tokens by second, and those after the first by second of decoding. Texts are
compared. `--rounds 2` has each session again, as when an agent is asked for the same another time.

    python -m benchmarks.agent --layers 48
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from benchmarks.serving import start_server
from benchmarks.timing import spread
from benchmarks.workload import DEMO_LAYERS, machine, padded_demo, write
from foredraft import demo
from foredraft.bench.workload import load_workloads

NO_CACHE, CACHE = ("--prefix-cache", "0"), ("--prefix-cache", "512")
VARIANTS = {
    "plain": (*NO_CACHE, "--drafter", "none"),
    "cache": (*CACHE, "--drafter", "none"),
    "lookup": (*NO_CACHE, "--drafter", "lookup"),
    "both": (*CACHE, "--drafter", "lookup"),
    "suffix": (*CACHE, "--drafter", "suffix", "--recent-texts", "64"),
    "own": (*CACHE, "--drafter", "suffix"),
}
SYSTEM = "# Edits of one function, each of them whole.\n"
MARK = (
    "# The same code with "  # where a prompt of the workload `edit-file` ends its file and asks for the edit
)
ROOM = 1024  # positions of the demo model


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a session.

    Attributes:
        prompt_tokens: Tokens of the conversation so far.
        cached: Those of them that were not read again.
        first: Seconds to the first token.
        seconds: To the last one.
        tokens: New tokens.
    """

    prompt_tokens: int
    cached: int
    first: float
    seconds: float
    tokens: int

    @property
    def decoded_per_second(self) -> float:
        """Tokens after the first one by second."""
        return (self.tokens - 1) / (self.seconds - self.first)


class Agent:
    """One session with one server.

    Args:
        http: Client of the server.
        file: The file that it edits.
        name: A name in the file, which each edit changes.
    """

    def __init__(self, http: httpx.Client, file: str, name: str) -> None:
        self._http, self._file, self._name = http, file, name
        self._model = http.get("/v1/models").json()["data"][0]["id"]
        self.text = SYSTEM + file  # the conversation so far
        self.turns: list[Turn] = []

    def ask(self, new_tokens: int) -> None:
        """Ask for the next edit, and take the answer into the conversation."""
        head = next(line for line in self._file.splitlines() if self._name in line)
        changed = f"{self._name}_{len(self.turns)}"
        self.text += f"\n# {changed}:\n{head.partition(self._name)[0]}{changed}"
        body = {
            "model": self._model, "prompt": self.text, "max_tokens": new_tokens, "temperature": 0,
            "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        usage: dict[str, Any] = {}
        first, begun = 0.0, time.perf_counter()
        with self._http.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line[6:])
                usage = chunk["usage"] or usage
                for choice in chunk["choices"]:
                    first = first or time.perf_counter() - begun
                    self.text += choice["text"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        self.turns.append(
            Turn(
                usage["prompt_tokens"],
                cached,
                first,
                time.perf_counter() - begun,
                usage["completion_tokens"],
            )
        )


def files(count: int, most: int) -> list[tuple[str, str]]:
    """Return functions of the workload `edit-file` of at most so many characters, each with a name in it."""
    found = []
    for prompt in load_workloads(("edit-file",))[0].prompts:
        file, mark, edit = str(prompt).partition(MARK)
        name = edit.partition(" ")[0]
        if mark and len(file) <= most and any(name in line for line in file.splitlines()):
            found.append((file.rstrip() + "\n", name))
    return found[:count]


def measure(clients: dict[str, httpx.Client], given: argparse.Namespace) -> dict[str, Any]:
    """Run the sessions; return each variant's figures."""
    turns: dict[str, list[list[Turn]]] = {name: [] for name in clients}
    identical = True
    for file, name in files(given.sessions, given.characters) * given.rounds:
        agents = {variant: Agent(http, file, name) for variant, http in clients.items()}
        for turn in range(given.turns):
            order = list(agents)[turn % len(agents) :] + list(agents)[: turn % len(agents)]
            for variant in order:
                agents[variant].ask(given.new_tokens)
        identical &= len({agent.text for agent in agents.values()}) == 1
        for variant, agent in agents.items():
            turns[variant].append(agent.turns)
    return {"identical": identical, "variants": {name: _figures(each) for name, each in turns.items()}}


def _figures(sessions: list[list[Turn]]) -> dict[str, Any]:
    every = [turn for session in sessions for turn in session]
    return {
        "seconds": spread([turn.seconds for turn in every]),
        "first_token_seconds": spread([turn.first for turn in every]),
        "session_seconds": spread([sum(turn.seconds for turn in session) for session in sessions]),
        "tokens_per_second": spread([turn.tokens / turn.seconds for turn in every]),
        "decoded_per_second": spread([turn.decoded_per_second for turn in every]),
        "prompt_tokens": sum(turn.prompt_tokens for turn in every),
        "cached_tokens": sum(turn.cached for turn in every),
        "turns": [[asdict(turn) for turn in session] for session in sessions],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--sessions", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--characters", type=int, default=500, help="longest file")
    parser.add_argument("--policy", default="fixed")
    parser.add_argument("--variants", nargs="+", default=[*VARIANTS], choices=[*VARIANTS])
    parser.add_argument("--name", default="agent")
    given = parser.parse_args()
    with TemporaryDirectory() as folder, ExitStack() as stack:
        model = str(demo.target_path())
        if given.layers > DEMO_LAYERS:
            model = str(padded_demo(Path(folder) / "target", given.layers))
        clients = {}
        for variant in given.variants:
            process, port = start_server(
                "--model", model, "--max-length", str(ROOM), "--max-batch", "1", "--policy", given.policy,
                *VARIANTS[variant],
            )  # fmt: skip
            stack.callback(process.wait)
            stack.callback(process.terminate)
            clients[variant] = stack.enter_context(
                httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600)
            )
        cases = measure(clients, given)
    write(given.name, {"what": vars(given), "machine": machine(), "cases": cases})


if __name__ == "__main__":
    main()
