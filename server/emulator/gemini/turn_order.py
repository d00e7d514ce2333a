"""The order of contents, and the pairing of function calls with their responses.

A function call turn is a model content with calls; the next content must contain the responses to exactly those calls.
Every rule has the error text that the API is known to return.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

from server.emulator.gemini.decoding import PART_DATA
from server.emulator.gemini.errors import invalid

Content: TypeAlias = Mapping[str, Any]
Part: TypeAlias = Mapping[str, Any]

_ROLES: Final = frozenset({"user", "model", "function"})
_CALL_ORDER: Final = (
    "Please ensure that function call turn comes immediately after a user turn or after a function response turn."
)
_RESPONSE_ORDER: Final = "Please ensure that function response turn comes immediately after a function call turn."
_COUNT: Final = (
    "Please ensure that the number of function response parts is equal to the number of function call parts of the"
    " function call turn."
)
_MIXED: Final = (
    "Please ensure that function call turn contains at least one function_call part which can not be mixed with"
    " function_response parts."
)
_FIRST: Final = "Please ensure that multiturn requests alternate between user and model."
_LAST: Final = "Please ensure that multiturn requests ends with a user role or a function response."


def role_of(content: Content) -> str:
    return str(content.get("role") or "user")


def calls_of(content: Content) -> list[Part]:
    return [part for part in content["parts"] if "function_call" in part]


def responses_of(content: Content) -> list[Part]:
    return [part for part in content["parts"] if "function_response" in part]


def has_standard_content(content: Content) -> bool:
    """Whether it contains anything besides function responses."""
    return len(responses_of(content)) < len(content["parts"])


def check_shape(contents: Sequence[Content], request: str = "GenerateContentRequest") -> None:
    """Check that every content has a known role and parts, and that no part is empty. Raises `ApiError`."""
    if not contents:
        raise invalid(f"* {request}.contents: contents is not specified\n")
    for index, content in enumerate(contents):
        if role_of(content) not in _ROLES:
            raise invalid("Please use a valid role: user, model.")
        if not content.get("parts"):
            raise invalid(f"* {request}.contents[{index}].parts: contents.parts must not be empty.\n")
        for position, part in enumerate(content["parts"]):
            if not any(name in part for name in PART_DATA):
                raise invalid(
                    f"* {request}.contents[{index}].parts[{position}].data: required oneof field 'data' must have one"
                    " initialized field\n"
                )


def check_order(contents: Sequence[Content]) -> None:
    """Check that the model can answer the conversation. Raises `ApiError`."""
    previous: Content | None = None
    for content in contents:
        if calls_of(content) and responses_of(content):
            raise invalid(_MIXED)
        if calls_of(content):
            _check_call_turn(content, previous)
        elif previous is None and role_of(content) == "model":
            raise invalid(_FIRST)
        _check_response_turn(content, previous)
        previous = content
    if previous is not None and role_of(previous) == "model":
        raise invalid(_LAST)


def _check_call_turn(content: Content, previous: Content | None) -> None:
    if role_of(content) != "model" or previous is None or role_of(previous) == "model":
        raise invalid(_CALL_ORDER)


def _check_response_turn(content: Content, previous: Content | None) -> None:
    calls = calls_of(previous) if previous is not None else []
    responses = responses_of(content)
    if responses and (not calls or role_of(content) == "model"):
        raise invalid(_RESPONSE_ORDER)
    if len(calls) != len(responses):
        raise invalid(_COUNT)
    _check_pairs([part["function_call"] for part in calls], [part["function_response"] for part in responses])


def _check_pairs(calls: Sequence[Mapping[str, Any]], responses: Sequence[Mapping[str, Any]]) -> None:
    names = {call["id"]: call.get("name") for call in calls if call.get("id")}
    for response in responses:
        if response.get("id") and response["id"] not in names:
            raise invalid(
                f"Function response id `{response['id']}` matches no function call of the function call turn."
            )
        if response.get("id") and names.pop(response["id"]) != response.get("name"):
            raise invalid(f"Function response `{response.get('name')}` has the id of a call of another function.")
    if Counter(call.get("name") for call in calls) != Counter(response.get("name") for response in responses):
        raise invalid("Please ensure that function response parts have the names of the function call parts.")
