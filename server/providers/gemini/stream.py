"""The fold of Gemini's stream.

A chunk is a whole response object with some more parts. All parts are sent back to Gemini in their order and as they
came, except that neighbouring plain texts without a signature are joined. No signature moves. An answer that has only
thinking, or that ended as a refusal, is not sent back; the calls of a refusal are not to be answered either.

Nearly all chunks only extend the last plain text. These usual chunks are decoded by msgspec into `_UsualChunk`, and
their texts are joined when the answer is read. Any other chunk, and any chunk that msgspec rejects, is decoded with
exact numbers and validated member by member. Both ways give the same events and the same answer.
"""

import base64
import hashlib
from collections.abc import Iterator
from typing import Any, Final, TypeAlias

import msgspec

from server.conversation.block import Block, SignatureMark, TextBlock, ThinkingBlock, ToolCallBlock, UnknownBlock
from server.conversation.errors import (
    Internal,
    ProviderCallMalformed,
    ProviderEmpty,
    ProviderEndedEarly,
    ProviderFailed,
    ProviderMalformed,
)
from server.conversation.event import ProviderEvent, TextDelta, ThinkingDelta, ToolCallBegin, ToolCallEnd, UsageReported
from server.conversation.exact_json import dumps_sendable, loads_exact, to_plain
from server.conversation.turn import Native, StopReason
from server.conversation.usage import Usage, find_count_faults, read_count
from server.providers.gemini.errors import error_from_body
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

DIALECT: Final = "gemini"

STOP_REASONS: Final = {
    "STOP": StopReason.END_TURN,
    "MAX_TOKENS": StopReason.LENGTH,
    "CONTINUATION": StopReason.PAUSED,
    "SAFETY": StopReason.REFUSAL,
    "RECITATION": StopReason.REFUSAL,
    "LANGUAGE": StopReason.REFUSAL,
    "BLOCKLIST": StopReason.REFUSAL,
    "PROHIBITED_CONTENT": StopReason.REFUSAL,
    "SPII": StopReason.REFUSAL,
    "IMAGE_SAFETY": StopReason.REFUSAL,
    "IMAGE_PROHIBITED_CONTENT": StopReason.REFUSAL,
    "IMAGE_RECITATION": StopReason.REFUSAL,
    "FINISH_REASON_UNSPECIFIED": StopReason.ERROR,
    "OTHER": StopReason.ERROR,
    "MALFORMED_FUNCTION_CALL": StopReason.ERROR,
    "UNEXPECTED_TOOL_CALL": StopReason.ERROR,
    "TOO_MANY_TOOL_CALLS": StopReason.ERROR,
    "NO_IMAGE": StopReason.ERROR,
    "IMAGE_OTHER": StopReason.ERROR,
    "MALFORMED_RESPONSE": StopReason.ERROR,
}
"""All documented finish reasons. Any other one is an error stop, with its name in the details."""

_MALFORMED_CALL: Final = "MALFORMED_FUNCTION_CALL"
_CHUNK: Final = {"candidates": list, "usageMetadata": dict, "promptFeedback": dict}
_FEEDBACK: Final = {"blockReason": str}
_CANDIDATE: Final = {"content": dict, "finishReason": str}
_CONTENT: Final = {"parts": list}
_PART: Final = {
    "text": str,
    "thought": bool,
    "thoughtSignature": str,
    "functionCall": dict,
    "inlineData": dict,
    "fileData": dict,
    "executableCode": dict,
    "codeExecutionResult": dict,
}
_INLINE: Final = {"mimeType": str, "data": str}
_CALL: Final = {"id": str, "name": str, "args": dict}
"""The types of the members that are read here. Gemini would reject a part with another type when it is sent back."""
_Count: TypeAlias = int | str
_Counts: TypeAlias = dict[str, _Count | list[dict[str, _Count]]]


