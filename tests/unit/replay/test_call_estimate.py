"""What is set aside for a call before it leaves."""

from decimal import Decimal

from server.conversation.call import Call
from server.conversation.usage import Usage
from server.replay.rerun.call_estimate import estimate_call, estimate_said, estimate_sent
from tests.support.builders import call_end, call_start

MANIFEST = ({"length": 1_000_000}, {"length": 3_000_000})
"""Most of it images."""


def recorded(tokens: int) -> Call:
    usage = Usage(fresh_input_tokens=tokens, output_tokens=300, reasoning_tokens=400)
    return Call(turn_seq=2, start=call_start(manifest=MANIFEST), end=call_end(usage=usage))


def test_a_request_is_taken_for_as_many_tokens_for_each_byte_as_the_recorded_one_had() -> None:
    assert estimate_sent(MANIFEST, recorded(2_000)) == 2_500
    assert estimate_sent(({"length": 8_000_000},), recorded(2_000)) == 5_000
    for unknown in (None, recorded(0), Call(turn_seq=2, start=call_start(manifest=()), end=call_end())):
        assert estimate_sent(MANIFEST, unknown) is None


def test_an_answer_is_as_long_as_it_may_be_or_twice_the_recorded_one() -> None:
    end = recorded(1).end
    assert end is not None
    assert estimate_said(100, end.usage) == 100
    assert estimate_said(None, end.usage) == 1_400
    assert estimate_said(None, None) == 1_024


def test_all_that_is_sent_is_written_to_a_cache_where_the_model_has_one() -> None:
    claude = estimate_call("anthropic", "claude-haiku-4-5", 1_000_000, 1_000)
    # 1 dollar a million, twice that for writing what lives long, and 5 for what is said.
    assert (claude.usd, claude.tokens) == (Decimal("2.005"), 1_001_000)
    assert estimate_call("gemini", "gemini-99", 10, 10).usd is None
