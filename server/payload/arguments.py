"""Prompt arguments: the values that templates can use.

    system          the clock, in UTC                                       dynamic layer only
    message         the text and language of the newest user task           dynamic layer only
    assistant       name, id, language, description
    conversation    id, identifier, source, direction, created_date; updated_date and duration in the dynamic layer only
    session         mode; empty if the conversation has none
    args            the conversation's args; in the dynamic layer overridden by those of the turn
    <any name>      every arg, and every variable of the assistant that no arg overrides

The names of the namespaces are reserved: an arg or a variable with such a name is available only in `args`. The result
shares no mutable value with its sources.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Final

from server.conversation.assistant import Assistant
from server.conversation.block import JsonValue, TextBlock
from server.conversation.conversation import Conversation
from server.conversation.store import BufferedTurn, PayloadSource
from server.conversation.turn import TurnKind

NAMESPACES: Final = frozenset({"system", "assistant", "conversation", "session", "message", "args"})
_WEEKDAYS: Final = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_UNIX_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def collect_arguments(source: PayloadSource, now: datetime) -> dict[str, JsonValue]:
    """Build the arguments of the dynamic layer; `now` is the time in it. In a tool loop the message is the user task
    that began it.
    """
    trigger = source.buffered[-1]
    task = _find_newest_task(source.buffered)
    args = {**((task.args if task else None) or {}), **(trigger.args or {})}
    return build_arguments(
        assistant=source.assistant,
        conversation=source.conversation,
        now=now,
        message_text=latest_user_text(source.buffered),
        message_language=choose_language(source.buffered, source.conversation.metadata),
        turn_args=args,
    )


def build_arguments(
    *,
    assistant: Assistant,
    conversation: Conversation,
    now: datetime,
    message_text: str,
    message_language: str,
    turn_args: Mapping[str, JsonValue] | None,
) -> dict[str, JsonValue]:
    """Build the arguments of the dynamic layer. The turn's args override the conversation's, and those override
    variables.
    """
    values = _build_namespaces(assistant, conversation, {**conversation.args, **(turn_args or {})})
    values["conversation"] |= {
        "updated_date": format_time(conversation.updated_at),
        # Clocks of two machines may disagree, and the time in the dynamic block may be an earlier one.
        "duration": max(0, (now - conversation.created_at) // timedelta(seconds=1)),
    }
    return values | {
        "system": _system(now.astimezone(UTC)),
        "message": {"text": message_text, "language": message_language},
    }


def build_static_arguments(*, assistant: Assistant, conversation: Conversation) -> dict[str, JsonValue]:
    """Build the arguments of the static layer, without those that depend on the clock, the message or the turn."""
    return _build_namespaces(assistant, conversation, conversation.args)


def hash_arguments(args: Mapping[str, JsonValue]) -> bytes:
    """Hash the args, independent of the order of their keys. Args that could render differently have
    different hashes.
    """
    text = json.dumps(clone(args), ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def format_time(moment: datetime) -> str:
    """Return the time in UTC, in seconds, as `system.current_datetime` has it."""
    return moment.astimezone(UTC).replace(tzinfo=None).isoformat(timespec="seconds") + "Z"


def choose_language(turns: Sequence[BufferedTurn], metadata: Mapping[str, JsonValue]) -> str:
    """Return the language of the newest user task, otherwise the client's, otherwise an empty text.

    The client's language is in the metadata, as `client.language` or as `language` in `client`.
    """
    task = _find_newest_task(turns)
    client = metadata.get("client")
    nested = client.get("language") if isinstance(client, Mapping) else None
    found = (task.language if task is not None else None, metadata.get("client.language"), nested)
    return next((language for language in found if isinstance(language, str) and language), "")


def latest_user_text(turns: Sequence[BufferedTurn]) -> str:
    """Return the text of the newest user task, without images, also after tool responses."""
    task = _find_newest_task(turns)
    blocks = (task.blocks if task is not None else None) or ()
    return "\n".join(block.text for block in blocks if isinstance(block, TextBlock))


def clone(value: JsonValue) -> JsonValue:
    """Copy a value deeply, as plain dicts and lists."""
    match value:
        case dict() | Mapping():
            return {key: clone(inner) for key, inner in value.items()}
        case list() | tuple():
            return [clone(inner) for inner in value]
        case _:
            return value


def _find_newest_task(turns: Sequence[BufferedTurn]) -> BufferedTurn | None:
    return next((turn for turn in reversed(turns) if turn.kind is TurnKind.USER_TASK), None)


def _build_namespaces(
    assistant: Assistant, conversation: Conversation, args: Mapping[str, JsonValue]
) -> dict[str, JsonValue]:
    root = {name: clone(value) for name, value in {**assistant.definition.variables, **args}.items()}
    return {
        **{name: value for name, value in root.items() if name not in NAMESPACES},
        "assistant": {
            "name": assistant.definition.name,
            "id": assistant.id,
            "language": assistant.definition.language,
            "description": assistant.definition.description,
        },
        "conversation": {
            "id": conversation.id,
            "identifier": conversation.identifier or "",
            "source": conversation.source or "",
            "direction": conversation.direction or "",
            "created_date": format_time(conversation.created_at),
        },
        # Without a mode, `session.mode` is undefined, which renders as an empty text.
        "session": {"mode": conversation.mode} if conversation.mode else {},
        "args": clone(args),
    }


def _system(now: datetime) -> dict[str, JsonValue]:
    since = now - _UNIX_EPOCH
    return {
        "current_date": now.date().isoformat(),
        "current_time": now.time().isoformat("seconds"),
        "current_datetime": format_time(now),
        "day_of_week": _WEEKDAYS[now.weekday()],
        "date_rfc1123": format_datetime(now, usegmt=True),
        "date_unix": since // timedelta(seconds=1),
        "date_unix_ms": since // timedelta(milliseconds=1),
    }
