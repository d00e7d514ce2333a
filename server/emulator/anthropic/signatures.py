"""The opaque texts that Claude returns and expects back unchanged: signatures, redacted thinking, compaction blocks.

Each is the base64 of its claims and of an HMAC over them. So they can be verified without stored state, also after a
restart, and any change invalidates them.
"""

import base64
import json
from typing import Any, Final, TypeAlias

from server.emulator.signing import Signer, decode_base64

Claims: TypeAlias = dict[str, Any]

_LENGTH_BYTES: Final = 4


def sign_claims(signer: Signer, claims: Claims) -> str:
    """Encode and sign the claims."""
    data = json.dumps(claims, separators=(",", ":"), sort_keys=True).encode()
    return base64.b64encode(len(data).to_bytes(_LENGTH_BYTES, "big") + data + signer.sign(data)).decode()


def verify_claims(signer: Signer, text: str | None) -> Claims | None:
    """The claims of a text that this signer made; None for anything else."""
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
