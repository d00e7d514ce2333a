"""One changed letter spoils a seal."""

import base64

from hypothesis import given
from hypothesis import strategies as st

from server.emulator.anthropic.signatures import seal, unseal
from server.emulator.signing import Signer

_SIGNER = Signer(b"secret")
_SEALED = [seal(_SIGNER, {"kind": "thinking", "id": "x" * length}) for length in range(6)]


def test_a_seal_gives_its_claims_back() -> None:
    claims = {"kind": "thinking", "text": "Ä", "none": None, "number": 3}
    assert unseal(_SIGNER, seal(_SIGNER, claims)) == claims


def test_another_signer_knows_nothing_of_it() -> None:
    assert unseal(Signer(b"other"), _SEALED[0]) is None


def test_no_two_seals_are_alike() -> None:
    assert seal(_SIGNER, {"a": 1}) != seal(_SIGNER, {"a": 1})


@given(
    sealed=st.sampled_from(_SEALED),
    place=st.integers(0, 10_000),
    letter=st.sampled_from("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/-_= \n"),
)
def test_one_letter_more_less_or_other_spoils_it(sealed: str, place: int, letter: str) -> None:
    at = place % len(sealed)
    for spoilt in (sealed[:at] + letter + sealed[at + 1 :], sealed[:at] + letter + sealed[at:], sealed[:at]):
        assert spoilt == sealed or unseal(_SIGNER, spoilt) is None


@given(st.binary())
def test_any_other_bytes_are_no_seal(data: bytes) -> None:
    assert unseal(_SIGNER, base64.b64encode(data).decode()) is None


def test_nothing_is_no_seal() -> None:
    assert unseal(_SIGNER, None) is None
    assert unseal(_SIGNER, "") is None
