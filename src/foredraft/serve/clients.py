"""Clients: whose share of the server a request counts in, and whose beginnings and texts it may find."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import NamedTuple, Self

from foredraft.serve.settings import Settings

__all__ = ["Client", "Share"]

HOME = 64  # bits of an IPv6 address that one subscriber has; the rest is the subscriber's own choice


class Share(NamedTuple):
    """What the engine knows of a request's client: arguments of `Service.submit`."""

    client: str = ""
    salts: tuple[str, ...] = ()
    text_salts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Client:
    """The client of a request.

    Attributes:
        name: Of the API key; without keys, the address.
        key: Name of the API key; "" where none is asked for.
    """

    name: str
    key: str

    @classmethod
    def of(cls, key: str, address: str) -> Self:
        """Return the client with a key, or without keys the one at an address.

        Examples:
            >>> Client.of("", "2001:db8::1") == Client.of("", "2001:db8::2")
            True
        """
        return cls(key or _home(address), key)

    def share(self, settings: Settings, cache_salt: str | None) -> Share:
        """Return the share of a request of this client; `cache_salt` is the request's own."""
        own, salt = self.key, cache_salt or ""
        return Share(
            self.name if settings.fair_shares else "",
            ("" if settings.shared_prefixes else own, salt),
            ("" if settings.share_texts else own, salt),
        )


def _home(address: str) -> str:
    """Return an address, of IPv6 the part that names its network."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:  # a socket of Unix, or a test
        return address
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.ip_network((int(found), HOME), strict=False))
