"""Signatures that only their maker can make, and both alphabets of base64 to write them in."""

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
        """A nonce and the HMAC over it and the fields; no two are alike, not even for the same fields."""
        nonce = self._digest(b"nonce", str(next(self._numbers)))[:_NONCE_BYTES]
        return nonce + self._digest(b"signature", nonce, *fields)

    def verify(self, signature: bytes, *fields: str | bytes) -> bool:
        """Whether this signer made the signature over exactly these fields."""
        nonce, proof = signature[:_NONCE_BYTES], signature[_NONCE_BYTES:]
        return hmac.compare_digest(proof, self._digest(b"signature", nonce, *fields))

    def replace_secret(self) -> None:
        """From now on nothing that was signed before is valid."""
        self._secret = self._digest(b"next secret")

    def _digest(self, *fields: str | bytes) -> bytes:
        # With their lengths, so that ("ab", "c") is not ("a", "bc").
        mac = hmac.new(self._secret, digestmod=hashlib.sha256)
        for field in fields:
            data = field.encode() if isinstance(field, str) else field
            mac.update(len(data).to_bytes(8, "big") + data)
        return mac.digest()


def decode_base64(text: str) -> bytes | None:
    """The bytes, in whichever of the two alphabets and with or without padding; None where it is no base64."""
    standard = text.rstrip("=").translate(_TO_STANDARD)
    try:
        return base64.b64decode(standard + "=" * (-len(standard) % 4), validate=True)
    except (binascii.Error, ValueError):
        return None
