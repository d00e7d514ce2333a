"""Names of models: which are valid, and under which names the tables of profiles and prices list them.

A name becomes part of a URL, so it contains nothing that has a meaning in a URL: no slash except in a documented
prefix, no percent sign, no question mark, no dot segment.
"""

import re
from collections.abc import Mapping
from typing import Final

from server.conversation.errors import ValidationFailed

MAX_LENGTH: Final = 200
_PATTERNS: Final[Mapping[str, re.Pattern[str]]] = {
    # No colon: it precedes the verb in the URLs of Gemini.
    "gemini": re.compile(r"(?:models/|tunedModels/)?[A-Za-z0-9][A-Za-z0-9._@-]*"),
    "anthropic": re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]*"),
}
_PREFIX: Final = "models/"
_DATE: Final = re.compile(r"-(?:20\d{6}|\d{3}|\d{2}-\d{2}|\d{2}-20\d{2})\Z")
"""`claude-opus-4-5-20251101`, `gemini-2.5-pro-001`, `gemini-2.5-pro-preview-05-06`, `...-flash-preview-09-2025`."""
_PREVIEW: Final = "-preview"


def find_name_fault(provider: str, model: str) -> str | None:
    """Return what is wrong with the name; None if it is valid for the provider."""
    pattern = _PATTERNS.get(provider)
    if pattern is not None and len(model) <= MAX_LENGTH and ".." not in model and pattern.fullmatch(model):
        return None
    return (
        "Expected the name of a model: letters, digits, hyphens, underscores and single dots, with a letter or a digit "
        f"first, and at most {MAX_LENGTH} characters."
    )


def check_model_name(provider: str, model: str) -> None:
    """Raise `ValidationFailed` for a name that is not valid for the provider."""
    fault = find_name_fault(provider, model)
    if fault is not None:
        raise ValidationFailed(f"model: {fault}", errors=[{"path": "model", "source": "body", "message": fault}])


def names_in_tables(model: str) -> tuple[str, ...]:
    """Return the names under which profiles and prices may list a model, the most exact first.

    A dated release has the profile and the price of its family: `claude-sonnet-4-5-20250929` is listed as
    `claude-sonnet-4-5`.
    """
    bare = model.removeprefix(_PREFIX)
    undated = _DATE.sub("", bare)
    # A dated preview of a released model: `gemini-2.5-flash-preview-09-2025`.
    released = undated.removesuffix(_PREVIEW) if undated != bare else bare
    return tuple(dict.fromkeys((bare, undated, released)))
