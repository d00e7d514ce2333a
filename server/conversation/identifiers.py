"""Identifiers: a prefix for the kind of object, and a UUID.

`conv_01jd0z8s3bf6h9kq2m4n6p8r0t` is the prefix, an underscore, and the 128 bits of a version 7 UUID in 26 lower-case
letters of Crockford's base 32. They sort roughly by creation time, which keeps indexes dense; nothing depends on that
order. In the database they are plain `uuid` values.
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
_CACHE_SIZE: Final = 4096
"""The same few ids are encoded repeatedly while a turn runs."""


def new_uuid() -> UUID:
    """Return a version 7 UUID: 48 bits of milliseconds, 12 bits of their fraction, 62 random bits."""
    milliseconds, nanoseconds = divmod(time.time_ns(), 1_000_000)
    fraction = (nanoseconds << 12) // 1_000_000
    random = int.from_bytes(os.urandom(8)) & ((1 << 62) - 1)
    return UUID(int=milliseconds << 80 | 0x7 << 76 | fraction << 64 | 0b10 << 62 | random)


def new_id(prefix: str) -> str:
    """Return a new identifier."""
    return encode_id(prefix, new_uuid())


@lru_cache(maxsize=_CACHE_SIZE)
def encode_id(prefix: str, value: UUID) -> str:
    """Return the identifier of a UUID."""
    return f"{prefix}_{encode_base32(value.int, _LENGTH)}"


@lru_cache(maxsize=_CACHE_SIZE)
def decode_id(prefix: str, text: str) -> UUID | None:
    """Return the UUID of an identifier, or None if the text is not an identifier of this kind.

    Only the canonical spelling is accepted, so identifiers can be compared as text.
    """
    head, _, body = text.rpartition("_")
    if head != prefix or len(body) != _LENGTH or not set(body) <= _VALUES.keys():
        return None
    value = 0
    for letter in body:
        value = value << 5 | _VALUES[letter]
    return UUID(int=value) if value >> 128 == 0 else None


def encode_base32(value: int, length: int) -> str:
    """Encode `length` letters, most significant first."""
    return "".join(ALPHABET[value >> 5 * position & 31] for position in reversed(range(length)))
