"""The fold of Claude's stream.

Blocks begin, grow by deltas and end. Each block is sent back to Claude as it began, extended by its deltas, in order. A
block that did not end is kept for readers; only what Claude accepts is sent back: partial text, but no thinking without
its signature and no call with incomplete arguments. An answer that has only thinking, or that ended as a refusal, is
not sent back; the calls of a refusal are not to be answered either.

Nearly all frames extend a text, a thinking or the arguments of a call. These usual frames are decoded by msgspec into
`_UsualFrame`, and their texts are joined when the block ends or is read. Any other frame, and any frame that msgspec
rejects, is decoded with exact numbers and validated member by member. Both ways give the same events and the same
answer.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

import msgspec

from server.conversation.block import Block, SignatureMark, TextBlock, ThinkingBlock, ToolCallBlock, UnknownBlock
from server.conversation.errors import (
    ProviderCallMalformed,
    ProviderEmpty,
    ProviderEndedEarly,
    ProviderFailed,
    ProviderMalformed,
)
from server.conversation.event import (
    ProviderEvent,
    TextDelta,
    ThinkingDelta,
    ToolCallBegin,
    ToolCallDelta,
    ToolCallEnd,
    UsageReported,
)
from server.conversation.exact_json import dumps_sendable, loads_exact, to_plain
from server.conversation.turn import Native, StopReason
from server.conversation.usage import Usage, add_usages, find_count_faults, read_count
from server.providers.anthropic.errors import error_from_body
from server.providers.provider import ProviderAnswer
from server.providers.wire.answer_values import (
    check_call_id,
    check_call_name,
    check_members,
    check_sendable,
    clean_details,
    read_response_id,
)
from server.providers.wire.error_response import clean_message
from server.providers.wire.frames import FrameReader

DIALECT: Final = "anthropic"

STOP_REASONS: Final = {
    "end_turn": StopReason.END_TURN,
    "stop_sequence": StopReason.END_TURN,
    "max_tokens": StopReason.LENGTH,
    "model_context_window_exceeded": StopReason.LENGTH,
    "tool_use": StopReason.TOOL_USE,
    "pause_turn": StopReason.PAUSED,
    "compaction": StopReason.PAUSED,
    "refusal": StopReason.REFUSAL,
}
_PARTIAL_JSON: Final = "_partial_json"
_TIME: Final = re.compile(r"[0-9T:.Z+-]{10,40}")
_THINKING: Final = frozenset({"thinking", "redacted_thinking"})


_MAY_CUT_CALLS: Final = frozenset({"max_tokens", "model_context_window_exceeded", "refusal"})
"""Stop reasons that may interrupt the arguments of a call. With any other one, the call is malformed."""
_MEMBERS: Final[Mapping[str, Mapping[str, type]]] = {
    "text": {"text": str, "citations": list},
    "thinking": {"thinking": str, "signature": str},
    "redacted_thinking": {"data": str},
    "tool_use": {"id": str, "name": str, "input": dict},
}
"""The types of the members that are read here. Other members are kept as they come."""
_DELTA_OF: Final[Mapping[str, str]] = {
    "text_delta": "text",
    "citations_delta": "text",
    "thinking_delta": "thinking",
    "signature_delta": "thinking",
    "input_json_delta": "tool_use",
}
"""Which delta belongs to which block type. Blocks of other types accept any delta."""
_CALL_ID: Final = re.compile(r"[a-zA-Z0-9_-]+")
_MAX_REASON_LENGTH: Final = 100


class _TextPiece(msgspec.Struct, forbid_unknown_fields=True, gc=False, tag_field="type", tag="text_delta"):
    text: str


class _ThinkingPiece(msgspec.Struct, forbid_unknown_fields=True, gc=False, tag_field="type", tag="thinking_delta"):
    thinking: str


class _ArgumentsPiece(msgspec.Struct, forbid_unknown_fields=True, gc=False, tag_field="type", tag="input_json_delta"):
    partial_json: str


class _UsualFrame(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """A frame that extends a block by text. Unknown members are forbidden, because msgspec would skip their values
    without validating them.
    """

    type: Literal["content_block_delta"]
    index: int
    delta: _TextPiece | _ThinkingPiece | _ArgumentsPiece


_usual_frames: Final = msgspec.json.Decoder(_UsualFrame)


class AnthropicFold:
    """Implements `server.providers.provider.Fold`."""

    def __init__(self) -> None:
        self._frames = FrameReader()
        self._blocks: dict[int, dict[str, Any]] = {}
        self._texts: dict[int, list[str]] = {}
        """By index, for each open block that usual frames extend: the pieces that follow its text or thinking, or the
        pieces of its arguments."""
        self._arguments: dict[int, list[str]] = {}
        self._ended: set[int] = set()
        self._closed: set[int] = set()
        """The indexes of blocks that accept no more deltas: those that ended, and calls whose arguments were cut
        off."""
        self._call_ids: set[str] = set()
        self._begun = False
        self._stopped = False
        self._first_index = 0
        """The index of the first block of the current call; earlier blocks belong to the calls before it."""
        self._response_id: str | None = None
        self._model_version: str | None = None
        self._stop_reason: StopReason | None = None
        self._stop_details: dict[str, Any] | None = None
        self._reported: dict[str, Any] = {}
        """The counts of the current call."""
        self._last_reported: dict[str, Any] | None = None
        """The counts of the last call that has reported any."""
        self._usage = Usage()
        self._usage_before = Usage()
        self._long_write_tokens = 0
        self._cache_miss_reason: str | None = None
        self._container: dict[str, Any] | None = None

    @property
    def answer(self) -> ProviderAnswer:
        for index in self._texts:
            self._join_texts(index)
        ordered = sorted(self._blocks)
        refused = self._stop_reason is StopReason.REFUSAL
        readable = (self._readable(index) for index in ordered)
        blocks = tuple(
            UnknownBlock(data=to_plain(block)) if refused and block.get("type") == "tool_use" else _block_from(block)
            for block in readable
        )
        kept = [self._blocks[index] for index in ordered if self._may_go_back(index)]
        sendable = not refused and any(block.get("type") not in _THINKING for block in kept)
        native = (
            Native(dialect=DIALECT, data=dumps_sendable({"role": "assistant", "content": kept})) if sendable else None
        )
        reported = self._last_reported
        return ProviderAnswer(
            blocks=blocks,
            native=native,
            stop_reason=self._stop_reason,
            usage=self._usage,
            usage_reported=None if reported is None else to_plain(reported),
            long_write_tokens=self._long_write_tokens,
            response_id=self._response_id,
            model_version=self._model_version,
            stop_details=self._stop_details,
            cache_miss_reason=self._cache_miss_reason,
            warnings=() if reported is None else find_count_faults(reported),
            container=self._container,
        )

    def feed(self, piece: bytes) -> Iterator[ProviderEvent]:
        for _, data in self._frames.feed(piece):
            event = self._take_usual(data)
            if event is not None:
                yield event
                continue
            try:
                document = loads_exact(data)
            except ValueError as error:
                raise ProviderMalformed from error
            if not isinstance(document, dict):
                raise ProviderMalformed
            yield from self._take(document)

    def finish(self) -> None:
        blocks = [block for index, block in self._blocks.items() if index >= self._first_index]
        if not self._stopped:
            begun = blocks or self._reported or self._frames.rest
            raise ProviderEndedEarly if begun else ProviderEmpty("The provider's stream was empty.")
        if self._stop_reason is None:
            raise ProviderEndedEarly("The provider's stream ended without a reason why the model stopped.")
        if (self._stop_details or {}).get("reason") not in _MAY_CUT_CALLS and any(
            block.get("type") == "tool_use" and index not in self._ended for index, block in self._blocks.items()
        ):
            raise ProviderCallMalformed
        for index in self._texts:
            self._join_texts(index)
        visible = any(block.get("type") not in _THINKING and block.get("text") != "" for block in blocks)
        if self._stop_reason is StopReason.END_TURN and not visible:
            raise ProviderEmpty

    def continue_answer(self) -> None:
        self._frames = FrameReader()
        self._first_index = max(self._blocks, default=-1) + 1
        self._usage_before = self._usage
        self._reported = {}
        self._begun = False
        self._stopped = False
        self._stop_reason = None
        self._stop_details = None

    def _take_usual(self, data: bytes) -> ProviderEvent | None:
        """Extend a block by the text of a usual frame, and return its event. Return None for any other frame."""
        if self._stopped:
            return None
        try:
            frame = _usual_frames.decode(data)
        except ValueError:
            return None
        delta, index = frame.delta, self._first_index + frame.index
        texts = self._texts.get(index)
        if texts is None:
            return None
        block = self._blocks[index]
        if type(delta) is _TextPiece and block["type"] == "text":
            texts.append(delta.text)
            return TextDelta(text=delta.text)
        if type(delta) is _ThinkingPiece and block["type"] == "thinking":
            texts.append(delta.thinking)
            return ThinkingDelta(text=delta.thinking)
        if type(delta) is _ArgumentsPiece and block["type"] == "tool_use" and delta.partial_json:
            texts.append(delta.partial_json)
            return ToolCallDelta(call_id=block["id"], arguments_json=delta.partial_json)
        return None

    def _join_texts(self, index: int) -> None:
        texts, block = self._texts.get(index), self._blocks[index]
        if texts and block["type"] != "tool_use":
            block[block["type"]] = "".join((block[block["type"]], *texts))
            texts.clear()

    def _take(self, event: dict[str, Any]) -> Iterator[ProviderEvent]:
        if self._stopped and event.get("type") != "ping":
            raise ProviderMalformed("The provider's stream goes on after its end.")
        match event.get("type"):
            case "message_start":
                yield from self._begin_message(_object(event, "message"))
            case "content_block_start":
                yield from self._begin_block(self._index(event), _object(event, "content_block"))
            case "content_block_delta":
                yield from self._grow_block(self._index(event), _object(event, "delta"))
            case "content_block_stop":
                yield from self._end_block(self._index(event))
            case "message_delta":
                yield from self._end_message(event)
            case "message_stop":
                self._stopped = True
            case "error":
                raise error_from_body(to_plain(event), None)
            case _:
                return

    def _index(self, event: dict[str, Any]) -> int:
        return self._first_index + _index(event)

    def _begin_message(self, message: dict[str, Any]) -> Iterator[ProviderEvent]:
        if self._begun:
            raise ProviderMalformed("The provider's stream begins twice.")
        self._begun = True
        self._response_id = read_response_id(message.get("id"))
        self._model_version = read_response_id(message.get("model"))
        self._note_diagnostics(message)
        self._note_container(message)
        yield from self._take_usage(message.get("usage"))

    def _begin_block(self, index: int, block: dict[str, Any]) -> Iterator[ProviderEvent]:
        if index in self._blocks:
            raise ProviderMalformed("Two blocks of the provider's answer have the same index.")
        _check_block(block)
        if block["type"] == "tool_use":
            check_call_id(block.get("id"), self._call_ids)
            self._call_ids.add(block["id"])
        self._blocks[index] = dict(block)
        if type(block.get(block["type"])) is str and block["type"] in {"text", "thinking"}:
            self._texts[index] = []
        if block["type"] == "tool_use":
            self._texts[index] = self._arguments[index] = []
            yield ToolCallBegin(call_id=block["id"], name=block["name"])
        elif block.get("type") == "text" and block.get("text"):
            yield TextDelta(text=_text(block, "text"))
        elif block.get("type") == "thinking" and block.get("thinking"):
            yield ThinkingDelta(text=_text(block, "thinking"))

    def _grow_block(self, index: int, delta: dict[str, Any]) -> Iterator[ProviderEvent]:
        block = self._blocks.get(index)
        if block is None:
            raise ProviderMalformed("A piece came for a block that had not begun.")
        if index in self._closed or not _may_grow(block, delta):
            raise ProviderMalformed("A piece came for a block that cannot take it.")
        check_sendable(delta)
        self._join_texts(index)
        match delta.get("type"):
            case "text_delta":
                yield TextDelta(text=_grow(block, "text", delta))
            case "thinking_delta":
                yield ThinkingDelta(text=_grow(block, "thinking", delta))
            case "signature_delta":
                _grow(block, "signature", delta)
            case "input_json_delta":
                piece = _text(delta, "partial_json")
                self._arguments.setdefault(index, []).append(piece)
                if block.get("type") == "tool_use" and piece:
                    yield ToolCallDelta(call_id=block["id"], arguments_json=piece)
            case "citations_delta":
                known = block.get("citations")
                block["citations"] = [*(known if isinstance(known, list) else []), delta.get("citation")]
            case "compaction_delta":
                # Its missing members are null, and must not be sent back as content.
                _grow_unknown(block, {name: value for name, value in delta.items() if value is not None})
            case _:
                _grow_unknown(block, delta)

    def _end_block(self, index: int) -> Iterator[ProviderEvent]:
        block = self._blocks.get(index)
        if block is None:
            raise ProviderMalformed("A block ended that had not begun.")
        if index in self._closed:
            raise ProviderMalformed("A block ended twice.")
        self._closed.add(index)
        self._join_texts(index)
        self._texts.pop(index, None)
        text = "".join(self._arguments.get(index, []))
        if text:
            try:
                given = loads_exact(text)
            except ValueError:
                given = None
            if not isinstance(given, dict):
                # The token limit cut the arguments off: the block is kept for readers and not sent back.
                return
            block["input"] = given
        _check_block(block)
        self._ended.add(index)
        if block.get("type") == "tool_use":
            yield ToolCallEnd(
                call_id=block["id"],
                name=block["name"],
                arguments=_arguments_of(block),
            )

    def _end_message(self, event: dict[str, Any]) -> Iterator[ProviderEvent]:
        delta = _object(event, "delta")
        check_members(delta, {"stop_reason": str})
        reason = delta.get("stop_reason")
        if isinstance(reason, str):
            calls = any(self._blocks[index].get("type") == "tool_use" for index in self._ended)
            stop_reason = STOP_REASONS.get(reason, StopReason.ERROR)
            given = delta.get("stop_details")
            details = {"reason": clean_message(reason), **clean_details(given if isinstance(given, dict) else {})}
            if type(delta.get("stop_sequence")) is str:
                details["stop_sequence"] = clean_message(delta["stop_sequence"])
            self._stop_reason = StopReason.TOOL_USE if calls and stop_reason is not StopReason.REFUSAL else stop_reason
            self._stop_details = details
        self._note_diagnostics(event)
        self._note_container(delta)
        yield from self._take_usage(event.get("usage"))

    def _take_usage(self, reported: Any) -> Iterator[ProviderEvent]:
        """Merge usage: later counts replace earlier ones, missing ones stay."""
        if not isinstance(reported, dict):
            return
        self._reported |= {name: value for name, value in reported.items() if value is not None}
        self._last_reported = self._reported
        usage, self._long_write_tokens = usage_from(self._reported)
        self._usage = add_usages([self._usage_before, usage])
        yield UsageReported(usage=self._usage)

    def _note_diagnostics(self, holder: dict[str, Any]) -> None:
        diagnostics = holder.get("diagnostics")
        reason = diagnostics.get("cache_miss_reason") if isinstance(diagnostics, dict) else None
        kind = reason.get("type") if isinstance(reason, dict) else None
        if type(kind) is str and len(kind) <= _MAX_REASON_LENGTH:
            self._cache_miss_reason = kind

    def _note_container(self, holder: dict[str, Any]) -> None:
        container = holder.get("container")
        given = container if isinstance(container, dict) else {}
        container_id, expires_at = read_response_id(given.get("id")), given.get("expires_at")
        if container_id is not None:
            is_time = type(expires_at) is str and _TIME.fullmatch(expires_at)
            self._container = {"id": container_id, "expires_at": expires_at if is_time else None}

    def _readable(self, index: int) -> dict[str, Any]:
        """Return the block. Incomplete arguments are returned as text, so that the block is not taken for a call."""
        block = self._blocks[index]
        if index in self._ended or block.get("type") != "tool_use":
            return block
        return block | {_PARTIAL_JSON: "".join(self._arguments.get(index, []))}

    def _may_go_back(self, index: int) -> bool:
        block = self._blocks[index]
        match block.get("type"):
            case "text":
                # Claude rejects blank text, even its own.
                return bool(str(block.get("text", "")).strip())
            case "thinking":
                return index in self._ended and bool(block.get("signature"))
            case _:
                return index in self._ended


def fold_body(body: bytes) -> ProviderAnswer:
    """Fold stored bytes into the answer, up to the first error."""
    fold = AnthropicFold()
    try:
        for _ in fold.feed(body):
            pass
    except ProviderFailed:
        return fold.answer
    return fold.answer


def usage_from(reported: dict[str, Any]) -> tuple[Usage, int]:
    """Convert Claude's counts, and count the cache tokens with the long lifetime. Its output includes thinking."""
    details = reported.get("output_tokens_details")
    thinking = read_count(details.get("thinking_tokens")) if isinstance(details, dict) else 0
    creation = reported.get("cache_creation")
    long_writes = read_count(creation.get("ephemeral_1h_input_tokens")) if isinstance(creation, dict) else 0
    usage = Usage(
        fresh_input_tokens=read_count(reported.get("input_tokens")),
        cache_read_tokens=read_count(reported.get("cache_read_input_tokens")),
        cache_write_tokens=read_count(reported.get("cache_creation_input_tokens")),
        output_tokens=max(0, read_count(reported.get("output_tokens")) - thinking),
        reasoning_tokens=thinking,
    )
    return usage, min(long_writes, usage.cache_write_tokens)


