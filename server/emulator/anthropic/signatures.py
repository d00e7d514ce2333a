"""The opaque texts that Claude hands out and wants back unchanged: signatures, redacted thinking, compaction blocks.

A seal is the base64 of what it claims and of an HMAC over that. So a seal can be read by its maker without memory, also
after a restart, and one changed letter spoils it.
"""

import base64
import json
from typing import Any, Final, TypeAlias

from server.emulator.signing import Signer, decode_base64

Claims: TypeAlias = dict[str, Any]

_LENGTH_BYTES: Final = 4


def seal(signer: Signer, claims: Claims) -> str:
    """The claims, sealed."""
    data = json.dumps(claims, separators=(",", ":"), sort_keys=True).encode()
    return base64.b64encode(len(data).to_bytes(_LENGTH_BYTES, "big") + data + signer.sign(data)).decode()


def unseal(signer: Signer, text: str | None) -> Claims | None:
    """The claims of a seal this signer made; None for anything else, however little it was altered."""
    raw = decode_base64(text) if text else None
    # Exactly as it was written: several texts of base64 can mean the same bytes.
    if raw is None or base64.b64encode(raw).decode() != text:
        return None
    length = int.from_bytes(raw[:_LENGTH_BYTES], "big")
    data, proof = raw[_LENGTH_BYTES : _LENGTH_BYTES + length], raw[_LENGTH_BYTES + length :]
    if len(data) != length or not signer.verify(proof, data):
        return None
    claims: Claims = json.loads(data)
    return claims
