"""What a call of a replay may come to, before it leaves: what is set aside of the budget. Rather too much than too
little.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

from server.conversation.block import JsonValue
from server.conversation.call import Call
from server.conversation.usage import Usage
from server.providers.model_profile import find_profile
from server.providers.pricing import price_call
from server.replay.rerun.replay import CallEstimate

_MIN_OUTPUT_TOKENS: Final = 1_024
_MARGIN: Final = 1.25
"""Other models split the same words into more tokens."""


def estimate_call(provider: str, model: str, sent_tokens: int, said_tokens: int) -> CallEstimate:
    """All that is sent is written to a cache for long, where the model has one."""
    profile = find_profile(provider, model)
    writes = profile.breakpoints > 0
    usage = Usage(
        fresh_input_tokens=0 if writes else sent_tokens,
        cache_write_tokens=sent_tokens if writes else 0,
        output_tokens=min(said_tokens, profile.output_limit_tokens),
    )
    cost = price_call(model, datetime.now(UTC), usage, long_write_tokens=usage.cache_write_tokens)
    return CallEstimate(usd=None if cost is None else cost.total_usd, tokens=count_tokens(usage))


def estimate_sent(manifest: Sequence[Mapping[str, JsonValue]], recorded: Call | None) -> int | None:
    """Tokens of a request with these blocks, as many for each byte as the recorded one had. None where it tells none.

    By their bytes alone images would count a hundred times too much.
    """
    if recorded is None or recorded.end is None:
        return None
    length, sent = _length_of(recorded.start.manifest), recorded.end.usage.input_tokens
    return round(_MARGIN * sent * _length_of(manifest) / length) if length and sent else None


def estimate_said(limit_tokens: int | None, expected: Usage | None) -> int:
    """Tokens of an answer: all that it may have, where that is said, else twice what the recorded one took."""
    said = 0 if expected is None else 2 * (expected.output_tokens + expected.reasoning_tokens)
    return limit_tokens or max(_MIN_OUTPUT_TOKENS, said)


def count_tokens(usage: Usage) -> int:
    """All of them."""
    return usage.input_tokens + usage.output_tokens + usage.reasoning_tokens


def _length_of(manifest: Sequence[Mapping[str, JsonValue]]) -> int:
    return sum(entry["length"] for entry in manifest)