def _check_block(block: dict[str, Any]) -> None:
    """Raise `ProviderMalformed` for a block that Claude would reject when it is sent back, or that is unreadable."""
    kind = block.get("type")
    if type(kind) is not str:
        raise ProviderMalformed("A block of the provider's answer has no type.")
    check_members(block, _MEMBERS.get(kind, {}))
    check_sendable(block)
    if kind == "tool_use":
        if not _CALL_ID.fullmatch(block.get("id") or ""):
            raise ProviderMalformed("The provider's answer has a tool call whose id cannot be one.")
        check_call_name(block.get("name"))


def _may_grow(block: dict[str, Any], delta: dict[str, Any]) -> bool:
    """Whether the delta fits the type of the block."""
    kind, of = delta.get("type"), block["type"]
    return type(kind) is str and (of not in _MEMBERS or bool(_DELTA_OF.get(kind, of) == of))


def _text(delta: dict[str, Any], name: str) -> str:
    piece = delta.get(name)
    if type(piece) is not str:
        raise ProviderMalformed
    return piece


def _grow(block: dict[str, Any], name: str, delta: dict[str, Any]) -> str:
    """Append the text of a delta to a member of the block, and return that text."""
    piece = _text(delta, name)
    block[name] = _text(block, name) + piece if block.get(name) else piece
    return piece


