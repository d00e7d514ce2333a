"""Identifiers: a prefix that says what it is, and a UUID that says which.

`conv_01jd0z8s3bf6h9kq2m4n6p8r0t` is the prefix, an underscore, and the 128 bits of a version 7 UUID in 26 letters of
Crockford's base 32, lower case. They sort by time of creation roughly, which keeps indexes dense; nothing depends on
that order. Inside the database they are plain `uuid` values.
"""

import os
import time
from functools import lru_cache
from typing import Final
from uuid import UUID

TENANT: Final = "tenant"
API_KEY: Final = "key"
ASSISTANT: Final = "asst"
CONVERSATION: Final = "conv"
REPLAY: Final = "replay"
ADMIN_SESSION: Final = "session"
AUDIT: Final = "audit"
SAVED_VIEW: Final = "view"

ALPHABET: Final = "0123456789abcdefghjkmnpqrstvwxyz"
_VALUES: Final = {letter: value for value, letter in enumerate(ALPHABET)}
_LENGTH: Final = 26
_REMEMBERED: Final = 4096
"""The same few ids are spelled again and again while a turn runs."""


def new_uuid() -> UUID:
    """A version 7 UUID: 48 bits of milliseconds, 12 bits of their fraction, 62 random bits."""
    milliseconds, nanoseconds = divmod(time.time_ns(), 1_000_000)
    fraction = (nanoseconds << 12) // 1_000_000
    random = int.from_bytes(os.urandom(8)) & ((1 << 62) - 1)
    return UUID(int=milliseconds << 80 | 0x7 << 76 | fraction << 64 | 0b10 << 62 | random)


def new_id(prefix: str) -> str:
    """A new identifier of the given kind."""
    return encode_id(prefix, new_uuid())


@lru_cache(maxsize=_REMEMBERED)
def encode_id(prefix: str, value: UUID) -> str:
    """The identifier that stands for a UUID."""
    return f"{prefix}_{encode_base32(value.int, _LENGTH)}"


@lru_cache(maxsize=_REMEMBERED)
def decode_id(prefix: str, text: str) -> UUID | None:
    """The UUID behind an identifier, or None where the text is not an identifier of this kind.

    Only the one canonical spelling is accepted, so an identifier can be compared as text anywhere.
    """
    head, _, body = text.rpartition("_")
    if head != prefix or len(body) != _LENGTH or not set(body) <= _VALUES.keys():
        return None
    value = 0
    for letter in body:
        value = value << 5 | _VALUES[letter]
    return UUID(int=value) if value >> 128 == 0 else None


def encode_base32(value: int, length: int) -> str:
    """`length` letters, most significant first."""
    return "".join(ALPHABET[value >> 5 * position & 31] for position in reversed(range(length)))
