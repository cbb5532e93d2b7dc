"""Limits of the load: keys tell clients apart, and how much may run, wait and be open, in all and by client.

A line of the file of keys is a key, or a name and a key. Keys of one name are one client. A file without a
key is an error: otherwise a mistake would open the server. Where the server is full, a client that has less
than an equal part of the bound may still come in, so that a client that fills the queue keeps no other one
out.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from foredraft.errors import ConfigError
from foredraft.files import TEXT
from foredraft.llm.requests import Submission
from foredraft.serve.logs import RequestRecord, current
from foredraft.serve.metrics import Metrics
from foredraft.serve.problems import Problem, busy, invalid
from foredraft.serve.settings import Settings

VARIABLE = "FOREDRAFT_API_KEY"  # of the environment; several keys are separated by commas
COMMENT = re.compile(r"(^|\s+)#(\s.*)?$")
UNNAMED = re.compile(r"key [0-9]+(?=\s+\S+$)")  # the name of a key that was given none, before a key


class Keys:
    def __init__(self, lines: list[str]) -> None:
        self._known: list[tuple[bytes, str]] = []  # digests and names
        for place, line in enumerate(lines):
            *name, key = line.rsplit(maxsplit=1)
            # clients may write a key that is not ASCII in two ways
            for encoding in ("utf-8", "latin-1") if max(key) < "\u0100" else ("utf-8",):
                digest = hashlib.sha256(key.encode(encoding)).digest()
                self._known.append((digest, name[0].strip() if name else f"key {place}"))

    def __bool__(self) -> bool:
        return bool(self._known)

    @classmethod
    def of(cls, settings: Settings) -> Keys:
        variable, remedy = os.environ.get(VARIABLE), "write keys into it, or unset it to ask for none"
        keys = [key.strip() for key in (variable or "").split(",") if key.strip()]
        if variable is not None and not keys:
            raise ConfigError(f"the environment variable {VARIABLE} is set, but has no key", remedy=remedy)
        if settings.api_key_file is not None:
            keys += _read(settings.api_key_file)
        for key in keys:
            if found := UNNAMED.match(key):
                says = f"an API key is named {found[0].strip()!r}, as keys without a name are called"
                raise ConfigError(says, remedy="give another name")
        return cls(keys)

    def check(self, authorization: str | None, key: str | None = None) -> str:
        """Return the name of the key in a header, or else of `key`; "" where the server asks for none."""
        if not self:
            return ""
        scheme, _, bearer = (authorization or "").partition(" ")
        names: list[str] = []
        for given in (bearer if scheme.lower() == "bearer" else None, key):
            if given is not None and not names:
                # ASGI hands the bytes of a header over as Latin-1.
                digest = hashlib.sha256(given.strip(" \t").encode("latin-1", "replace")).digest()
                names = [name for known, name in self._known if hmac.compare_digest(digest, known)]
        if not names:
            raise Problem(
                401, "the API key is missing or wrong; send Authorization: Bearer KEY",
                code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"},
            )  # fmt: skip
        current().key = names[0]
        return names[0]


def _read(file: Path) -> list[str]:
    def refused(problem: str, remedy: str) -> ConfigError:
        return ConfigError(problem, option="api_key_file", value=str(file), remedy=remedy)

    try:
        lines = file.read_text(encoding=TEXT).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise refused("which cannot be read", "give a text file in UTF-8") from error
    found = []
    for number, line in enumerate(lines, 1):
        if line.lstrip().startswith("#") or not (rest := COMMENT.sub("", line).strip()):
            continue
        if re.search(r"\s#", rest):
            remedy = "write a comment as ' # ...', and give keys that do not begin with #"
            raise refused(f"which has a # before a letter in line {number}", remedy)
        found.append(rest)
    if not found:
        raise refused("which has no key", "write one key a line, or leave the option out to ask for none")
    return found


HOME = 64  # bits of an IPv6 address that one subscriber has; the rest is the subscriber's own choice


def client_of(key: str, address: str) -> str:
    """Return the client with a key, or without keys the one at an address.

    Examples:
        >>> client_of("", "2001:db8::1") == client_of("", "2001:db8::2")
        True
    """
    if key:
        return key
    try:
        found = ipaddress.ip_address(address)
    except ValueError:  # a socket of Unix, or a test
        return address
    if isinstance(found, ipaddress.IPv6Address):
        return str(found.ipv4_mapped or ipaddress.ip_network((int(found), HOME), strict=False))
    return str(found)


def owned(asked: Submission, record: RequestRecord, settings: Settings, cache_salt: str | None) -> Submission:
    """Return a submission as that of its client; `cache_salt` is the request's own."""
    own, salt = record.key, cache_salt or ""
    return replace(
        asked, client=client_of(own, record.address) if settings.fair_shares else "",
        salts=("" if settings.shared_prefixes else own, salt),
        text_salts=("" if settings.share_texts else own, salt),
    )  # fmt: skip


OVERFLOW = 2  # times a bound: what runs and waits in all, where clients with less than their share come last


