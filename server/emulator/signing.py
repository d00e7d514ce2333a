"""Unforgeable signatures, and base64 in both alphabets."""

import base64
import binascii
import hashlib
import hmac
from itertools import count
from typing import Final

_NONCE_BYTES: Final = 8
_TO_STANDARD: Final = str.maketrans("-_", "+/")


class Signer:
    """Signs fields with a secret. The n-th signature of a signer is the same in every run."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._numbers = count(1)

    def sign(self, *fields: str | bytes) -> bytes:
        """A nonce and the HMAC over the nonce and the fields. Two signatures are never equal, even for the same
        fields.
        """
        nonce = self._digest(b"nonce", str(next(self._numbers)))[:_NONCE_BYTES]
        return nonce + self._digest(b"signature", nonce, *fields)

    def verify(self, signature: bytes, *fields: str | bytes) -> bool:
        """Whether this signer made the signature over exactly these fields."""
        nonce, proof = signature[:_NONCE_BYTES], signature[_NONCE_BYTES:]
        return hmac.compare_digest(proof, self._digest(b"signature", nonce, *fields))

    def replace_secret(self) -> None:
        """Invalidate every signature made so far."""
        self._secret = self._digest(b"next secret")

    def _digest(self, *fields: str | bytes) -> bytes:
        # With their lengths, so that ("ab", "c") is not ("a", "bc").
        mac = hmac.new(self._secret, digestmod=hashlib.sha256)
        for field in fields:
            data = field.encode() if isinstance(field, str) else field
            mac.update(len(data).to_bytes(8, "big") + data)
        return mac.digest()


def decode_base64(text: str) -> bytes | None:
    """Decode either alphabet, with or without padding; None if the text is not base64."""
    standard = text.rstrip("=").translate(_TO_STANDARD)
    try:
        return base64.b64decode(standard + "=" * (-len(standard) % 4), validate=True)
    except (binascii.Error, ValueError):
        return None
