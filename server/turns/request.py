"""The input of a turn, as a client sends it."""

from collections.abc import Mapping
from dataclasses import dataclass

from server.conversation.block import Blob, Block, JsonValue
from server.conversation.conversation import OnBusy
from server.conversation.turn import TurnKind


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """New input for a conversation. It is validated as far as possible without the conversation."""

    conversation_id: str
    kind: TurnKind
    """`user_task` or `tool_response`."""
    blocks: tuple[Block, ...]
    body_hash: bytes
    """SHA-256 of the meaning of the request. It distinguishes a retry from a reused key."""
    blobs: tuple[Blob, ...] = ()
    answers: tuple[str, ...] = ()
    """For tool responses: the ids of the calls that are answered."""
    on_busy: OnBusy = OnBusy.REJECT
    abandons_calls: bool = False
    """For a user task: pending calls are abandoned."""
    language: str | None = None
    args: Mapping[str, JsonValue] | None = None
    idempotency_key: str | None = None
    announces_retry: bool = False
    expected_revision: int | None = None