class Shared:
    """An amount that is bounded in all and shared among clients."""

    def __init__(self, most: Callable[[], int], says: str, note: Callable[[], None] = lambda: None) -> None:
        self.most, self._says, self._note = most, says, note  # what a refusal says of the amount, and notes
        self._amounts: Counter[str] = Counter()  # by client; none is 0

    @property
    def total(self) -> int:
        return self._amounts.total()

    def of(self, client: str) -> int:
        return self._amounts[client]

    def add(self, client: str, more: int) -> None:
        self._amounts[client] += more
        if not self._amounts[client]:
            del self._amounts[client]

    def check(self, client: str, more: int) -> None:
        """Raise Problem unless a client may have so much more."""
        most, total = self.most(), self.total + more
        share = most // len({*self._amounts, client})
        if total > most and (self.of(client) + more > share or total > OVERFLOW * most):
            self._note()
            raise busy(f"{self.total} {self._says.format(most)}")


class Held:
    """What one request has of a shared amount, until it lets go of it."""

    def __init__(self, shared: Shared, client: str) -> None:
        self._shared, self._client, self._own = shared, client, 0

    def grow(self, more: int) -> None:
        """Take more; raise Problem where that is too much beside what others have."""
        if self._shared.total > self._own:
            self._shared.check(self._client, more)
        self._own += more
        self._shared.add(self._client, more)

    def shrink(self, left: int = 0) -> None:
        """Let go of all but `left`."""
        if self._own > left:
            self._shared.add(self._client, left - self._own)
            self._own = left


class Bodies(Shared):
    """What the bodies of all requests and the messages of all WebSockets take together, in bytes."""

    def __init__(self, most: Callable[[], int]) -> None:
        super().__init__(most, "bytes of bodies are held, of {} at most (--max-bodies)")

    def of_address(self, address: str) -> Held:
        """Return what holds one body from when it comes until its request is answered."""
        return Held(self, client_of("", address))


class Permit(NamedTuple):
    samples: Held
    tokens: Held  # of its prompts

    def free(self) -> None:
        self.samples.shrink()
        self.tokens.shrink()


class Limits:
    """Counts what runs and waits. A permit is taken before a prompt is read, so that a burst cannot pass."""

    def __init__(self, settings: Settings, rows: int, metrics: Metrics) -> None:
        def shared(most: int, says: str, reason: str) -> Shared:
            return Shared(lambda: most, says, lambda: metrics.refused(reason))

        self._most_of_client, self._metrics = settings.max_per_key, metrics
        says = "samples run or wait, of {} at most (max_queued)"
        self.samples = shared(rows + settings.max_queued, says, "queue full")
        says = "prompt tokens run or wait, of {} at most (max_queued_tokens)"
        self.tokens = shared(settings.max_queued_tokens, says, "prompt tokens")

    def take(self, samples: int, client: str) -> Permit:
        all_, most = self.samples.most(), self._most_of_client
        if samples <= all_:
            self.samples.check(client, samples)
        if samples > all_ or (most and samples > most):
            allowed = min(all_, most or all_)
            raise Problem(400, f"{samples} samples in one request, of {allowed} at most")
        if most and (own := self.samples.of(client)) + samples > most:
            self._metrics.refused("key limit")
            says = f"this client has {own} samples that run or wait, of {most} at most (max_per_key)"
            raise busy(says, 429)
        permit = Permit(Held(self.samples, client), Held(self.tokens, client))
        permit.samples.grow(samples)
        return permit

    def take_tokens(self, permit: Permit, tokens: int) -> None:
        if tokens > (most := self.tokens.most()):
            message = f"{tokens} prompt tokens in one request, of {most} at most (max_queued_tokens)"
            raise invalid("prompt", message)
        permit.tokens.grow(tokens)


RESERVED_FILES = 64  # descriptors that are no connections: files of models, pipes, the event loop


class Connections:
    """All connections of a server, by address; the process may open more files from now on, if it may.

    Where it may not, one address gets the same part of all connections as the options give it.
    """

    def __init__(self, settings: Settings, largest_frame: Callable[[], int], bodies: Bodies) -> None:
        self.settings, wanted = settings, settings.max_connections
        self.largest_frame = largest_frame  # returns the most bytes of a message of a WebSocket
        self.bodies = bodies  # what messages of WebSockets count in, beside bodies
        self.most = max(1, _open_files(wanted + RESERVED_FILES) - RESERVED_FILES)  # in all
        # of one address, rounded up; 0 is no limit
        self.most_of_address = -(-settings.max_connections_per_address * self.most // wanted)
        self._addresses: dict[int, str] = {}  # by transport, which may no longer know it at the end
        self._open = Shared(lambda: self.most, "")

    def enter(self, transport: Any) -> Problem | None:
        """Count a connection; return why it is refused, or None."""
        address = str((transport.get_extra_info("peername") or ("",))[0])
        self._addresses[id(transport)] = address
        self._open.add(address, 1)
        most = self.most_of_address
        if self._open.total > self.most:
            return busy(f"{self.most} connections are open, as many as there may be (--max-connections)")
        if most and self._open.of(address) > most:
            message = f"{most} connections of this address are open (--max-connections-per-address)"
            return busy(message, 429)
        return None

    def leave(self, transport: Any) -> None:
        if (address := self._addresses.pop(id(transport), None)) is not None:
            self._open.add(address, -1)


def _open_files(wanted: int) -> int:
    """Return how many files the process may open, of those wanted; raise the limit where it may."""
    try:
        import resource
    except ImportError:
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return wanted if soft == resource.RLIM_INFINITY else min(wanted, soft)
