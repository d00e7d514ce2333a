"""The client behind trusted proxies: its address and whether it speaks TLS.

A header that a client can send proves nothing. The forwarded headers are read only if the peer of the connection is a
trusted proxy, and the list of addresses is read from the right: each proxy appends the address that it saw, so the
first one from the right that is not itself a trusted proxy is the client, and whatever is left of it came from there.
"""

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from litestar.connection import ASGIConnection

Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network
_Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True, slots=True)
class TrustedProxies:
    """The proxies whose `X-Forwarded-For` and `X-Forwarded-Proto` are believed. Empty: nobody's."""

    networks: tuple[Network, ...] = ()

    def address_of(self, connection: ASGIConnection[Any, Any, Any, Any]) -> str | None:
        """The client's address; the connection's own if no trusted proxy is between. None for a unix socket."""
        peer = connection.client.host if connection.client else None
        if peer is None or not self._trusts(_parse(peer)):
            return peer
        return self._find_client(peer, connection.headers.getall("x-forwarded-for", []))

    def is_secure(self, connection: ASGIConnection[Any, Any, Any, Any]) -> bool:
        """Whether the client speaks TLS, to this server or to a trusted proxy."""
        if connection.scope["scheme"] == "https":
            return True
        if connection.client is None or not self._trusts(_parse(connection.client.host)):
            return False
        # The proxy next to this server sets the header or appends to it.
        return _items(connection.headers.getall("x-forwarded-proto", []))[-1:] == ["https"]

    def _find_client(self, peer: str, values: Sequence[str]) -> str:
        client = peer
        for item in reversed(_items(values)):
            address = _parse(item)
            if address is None:
                # A proxy of ours wrote something else than an address: what is left of it is not known to be true.
                return client
            client = str(address)
            if not self._trusts(address):
                return client
        return client

    def _trusts(self, address: _Address | None) -> bool:
        return address is not None and any(
            address.version == network.version and address in network for network in self.networks
        )


def _items(values: Sequence[str]) -> list[str]:
    """Several headers of one name mean the same as one with commas between."""
    return [item.strip().lower() for value in values for item in value.split(",") if item.strip()]


def _parse(text: str) -> _Address | None:
    """An address, with or without the port that some proxies add to it."""
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
