"""The address of the client, with trusted and forged headers."""

import ipaddress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from litestar.connection import ASGIConnection

from server.web.forwarded import TrustedProxies

NONE = TrustedProxies()
OURS = TrustedProxies((ipaddress.ip_network("10.0.0.0/8"), ipaddress.ip_network("2001:db8::/32")))

forwarded_values = st.lists(st.text(st.characters(codec="latin-1", exclude_characters="\r\n"), max_size=40), max_size=4)


def connect(peer: str | None, *forwarded: str, protocols: tuple[str, ...] = ()) -> ASGIConnection[Any, Any, Any, Any]:
    headers = [(b"x-forwarded-for", value.encode("latin-1")) for value in forwarded]
    headers += [(b"x-forwarded-proto", value.encode("latin-1")) for value in protocols]
    scope: Any = {"type": "http", "scheme": "http", "headers": headers, "client": peer and (peer, 5000), "state": {}}
    return ASGIConnection(scope)


@pytest.mark.parametrize(
    ("peer", "forwarded", "client"),
    [
        ("10.0.0.1", ["203.0.113.9"], "203.0.113.9"),
        # What the client sends is to the left of what the proxy adds, in the same header or in an earlier one.
        ("10.0.0.1", ["198.51.100.1, 203.0.113.9"], "203.0.113.9"),
        ("10.0.0.1", ["198.51.100.1", "203.0.113.9"], "203.0.113.9"),
        ("10.0.0.1", ["198.51.100.1", "203.0.113.9, 10.0.0.2"], "203.0.113.9"),
        ("10.0.0.1", ["10.9.9.9", "203.0.113.9", "10.0.0.2"], "203.0.113.9"),
        ("10.0.0.1", ["10.0.0.7, 10.0.0.2"], "10.0.0.7"),
        ("10.0.0.1", [], "10.0.0.1"),
        ("10.0.0.1", ["203.0.113.9, unknown"], "10.0.0.1"),
        ("10.0.0.1", ["203.0.113.9, unknown, 10.0.0.2"], "10.0.0.2"),
        ("10.0.0.1", ["203.0.113.9:4711"], "203.0.113.9"),
        ("2001:db8::1", ["[2001:DB9::7]:4711"], "2001:db9::7"),
        ("::ffff:10.0.0.1", ["::ffff:203.0.113.9"], "203.0.113.9"),
        ("203.0.113.1", ["198.51.100.1"], "203.0.113.1"),
        (None, ["198.51.100.1"], None),
    ],
)
def test_the_client_is_the_first_address_from_the_right_that_is_not_a_trusted_proxy(
    peer: str | None, forwarded: list[str], client: str | None
) -> None:
    assert OURS.address_of(connect(peer, *forwarded)) == client


@given(claimed=forwarded_values)
def test_no_header_of_a_client_changes_its_address(claimed: list[str]) -> None:
    assert NONE.address_of(connect("203.0.113.9", *claimed)) == "203.0.113.9"
    assert OURS.address_of(connect("10.0.0.1", *claimed, "203.0.113.9")) == "203.0.113.9"
    assert OURS.address_of(connect("10.0.0.1", ",".join([*claimed, "203.0.113.9"]))) == "203.0.113.9"


def test_the_scheme_is_taken_from_a_proxy_only() -> None:
    assert OURS.is_secure(connect("10.0.0.1", protocols=("https",)))
    assert not OURS.is_secure(connect("203.0.113.9", protocols=("https",)))
    assert not NONE.is_secure(connect("10.0.0.1", protocols=("https",)))
    assert not OURS.is_secure(connect("10.0.0.1", protocols=("https", "http")))