def _arguments_of(block: dict[str, Any]) -> dict[str, Any]:
    given = block.get("input")
    return to_plain(given) if isinstance(given, dict) else {}


def _grow_unknown(block: dict[str, Any], delta: dict[str, Any]) -> None:
    """Apply a delta of an unknown type: texts and lists grow, another value is replaced by one of the same type.

    A text for a member that is an object is ignored, because its meaning is unknown.
    """
    for name, value in delta.items():
        known = block.get(name)
        if name == "type":
            continue
        if type(known) is str and type(value) is str:
            block[name] = known + value
        elif isinstance(known, list) and isinstance(value, list):
            block[name] = [*known, *value]
        elif known is None or type(known) is type(value):
            block[name] = value


def _object(event: dict[str, Any], name: str) -> dict[str, Any]:
    found = event.get(name)
    if not isinstance(found, dict):
        raise ProviderMalformed
    return found


def _index(event: dict[str, Any]) -> int:
    try:
        return int(event["index"])
    except (KeyError, TypeError, ValueError) as error:
        raise ProviderMalformed from error


def _block_from(block: dict[str, Any]) -> Block:
    match block.get("type"):
        case "text":
            return TextBlock(text=str(block.get("text", "")))
        case "thinking":
            mark = mark_signature(block.get("signature"))
            return ThinkingBlock(text=str(block.get("thinking", "")), signature=mark)
        case "redacted_thinking":
            return ThinkingBlock(text="", redacted=True, signature=mark_signature(block.get("data")))
        case "tool_use" if _PARTIAL_JSON not in block:
            toolset = block.get("toolset_name")
            return ToolCallBlock(
                id=block["id"],
                name=block["name"],
                arguments=_arguments_of(block),
                toolset_name=toolset if type(toolset) is str else None,
            )
        case _:
            return UnknownBlock(data=to_plain(block))


def mark_signature(text: Any) -> SignatureMark | None:
    """Return the mark of a signature."""
    if not isinstance(text, str) or not text:
        return None
    data = text.encode("utf-8", "surrogatepass")
    return SignatureMark(length=len(data), fingerprint=hashlib.sha256(data).hexdigest()[:16])