class _PlainText(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    text: str
    thought: bool | msgspec.UnsetType = msgspec.UNSET


class _UsualContent(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    parts: list[_PlainText]
    role: str = ""


class _UsualCandidate(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    content: _UsualContent
    index: int = 0


class _UsualChunk(msgspec.Struct, forbid_unknown_fields=True, gc=False, rename="camel"):
    """A chunk that has only plain texts and counts. Unknown members are forbidden, because msgspec would skip their
    values without validating them. The types bound the nesting.
    """

    candidates: list[_UsualCandidate]
    usage_metadata: _Counts | msgspec.UnsetType = msgspec.UNSET
    model_version: str | msgspec.UnsetType = msgspec.UNSET
    response_id: str | msgspec.UnsetType = msgspec.UNSET
    create_time: str = ""


_usual_chunks: Final = msgspec.json.Decoder(_UsualChunk)
_NOT_PLAIN: Final = object()
"""The kind of a part that no text is joined to, see `_kind_of`."""


class GeminiFold:
    """Implements `server.providers.provider.Fold`."""

    def __init__(self) -> None:
        self._frames = FrameReader()
        self._parts: list[dict[str, Any]] = []
        self._last_kind: object = _NOT_PLAIN
        """The kind of the last part, see `_kind_of`."""
        self._last_texts: list[str] = []
        """Texts of usual chunks that follow the text of the last part."""
        self._made_ids: dict[int, str] = {}
        """The ids that were made for calls without one, by index. They are not sent back."""
        self._call_ids: set[str] = set()
        self._response_id: str | None = None
        self._model_version: str | None = None
        self._stop_reason: StopReason | None = None
        self._stop_details: dict[str, Any] | None = None
        self._reported: dict[str, Any] | bytes | None = None
        """The last counts, or the usual chunk that has them."""
        self._finish_reason: str | None = None
        self._read = hashlib.sha256()

    @property
    def answer(self) -> ProviderAnswer:
        self._join_texts()
        refused = self._stop_reason is StopReason.REFUSAL
        blocks = tuple(
            UnknownBlock(data=to_plain(part))
            if refused and "functionCall" in part
            else _block_from(part, self._made_ids.get(index))
            for index, part in enumerate(self._parts)
        )
        kept = self._parts if self._finish_reason is not None else _without_open_thinking(self._parts)
        sendable = not refused and any(map(_is_visible, kept))
        reported = loads_exact(self._reported)["usageMetadata"] if isinstance(self._reported, bytes) else self._reported
        return ProviderAnswer(
            blocks=blocks,
            native=Native(dialect=DIALECT, data=dumps_sendable({"role": "model", "parts": kept})) if sendable else None,
            stop_reason=self._stop_reason,
            usage=Usage() if reported is None else usage_from(reported),
            usage_reported=None if reported is None else to_plain(reported),
            response_id=self._response_id,
            model_version=self._model_version,
            stop_details=self._stop_details,
            warnings=() if reported is None else find_count_faults(reported),
        )

    def feed(self, piece: bytes) -> Iterator[ProviderEvent]:
        for _, data in self._frames.feed(piece):
            self._read.update(data)
            texts = self._take_usual(data)
            if texts is None:
                self._join_texts()
                yield from self._take(_decode(data))
                continue
            for text in texts:
                if text:
                    yield ThinkingDelta(text=text) if self._last_kind is True else TextDelta(text=text)

    def finish(self) -> None:
        if self._frames.rest:
            raise ProviderEndedEarly
        if self._finish_reason is None:
            raise ProviderEndedEarly if self._parts else ProviderEmpty("The provider's stream was empty.")
        if self._finish_reason == _MALFORMED_CALL and self._stop_reason is StopReason.ERROR:
            said = (self._stop_details or {}).get("finishMessage")
            facts = {"provider_message": said} if isinstance(said, str) and said else {}
            raise ProviderCallMalformed(**facts, provider_status=self._finish_reason)
        self._join_texts()
        if self._stop_reason is StopReason.END_TURN and not any(map(_is_visible, self._parts)):
            raise ProviderEmpty

    def continue_answer(self) -> None:
        raise Internal("Answers of Gemini cannot be continued by another call.")

    def _take_usual(self, data: bytes) -> list[str] | None:
        """Extend the last part by the texts of a usual chunk, and return them. Return None for any other chunk."""
        if self._last_kind is _NOT_PLAIN or self._finish_reason is not None:
            return None
        try:
            chunk = _usual_chunks.decode(data)
        except ValueError:
            return None
        if (
            len(chunk.candidates) != 1
            or (chunk.response_id is not msgspec.UNSET and chunk.response_id != self._response_id)
            or (chunk.model_version is not msgspec.UNSET and chunk.model_version != self._model_version)
        ):
            return None
        parts = chunk.candidates[0].content.parts
        for part in parts:
            if part.thought is not self._last_kind:
                return None
        if chunk.usage_metadata is not msgspec.UNSET:
            self._reported = data
        texts = [part.text for part in parts]
        self._last_texts += texts
        return texts

    def _join_texts(self) -> None:
        if self._last_texts:
            last = self._parts[-1]
            last["text"] = "".join((last["text"], *self._last_texts))
            self._last_texts.clear()

    def _take(self, chunk: dict[str, Any]) -> Iterator[ProviderEvent]:
        if "error" in chunk:
            raise error_from_body(to_plain(chunk), None)
        self._response_id = read_response_id(chunk.get("responseId")) or self._response_id
        self._model_version = read_response_id(chunk.get("modelVersion")) or self._model_version
        reported = chunk.get("usageMetadata")
        if isinstance(reported, dict):
            # Every chunk repeats the counts so far; only the last ones are reported.
            self._reported = reported
        feedback = chunk.get("promptFeedback")
        if isinstance(feedback, dict) and feedback.get("blockReason"):
            check_members(feedback, _FEEDBACK)
            self._stop(feedback["blockReason"], StopReason.REFUSAL, feedback)
        candidates = chunk.get("candidates")
        for candidate in candidates[:1] if isinstance(candidates, list) else []:
            yield from self._take_candidate(candidate)
        if self._finish_reason is not None and isinstance(reported, dict):
            yield UsageReported(usage=usage_from(reported))

    def _take_candidate(self, candidate: Any) -> Iterator[ProviderEvent]:
        if not isinstance(candidate, dict):
            raise ProviderMalformed
        check_members(candidate, _CANDIDATE)
        content = candidate.get("content") or {}
        check_members(content, _CONTENT)
        parts = content.get("parts")
        for part in parts if isinstance(parts, list) else []:
            if not isinstance(part, dict):
                raise ProviderMalformed
            check_members(part, _PART)
            check_sendable(part)
            _check_inline(part.get("inlineData") or {})
            yield from self._take_part(part)
        reason = candidate.get("finishReason")
        if isinstance(reason, str):
            details: dict[str, Any] = {
                name: candidate[name] for name in ("finishMessage", "safetyRatings") if name in candidate
            }
            self._stop(reason, STOP_REASONS.get(reason, StopReason.ERROR), details)

    def _take_part(self, part: dict[str, Any]) -> Iterator[ProviderEvent]:
        call = part.get("functionCall")
        if isinstance(call, dict):
            call_id = call.get("id") or self._make_id()
            self._check_call(call, call_id)
            if not call.get("id"):
                self._made_ids[len(self._parts)] = call_id
            self._append(part)
            name = call["name"]
            yield ToolCallBegin(call_id=call_id, name=name)
            yield ToolCallEnd(call_id=call_id, name=name, arguments=to_plain(call.get("args") or {}))
            return
        self._append(part)
        text = part.get("text")
        if isinstance(text, str) and text:
            yield ThinkingDelta(text=text) if part.get("thought") else TextDelta(text=text)

    def _check_call(self, call: dict[str, Any], call_id: Any) -> None:
        check_members(call, _CALL)
        check_call_name(call.get("name"))
        check_call_id(call_id, self._call_ids)
        self._call_ids.add(call_id)

    def _make_id(self) -> str:
        """Make an id for a call without one. It is a hash of the bytes so far: the same bytes give the same id."""
        place = self._read.copy()
        place.update(str(len(self._parts)).encode())
        return f"call_{place.hexdigest()[:32]}"

    def _append(self, part: dict[str, Any]) -> None:
        kind = _kind_of(part)
        if kind is not _NOT_PLAIN and kind is self._last_kind:
            self._parts[-1]["text"] += part["text"]
        else:
            self._parts.append(part)
            self._last_kind = kind

    def _stop(self, reason: str, stop_reason: StopReason, details: dict[str, Any]) -> None:
        self._finish_reason = reason
        has_call = bool(self._call_ids)
        self._stop_reason = StopReason.TOOL_USE if has_call and stop_reason is not StopReason.REFUSAL else stop_reason
        self._stop_details = {"reason": clean_message(reason), **clean_details(details)}


def _decode(data: bytes) -> dict[str, Any]:
    try:
        chunk = loads_exact(data)
    except ValueError as error:
        raise ProviderMalformed from error
    if not isinstance(chunk, dict):
        raise ProviderMalformed
    check_members(chunk, _CHUNK)
    return chunk


def _kind_of(part: dict[str, Any]) -> object:
    """Return the `thought` of a plain text, or `UNSET` if it has none. Neighbouring texts of one kind are joined.

    `_NOT_PLAIN` for a part that has any other member.
    """
    is_plain = type(part.get("text")) is str and part.keys() <= {"text", "thought"}
    return part.get("thought", msgspec.UNSET) if is_plain else _NOT_PLAIN


def _check_inline(inline: dict[str, Any]) -> None:
    """Raise `ProviderMalformed` for an image or a document that Gemini would reject when it is sent back."""
    check_members(inline, _INLINE)
    data = (inline.get("data") or "").rstrip("=").replace("-", "+").replace("_", "/")
    try:
        base64.b64decode(data + "=" * (-len(data) % 4), validate=True)
    except ValueError as error:
        raise ProviderMalformed("The provider's answer has inline data that is not base64.") from error


def fold_body(body: bytes) -> ProviderAnswer:
    """Fold stored bytes into the answer, up to the first error."""
    fold = GeminiFold()
    try:
        for _ in fold.feed(body):
            pass
    except ProviderFailed:
        return fold.answer
    return fold.answer


def _is_visible(part: dict[str, Any]) -> bool:
    return "text" not in part or bool(part["text"] and not part.get("thought"))


def _without_open_thinking(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the parts without thinking after the last signature."""
    signed = max((place for place, part in enumerate(parts) if part.get("thoughtSignature")), default=-1)
    return [part for place, part in enumerate(parts) if place <= signed or not part.get("thought")]


def usage_from(reported: dict[str, Any]) -> Usage:
    """Convert Gemini's counts, as `loads_exact` returns them.

    Its prompt count includes cached tokens; its candidates count does not include thoughts.
    """

    def count(name: str) -> int:
        return read_count(reported.get(name))

    cached = count("cachedContentTokenCount")
    return Usage(
        fresh_input_tokens=read_count(max(0, count("promptTokenCount") - cached) + count("toolUsePromptTokenCount")),
        cache_read_tokens=cached,
        output_tokens=count("candidatesTokenCount"),
        reasoning_tokens=count("thoughtsTokenCount"),
    )


def _block_from(part: dict[str, Any], made_id: str | None) -> Block:
    signature = mark_signature(part.get("thoughtSignature"))
    call = part.get("functionCall")
    if isinstance(call, dict):
        return ToolCallBlock(
            id=made_id or call["id"],
            name=call["name"],
            arguments=to_plain(call.get("args") or {}),
            signature=signature,
            is_id_ours=made_id is not None,
        )
    if isinstance(part.get("text"), str):
        if part.get("thought"):
            return ThinkingBlock(text=part["text"], signature=signature)
        return TextBlock(text=part["text"], signature=signature)
    return UnknownBlock(data=to_plain(part))


def mark_signature(text: Any) -> SignatureMark | None:
    """Return the mark of a signature. It depends on the bytes, not on the alphabet or padding of the base64."""
    if not isinstance(text, str) or not text:
        return None
    data = decode_signature(text)
    return SignatureMark(length=len(data), fingerprint=hashlib.sha256(data).hexdigest()[:16])


def decode_signature(text: str) -> bytes:
    """Return the bytes of a signature; text that is not base64 is used as it is."""
    bare = text.rstrip("=").replace("-", "+").replace("_", "/")
    try:
        return base64.b64decode(bare + "=" * (-len(bare) % 4), validate=True)
    except ValueError:
        return text.encode("utf-8", "surrogatepass")
