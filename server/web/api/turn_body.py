"""The body of a new turn, and its translation into a `TurnRequest`."""

import asyncio
import base64
import binascii
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Final, Literal, Self

from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator

from server.conversation.block import Blob, Block, ImageBlock, JsonValue, TextBlock, ToolResultBlock, block_to_json
from server.conversation.conversation import OnBusy
from server.conversation.errors import HistoryRuleBroken
from server.conversation.image import IMAGE_TYPES, find_image_header
from server.conversation.turn import TurnKind
from server.turns.request import TurnRequest
from server.web.body import MAX_BIGINT, Body, JsonObject, TextLimit, ToolOutput
from server.web.headers import TurnHeaders, read_expected_revision
from server.web.validation import refuse

_TEXT: Final = TextLimit(1_000_000, blank=False)


class InputText(Body):
    """Text of the user."""

    type: Literal["text"]
    text: Annotated[str, _TEXT] = Field(examples=["What is in this picture?"])


class InputImage(Body):
    """An image: PNG, JPEG, WebP or GIF."""

    type: Literal["image"]
    data: str = Field(description="The bytes in base64, not a `data:` URL.", min_length=1)
    media_type: Literal["image/png", "image/jpeg", "image/webp", "image/gif"] | None = Field(
        default=None, description="The expected type; refused if the bytes are of another type."
    )


class InputToolResult(Body):
    """The result of one tool call."""

    tool_call_id: str = Field(min_length=1, max_length=256, examples=["call_1f0c"])
    output: ToolOutput = Field(description="Any JSON.", examples=[{"celsius": 4}])
    is_error: bool = Field(default=False, description="The tool failed; `output` describes the failure.")


def _form_of(value: object) -> str:
    """Return the form of the input, so that a fault in a part is not reported as a fault in a text."""
    return "parts" if isinstance(value, list) else "text"


