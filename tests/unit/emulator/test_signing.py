"""Signatures are valid only for what was signed, and are readable in every spelling of base64."""

import base64

from hypothesis import given
from hypothesis import strategies as st

from server.emulator.signing import Signer, decode_base64

fields = st.lists(st.text() | st.binary(), max_size=4)


@given(fields)
def test_a_signature_is_valid_for_its_own_fields(values: list[str | bytes]) -> None:
    signer = Signer(b"secret")

    assert signer.verify(signer.sign(*values), *values)


@given(fields, fields)
def test_it_is_invalid_for_others(values: list[str | bytes], others: list[str | bytes]) -> None:
    signer = Signer(b"secret")
    plain = [[item.encode() if isinstance(item, str) else item for item in items] for items in (values, others)]

    assert signer.verify(signer.sign(*values), *others) is (plain[0] == plain[1])


@given(st.integers(0, 39), st.integers(0, 7))
def test_one_flipped_bit_invalidates_it(byte: int, bit: int) -> None:
    signer = Signer(b"secret")
    signature = bytearray(signer.sign("a"))
    signature[byte] ^= 1 << bit

    assert not signer.verify(bytes(signature), "a")


def test_fields_are_separated() -> None:
    signer = Signer(b"secret")

    assert not signer.verify(signer.sign("ab", "c"), "a", "bc")


def test_signatures_differ_but_are_the_same_in_every_run() -> None:
    first, second = ([signer.sign("a") for _ in range(3)] for signer in (Signer(b"x"), Signer(b"x")))

    assert first == second
    assert len(set(first)) == 3
    assert not Signer(b"y").verify(first[0], "a")


@given(st.binary())
def test_base64_is_read_in_both_alphabets_with_and_without_padding(data: bytes) -> None:
    for text in (base64.b64encode(data).decode(), base64.urlsafe_b64encode(data).decode()):
        assert decode_base64(text) == decode_base64(text.rstrip("=")) == data


def test_invalid_base64_is_none() -> None:
    assert decode_base64("not base64!") is None
    assert decode_base64("a") is None
