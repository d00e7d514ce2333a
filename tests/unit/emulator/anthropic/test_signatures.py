"""Any change of a signed text invalidates its signature."""

import base64

from hypothesis import given
from hypothesis import strategies as st

from server.emulator.anthropic.signatures import sign_claims, verify_claims
from server.emulator.signing import Signer

_SIGNER = Signer(b"secret")
_SEALED = [sign_claims(_SIGNER, {"kind": "thinking", "id": "x" * length}) for length in range(6)]


def test_a_signature_returns_its_claims() -> None:
    claims = {"kind": "thinking", "text": "Ä", "none": None, "number": 3}
    assert verify_claims(_SIGNER, sign_claims(_SIGNER, claims)) == claims


def test_another_signer_rejects_it() -> None:
    assert verify_claims(Signer(b"other"), _SEALED[0]) is None


def test_no_two_signatures_are_equal() -> None:
    assert sign_claims(_SIGNER, {"a": 1}) != sign_claims(_SIGNER, {"a": 1})


@given(
    sealed=st.sampled_from(_SEALED),
    place=st.integers(0, 10_000),
    letter=st.sampled_from("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/-_= \n"),
)
def test_any_changed_letter_invalidates_it(sealed: str, place: int, letter: str) -> None:
    at = place % len(sealed)
    for spoilt in (sealed[:at] + letter + sealed[at + 1 :], sealed[:at] + letter + sealed[at:], sealed[:at]):
        assert spoilt == sealed or verify_claims(_SIGNER, spoilt) is None


@given(st.binary())
def test_any_other_bytes_are_no_signature(data: bytes) -> None:
    assert verify_claims(_SIGNER, base64.b64encode(data).decode()) is None


def test_an_empty_text_is_no_signature() -> None:
    assert verify_claims(_SIGNER, None) is None
    assert verify_claims(_SIGNER, "") is None