class TurnInput(Body):
    """New input of a conversation: a task of the user, or the results of all pending tool calls."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [{"required": ["input"]}, {"required": ["tool_results"]}],
            "examples": [
                {"input": "What is the weather in Oslo?"},
                {"input": [{"type": "text", "text": "And in Bergen?"}], "on_busy": "queue", "language": "en"},
                {"tool_results": [{"tool_call_id": "call_1f0c", "output": {"celsius": 4}}]},
            ],
        }
    )

    input: Annotated[
        Annotated[str, _TEXT, Tag("text")]
        | Annotated[
            list[Annotated[InputText | InputImage, Field(discriminator="type")]],
            Field(min_length=1, max_length=64),
            Tag("parts"),
        ],
        Discriminator(_form_of),
    ] = Field(default="", description="A task of the user: a text, or 1 to 64 parts.")
    tool_results: Annotated[list[InputToolResult], Field(min_length=1, max_length=128)] = Field(
        default_factory=list, description="The results of all pending tool calls, in any order."
    )
    on_busy: Literal["reject", "queue", "supersede"] = Field(
        default="reject", description="What to do while another turn is running: refuse, wait for it, or cancel it."
    )
    expected_revision: int | None = Field(
        default=None, ge=0, le=MAX_BIGINT, description="Refuse unless the conversation is at this revision."
    )
    args: JsonObject | None = Field(default=None, description="Prompt arguments for this turn only.")
    language: str | None = Field(default=None, max_length=64, description="The language of the user.")
    abandon_pending_calls: bool = Field(
        default=False,
        description="With `input`: abandon pending tool calls. By default they have to be answered first.",
    )

    @model_validator(mode="after")
    def _check_members(self) -> Self:
        if bool(self.input) == bool(self.tool_results):
            message = "Expected exactly one of `input` and `tool_results`"
            raise ValueError(message)
        if self.tool_results and self.abandon_pending_calls:
            message = "Expected `abandon_pending_calls` with `input` only"
            raise ValueError(message)
        return self


async def read_turn_request(
    conversation_id: str, body: TurnInput, headers: TurnHeaders, *, image_limit_bytes: int
) -> TurnRequest:
    """Build the request. Raises `ValidationFailed` for an invalid image, `HistoryRuleBroken` for a repeated result."""
    repeated = [call_id for call_id, count in Counter(r.tool_call_id for r in body.tool_results).items() if count > 1]
    if repeated:
        raise HistoryRuleBroken(
            "There is more than one result for a tool call.",
            hint="Send exactly one result for each pending tool call.",
            rule="one_response_per_call",
            repeated_ids=repeated,
        )
    blobs: dict[str, Blob] = {}
    if body.tool_results:
        kind, blocks = TurnKind.TOOL_RESPONSE, _result_blocks(body.tool_results)
    elif isinstance(body.input, str):
        kind, blocks = TurnKind.USER_TASK, (TextBlock(text=body.input),)
    else:
        kind = TurnKind.USER_TASK
        # In a thread: decoding and hashing megabytes would block every other request of this process.
        blocks = await asyncio.to_thread(_part_blocks, body.input, blobs, image_limit_bytes)
    return TurnRequest(
        conversation_id=conversation_id,
        kind=kind,
        blocks=blocks,
        body_hash=hash_request(blocks, body.args, body.language, abandons_calls=body.abandon_pending_calls),
        blobs=tuple(blobs.values()),
        answers=tuple(result.tool_call_id for result in body.tool_results),
        on_busy=OnBusy(body.on_busy),
        abandons_calls=body.abandon_pending_calls,
        language=body.language,
        args=body.args,
        idempotency_key=headers.idempotency_key,
        announces_retry=headers.announces_retry,
        expected_revision=read_expected_revision(headers.if_match, body.expected_revision),
    )


def hash_request(
    blocks: Sequence[Block], args: Mapping[str, JsonValue] | None, language: str | None, *, abandons_calls: bool
) -> bytes:
    """Return a SHA-256 that identifies equal requests, for idempotency.

    `on_busy` and `expected_revision` are excluded, because a client may change them when it retries. The order of
    members does not matter, and a text is equal to a single text part.
    """
    content = [[block_to_json(block) for block in blocks], args or {}, language, abandons_calls]
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).digest()


def _result_blocks(results: Sequence[InputToolResult]) -> tuple[Block, ...]:
    return tuple(
        ToolResultBlock(tool_call_id=result.tool_call_id, output=result.output, is_error=result.is_error)
        for result in results
    )


def _part_blocks(
    parts: Sequence[InputText | InputImage], blobs: dict[str, Blob], image_limit_bytes: int
) -> tuple[Block, ...]:
    blocks: list[Block] = []
    for index, part in enumerate(parts):
        if isinstance(part, InputText):
            blocks.append(TextBlock(text=part.text))
            continue
        blob = read_image(part, f"input.{index}", image_limit_bytes)
        blobs[blob.sha256.hex()] = blob
        blocks.append(ImageBlock(media_type=blob.media_type, sha256=blob.sha256.hex(), size_bytes=len(blob.data)))
    return tuple(blocks)


def read_image(part: InputImage, path: str, limit_bytes: int) -> Blob:
    """Decode an image and detect its type, which has to be the declared one. Raises `ValidationFailed`."""
    if len(part.data) > (limit_bytes + 2) // 3 * 4:
        raise refuse(f"{path}.data", f"Expected at most {limit_bytes} bytes")
    try:
        data = base64.b64decode(part.data.encode("ascii"), validate=True)
    except (UnicodeEncodeError, binascii.Error):
        raise refuse(f"{path}.data", "Expected base64 with padding and no other characters") from None
    if len(data) > limit_bytes:
        raise refuse(f"{path}.data", f"Expected at most {limit_bytes} bytes")
    header = find_image_header(data)
    if header is None:
        raise refuse(f"{path}.data", f"Expected an image: {', '.join(IMAGE_TYPES)}")
    if part.media_type not in {None, header.media_type}:
        raise refuse(f"{path}.media_type", f"Expected {header.media_type}, the type of the bytes")
    return Blob(sha256=hashlib.sha256(data).digest(), media_type=header.media_type, data=data)
