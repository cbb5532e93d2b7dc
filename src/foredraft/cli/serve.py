"""`foredraft serve`: an OpenAI-compatible server of one model."""

from __future__ import annotations

import json
import os
import shlex
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group, Parameter

from foredraft.cli.options import NONE, DraftOptions, Flag, ModelOptions, common, load_options
from foredraft.cli.progress import ProgressBars
from foredraft.cli.sections import Repeatable
from foredraft.errors import ConfigError
from foredraft.serve.settings import Settings

if TYPE_CHECKING:
    from foredraft.serve.state import Model

__all__ = ["ServerOptions", "serve"]

SERVER = Group("Server", sort_key=0)
DEFAULTS = Settings()
WORKERS = "AnyIO worker"  # names of threads that work beside the event loop begin so
KEY = "API_KEY"  # stands for a key in the calls to paste


@Parameter(name="*", group=SERVER)
@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Options of the server."""

    host: Annotated[str, common(SERVER)] = DEFAULTS.host
    """Address to listen on. 0.0.0.0 serves other machines: give --api-key-file, too."""
    port: Annotated[int, common(SERVER)] = DEFAULTS.port
    """Port to listen on; 0 takes a free one."""
    api_key_file: Annotated[Path | None, common(SERVER)] = DEFAULTS.api_key_file
    """File with one API key a line; # begins a comment. Keys in the environment variable FOREDRAFT_API_KEY,
    separated by commas, count, too. Default: no key is asked for."""
    fair_shares: bool = DEFAULTS.fair_shares
    """Share rows and the reading of prompts among API keys or, without keys, among addresses."""
    max_queued: int = DEFAULTS.max_queued
    """Samples that may wait for a row of the batch; further requests get status 503, unless their client has
    less than its share."""
    max_queued_tokens: int = DEFAULTS.max_queued_tokens
    """Prompt tokens of all requests that run or wait, shared in the same way."""
    prefix_cache: int = DEFAULTS.prefix_cache
    """MiB of memory for beginnings of prompts that later requests need not read; 0 turns it off."""
    shared_prefixes: Flag = DEFAULTS.shared_prefixes
    """Let all API keys find each other's beginnings there: how soon a prompt is read then tells a client
    whether another one has sent it."""
    max_per_key: int = DEFAULTS.max_per_key
    """Samples of one API key, or without keys of one address, that run or wait; further requests get status
    429. 0 is no limit."""
    max_body: int = DEFAULTS.max_body
    """Largest body of a request, in bytes; 0 follows from the length of the model's context."""
    max_patterns: int = DEFAULTS.max_patterns
    """Bytes of a request's stop strings, banned phrases and grammar together."""
    max_connections: int = DEFAULTS.max_connections
    """Connections that are open at a time, as far as the limit of open files allows them."""
    max_connections_per_address: int = DEFAULTS.max_connections_per_address
    """Connections of one address, such as a proxy's; 0 is no limit."""
    head_seconds: float = DEFAULTS.head_seconds
    """Time that the head of a request has to come."""
    body_seconds: float = DEFAULTS.body_seconds
    """Time that the body of a request has to come."""
    drain_seconds: float = DEFAULTS.drain_seconds
    """Time that requests have to finish after SIGTERM; a second signal ends the server at once."""
    max_unread: int = DEFAULTS.max_unread
    """A sample of a stream pauses where its reader has not taken so many of its tokens, and goes on once the
    reader takes them. Meanwhile it gives its row to a request that waits."""
    slow_reader_seconds: float = DEFAULTS.slow_reader_seconds
    """A stream whose reader takes nothing for this long ends."""
    heartbeat_seconds: float = DEFAULTS.heartbeat_seconds
    """A stream that is silent for this long sends a comment."""
    vllm_metrics: Flag = DEFAULTS.vllm_metrics
    """Give metrics vLLM's names where it has them."""
    log_format: Literal["text", "json"] = DEFAULTS.log_format
    """Form of the log's lines, one for each request and each warning; json is one object a line."""
    access_log: bool = DEFAULTS.access_log
    """Write a line for each request."""
    otel: Flag = DEFAULTS.otel
    """Send a trace of each request to an OpenTelemetry collector: OTEL_EXPORTER_OTLP_ENDPOINT and the other
    standard variables of the environment say where."""
    log_prompts: Flag = DEFAULTS.log_prompts
    """Write prompts, as token ids, to the log."""
    cors: Repeatable = DEFAULTS.cors
    """Origin that browsers may call from; repeatable."""


def serve(
    *,
    server: ServerOptions = ServerOptions(),
    model: ModelOptions = NONE,
    drafting: DraftOptions = NONE,
) -> int:
    """Serve one model by the OpenAI API: chat, completions, streams over SSE and WebSocket, metrics.

    Ctrl-C or SIGTERM lets running requests finish, and a second one ends the server at once.
    """
    whole = (
        "max_queued", "max_queued_tokens", "prefix_cache", "max_per_key", "max_body", "max_patterns",
        "max_connections_per_address", "port",
    )  # fmt: skip
    for name in whole:
        if getattr(server, name) < 0:
            raise ConfigError(option=name, value=getattr(server, name), remedy="give 0 or more")
    for name in ("max_unread", "max_connections"):
        if getattr(server, name) < 1:
            raise ConfigError(option=name, value=getattr(server, name), remedy="give 1 or more")
    for name in ("head_seconds", "body_seconds", "drain_seconds", "slow_reader_seconds", "heartbeat_seconds"):
        if not getattr(server, name) > 0:
            raise ConfigError(option=name, value=getattr(server, name), remedy="give seconds, above 0")
    try:
        from foredraft.serve.server import serve as run
    except ImportError as error:
        raise ConfigError(
            f"serving needs the package {error.name}", remedy="install it: pip install 'foredraft[serve]'"
        ) from error
    import foredraft

    settings = Settings(**asdict(server))
    bars = ProgressBars()

    def load() -> foredraft.LLM:
        try:
            return foredraft.load(model.get("model"), **load_options(model, drafting), progress=bars.show)
        finally:
            bars.clear()

    finished = run(load, settings, _greet)
    if not finished or any(each.name.startswith(WORKERS) for each in threading.enumerate()):
        # No thread can be stopped while it loads a model, or works for a client that has left, and
        # Python's own exit waits for it, or aborts under it.
        sys.stderr.flush()
        os._exit(0)
    return 0


def _greet(address: str, model: Model, keys: bool) -> None:
    """Say where the server is, with calls to paste; keys: requests need an API key."""
    name, chat = model.names[0], model.chats
    path = "chat/completions" if chat else "completions"
    prompt: dict[str, Any] = {"prompt": "def add(a, b):"}
    if chat:
        prompt = {"messages": [{"role": "user", "content": "Hello"}]}
    fields = {"model": name, **prompt, "max_tokens": 64}
    data = shlex.quote(json.dumps({**fields, "stream": True}))
    header = f" -H 'Authorization: Bearer {KEY}'" if keys else ""
    arguments = ", ".join(f"{field}={json.dumps(value)}" for field, value in fields.items())
    says = "; put your API key in place of API_KEY" if keys else ""
    print(
        f"""foredraft serves {name} at {address} (Ctrl-C ends it){says}
Open {address} in a browser to watch it draft.

curl -N {address}/v1/{path} -H 'Content-Type: application/json'{header} -d {data}

from openai import OpenAI
client = OpenAI(base_url="{address}/v1", api_key="{KEY if keys else 'none'}")
print(client.{path.replace('/', '.')}.create({arguments}))
""",
        file=sys.stderr, flush=True,
    )  # fmt: skip
