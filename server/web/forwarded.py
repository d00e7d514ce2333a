"""The address of a client behind trusted proxies, and whether it uses TLS.

A client can send any header, so the forwarded headers are used only if the peer of the connection is a trusted proxy.
The list of addresses is read from the right: each proxy appends the address of its peer, so the first address from the
right that is not a trusted proxy is the client, and addresses to the left of it may be forged.
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
    """The proxies whose `X-Forwarded-For` and `X-Forwarded-Proto` are used; none by default."""

    networks: tuple[Network, ...] = ()

    def address_of(self, connection: ASGIConnection[Any, Any, Any, Any]) -> str | None:
        """Return the client's address: the peer's unless it is a trusted proxy. None for a unix socket."""
        peer = connection.client.host if connection.client else None
        if peer is None or not self._trusts(_parse(peer)):
            return peer
        return self._find_client(peer, connection.headers.getall("x-forwarded-for", []))

    def is_secure(self, connection: ASGIConnection[Any, Any, Any, Any]) -> bool:
        """Return whether the client uses TLS, to this server or to a trusted proxy."""
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
                # A trusted proxy wrote something other than an address: entries to the left cannot be trusted.
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
    """Split header values at commas: several headers of one name are equivalent to one."""
    return [item.strip().lower() for value in values for item in value.split(",") if item.strip()]


def _parse(text: str) -> _Address | None:
    """Parse an address with or without a port."""
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
