"""Thought signatures: on which parts, what they are bound to, and which of them a request must contain.

A signature is bound to the model family, the account and its part: an altered, foreign or moved signature, or one on a
part that was merged with another, is rejected as corrupted. Only the current turn (everything after the newest user
content that has more than function responses) must have them, on the first function call of every step. Older ones may
be absent, but not wrong. The two documented dummy values are accepted everywhere.
"""

import base64
from collections.abc import Mapping, Sequence
from typing import Any, Final

from server.emulator.gemini.errors import invalid
from server.emulator.gemini.models import Model
from server.emulator.gemini.turn_order import Content, calls_of, has_standard_content, role_of
from server.emulator.signing import Signer, decode_base64
from server.emulator.tokens import canonical_json

DUMMIES: Final = frozenset({"skip_thought_signature_validator", "context_engineering_is_the_way_to_go"})


def sign_part(signer: Signer, model: Model, account: str, part: Mapping[str, Any]) -> str:
    """The signature of a part (in snake_case), in standard base64 as the API writes it."""
    return base64.b64encode(signer.sign(model.family, account, *_bound_to(part))).decode()


def check_signatures(signer: Signer, model: Model, account: str, contents: Sequence[Content]) -> None:
    """Check all signatures. Raises `ApiError` if a required one is missing or any is wrong."""
    if not model.validates_signatures:
        return
    for index in range(_current_turn_start(contents), len(contents)):
        _check_presence(contents[index], index)
    for content in contents:
        for part in content["parts"]:
            signature = part.get("thought_signature")
            if signature and not _is_good(signature, signer, model, account, part):
                raise invalid(model.bad_signature_text)


def _current_turn_start(contents: Sequence[Content]) -> int:
    for index in range(len(contents) - 1, -1, -1):
        if role_of(contents[index]) != "model" and has_standard_content(contents[index]):
            return index + 1
    return 0


def _check_presence(content: Content, index: int) -> None:
    calls = calls_of(content)
    if calls and not calls[0].get("thought_signature"):
        name = calls[0]["function_call"].get("name", "")
        raise invalid(
            "Function call is missing a thought_signature in functionCall parts. This is required for tools to work"
            " correctly, and missing thought_signature may lead to degraded model performance. Additional data,"
            f" function call `default_api:{name}` , position {index + 1}. Please refer to"
            " https://ai.google.dev/gemini-api/docs/thought-signatures for more details."
        )


def _is_good(signature: str, signer: Signer, model: Model, account: str, part: Mapping[str, Any]) -> bool:
    data = decode_base64(signature) or b""
    if signature in DUMMIES or data in {dummy.encode() for dummy in DUMMIES}:
        return True
    return signer.verify(data, model.family, account, *_bound_to(part))


def _bound_to(part: Mapping[str, Any]) -> tuple[str, str]:
    call = part.get("function_call")
    if call is not None:
        return "function_call", canonical_json([call.get("name", ""), call.get("args", {})])
    if "text" in part:
        return "text", str(part["text"])
    return "other", canonical_json({name: value for name, value in part.items() if name != "thought_signature"})
