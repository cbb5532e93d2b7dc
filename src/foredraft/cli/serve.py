"""`foredraft serve`: an OpenAI-compatible server of one model."""

from __future__ import annotations

import json
import os
import shlex
import sys
import threading
from typing import TYPE_CHECKING, Any, TypeAlias

from cyclopts import Group

from foredraft.arguments import declared
from foredraft.cli.options import DraftOptions, ModelOptions, PrefixOptions, TextsOptions, load_options
from foredraft.cli.render import ProgressBars
from foredraft.cli.sections import NONE, Given, derived, section
from foredraft.errors import ConfigError
from foredraft.serve.settings import Settings

if TYPE_CHECKING:
    from foredraft.serve.generations import Model

WORKERS = "AnyIO worker"  # names of threads that work beside the event loop begin so
KEY = "API_KEY"  # stands for a key in the calls to paste

if TYPE_CHECKING:
    ServerOptions: TypeAlias = Given
else:
    OWN = derived(*declared(Settings), of=declared(Settings))
    ServerOptions = section(
        "ServerOptions", Group("Server", sort_key=0), OWN, ["host", "port", "api_key_file"]
    )


def serve(
    *,
    server: ServerOptions = NONE,
    model: ModelOptions = NONE,
    drafting: DraftOptions = NONE,
    texts: TextsOptions = NONE,
    prefixes: PrefixOptions = NONE,
) -> int:
    """Serve one model by the OpenAI API: chat, completions, streams over SSE and WebSocket, metrics.

    Ctrl-C or SIGTERM lets running requests finish, and a second one ends the server at once.
    """
    settings = Settings(**server)
    try:
        from foredraft.serve.server import serve as run
    except ImportError as error:
        raise ConfigError(
            f"serving needs the package {error.name}", remedy="install it: pip install 'foredraft[serve]'"
        ) from error
    import foredraft
    from foredraft.loading import load_for

    loaded: list[foredraft.LLM] = []

    def load() -> foredraft.LLM:
        options, kept = load_options(model, drafting, texts, prefixes), settings.prefix_cache << 20
        with ProgressBars() as bars:
            loaded.append(load_for(None, model.get("model"), reserved=kept, **options, progress=bars.show))
        return loaded[0]

    finished = run(load, settings, _greet)
    if finished and "texts_file" in texts:
        loaded[0].save_texts()
    if finished and prefixes:
        loaded[0].close()  # once all is written
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
