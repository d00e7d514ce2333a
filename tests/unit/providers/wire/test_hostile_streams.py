"""For any bytes that a provider sends, a fold gives a well-formed answer or raises a provider failure with a code.

Recorded streams are damaged: values are replaced by hostile ones, frames are dropped, repeated, moved and spliced from
another stream, bytes are cut and changed. The result has to be storable, and sendable to clients and to the provider.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.conversation.block import ToolCallBlock, block_to_json, decode_blocks, encode_blocks
from server.conversation.errors import ProviderFailed, every_error
from server.conversation.event import ProviderEvent
from server.conversation.exact_json import loads_exact
from server.conversation.turn import StopReason
from server.conversation.usage import MAX_TOKEN_COUNT, Usage
from server.postgres.codec import decode_json, encode_json, encode_text
from server.providers.anthropic import request as anthropic_request
from server.providers.anthropic.stream import AnthropicFold
from server.providers.anthropic.stream import fold_body as fold_anthropic
from server.providers.gemini import request as gemini_request
from server.providers.gemini.stream import GeminiFold
from server.providers.gemini.stream import fold_body as fold_gemini
from server.providers.provider import Fold, ProviderAnswer
from server.web.sse import encode_event
from tests.recordings.catalogue import RECORDINGS
from tests.recordings.damage import HOSTILE, documents_of, encode, places_in, put

_CODES: Final = {error.code for error in every_error(ProviderFailed)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Vendor:
    name: str
    open: Callable[[], Fold]
    reference: Callable[[], Fold]
    fold_body: Callable[[bytes], ProviderAnswer]
    unsigned: Callable[[bytes], bytes | None]

    @property
    def bodies(self) -> list[bytes]:
        return [one.body for one in RECORDINGS if one.vendor == self.name]


class SlowGeminiFold(GeminiFold):
    """The reference: every chunk is decoded exactly and validated member by member."""

    def _take_usual(self, _data: bytes) -> None:
        return None


class SlowAnthropicFold(AnthropicFold):
    """The reference: every frame is decoded exactly and validated member by member."""

    def _take_usual(self, _data: bytes) -> None:
        return None


VENDORS: Final = (
    Vendor(
        name="gemini",
        open=GeminiFold,
        reference=SlowGeminiFold,
        fold_body=fold_gemini,
        unsigned=gemini_request.unsigned_message,
    ),
    Vendor(
        name="anthropic",
        open=AnthropicFold,
        reference=SlowAnthropicFold,
        fold_body=fold_anthropic,
        unsigned=anthropic_request.unsigned_message,
    ),
)


def read(vendor: Vendor, body: bytes, size: int) -> tuple[Fold, list[ProviderEvent], ProviderFailed | None]:
    return read_with(vendor.open(), body, size)


def read_with(fold: Fold, body: bytes, size: int) -> tuple[Fold, list[ProviderEvent], ProviderFailed | None]:
    events: list[ProviderEvent] = []
    try:
        for start in range(0, len(body), size):
            events.extend(fold.feed(body[start : start + size]))
        fold.finish()
    except ProviderFailed as failure:
        return fold, events, failure
    return fold, events, None


def assert_sound(vendor: Vendor, body: bytes) -> ProviderFailed | None:
    """The invariant."""
    fold, events, failure = read(vendor, body, max(1, len(body)))
    answer = fold.answer
    assert failure is None or failure.code in _CODES
    assert_well_formed(vendor, answer)
    if failure is None:
        assert isinstance(answer.stop_reason, StopReason)
    for number, event in enumerate(events):
        json.loads(encode_event(number, event).partition(b"data: ")[2])
    assert vendor.fold_body(body) == answer
    in_pieces, same_events, same_failure = read(vendor, body, 7)
    assert (in_pieces.answer, same_events, type(same_failure)) == (answer, events, type(failure))
    return failure


def assert_well_formed(vendor: Vendor, answer: ProviderAnswer) -> None:
    usage = answer.usage
    counts = [getattr(usage, each.name) for each in fields(Usage)] + [answer.long_write_tokens]
    assert all(type(count) is int and 0 <= count <= MAX_TOKEN_COUNT for count in counts)
    assert answer.long_write_tokens <= usage.cache_write_tokens
    blocks = [block_to_json(block) for block in answer.blocks]
    for document in (blocks, answer.usage_reported, answer.stop_details):
        stored = encode_json(document)
        stored.encode()
        assert "\x00" not in stored
        assert decode_json(stored) == document
    assert decode_blocks(encode_blocks(answer.blocks)) == answer.blocks
    for text in (answer.response_id, answer.cache_miss_reason):
        assert text is None or (type(text) is str and encode_text(text).encode())
    calls = [block for block in answer.blocks if isinstance(block, ToolCallBlock)]
    assert len({call.id for call in calls}) == len(calls)
    assert all(type(call.id) is str and call.id and type(call.name) is str for call in calls)
    for make in (gemini_request.foreign_message, anthropic_request.foreign_message):
        message = make(answer.blocks)
        assert message is None or json.loads(message)
    if answer.native is not None:
        assert b"\\ud8" not in answer.native.data.replace(b"\\\\", b"")
        loads_exact(answer.native.data)
        unsigned = vendor.unsigned(answer.native.data)
        assert unsigned is None or json.loads(unsigned)


@st.composite
def damaged(draw: st.DrawFn, vendor: Vendor) -> bytes:
    documents = documents_of(draw(st.sampled_from(vendor.bodies)))
    for _ in range(draw(st.integers(1, 3))):
        if not documents:
            break
        at = draw(st.integers(0, len(documents) - 1))
        match draw(st.sampled_from(["value", "value", "value", "drop", "repeat", "move", "splice"])):
            case "value":
                path = draw(st.sampled_from(places_in(documents[at])))
                documents[at] = put(documents[at], path, draw(st.sampled_from(HOSTILE)))
            case "drop":
                del documents[at]
            case "repeat":
                documents.insert(at, documents[at])
            case "move":
                documents.insert(draw(st.integers(0, len(documents) - 1)), documents.pop(at))
            case _:
                documents[at:at] = documents_of(draw(st.sampled_from(vendor.bodies)))
    body = encode(documents)
    if draw(st.booleans()):
        body = body[: draw(st.integers(0, len(body)))]
    if body and draw(st.integers(0, 4)) == 0:
        at = draw(st.integers(0, len(body) - 1))
        body = body[:at] + draw(st.binary(min_size=1, max_size=4)) + body[at + 1 :]
    return body


@pytest.mark.parametrize("vendor", VENDORS, ids=lambda vendor: vendor.name)
@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_any_damage_gives_an_answer_or_a_failure_of_the_provider(vendor: Vendor, data: st.DataObject) -> None:
    assert_sound(vendor, data.draw(damaged(vendor)))


INSERTED: Final = (
    *(b'"index":1.0,', b'"index":-1,', b'"index":"0",', b'"type":"text_delta",', b'"type":"thinking_delta",'),
    *(b'"text":"a",', b'"thinking":"a",', b'"partial_json":"a",', b'"delta":{"type":"text_delta","text":"a"},'),
    *(b'"thought":true,', b'"thought":null,', b'"responseId":"other",', b'"responseId":"no id",'),
    *(b'"usageMetadata":{"a":[[[1.0]]]},', b'"usageMetadata":null,', b'"new":{"a":' + b"[" * 250 + b"]" * 250 + b"},"),
    *(
        b"\xff",
        b"\xed\xa0\x80",
        b"\\ud800",
        b"\\udc00",
        b"\x00",
        b"\x7f",
        b"\n",
        b"\r\n\r\n",
        "é😀".encode(),
        b" ",
        b",",
    ),
)
"""Bytes that change the meaning of a usual frame, or make it another one."""


@pytest.mark.parametrize("vendor", VENDORS, ids=lambda vendor: vendor.name)
@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_usual_frames_mean_the_same_as_if_each_were_validated_member_by_member(
    vendor: Vendor, data: st.DataObject
) -> None:
    body = data.draw(damaged(vendor) | st.sampled_from(vendor.bodies))
    for _ in range(data.draw(st.integers(0, 2))):
        # After a brace or a comma a member is inserted that is well-formed; elsewhere anything may result.
        places = [at + 1 for at, byte in enumerate(body) if byte in b"{,"] or [0]
        at = data.draw(st.sampled_from(places) | st.integers(0, len(body)))
        body = body[:at] + data.draw(st.sampled_from(INSERTED)) + body[at:]
    fold, events, failure = read(vendor, body, max(1, len(body)))
    reference, same_events, same_failure = read_with(vendor.reference(), body, max(1, len(body)))
    assert (fold.answer, events) == (reference.answer, same_events)
    assert (type(failure), str(failure)) == (type(same_failure), str(same_failure))


@pytest.mark.parametrize("vendor", VENDORS, ids=lambda vendor: vendor.name)
def test_only_a_few_frames_of_a_stream_are_unusual(vendor: Vendor, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[bytes] = []

    def count(data: bytes) -> Any:
        decoded.append(data)
        return loads_exact(data)

    monkeypatch.setattr(f"server.providers.{vendor.name}.stream.loads_exact", count)
    body = next(one.body for one in RECORDINGS if str(one) == f"{vendor.name}-text")
    assert vendor.fold_body(body).stop_reason is StopReason.END_TURN
    assert len(decoded) <= 12 < len(documents_of(body))


@pytest.mark.slow
@pytest.mark.parametrize("vendor", VENDORS, ids=lambda vendor: vendor.name)
def test_each_value_of_each_recording_may_be_hostile(vendor: Vendor) -> None:
    """Replace every value once, with one hostile value after the other: a seeded subset of what the property
    samples.
    """
    turn = 0
    for body in vendor.bodies:
        documents = documents_of(body)
        for at, document in enumerate(documents):
            for path in places_in(document):
                for _ in range(2):
                    hostile = HOSTILE[turn % len(HOSTILE)]
                    turn += 1
                    changed = [*documents[:at], put(document, path, hostile), *documents[at + 1 :]]
                    assert_sound(vendor, encode(changed))


@given(body=st.binary(max_size=200))
@pytest.mark.parametrize("vendor", VENDORS, ids=lambda vendor: vendor.name)
def test_any_bytes_give_an_answer_or_a_failure(vendor: Vendor, body: bytes) -> None:
    assert_sound(vendor, body)
