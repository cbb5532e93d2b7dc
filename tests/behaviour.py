"""What users see of Foredraft, one record a line of JSON, so that two versions of it can be compared.

    python -m tests.behaviour record FILE     in a checkout of each version, on one machine
    python -m tests.behaviour compare A B     lists what differs; exit code 1 if anything does

Recorded are the tokens of every drafter under every policy that can run it, greedy and seeded, on tiny models,
the demo and, where its package is installed, SmolLM2; the replies of every route; every command's `--help-all`;
and what `foredraft info` says of every family and spelling of a config.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import foredraft
from foredraft import LLM, ConfigError, SamplingParams, demo
from foredraft.cli import main
from foredraft.cli.commands import app
from foredraft.kinds.tables import POLICIES
from tests.support import every_drafter
from tests.support.checkpoints import VARIANTS, save_variant
from tests.support.real_models import smollm2
from tests.support.serving import load_chat, serving

PROMPT = "def add(a, b):"
GREEDY, SEEDED = {"temperature": 0}, {"temperature": 0.9, "top_p": 0.95, "seed": 3}
LOADABLE = ("none", "lookup", "suffix", "layer-skip", "low-bit", "auto")  # of a model alone
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 12, "seed": 3}
TOOL = {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}}
# What a route is asked: the method, the path, and the body.
REQUESTS: dict[str, tuple[str, str, dict[str, Any] | None]] = {
    **{
        path: ("GET", path, None)
        for path in ("/health", "/ready", "/version", "/v1/models", "/v1/capabilities", "/tokenizer_info", "/openapi.json")
    },
    "chat": ("POST", "/v1/chat/completions", CHAT),
    "chat, streamed": ("POST", "/v1/chat/completions", {**CHAT, "stream": True}),
    "chat, scored": ("POST", "/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2, "n": 2}),
    "chat with tools": ("POST", "/v1/chat/completions", {**CHAT, "tools": [{"type": "function", "function": TOOL}]}),
    "completion": ("POST", "/v1/completions", {"prompt": PROMPT, "max_tokens": 12, "seed": 3, "logprobs": 1}),
    "completion, streamed": ("POST", "/v1/completions", {"prompt": PROMPT, "max_tokens": 12, "stream": True, "seed": 3}),
    "message": ("POST", "/v1/messages", {**CHAT, "temperature": 0}),
    "message, streamed": ("POST", "/v1/messages", {**CHAT, "temperature": 0, "stream": True}),
    "message counted": ("POST", "/v1/messages/count_tokens", {"messages": CHAT["messages"]}),
    "response": ("POST", "/v1/responses", {"input": PROMPT, "max_output_tokens": 12, "temperature": 0}),
    "response, streamed": ("POST", "/v1/responses", {"input": PROMPT, "max_output_tokens": 12, "stream": True, "temperature": 0}),
    "tokens": ("POST", "/tokenize", {"prompt": PROMPT}),
    "text": ("POST", "/detokenize", {"tokens": [5, 6, 7]}),
    "unknown field": ("POST", "/v1/chat/completions", {**CHAT, "temprature": 1}),
    "unknown model": ("POST", "/v1/completions", {"prompt": PROMPT, "model": "other"}),
    "no body": ("POST", "/v1/completions", None),
}  # fmt: skip
# What differs from run to run: ids, clocks and random ports.
PASSING = re.compile(
    r'(?<="id":")[\da-f]{24}(?=")|(?<=")(chatcmpl|cmpl|msg|resp|rs|fc|call|req|toolu)[-_][\w-]+(?=")|\b1[6-9]\d{8}(\.\d+)?\b|127\.0\.0\.1:\d+'
    r'|(?<="seconds":)[\d.]+|(?<="tokens_per_second":)[\d.]+'
)
FREE = re.compile(r'(?<="free_bytes": )\d+')  # memory


def recorded() -> Iterator[tuple[str, Any]]:
    """Yield what is seen, by name."""
    with TemporaryDirectory(prefix="foredraft-behaviour-") as made:
        folder = Path(made)
        yield from _helps()
        yield from _tiny(folder / "tiny")
        yield from _alone("demo", demo.target_path(), draft=demo.draft_path())
        try:
            yield from _alone("smollm2", smollm2())
        except ModuleNotFoundError:
            print("without SmolLM2: its package is not installed", file=sys.stderr)
        yield from _replies(folder / "served")
        yield from _infos(folder / "families")


def _tokens(name: str, llm: LLM, drafters: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    for drafter in drafters:
        for label, given in (("greedy", GREEDY), ("seeded", SEEDED)):
            params = SamplingParams(max_new_tokens=24, drafter=drafter, **given)
            yield f"tokens: {name}, {drafter}, {label}", llm.generate([PROMPT], params)[0].token_ids


def _tiny(folder: Path) -> Iterator[tuple[str, Any]]:
    folder.mkdir()
    every_drafter.save_models(folder)
    for loaded, drafters in every_drafter.DRAFTERS.items():
        with every_drafter.load(folder, loaded, "cpu") as llm:
            yield from _tokens(f"tiny with {loaded}", llm, drafters)


def _alone(name: str, target: Path, **options: Any) -> Iterator[tuple[str, Any]]:
    """Load a model with each of its drafters and each policy that can run it."""
    for drafter in (*LOADABLE, *(["draft-model"] if options else [])):
        given = options if drafter in ("draft-model", "auto") else {}
        if drafter == "layer-skip":
            given = {"plan": "skip:attn=1/mlp=2"}
        for policy in POLICIES:
            label = f"{name}, {policy}"
            try:
                with foredraft.load(
                    str(target), drafter=drafter, policy=policy, max_batch=2, max_length=256, **given
                ) as llm:
                    yield from _tokens(label, llm, (drafter,))
            except ConfigError as error:
                yield f"refused: {label}, {drafter}", str(error)


def _replies(folder: Path) -> Iterator[tuple[str, Any]]:
    folder.mkdir()
    with load_chat(folder) as llm, serving(llm) as served:
        for name, (method, path, body) in REQUESTS.items():
            reply = served.client.request(method, path, json=body)
            text = reply.text
            if reply.headers["content-type"] == "application/json":  # an object's fields have no order
                text = json.dumps(reply.json(), sort_keys=True, separators=(",", ":"))
            yield f"reply: {name}", [reply.status_code, PASSING.sub("*", text)]


def _helps() -> Iterator[tuple[str, Any]]:
    commands = [[each] for each in app if not each.startswith("-")]
    commands += [["train", each] for each in app["train"] if not each.startswith("-")]
    for words in commands:
        yield f"help: {' '.join(words)}", _told(*words, "--help-all")


def _infos(folder: Path) -> Iterator[tuple[str, Any]]:
    folder.mkdir()
    for name in VARIANTS:
        told = _told("info", "--model", str(save_variant(folder / name, name)), "--json")
        yield f"info: {name}", [FREE.sub("*", each.replace(str(folder), "*")) for each in told]


def _told(*words: str) -> list[str]:
    """Return what a command writes and what it says beside that."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), contextlib.suppress(SystemExit):
        main(words)
    return [out.getvalue(), err.getvalue()]


def run(verb: str, *files: str) -> int:
    """Record to a file, or compare two."""
    if verb == "record":
        torch.set_num_threads(1)
        with Path(files[0]).open("w", encoding="utf-8") as file:
            for record in recorded():
                print(json.dumps(record), file=file, flush=True)
        return 0
    one, other = (
        dict(map(json.loads, Path(file).read_text(encoding="utf-8").splitlines())) for file in files
    )
    differing = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    for name in differing:
        print(f"{name}\n  {one.get(name)!r}\n  {other.get(name)!r}")
    print(len(differing), "of", len({**one, **other}), "differ")
    return int(bool(differing))


if __name__ == "__main__":
    sys.exit(run(*sys.argv[1:]))
