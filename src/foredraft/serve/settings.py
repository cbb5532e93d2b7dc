"""Options of a server. Every value is checked when the object is made."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from foredraft.arguments import check_fields, option
from foredraft.arguments.values import Choice, File, Flag, Name, Number, Strings, Unfit, Whole
from foredraft.errors import ConfigError
from foredraft.kinds.load_options import PREFIX_MIB

COUNT = Whole("0 or more", most=math.inf)
SEVERAL = Whole("1 or more", least=1, most=math.inf)
SECONDS = Number("seconds, above 0", most=math.inf, above=True)
FORMS = ("text", "json")


class Origins(Strings):
    """Origins of pages, as browsers send them (RFC 6454, section 6.2), or "*" for all."""

    def read(self, given: Any) -> tuple[str, ...]:
        origins = super().read(given)
        for origin in origins:
            parts = urlsplit(origin)
            if origin not in ("*", "null") and origin != f"{parts.scheme}://{parts.netloc}":
                host = re.split(r"[/?#]", (origin.partition("://")[2] or origin).lstrip("/"), maxsplit=1)[0]
                example = f"http://{host or 'localhost:3000'}"
                raise Unfit(f'give a scheme, a host and a port, as in "{example}"', value=origin)
        return origins


@dataclass(frozen=True, slots=True)
class Settings:
    """Options of a server.

    Args:
        host: Address to listen on. 0.0.0.0 serves other machines: give `api_key_file`, too.
        port: Port to listen on; 0 takes a free one.
        api_key_file: File with one API key a line; # begins a comment. Keys in the environment variable
            FOREDRAFT_API_KEY, separated by commas, count, too. Default: no key is asked for.
        fair_shares: Share rows and the reading of prompts among API keys or, without keys, among addresses.
            Otherwise all requests are those of one client.
        max_queued: Samples that may wait for a row of the batch; further requests get status 503, unless
            their client has less than its share; such clients are served up to twice as many samples in all.
        max_queued_tokens: Prompt tokens of all requests that run or wait, shared in the same way.
        prefix_cache: MiB of memory for beginnings of prompts that later requests need not read; 0 turns it
            off.
        shared_prefixes: Let all API keys find each other's beginnings there: how soon a prompt is read then
            tells a client whether another one has sent it.
        share_texts: Let drafter "suffix" copy from texts of all API keys: how soon a text comes then tells a
            client whether another one has got the same. Otherwise each key's texts are its own.
        max_per_key: Samples of one API key, or without keys of one address, that run or wait; further
            requests get status 429. 0 is no limit.
        max_body: Largest body of a request, in bytes; 0 follows from the length of the model's context.
        max_bodies: Bytes of all bodies that are being read or are not answered yet, shared among addresses as
            `max_queued` is among clients; 0 is the largest body for each row and 64 times more.
        max_patterns: Bytes of a request's stop strings, banned phrases and grammar together.
        max_connections: Connections that are open at a time, as far as the limit of open files allows them.
        max_connections_per_address: Connections of one address, such as a proxy's; 0 is no limit.
        head_seconds: Time that the head of a request has to come.
        body_seconds: Time that the body of a request has to come.
        drain_seconds: Time that requests have to finish after SIGTERM; a second signal ends the server at
            once.
        max_unread: A sample of a stream pauses where its reader has not taken so many of its tokens, and goes
            on once the reader takes them. Meanwhile it gives its row to a request that waits.
        slow_reader_seconds: A stream whose reader takes nothing for this long ends.
        heartbeat_seconds: A stream that is silent for this long sends a comment.
        vllm_metrics: Give metrics vLLM's names where it has them.
        log_format: Form of the log's lines, "text" or "json", one for each request and each warning; "json"
            is one object a line.
        access_log: Write a line for each request.
        otel: Send a trace of each request to an OpenTelemetry collector: OTEL_EXPORTER_OTLP_ENDPOINT and the
            other standard variables of the environment say where.
        log_prompts: Write prompts, as token ids, to the log.
        cors: Origins that browsers may call from, such as http://localhost:3000; * is all.
    """

    host: str = field(default="127.0.0.1", metadata=option(Name("an address")))
    port: int = field(default=8000, metadata=option(COUNT))
    api_key_file: Path | None = field(default=None, metadata=option(File("a file")))
    fair_shares: bool = field(default=True, metadata=option(Flag()))
    max_queued: int = field(default=256, metadata=option(COUNT))
    max_queued_tokens: int = field(default=1_000_000, metadata=option(COUNT))
    prefix_cache: int = field(default=PREFIX_MIB, metadata=option(COUNT))
    shared_prefixes: bool = field(default=False, metadata=option(Flag()))
    share_texts: bool = field(default=False, metadata=option(Flag()))
    max_per_key: int = field(default=0, metadata=option(COUNT))
    max_body: int = field(default=0, metadata=option(COUNT))
    max_bodies: int = field(default=0, metadata=option(COUNT))
    max_patterns: int = field(default=256 << 10, metadata=option(COUNT))
    max_connections: int = field(default=4096, metadata=option(SEVERAL))
    max_connections_per_address: int = field(default=1024, metadata=option(COUNT))
    head_seconds: float = field(default=10.0, metadata=option(SECONDS))
    body_seconds: float = field(default=60.0, metadata=option(SECONDS))
    drain_seconds: float = field(default=30.0, metadata=option(SECONDS))
    max_unread: int = field(default=256, metadata=option(SEVERAL))
    slow_reader_seconds: float = field(default=30.0, metadata=option(SECONDS))
    heartbeat_seconds: float = field(default=15.0, metadata=option(SECONDS))
    vllm_metrics: bool = field(default=False, metadata=option(Flag()))
    log_format: Literal["text", "json"] = field(default="text", metadata=option(Choice(names=FORMS)))
    access_log: bool = field(default=True, metadata=option(Flag()))
    otel: bool = field(default=False, metadata=option(Flag()))
    log_prompts: bool = field(default=False, metadata=option(Flag()))
    cors: tuple[str, ...] = field(default=(), metadata=option(Origins()))

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
