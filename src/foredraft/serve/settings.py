"""Options of a server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["Settings"]


@dataclass(frozen=True, slots=True)
class Settings:
    """Options of a server.

    Attributes:
        host: The address to listen on.
        port: The port to listen on; 0 takes a free one.
        api_key_file: A file with one key a line; None asks for no key, unless the environment has one.
        fair_shares: Share rows and the reading of prompts among clients, which are API keys or, without keys,
            addresses. Otherwise all requests are those of one client.
        max_queued: Samples that may wait for a row; further requests get status 503. A client that has less
            than its share is still served, up to twice as many samples in all.
        max_queued_tokens: Prompt tokens of all requests that run or wait; shared as `max_queued` is.
        prefix_cache: MiB for beginnings of prompts that later requests need not read; 0 turns it off.
        shared_prefixes: Requests of all API keys find each other's beginnings there.
        max_per_key: Samples of one key, or without keys of one address, that run or wait; further requests
            get status 429. 0 is no limit.
        max_body: Largest body of a request, in bytes; 0 follows from the length of the model's context.
        max_bodies: Bytes of all bodies that are being read or are not answered yet, shared among addresses as
            `max_queued` is among clients; 0 is the largest body for each row and 64 times more.
        max_patterns: Bytes of a request's stop strings, banned phrases and grammar together.
        max_connections: Open at a time; further ones are refused. The limit of open files may allow fewer.
        max_connections_per_address: The same of one address; 0 is no limit.
        head_seconds: The time that the head of a request has to come.
        body_seconds: The time that its body has.
        drain_seconds: After SIGTERM, the time that requests have to finish.
        max_unread: A sample of a stream pauses where its reader has not taken so many of its tokens.
        slow_reader_seconds: A stream whose reader takes nothing for this long ends.
        heartbeat_seconds: A stream that is silent for this long sends a comment.
        vllm_metrics: Name metrics as vLLM does, where it has them.
        log_format: The form of lines in the log.
        access_log: Write a line for each request.
        log_prompts: Write prompts to the log.
        otel: Send a trace of each request to an OpenTelemetry collector, which the environment names.
        cors: Origins that browsers may call from; none by default.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key_file: Path | None = None
    fair_shares: bool = True
    max_queued: int = 256
    max_queued_tokens: int = 1_000_000
    prefix_cache: int = 512
    shared_prefixes: bool = False
    max_per_key: int = 0
    max_body: int = 0
    max_bodies: int = 0
    max_patterns: int = 256 << 10
    max_connections: int = 4096
    max_connections_per_address: int = 1024
    head_seconds: float = 10.0
    body_seconds: float = 60.0
    drain_seconds: float = 30.0
    max_unread: int = 256
    slow_reader_seconds: float = 30.0
    heartbeat_seconds: float = 15.0
    vllm_metrics: bool = False
    log_format: Literal["text", "json"] = "text"
    access_log: bool = True
    log_prompts: bool = False
    otel: bool = False
    cors: tuple[str, ...] = ()
