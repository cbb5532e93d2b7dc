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
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from foredraft.errors import ConfigError
from foredraft.serve.logs import current
from foredraft.serve.metrics import Metrics
from foredraft.serve.problems import Problem, busy
from foredraft.serve.settings import Settings

if TYPE_CHECKING:
    from foredraft.serve.bodies import Bodies

VARIABLE = "FOREDRAFT_API_KEY"  # of the environment; several keys are separated by commas
COMMENT = re.compile(r"(^|\s+)#(\s.*)?$")
UNNAMED = re.compile(r"key [0-9]+(?=\s+\S+$)")  # the name of a key that was given none, before a key


class Keys:
    """The keys that a server takes; without any it asks for none."""

    def __init__(self, lines: list[str]) -> None:
        self._digests: list[bytes] = []
        self._names: list[str] = []
        for place, line in enumerate(lines):
            *name, key = line.rsplit(maxsplit=1)
            # clients may write a key that is not ASCII in two ways
            for encoding in ("utf-8", "latin-1") if max(key) < "\u0100" else ("utf-8",):
                self._digests.append(hashlib.sha256(key.encode(encoding)).digest())
                self._names.append(name[0].strip() if name else f"key {place}")

    def __bool__(self) -> bool:
        return bool(self._digests)

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
        if not self._digests:
            return ""
        scheme, _, bearer = (authorization or "").partition(" ")
        matches = [False] * len(self._digests)
        for given in (bearer if scheme.lower() == "bearer" else None, key):
            if given is not None and not any(matches):
                # ASGI hands the bytes of a header over as Latin-1.
                digest = hashlib.sha256(given.strip(" \t").encode("latin-1", "replace")).digest()
                matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if not any(matches):
            raise Problem(
                401, "the API key is missing or wrong; send Authorization: Bearer KEY",
                code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"},
            )  # fmt: skip
        current().key = name = self._names[matches.index(True)]
        return name


def _read(file: Path) -> list[str]:
    def refused(problem: str, remedy: str) -> ConfigError:
        return ConfigError(problem, option="api_key_file", value=str(file), remedy=remedy)

    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()  # editors of Windows begin with a mark
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


class Tenant(NamedTuple):
    """What the engine knows of a request's client: arguments of `Service.submit`."""

    client: str = ""
    salts: tuple[str, ...] = ()
    text_salts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Client:
    """The client of a request."""

    name: str  # of the API key; without keys, the address
    key: str  # name of the API key; "" where none is asked for

    @classmethod
    def of(cls, key: str, address: str) -> Self:
        """Return the client with a key, or without keys the one at an address.

        Examples:
            >>> Client.of("", "2001:db8::1") == Client.of("", "2001:db8::2")
            True
        """
        home = address
        with suppress(ValueError):  # a socket of Unix, or a test
            found = ipaddress.ip_address(address)
            if isinstance(found, ipaddress.IPv6Address):
                network = ipaddress.ip_network((int(found), HOME), strict=False)
                found, home = found.ipv4_mapped or found, str(network)
            if isinstance(found, ipaddress.IPv4Address):
                home = str(found)
        return cls(key or home, key)

    def tenant(self, settings: Settings, cache_salt: str | None) -> Tenant:
        """Return what the engine knows of a client; `cache_salt` is the request's own."""
        own, salt = self.key, cache_salt or ""
        return Tenant(
            self.name if settings.fair_shares else "",
            ("" if settings.shared_prefixes else own, salt),
            ("" if settings.share_texts else own, salt),
        )


OVERFLOW = 2  # times a bound: what runs and waits in all, where clients with less than their share come last


class Shared:
    """An amount that is bounded in all and shared among clients."""

    def __init__(self) -> None:
        self._amounts: Counter[str] = Counter()  # by client; none is 0

    @property
    def total(self) -> int:
        return self._amounts.total()

    def of(self, client: str) -> int:
        return self._amounts[client]

    def add(self, client: str, more: int) -> None:
        """Add to the amount of a client; a negative number takes away."""
        self._amounts[client] += more
        if not self._amounts[client]:
            del self._amounts[client]

    def fits(self, client: str, more: int, most: int) -> bool:
        """Return whether a client may have so many more of what is bounded by `most`."""
        total = self.total + more
        if total <= most:
            return True
        share = most // len({*self._amounts, client})
        return self.of(client) + more <= share and total <= OVERFLOW * most


class Permit:
    """The permit of one request to run or wait."""

    def __init__(self, limits: Limits, samples: int, client: str) -> None:
        self._limits, self.samples, self.client, self.tokens = limits, samples, client, 0
        self._taken = True

    def free(self) -> None:
        if self._taken:
            self._taken = False
            self._limits.give_back(self)


class Limits:
    """Counts what runs and waits. A permit is taken before a prompt is read, so that a burst cannot pass."""

    def __init__(self, settings: Settings, rows: int, metrics: Metrics) -> None:
        self._settings, self._most, self._metrics = settings, rows + settings.max_queued, metrics
        self._samples, self._tokens = Shared(), Shared()

    @property
    def samples(self) -> int:
        return self._samples.total

    @property
    def tokens(self) -> int:
        return self._tokens.total

    def take(self, samples: int, client: str) -> Permit:
        most, own = self._settings.max_per_key, self._samples.of(client)
        if samples <= self._most and not self._samples.fits(client, samples, self._most):
            self._metrics.refused("queue full")
            raise busy(f"{self.samples} samples run or wait, of {self._most} at most (max_queued)")
        if samples > self._most or (most and samples > most):
            allowed = min(self._most, most or self._most)
            raise Problem(400, f"{samples} samples in one request, of {allowed} at most")
        if most and own + samples > most:
            self._metrics.refused("key limit")
            says = f"this client has {own} samples that run or wait, of {most} at most (max_per_key)"
            raise busy(says, 429)
        self._samples.add(client, samples)
        return Permit(self, samples, client)

    def take_tokens(self, permit: Permit, tokens: int) -> None:
        most = self._settings.max_queued_tokens
        if tokens > most:
            message = f"{tokens} prompt tokens in one request, of {most} at most (max_queued_tokens)"
            raise Problem(400, message, param="prompt")
        if not self._tokens.fits(permit.client, tokens, most):
            self._metrics.refused("prompt tokens")
            raise busy(f"{self.tokens} prompt tokens run or wait, of {most} at most (max_queued_tokens)")
        self._tokens.add(permit.client, tokens)
        permit.tokens = tokens

    def give_back(self, permit: Permit) -> None:
        self._samples.add(permit.client, -permit.samples)
        self._tokens.add(permit.client, -permit.tokens)


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
        self._addresses: dict[int, str] = {}
        self._by_address: Counter[str] = Counter()

    def enter(self, transport: Any) -> Problem | None:
        """Count a connection; return why it is refused, or None."""
        address = str((transport.get_extra_info("peername") or ("",))[0])
        self._addresses[id(transport)] = address
        self._by_address[address] += 1
        most = self.most_of_address
        if len(self._addresses) > self.most:
            return busy(f"{self.most} connections are open, as many as there may be (--max-connections)")
        if most and self._by_address[address] > most:
            message = f"{most} connections of this address are open (--max-connections-per-address)"
            return busy(message, 429)
        return None

    def leave(self, transport: Any) -> None:
        address = self._addresses.pop(id(transport), None)
        if address is not None:
            self._by_address[address] -= 1
            if not self._by_address[address]:
                del self._by_address[address]


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
